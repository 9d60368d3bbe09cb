"""Training on several hosts over ssh: time to the first step, agents' cost, how soon a loss shows.

The time is counted from the command. The hosts are network, process and mount namespaces of this
machine, each with an sshd (tests/hosts). Needs to be root.
"""

import argparse
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import show
from pipeline_lib.core.files import read_jsonl
from tests.hosts.machines import Machine, machines
from tests.hosts.project import AGENT, HostsProject
from tests.pipeline.conftest import Project

TIMEOUT_S = 10
MEASURED_STEPS = 200


def run(most_hosts: int = 3) -> None:
    """Print the three tables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared = Project(folder / "prepared")
        prepared.snakemake("shard")
        with machines(folder / "machines", most_hosts) as made:
            starts = [
                _start(prepared, folder / f"start{count}", made[:count])
                for count in range(1, most_hosts + 1)
            ]
            rows = [
                [str(count), f"{taken_s:.1f} s"] for count, taken_s in enumerate(starts, start=1)
            ]
            show("from `snakemake` to the first step, data ready", ["hosts", "time"], rows)
            show("agents at work", ["what", "value"], _cost(prepared, folder / "cost", made[:2]))
            rows = [
                [
                    "a rank on m2 is killed",
                    _loss(prepared, folder / "rank", made[:2], lambda m: _kill(m, "rank")),
                ],
                [
                    "the agent on m2 is killed",
                    _loss(prepared, folder / "agent", made[:2], lambda m: _kill(m, "agent")),
                ],
                ["the link of m2 is cut", _loss(prepared, folder / "cut", made[:2], Machine.cut)],
            ]
            show(f"from a fault to the error (timeout_s: {TIMEOUT_S})", ["fault", "time"], rows)


def _project(prepared: Project, root: Path, made: list[Machine]) -> HostsProject:
    project = HostsProject(root, made)
    project.take_data(prepared)
    project.edit(
        "global_batch_tokens: 2048, micro_batch_blocks: 2",
        "global_batch_tokens: 2304, micro_batch_blocks: 1",
    )
    project.edit("epochs: 2", f"epochs: 100, timeout_s: {TIMEOUT_S}")
    project.edit("save_every_steps: 3", "save_every_steps: 1000")
    if len(made) == 1:
        project.environment["PIPELINE_HOSTS"] = ""
    return project


def _start(prepared: Project, root: Path, made: list[Machine]) -> float:
    """Return the seconds from the command to the first step."""
    project = _project(prepared, root, made)
    begun_s = time.monotonic()
    started = project.start_training()
    project.wait_for_step(1)
    taken_s = time.monotonic() - begun_s
    project.interrupt(signal.SIGINT)
    started.wait(60)
    return taken_s


def _cost(prepared: Project, root: Path, made: list[Machine]) -> list[list[str]]:
    """Return an agent's and the training stage's CPU time for a step, and the step's time."""
    project = _project(prepared, root, made)
    started = project.start_training()
    project.wait_for_step(50)
    agent = made[1].processes(AGENT)[-1]
    stage = made[0].processes("python -m pipeline_lib train")[-1]
    workers = {"an agent": agent, "the training stage": stage}
    before = {name: sum(worker.cpu_times()[:2]) for name, worker in workers.items()}
    first = len(project.steps_done())
    project.wait_for_step(first + MEASURED_STEPS)
    steps = len(project.steps_done()) - first
    used = {name: sum(worker.cpu_times()[:2]) - before[name] for name, worker in workers.items()}
    durations = [row["step_s"] for row in read_jsonl(project.run_dir / "metrics.jsonl")][first:]
    project.interrupt(signal.SIGINT)
    started.wait(60)
    rows = [["a step (median)", f"{1000 * statistics.median(durations):.1f} ms"]]
    return rows + [
        [f"CPU time of {name} for a step", f"{1e6 * spent / steps:.0f} us"]
        for name, spent in used.items()
    ]


def _loss(
    prepared: Project, root: Path, made: list[Machine], fault: Callable[[Machine], None]
) -> str:
    """Return the time from `fault` on the last host until snakemake has told and ended."""
    project = _project(prepared, root, made)
    started = project.start_training()
    project.wait_for_step(20)
    begun_s = time.monotonic()
    fault(made[-1])
    project.wait_for_event("run.interrupted")
    taken_s = time.monotonic() - begun_s
    started.wait(60)
    made[-1].mend()
    return f"{taken_s:.1f} s: {project.events('run.interrupted')[-1]['reason'][:90]}"


def _kill(machine: Machine, what: str) -> None:
    for process in machine.processes(f"-m pipeline_lib {what}"):
        process.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument(
        "--hosts", type=int, default=3, help="the largest number of hosts; default: 3"
    )
    run(parser.parse_args().hosts)
