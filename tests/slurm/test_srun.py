"""Training as tasks of srun, in jobs of a real SLURM: the same weights, signals that save, and no orphans."""

import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.processes import wait_for
from tests.slurm.cluster import Cluster, cluster, needs_slurm
from tests.train.conftest import Arena, arena
from tests.train.helpers import digest_of, load_weights
from tests.train.launching import ROOT, Stage, make_stage

__all__ = ["arena"]
pytestmark = [pytest.mark.slurm, needs_slurm]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


def submit(slurm: Cluster, stage: Stage, log: Path) -> int:
    """The training stage as a batch job with a task for each rank."""
    script = f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(stage.command)}"
    return slurm.submit(script, log, "--ntasks=2", "--gres=gpu:2", "--time=10")


def test_tasks_of_srun_train_to_the_same_weights(slurm: Cluster, arena: Arena, tmp_path: Path) -> None:
    by_srun = make_stage(arena, "srun", replica="srun")
    by_torchrun = make_stage(arena, "torchrun", replica="torchrun")
    log = tmp_path / "job.log"
    job = submit(slurm, by_srun, log)
    assert by_torchrun.run() == 0, by_torchrun.output

    assert slurm.wait(job) == "COMPLETED", log.read_text()
    assert digest_of(load_weights(by_srun.result)) == digest_of(load_weights(by_torchrun.result))
    assert by_srun.processes() == []


def test_scancel_signal_saves_and_ends_with_75(slurm: Cluster, arena: Arena, tmp_path: Path) -> None:
    stage, log = make_stage(arena, "srun", epochs=1000, save_every_steps=100_000), tmp_path / "job.log"
    job = submit(slurm, stage, log)
    stage.wait_for_step(2)
    slurm.call("scancel", "--signal=TERM", str(job))

    assert slurm.wait(job) == "FAILED"
    assert slurm.exit_code(job) == 75, log.read_text()
    [saved] = stage.run_dir.glob("checkpoints/step-*")
    assert int(saved.name.removeprefix("step-")) == max(stage.steps_done())
    assert "stopped by a signal after step" in log.read_text()


def test_a_signal_to_the_stage_alone_does_the_same(slurm: Cluster, arena: Arena, tmp_path: Path) -> None:
    stage, log = make_stage(arena, "srun", epochs=1000, save_every_steps=100_000), tmp_path / "job.log"
    job = submit(slurm, stage, log)
    stage.wait_for_step(2)
    slurm.call("scancel", "--batch", "--signal=USR1", str(job))

    slurm.wait(job)
    assert slurm.exit_code(job) == 75, log.read_text()
    assert list(stage.run_dir.glob("checkpoints/step-*"))


def test_a_killed_task_is_named_and_ends_the_others(slurm: Cluster, arena: Arena, tmp_path: Path) -> None:
    stage, log = make_stage(arena, "srun", epochs=1000, save_every_steps=2), tmp_path / "job.log"
    job = submit(slurm, stage, log)
    stage.wait_for_checkpoint()
    victim = next(found for found in stage.processes() if found.environ().get("SLURM_PROCID") == "1")
    os.kill(victim.pid, signal.SIGKILL)

    slurm.wait(job)
    assert slurm.exit_code(job) == 75, log.read_text()
    assert "srun: error: n1: task 1: Killed" in log.read_text()
    assert re.search(r"^error: rank (0 or )?1 ", log.read_text(), re.MULTILINE)
    assert "(out of memory?)" in log.read_text()
    assert "is saved; run the same command again to continue" in log.read_text()
    assert stage.processes() == []


@pytest.mark.parametrize("killed", ["srun", "train"])
def test_kill_9_of_srun_or_of_the_stage_leaves_no_orphan(
    slurm: Cluster, arena: Arena, tmp_path: Path, killed: str
) -> None:
    stage, log = make_stage(arena, "srun", epochs=1000), tmp_path / "job.log"
    job = submit(slurm, stage, log)
    stage.wait_for_step(2)
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        is_of_run = any(str(arena.store.root) in part for part in command)
        if is_of_run and killed in (Path(command[0]).name, command[3]):
            process.kill()

    wait_for(lambda: stage.processes() == [], "the end of all tasks")
    assert slurm.wait(job) == "FAILED"


def test_srun_outside_of_a_job_is_refused(arena: Arena) -> None:
    stage = make_stage(arena, "srun")

    assert stage.run() == 2
    assert "cluster.launcher: srun starts tasks within a SLURM job, and this is none" in stage.output
