"""A desk for each test, and no SLURM but what a test puts there."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline_lib.config.compile import Experiment
from tests.status.stubs import Desk, stub_squeue

Hold = Callable[..., int]
Queue = Callable[..., None]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    empty = tmp_path / "no-slurm"
    empty.mkdir()
    (empty / "git").symlink_to("/usr/bin/git")
    monkeypatch.setenv("PATH", str(empty))
    return Desk(tmp_path)


@pytest.fixture
def queue(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Queue:
    """Let SLURM's queue hold one job, `number|state|reason|start`, for an instance; or none."""

    def hold_job(job: str, digest: str = "", rule: str = "train") -> None:
        comment = f"rule_{rule}_stage_wildcards_{digest}"
        stub_squeue(desk.folder / "bin", monkeypatch, f"{job}|/w|{comment}\n" if job else "")
        monkeypatch.setenv("PATH", f"{desk.folder / 'bin'}:/usr/bin:/bin")

    return hold_job


@pytest.fixture
def hold(desk: Desk) -> Iterator[Hold]:
    """Hold a lock by a process of its own; its pid."""
    processes = []

    def start(experiment: Experiment, part: str = "train", job: str = "") -> int:
        processes.append(desk.hold(experiment, part, job))
        return processes[-1].pid

    yield start
    for process in processes:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
