"""When an interrupted job is queued again, and when that would lead nowhere."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.core.errors import Interrupted
from pipeline_lib.slurm.requeue import TrainingJob, queue_again, why_not
from tests.train.conftest import small_disk


def requeued(*steps: int, job: int = 7) -> list[dict[str, Any]]:
    return [{"event": "run.requeued", "job": job, "step": step} for step in steps]


REFUSED = {"event": "run.requeue_refused", "job": 7, "step": 10}


@pytest.mark.parametrize(
    ("events", "saved_step", "most", "reason"),
    [
        ([], 0, 20, None),
        (requeued(0), 0, 20, None),
        (requeued(10, 10), 20, 20, None),
        (requeued(10, 20), 20, 20, None),
        (requeued(0, 10, 10, 20), 20, 20, None),
        (requeued(10, 10, 10, job=6), 10, 20, None),
        ([{"event": "run.launched", "job": 7}] * 30, 10, 20, None),
        (
            requeued(5, 0, 0),
            0,
            20,
            "3 attempts in a row ended at step 0, so something else is wrong",
        ),
        (
            requeued(5, 10, 10),
            10,
            20,
            "3 attempts in a row ended at step 10, so something else is wrong",
        ),
        (requeued(10, 20), 30, 3, None),
        (requeued(10, 20), 30, 2, "cluster.max_requeues allows 2 times, and that is reached"),
        ([], 30, 0, "cluster.max_requeues allows 0 times, and that is reached"),
        ([*requeued(10), REFUSED, *requeued(10), REFUSED], 10, 1, None),
    ],
)
def test_it_is_queued_again_while_it_gets_on(
    events: list[dict[str, Any]], saved_step: int, most: int, reason: str | None
) -> None:
    assert (
        why_not(events, TrainingJob(7, Path("events.jsonl"), saved_step, max_requeues=most))
        == reason
    )


def test_why_slurm_refused_is_told_though_there_is_no_room_for_the_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events_path = tmp_path / "events.jsonl"
    script = tmp_path / "scontrol"
    script.write_text(
        f"#!/bin/sh\n[ $2 = show ] && echo JobId=7 JobState=RUNNING && exit\n"
        f"ln -sf /dev/full {events_path}\necho not allowed >&2\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    assert (
        queue_again(TrainingJob(7, events_path, 0, 20), Interrupted("a peer"), print)
        == "scontrol requeue 7: not allowed"
    )


@pytest.mark.root
def test_a_full_disk_is_why_it_is_not(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run", "size=1m") as disk:
        events_path = disk / "events.jsonl"
        events_path.write_text("x" * os.sysconf("SC_PAGE_SIZE"))  # a cut line that fills its page
        with suppress(OSError):
            (disk / "rest").write_bytes(bytes(2_000_000))
        told = queue_again(TrainingJob(7, events_path, 0, 20), Interrupted("a peer"), print)
    assert told.startswith(f"{events_path}: the disk is full")
