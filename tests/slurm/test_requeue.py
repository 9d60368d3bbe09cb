"""When an interrupted job is queued again, and when that would lead nowhere."""

from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.slurm.requeue import Run, why_not


def run(saved_step: int, most: int = 20) -> Run:
    return Run(job=7, events_path=Path("events.jsonl"), saved_step=saved_step, max_requeues=most)


def requeued(*steps: int, job: int = 7) -> list[dict[str, Any]]:
    return [{"event": "run.requeued", "job": job, "step": step} for step in steps]


@pytest.mark.parametrize(
    ("events", "saved_step"),
    [
        ([], 0),
        (requeued(0), 0),
        (requeued(10, 10), 20),
        (requeued(10, 20), 20),
        (requeued(0, 10, 10, 20), 20),
        (requeued(10, 10, 10, job=6), 10),
        ([{"event": "run.launched", "job": 7}] * 30, 10),
    ],
)
def test_it_is_while_it_gets_on(events: list[dict[str, Any]], saved_step: int) -> None:
    assert why_not(events, run(saved_step)) is None


@pytest.mark.parametrize("step", [0, 10])
def test_three_attempts_that_saved_nothing_new_are_enough(step: int) -> None:
    reason = why_not(requeued(5, step, step), run(step))
    assert reason == f"3 attempts in a row ended at step {step}, so something else is wrong"


def test_the_budget_is_the_config_s() -> None:
    events = requeued(10, 20)
    assert why_not(events, run(30, most=3)) is None
    assert why_not(events, run(30, most=2)) == "that was done 2 times, as often as cluster.max_requeues allows"
    assert why_not([], run(30, most=0)) is not None


def test_what_slurm_refused_does_not_count() -> None:
    refused = {"event": "run.requeue_refused", "job": 7, "step": 10}
    assert why_not([*requeued(10), refused, *requeued(10), refused], run(10, most=1)) is None
