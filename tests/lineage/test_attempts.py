"""What became of each attempt, as the events tell."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline_lib.core.errors import CONTINUES, DiskFull, Interrupted, PipelineError
from pipeline_lib.core.events import read_events
from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.core.stage import Job
from pipeline_lib.launch.heartbeat import LostRank
from pipeline_lib.launch.outcome import RankFailed, RanksLost
from pipeline_lib.launch.place import RankPlacement
from pipeline_lib.launch.stage import LaunchedAttempt
from tests.complete import plan_document
from tests.locks import hold


def launched(attempt: int, **fields: Any) -> dict[str, Any]:
    return {
        "event": "run.launched",
        "at": 10.0 * attempt,
        "attempt": attempt,
        "ranks": 2,
        "launcher": "srun",
        **fields,
    }


@dataclass(frozen=True)
class Failing(LaunchedAttempt):
    """An attempt that ends with `error` as soon as it has begun."""

    error: PipelineError

    def _start(self, _: Mapping[str, str]) -> None:
        raise self.error


def written_by_the_launcher(run_dir: Path, error: PipelineError) -> list[dict[str, Any]]:
    """The events of an attempt that ended so."""
    job = cast(
        Job,
        SimpleNamespace(
            out=run_dir / "out", say=print, lock=hold(run_dir.parent / f"{run_dir.name}.lock")
        ),
    )
    attempt = Failing(
        job,
        run_dir,
        plan_document(),
        RankPlacement("spawn", 1, 2, 1, "cpu"),
        run_dir,
        1,
        None,
        error,
    )
    with pytest.raises(type(error)) as raised:
        attempt.run({})
    assert raised.value is error
    return read_events(run_dir / "events.jsonl")


def ends_of(*own: dict[str, Any]) -> str:
    [one] = RunRecord([launched(1), *({"attempt": 1, **event} for event in own)]).attempts
    return one.end


def test_each_is_told_with_its_place_and_its_end() -> None:
    events = [
        launched(1, job=7, nodes=["n1", "n2"]),
        {
            "event": "run.interrupted",
            "attempt": 1,
            "reason": "rank 1 on n2 was lost",
            "exit_code": 75,
        },
        {
            "event": "run.requeued",
            "attempt": 1,
            "job": 7,
            "step": 40,
            "reason": "rank 1 on n2 was lost",
        },
        launched(2, job=7, nodes=["n1", "n3"]),
        {"event": "run.resumed", "attempt": 2, "step": 40},
        {
            "event": "run.requeued",
            "attempt": 2,
            "job": 7,
            "step": 55,
            "reason": "stopped by a signal\nmore",
        },
        launched(3, job=None, nodes=[]),
        {"event": "run.resumed", "attempt": 3, "step": 55},
        launched(4, job=None, nodes=[]),
        {"event": "run.resumed", "attempt": 4, "step": 60},
        {"event": "run.end", "attempt": 4, "step": 90},
    ]
    found = RunRecord(events).attempts
    assert [(one.number, one.first_step) for one in found] == [(1, 0), (2, 40), (3, 55), (4, 60)]
    assert found[0].place == "2 ranks by srun on n1, n2 in SLURM job 7"
    assert found[3].place == "2 ranks by srun"
    start = {"event": "run.start", "attempt": 1, "processor": "GenuineIntel AVX2"}
    [one] = RunRecord([launched(1), start]).attempts
    assert one.place.endswith(" (GenuineIntel AVX2)")
    assert [one.end for one in found] == [
        "rank 1 on n2 was lost; queued again at step 40",
        "stopped by a signal; queued again at step 55",
        "interrupted without a word: killed, or its node lost",
        "done",
    ]


@pytest.mark.parametrize(
    "error",
    [
        RanksLost(
            f"{LostRank(1, 'never heard')}; nothing was saved yet; {CONTINUES}",
            [LostRank(1, "never heard")],
        ),
        Interrupted(f"training stopped by SIGINT; step 12 is saved; {CONTINUES}"),
        RankFailed("rank 0: the loss was not finite in 3 steps in a row", 70),
        DiskFull("/scratch: no room for the checkpoint after step 12\n  - it has 6 GB"),
    ],
    ids=["lost", "ctrl-c", "guards", "disk"],
)
def test_the_reason_that_the_launcher_writes_down_is_told(
    tmp_path: Path, error: PipelineError
) -> None:
    events = written_by_the_launcher(tmp_path, error)

    [one] = RunRecord([launched(1), *events]).attempts

    assert one.end == str(error).splitlines()[0].removesuffix(f"; {CONTINUES}")
    assert events[-1]["event"] == ("run.interrupted" if error.exit_code == 75 else "run.failed")
    assert events[-1]["exit_code"] == error.exit_code


def test_the_launcher_writes_no_credentials_and_no_endless_reason(tmp_path: Path) -> None:
    [event] = written_by_the_launcher(
        tmp_path, PipelineError(f"https://me:s3cret@host/ refused {'x' * 9000}")
    )

    assert event["reason"].startswith("https://me:***@host/ refused xxx")
    assert len(event["reason"]) == 500


def test_events_that_cannot_be_written_hide_no_reason(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "nowhere" / "events.jsonl")

    assert written_by_the_launcher(tmp_path, DiskFull("no room")) == []


def test_a_lost_rank_is_told_once(tmp_path: Path) -> None:
    lost = LostRank(1, "silent", "n2", 7, 41, "training", 12.3)
    events = written_by_the_launcher(
        tmp_path, RanksLost(f"{lost}; step 40 is saved; {CONTINUES}", [lost])
    )

    assert [event["event"] for event in events] == ["rank.lost", "run.interrupted"]
    assert (
        ends_of(*events)
        == "rank 1 on n2 was last heard 12 s before the others, in step 41; step 40 is saved"
    )


def test_a_job_that_slurm_did_not_queue_again() -> None:
    stopped = {
        "event": "run.interrupted",
        "reason": f"stopped after step 40, which is saved; {CONTINUES}",
    }
    asked = {"event": "run.requeued", "step": 40, "reason": stopped["reason"]}
    refused = {
        "event": "run.requeue_refused",
        "step": 40,
        "reason": "scontrol requeue 7: Job requeue disabled",
    }

    said = ends_of(stopped, asked, refused)

    assert (
        said == "stopped after step 40, which is saved; not queued again: scontrol requeue 7: Job "
        "requeue disabled"
    )


def test_what_came_last_decides() -> None:
    """A rank can fail once the first has left the result."""
    assert (
        ends_of({"event": "run.end", "step": 90}, {"event": "run.failed", "reason": "no room"})
        == "no room"
    )


def test_broken_events_are_passed_over() -> None:
    broken: list[dict[str, Any]] = [
        {"event": "run.launched"},
        {"attempt": 1},
        {"event": "run.launched", "attempt": "x"},
    ]
    assert RunRecord(broken).attempts == []
    [one] = RunRecord([{"event": "run.launched", "attempt": 1, "at": "?"}]).attempts
    assert one.place == "? ranks by ?"
