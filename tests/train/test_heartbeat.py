"""A rank that gives no sign of life is named, and so is one that others wait for."""

import os
import signal
import time
from pathlib import Path

import pytest

from pipeline_lib.core.events import read_events
from pipeline_lib.core.files import write_json
from pipeline_lib.launch import heartbeat
from pipeline_lib.launch.heartbeat import Heartbeat, Sign, find_lost, read_signs
from tests.processes import running, wait_for
from tests.train.conftest import Arena
from tests.train.launching import ENDLESS, make_stage

EVERY_S = 1.0


def sign(
    rank: int, heard_s: float, step: int = 41, doing: str = "training", for_s: float = 9.0
) -> Sign:
    return Sign(rank, f"n{rank}", 100 + rank, step, doing, EVERY_S, for_s, heard_s)


def named(*signs: Sign, ranks: int = 3) -> list[str]:
    return [str(lost) for lost in find_lost({one.rank: one for one in signs}, ranks)]


def test_who_is_silent_is_named() -> None:
    said = named(sign(0, 1012.0, doing="ended"), sign(1, 1000.0), sign(2, 1011.0))

    assert said == ["rank 1 on n1 was last heard 12 s before the others, in step 41"]


def test_who_was_never_heard_is_named() -> None:
    assert named(sign(0, 1.0), sign(2, 1.0)) == ["rank 1 was never heard: it did not start"]


def test_who_is_behind_is_named_if_all_were_heard() -> None:
    said = named(sign(0, 10.0), sign(1, 10.0, step=40, doing="validating"), sign(2, 9.5))

    assert said == ["rank 1 on n1 was behind the others, validating, after step 40"]


def test_an_old_sign_of_one_that_was_getting_on_is_no_blame() -> None:
    assert named(sign(0, 10.0), sign(1, 10.0, step=40, for_s=0.1), sign(2, 10.0)) == []


def test_who_ended_by_himself_is_not_lost() -> None:
    assert named(sign(0, 1.0, doing="ended"), sign(1, 30.0), sign(2, 30.0)) == []


def test_nobody_is_blamed_where_nobody_was_heard() -> None:
    assert named() == []


def beat(run_dir: Path) -> None:
    with Heartbeat(run_dir, 3, "n7", timeout_s=0.4) as heartbeat:
        heartbeat.observe("step.begin", {"step": 5})
        time.sleep(60)


def test_a_frozen_process_stops_beating_and_a_free_one_goes_on(tmp_path: Path) -> None:
    with running(beat, tmp_path) as process:
        wait_for(
            lambda: 3 in (signs := read_signs(tmp_path, 4)) and signs[3].step == 5,
            "a sign in step 5",
        )
        first = read_signs(tmp_path, 4)[3]
        assert (first.host, first.pid, first.doing) == ("n7", process.pid, "training")
        wait_for(lambda: read_signs(tmp_path, 4)[3].heard_s > first.heard_s, "another sign")
        os.kill(process.pid or 0, signal.SIGSTOP)
        last = read_signs(tmp_path, 4)[3]
        time.sleep(0.5)
        frozen = read_signs(tmp_path, 4)[3]
        os.kill(process.pid or 0, signal.SIGCONT)
        wait_for(lambda: read_signs(tmp_path, 4)[3].heard_s > frozen.heard_s, "a sign of the freed")
    assert frozen.heard_s - last.heard_s < 0.2


def test_a_rank_that_goes_on_after_long_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its next sign, it is not taken for one that was awaited as it started."""
    monkeypatch.setattr(heartbeat, "EVERY_S", 1000.0)
    with Heartbeat(tmp_path, 0, "n1", timeout_s=10_000) as beating:
        beating.observe("rank.doing", {"what": "loading"})
        assert read_signs(tmp_path, 1)[0].doing == "starting"
        monkeypatch.setattr(heartbeat, "MISSED_BEATS", 0)
        beating.observe("step.begin", {"step": 1})
        wait_for(lambda: read_signs(tmp_path, 1)[0].step == 1, "a sign in the first step")


def test_the_last_sign_says_so(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, 0, "n1", timeout_s=30) as heartbeat:
        heartbeat.observe("rank.doing", {"what": "saving"})

    assert read_signs(tmp_path, 1)[0].doing == "ended"
    assert [path.name for path in (tmp_path / "heartbeats").iterdir()] == ["rank-0.json"]


def test_a_sign_that_cannot_be_written_or_read_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "heartbeats").write_text("in the way")
    with Heartbeat(tmp_path, 0, "n1", timeout_s=30):
        assert read_signs(tmp_path, 1) == {}
    (tmp_path / "heartbeats").unlink()
    write_json(tmp_path / "heartbeats" / "rank-0.json", {"rank": 0})
    assert read_signs(tmp_path, 1) == {}


@pytest.mark.slow
def test_a_frozen_rank_is_named_soon_after_the_timeout(arena: Arena) -> None:
    """F02.

    The process group gives up after 4 s; that the frozen one goes on later harms nothing.
    """
    stage = make_stage(
        arena,
        "spawn",
        3,
        timeout_s=4,
        save_every_steps=100_000,
        global_batch_tokens=384,
        **ENDLESS,
    )
    process = stage.start()
    stage.wait_for_step(2)
    wait_for(lambda: read_signs(stage.run_dir, 3)[1].step > 1, "a sign of rank 1 in a step")
    victim = stage.rank(1)
    victim.send_signal(signal.SIGSTOP)
    # of a larger world: not looked at
    (stage.run_dir / "heartbeats" / "rank-9.json").write_text("{}")
    assert process.wait(120) == 75, stage.output  # a start would have 900 s

    assert "error: rank 1 on " in stage.output
    assert " s before the others, in step " in stage.output
    [lost] = [
        event
        for event in read_events(stage.run_dir / "events.jsonl")
        if event["event"] == "rank.lost"
    ]
    assert (lost["rank"], lost["why"], lost["pid"]) == (1, "silent", victim.pid)
    assert lost["silent_s"] > 2
    if victim.is_running():
        victim.send_signal(signal.SIGCONT)
    wait_for(lambda: stage.processes() == [], "the end of all processes")
