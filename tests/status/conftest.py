"""A desk for each test, and no SLURM but what a test puts there."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline_lib.config.compile import Experiment
from tests.status.stubs import Desk

Hold = Callable[..., int]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    empty = tmp_path / "no-slurm"
    empty.mkdir()
    (empty / "git").symlink_to("/usr/bin/git")
    monkeypatch.setenv("PATH", str(empty))
    return Desk(tmp_path)


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
