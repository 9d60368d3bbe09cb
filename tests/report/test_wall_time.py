"""Where the wall time went: all accounted for, once, with the work and bytes that took it."""

from typing import Any

import pytest

from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.core.spans import Spans
from pipeline_lib.core.store import Manifest
from pipeline_lib.report.wall_time import Span, wall_time
from tests.complete import step

DIGESTS = {"train": "1" * 16, "merge": "2" * 16, "data.0": "3" * 16, "data.1": "3" * 16}


def manifest(part: str, duration_s: float, **counts: Any) -> Manifest:
    return Manifest(
        stage=part, digest=DIGESTS[part], spec={}, files={}, duration_s=duration_s, counts=counts
    )


def event(name: str, attempt: int, at: float, **fields: Any) -> dict[str, Any]:
    return {"event": name, "attempt": attempt, "at": at, **fields}


def test_a_training_is_the_sum_of_its_attempts() -> None:
    events = [
        *(event("run.launched", 1, 0.0), event("run.start", 1, 5.0), event("run.steps", 1, 8.0)),
        *(event("checkpoint.saved", 1, 20.0, wait_s=0.5), event("run.interrupted", 1, 21.0)),
        *(
            event("run.launched", 2, 100.0),
            event("run.start", 2, 104.0),
            event("run.steps", 2, 106.0),
        ),
        *(event("checkpoint.saved", 2, 120.0, wait_s=0.25), event("run.end", 2, 121.0)),
    ]
    steps = [
        step(1, step_s=9.0, data_wait_s=1.0, attempt=1),
        step(2, step_s=11.0, attempt=2),
    ]
    found = wall_time({"train": manifest("train", 24.0)}, RunRecord(events), steps)
    assert [(span.name, span.duration_s) for span in found] == [
        ("start and load", 9.0),
        ("first pass", 5.0),
        ("steps", 21.0),
        ("wait for saves", 0.75),
        ("rest", 21.0 + 24.0 - 35.75),
    ]


def test_a_training_of_earlier_code_is_one_span() -> None:
    events = [event("run.launched", 1, 0.0), event("run.start", 1, 5.0), event("run.end", 1, 9.0)]
    found = wall_time({"train": manifest("train", 12.0)}, RunRecord(events), [step(1, step_s=3.0)])
    assert found == [Span("train", "", 12.0)]


def test_what_a_stage_recorded_is_shown_with_its_rate_and_the_rest() -> None:
    recorded = [
        {"name": "write", "duration_s": 8.0, "bytes": 16_000_000_000},
        {"name": "compare", "duration_s": 1.5, "bytes": 0},
    ]
    found = wall_time({"merge": manifest("merge", 10.0, spans=recorded)}, RunRecord(), [])
    assert found == [
        Span("merge", "write", 8.0, 16_000_000_000),
        Span("merge", "compare", 1.5),
        Span("merge", "rest", 0.5),
    ]
    assert [span.bytes_per_s for span in found] == [2e9, None, None]


@pytest.mark.parametrize(
    "spans",
    [
        "x",
        [3],
        [{"name": "write", "duration_s": "x"}],
        [{"name": "write", "duration_s": -1}],
        {},
        [],
    ],
)
def test_a_damaged_record_is_left_out(spans: Any) -> None:
    found = wall_time({"merge": manifest("merge", 10.0, spans=spans)}, RunRecord(), [])
    assert found == [Span("merge", "", 10.0)]


def test_a_stage_that_made_two_parts_is_counted_once() -> None:
    parts = {part: manifest(part, 3.0) for part in ("data.0", "data.1")}
    assert wall_time(parts, RunRecord(), []) == [Span("data.0", "", 3.0)]


def test_spans_follow_one_another_and_one_that_begins_again_goes_on() -> None:
    spans = Spans()
    assert spans.counts() == {}
    for name, size_bytes in (("load", 10), ("score", 0), ("load", 5)):
        spans.begin(name, size_bytes)
    found = spans.counts()["spans"]
    assert [(span["name"], span["bytes"]) for span in found] == [("load", 15), ("score", 0)]
    assert all(span["duration_s"] >= 0 for span in found)
