"""Training in jobs of a real SLURM, on one node and two: equal weights, saves, no orphans.

The saves are made on signals.
"""

import contextlib
import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline_lib.core.events import read_events
from tests.listeners import assert_private, listeners
from tests.processes import wait_for
from tests.slurm.loopback import Loopback, loopback
from tests.slurm.needs import needs_slurm
from tests.train.conftest import Arena, arena, whole
from tests.train.helpers import digest_of, load_weights
from tests.train.launching import DEADLINE_S, ENDLESS, ROOT, Stage, make_stage

__all__ = ["arena", "whole"]
pytestmark = [pytest.mark.slow, pytest.mark.slurm, needs_slurm]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Loopback]:
    with loopback(nodes=2) as made:
        yield made


# As Snakemake's job step does, which hands down no variable of SLURM but the job's number.
STRIP = """for name in $(compgen -e | grep -E '^(SLURM|SRUN|SBATCH)_'); do
    [ $name = SLURM_JOB_ID ] || unset $name
done"""


def submit(
    slurm: Loopback, stage: Stage, log: Path, nodes: int = 1, ranks_per_node: int = 2
) -> int:
    """The training stage as a batch job."""
    script = f"{STRIP}\ncd {shlex.quote(str(ROOT))} && exec {shlex.join(stage.command)}"
    size = (
        f"--nodes={nodes}",
        f"--ntasks-per-node={ranks_per_node}",
        f"--gres=gpu:{ranks_per_node}",
    )
    return slurm.submit(script, log, *size, "--time=10")


def test_a_warning_saves_and_the_next_job_ends_with_the_same_weights(
    slurm: Loopback, arena: Arena, whole: Callable[..., Path], tmp_path: Path
) -> None:
    """Two nodes with two ranks each: tasks of the first job are launchers, of the second ranks."""
    settings: dict[str, Any] = {"epochs": 20, "save_every_steps": 100_000}
    stage = make_stage(arena, "spawn", ranks=4, nodes=2, **settings)
    warned = submit(slurm, stage, tmp_path / "warned.log", nodes=2)
    warn(slurm, stage, warned, tmp_path / "warned.log")

    stage, log = make_stage(arena, "auto", ranks=4, nodes=2, **settings), tmp_path / "next.log"
    job = submit(slurm, stage, log, nodes=2)
    assert slurm.wait(job, DEADLINE_S) == "COMPLETED", log.read_text()
    assert "continuing from step-" in log.read_text()
    assert digest_of(load_weights(stage.result)) == digest_of(load_weights(whole(4, **settings)))
    launched = [
        event
        for event in read_events(stage.result / "events.jsonl")
        if event["event"] == "run.launched"
    ]
    assert [event["job"] for event in launched] == [warned, job]
    assert [event["launcher"] for event in launched] == ["spawn", "srun"]
    assert [event["nodes"] for event in launched] == [["n1", "n2"]] * 2
    assert stage.processes() == []


def warn(slurm: Loopback, stage: Stage, job: int, log: Path, *option: str) -> None:
    """Warn the job's tasks as SLURM does before a limit: only an option tells its script."""
    stage.wait_for_step(2)
    # which listens for SLURM
    ours = [process for process in stage.processes() if process.name() != "srun"]
    assert_private(listeners(ours))  # the nodes' addresses are loopback addresses
    slurm.call("scancel", *option, "--signal=USR1", str(job))

    assert slurm.wait(job) == "FAILED"
    assert slurm.exit_code(job) == 75, log.read_text()
    [saved] = stage.run_dir.glob("checkpoints/step-*")
    assert int(saved.name.removeprefix("step-")) == max(stage.steps_done())
    assert "stopped by a signal after step" in log.read_text()
    assert stage.processes() == []


def test_a_killed_task_is_named_and_ends_the_others(
    slurm: Loopback, arena: Arena, tmp_path: Path
) -> None:
    stage, log = make_stage(arena, "srun", save_every_steps=2, **ENDLESS), tmp_path / "job.log"
    job = submit(slurm, stage, log)
    stage.wait_for_checkpoint()
    victim = stage.rank(1, "SLURM_PROCID")
    os.kill(victim.pid, signal.SIGKILL)

    slurm.wait(job)
    assert slurm.exit_code(job) == 75, log.read_text()
    assert "srun: error: n1: task 1: Killed" in log.read_text()
    assert re.search(r"^error: rank (0 or )?1 ", log.read_text(), re.MULTILINE)
    assert "(out of memory?)" in log.read_text()
    assert "is saved; run the same command again to continue" in log.read_text()
    assert stage.processes() == []


@pytest.fixture
def alone(slurm: Loopback, arena: Arena, tmp_path: Path) -> tuple[int, Stage, Path]:
    """A job with a long training of one rank, at its second step."""
    stage = make_stage(arena, "srun", ranks=1, save_every_steps=100_000, **ENDLESS)
    log = tmp_path / "job.log"
    job = submit(slurm, stage, log, ranks_per_node=1)
    stage.wait_for_step(2)
    return job, stage, log


@pytest.mark.parametrize("option", [(), ("--batch",)], ids=["tasks", "stage alone"])
def test_a_warning_of_ranks_that_are_tasks_or_of_their_stage_alone_saves(
    slurm: Loopback, alone: tuple[int, Stage, Path], option: tuple[str, ...]
) -> None:
    job, stage, log = alone
    warn(slurm, stage, job, log, *option)


@pytest.mark.parametrize("killed", ["srun", "train"])
def test_kill_9_of_srun_or_of_the_stage_leaves_no_orphan(
    slurm: Loopback, arena: Arena, alone: tuple[int, Stage, Path], killed: str
) -> None:
    job, stage, _ = alone
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        is_of_run = any(str(arena.store.root) in part for part in command)
        if is_of_run and (Path(command[0]).name == killed or command[3:4] == [killed]):
            with contextlib.suppress(psutil.NoSuchProcess):  # srun has a child, which ends with it
                process.kill()

    wait_for(lambda: stage.processes() == [], "the end of all tasks")
    assert slurm.wait(job) == "FAILED"


def test_srun_outside_of_a_job_is_refused(arena: Arena) -> None:
    stage = make_stage(arena, "srun")

    assert stage.run() == 2
    assert "cluster.launcher: srun works only in a SLURM job, and this is not one" in stage.output
