"""What became of each attempt, as the events tell."""

from typing import Any

from pipeline_lib.publish.attempts import attempts_of


def launched(attempt: int, **fields: Any) -> dict[str, Any]:
    return {"event": "run.launched", "at": 10.0 * attempt, "attempt": attempt, "ranks": 2, "launcher": "srun", **fields}


def test_each_is_told_with_its_place_and_its_end() -> None:
    events = [
        launched(1, job=7, nodes=["n1", "n2"]),
        {"event": "rank.lost", "attempt": 1, "rank": 1, "why": "silent", "host": "n2", "step": 41, "silent_s": 12.3},
        {"event": "run.requeued", "attempt": 1, "job": 7, "step": 40, "reason": "rank 0 lost a peer"},
        launched(2, job=7, nodes=["n1", "n3"]),
        {"event": "run.resumed", "attempt": 2, "step": 40},
        {"event": "run.requeued", "attempt": 2, "job": 7, "step": 55, "reason": "stopped by a signal\nmore"},
        launched(3, job=None, nodes=[]),
        {"event": "run.resumed", "attempt": 3, "step": 55},
        launched(4, job=None, nodes=[]),
        {"event": "run.resumed", "attempt": 4, "step": 60},
        {"event": "run.end", "attempt": 4, "step": 90},
    ]
    found = attempts_of(events)
    assert [(one.number, one.first_step) for one in found] == [(1, 0), (2, 40), (3, 55), (4, 60)]
    assert found[0].place == "2 ranks by srun on n1, n2 in SLURM job 7"
    assert found[3].place == "2 ranks by srun"
    assert [one.end for one in found] == [
        "rank 1 on n2: silent for 12 s, in step 41; queued again at step 40",
        "stopped by a signal; queued again at step 55",
        "interrupted without a word: killed, or its node lost",
        "done",
    ]


def test_broken_events_are_passed_over() -> None:
    assert attempts_of([{"event": "run.launched"}, {"attempt": 1}, {"event": "run.launched", "attempt": "x"}]) == []
    [one] = attempts_of([{"event": "run.launched", "attempt": 1, "at": "?"}])
    assert one.place == "? ranks by ?"
