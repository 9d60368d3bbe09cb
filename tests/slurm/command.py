"""The command `tests/slurm/cluster`: up, down, status, and what clusters do to jobs."""

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields

from tests.slurm import daemons
from tests.slurm.daemons import LoopbackError
from tests.slurm.loopback import Loopback, current, down, up
from tests.slurm.settings import Settings

DEFAULTS = Settings()


def main() -> int:
    """Do what the command line says; the exit code."""
    asked = _parser().parse_args()
    act: Callable[[argparse.Namespace], None] = asked.act
    try:
        act(asked)
    except (LoopbackError, OSError, subprocess.SubprocessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cluster", description="A SLURM on this machine, with pretended GPUs."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, act: Callable[[argparse.Namespace], None], text: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(act=act)
        return command

    start = add("up", _up, "start the cluster")
    numbers = {
        "nodes": "nodes",
        "gpus": "GPUs of a node",
        "cpus": "cores of a node",
        "memory_mb": "memory of a node",
    }
    seconds = {
        "slurmd_timeout_s": "silence after which a node is down",
        "kill_wait_s": "from SIGTERM to SIGKILL at a job's time limit",
        "grace_s": "the same for a job of partition gpu that one of partition urgent preempts",
    }
    for name, text in (numbers | seconds).items():
        default = getattr(DEFAULTS, name)
        start.add_argument(
            _flag(name), type=int, default=default, metavar="N", help=f"{text}: {default}"
        )
    start.add_argument(
        "--namespaces", action="store_true", help="each node in a network of its own"
    )
    start.add_argument(
        "--accounting", action="store_true", help="with slurmdbd and MariaDB, for sacct"
    )
    add("down", _down, "end all jobs and the cluster, and remove it")
    add("status", _status, "show nodes, jobs and daemons")
    add("kill-node", _kill, "take a node's power").add_argument("node")
    add("restore-node", _restore, "give it back, and wait until jobs may run there").add_argument(
        "node"
    )
    limit = add(
        "limit-link",
        lambda asked: _running().limit_link(asked.node, asked.rate),
        "throttle or cut its network",
    )
    limit.add_argument("node")
    limit.add_argument(
        "rate",
        metavar="RATE|down|up|none",
        help="both ways, such as 100mbit; none: without a limit",
    )
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _up(asked: argparse.Namespace) -> None:
    made = up(Settings(**{field.name: getattr(asked, field.name) for field in fields(Settings)}))
    print(
        f"up: {', '.join(made.nodes)}; logs in {made.folder}; `snakemake --profile slurm` finds "
        "it; end it with down"
    )


def _down(_asked: argparse.Namespace) -> None:
    print("down" if down() else "no cluster was up")


def _status(_asked: argparse.Namespace) -> None:
    found = _running()
    running = daemons.supervisors(found.folder)
    print(f"folder {found.folder}")
    for name in (*found.plan.control_daemons, *found.nodes):
        print(f"{name:<10} {'pid ' + str(running[name]) if name in running else 'not running'}")
    if "slurmctld" in running:
        print(found.call("sinfo", "--Node", "--partition=gpu", "--format=%N %T %C %G %E"), end="")
        print(found.call("squeue", "--format=%i %P %T %M %N %R %k"), end="")


def _kill(asked: argparse.Namespace) -> None:
    _running().kill_node(asked.node)
    print(f"{asked.node} is dead; slurmctld will notice")


def _limit(asked: argparse.Namespace) -> None:
    _running().limit_link(asked.node, asked.rate)
    print(f"the link of {asked.node}: {asked.rate}")


def _restore(asked: argparse.Namespace) -> None:
    found = _running()
    found.restore_node(asked.node)
    print(f"{asked.node} is {found.node_state(asked.node)}")


def _running() -> Loopback:
    found = current()
    if found is None:
        raise LoopbackError("no cluster is up: start one with tests/slurm/cluster up")
    return found
