"""Commands that other commands start as child processes: ranks, trackers, probes, measurements."""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.run_folder import PLAN_NAME
from pipeline_lib.core.stage import say
from pipeline_lib.core.store import Store
from pipeline_lib.core.text import RedactedText


def add_to(commands: Any) -> None:
    """Add these commands to the subparsers `commands`."""
    rank = commands.add_parser("rank", help="one rank of a training run; started by `train`")
    for option in ("--spec", "--plan", "--out"):
        rank.add_argument(option, type=Path, required=True)
    rank.add_argument("--attempt", type=int, required=True)
    rank.add_argument("--lock-token", required=True, help="of the lock that `train` holds on the run")
    rank.add_argument("--resume-from", type=Path)
    rank.set_defaults(command=run_rank)
    agent = commands.add_parser("agent", help="starts the ranks of a node within a SLURM job; started by `train`")
    agent.add_argument("--launcher", choices=("torchrun", "accelerate"), required=True)
    for option in ("--nodes", "--ranks-per-node", "--timeout-s"):
        agent.add_argument(option, type=int, required=True)
    agent.add_argument("--run-dir", type=Path, required=True)
    agent.add_argument("rank_arguments", nargs="+", help="what each rank is told")
    agent.set_defaults(command=run_agent)
    tracker = commands.add_parser("track", help="show a run in a tracker; started by `train`")
    tracker.add_argument("--to", choices=("tensorboard", "swanlab", "wandb", "mlflow"), required=True)
    for option in ("--run-dir", "--plan"):
        tracker.add_argument(option, type=Path, required=True)
    tracker.set_defaults(command=track)
    asked = commands.add_parser("probe", help="one measurement; started by `doctor`")
    asked.add_argument("name", choices=("gpus", "torch", "disk", "exchange", "node"))
    asked.add_argument("--store", type=Path, default=Path())
    asked.add_argument("--token", default="", help="name of a file in the store, for `node`")
    asked.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    asked.set_defaults(command=probe)
    site = commands.add_parser("site", help="the variables of the site file, for a job's shell")
    site.set_defaults(command=tell_site)
    one = commands.add_parser("measure", help="one rank of a calibration; started by `calibrate`")
    one.add_argument("--task", type=Path, required=True)
    one.set_defaults(command=measure)


def run_rank(arguments: argparse.Namespace) -> None:
    """Train as the rank that the environment names. If a launcher started it, leave error messages to the launcher."""
    from pipeline_lib.core.processes import die_with_owner

    # Before the slow imports. An agent has SIGTERM ignored; SIGUSR1, SLURM's warning, waits until the run can save.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    die_with_owner(os.environ)

    from pipeline_lib.config.compile import run_digest
    from pipeline_lib.core.lock import Lock
    from pipeline_lib.launch.environment import dist_environment
    from pipeline_lib.launch.outcome import Heartbeat, Reporting, host_of
    from pipeline_lib.plan.content import read_plan
    from pipeline_lib.train.rank import RankJob, train_rank

    os.environ.update(dist_environment(os.environ))
    store = Store.around(arguments.spec, os.environ)
    spec = store.read_spec(arguments.spec)
    job = RankJob(
        spec,
        store,
        read_plan(arguments.plan / PLAN_NAME),
        arguments.out,
        arguments.attempt,
        Lock(store.lock_path(run_digest(spec)), arguments.lock_token),
        arguments.resume_from,
    )
    job.lock.end_process_when_lost()
    try:
        rank = int(os.environ.get("RANK", "0"))
        heartbeat = Heartbeat(job.run_dir, rank, host_of(os.environ), job.train.timeout_s)
        with Reporting(job.run_dir, rank), heartbeat, job.lock.required():
            train_rank(job, os.environ, say, (heartbeat.observe,))
    except PipelineError as error:
        if "RANK" not in os.environ:
            raise
        sys.exit(error.exit_code)


def run_agent(arguments: argparse.Namespace) -> None:
    """Start the ranks of this node and exit with their code; the stage reports what went wrong."""
    from pipeline_lib.core.processes import die_with_owner

    die_with_owner(os.environ)

    from pipeline_lib.launch.stage import Agent

    agent = Agent(
        arguments.launcher,
        arguments.nodes,
        arguments.ranks_per_node,
        arguments.timeout_s,
        arguments.run_dir,
        arguments.rank_arguments,
    )
    sys.exit(agent.run(os.environ))


def track(arguments: argparse.Namespace) -> None:
    """Send the metrics of a run to a tracker until standard input ends, which marks the end of the run."""
    from pipeline_lib.tracking.run import feed_tracker

    # Until the process ends: a tracker's library may print the address it was given, with the password in it.
    sys.stdout, sys.stderr = RedactedText(sys.stdout), RedactedText(sys.stderr)
    feed_tracker(arguments.to, arguments.run_dir, arguments.plan, os.environ)


def probe(arguments: argparse.Namespace) -> None:
    """Measure one thing and print it as JSON, in a process that `doctor` can abandon."""
    import json

    from pipeline_lib.doctor.machine import disk, gpus

    if arguments.name == "node":
        from pipeline_lib.doctor.task import run_task

        run_task(os.environ, arguments.store, arguments.token, arguments.device, say)
        return
    if arguments.name == "gpus":
        found = gpus()
    elif arguments.name == "disk":
        found = disk(arguments.store)
    else:
        from pipeline_lib.doctor.exchange import exchange, torch_facts

        found = torch_facts() if arguments.name == "torch" else exchange(os.environ, arguments.device)
    print(json.dumps(found), flush=True)


def measure(arguments: argparse.Namespace) -> None:
    """Measure as the rank that the environment names, and print the results as JSON."""
    from pipeline_lib.core.processes import die_with_owner

    die_with_owner(os.environ)  # before the slow imports

    import json

    from pipeline_lib.calibrate.rank import measure_rank
    from pipeline_lib.calibrate.run import Task

    found = measure_rank(Task.from_json(arguments.task.read_text(encoding="utf-8")), os.environ)
    print(json.dumps(found), flush=True)


def tell_site(_: argparse.Namespace) -> None:
    """Print the site's variables for a shell's `eval`; as arguments of a command they would be visible to others."""
    from pipeline_lib.slurm.site import Site

    print(Site.load(os.environ).exports(), end="")
