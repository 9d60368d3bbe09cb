"""What a training cost is what its attempts held, whatever became of their steps."""

from typing import Any

import pytest

from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.report.cost import spent
from tests.complete import plan_document, step

GPUS = plan_document(cluster={"ranks": 8, "cpus_per_rank": 12, "device": "cuda"})
CORES = plan_document(cluster={"ranks": 2, "cpus_per_rank": 3, "device": "cpu"})


def attempt(number: int, begin_s: float, end_s: float, ranks: int | None) -> list[dict[str, Any]]:
    start: dict[str, Any] = {"at": begin_s, "event": "run.start", "attempt": number}
    return [
        start if ranks is None else start | {"world_size": ranks},
        {"at": end_s, "event": "run.end", "attempt": number},
    ]


def test_attempts_on_different_numbers_of_gpus_add_up_without_the_wait_between_them() -> None:
    events = [
        *attempt(1, 1000, 4600, 8),
        *attempt(2, 90_000, 93_600, 4),
        {"at": 1e9, "event": "no.attempt"},
    ]
    steps = [step(1, step_s=1800, attempt=1), step(2, step_s=1800, attempt=2)]
    found = spent(GPUS, steps, RunRecord(events), world_size=4, train_s=None)
    assert found is not None
    assert (found.device, found.devices, found.held_s, found.hours) == ("GPU", 8, 7200, 12)
    assert found.used_fraction == 0.5


def test_cpus_are_counted_in_cores_and_an_unknown_world_is_the_plans() -> None:
    found = spent(CORES, [], RunRecord(attempt(1, 0, 1800, None)), world_size=None, train_s=None)
    assert found is not None
    assert (found.device, found.devices, found.hours, found.used_fraction) == (
        "CPU core",
        6,
        3,
        None,
    )


def test_without_events_the_time_of_the_steps_counts() -> None:
    found = spent(GPUS, [], RunRecord(), world_size=2, train_s=1800)
    assert found is not None
    assert (found.devices, found.hours) == (2, 1)


@pytest.mark.parametrize(
    "events",
    [[], [{"event": "run.start", "attempt": 1}], [{"event": "x", "at": 1.0, "attempt": 1}]],
)
def test_what_nothing_tells_is_not_made_up(events: list[dict[str, Any]]) -> None:
    found = spent(CORES, [], RunRecord(events), world_size=None, train_s=None)
    assert found is None
