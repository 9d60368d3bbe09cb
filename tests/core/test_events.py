from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.core.errors import DiskFull
from pipeline_lib.core.events import EventLog, read_events
from tests.processes import FORK, finish


def emit_many(path: Path, process: int, count: int) -> None:
    log = EventLog(path, process=process)
    for number in range(count):
        log.emit("step.end", number=number, text="x" * (number % 300))


def test_events_of_several_processes_all_arrive_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    writers = [FORK.Process(target=emit_many, args=(path, process, 300)) for process in range(4)]
    for writer in writers:
        writer.start()
    finish(list(writers))

    events = read_events(path)
    for process in range(4):
        mine = [event for event in events if event["process"] == process]
        assert [event["number"] for event in mine] == list(range(300))
        assert [len(event["text"]) for event in mine] == list(range(300))
    assert len(events) == 4 * 300


def test_an_event_says_what_when_and_where(tmp_path: Path) -> None:
    EventLog(tmp_path / "events", rank=3).emit("checkpoint.sealed", step=7)

    [event] = read_events(tmp_path / "events")

    assert event["event"] == "checkpoint.sealed"
    assert (event["rank"], event["step"]) == (3, 7)
    assert event["at"] > 1.7e9, "seconds since 1970"
    assert event["monotonic_s"] > 0


def test_observers_hear_every_event_also_without_a_file() -> None:
    heard = list[tuple[str, dict[str, Any]]]()
    log = EventLog(None, observers=(lambda name, fields: heard.append((name, fields)),), rank=0)

    log.emit("a", x=1)
    log.notify("b", y=2)

    assert heard == [("a", {"x": 1}), ("b", {"y": 2})]


def test_a_notice_is_not_written_down_and_no_file_holds_no_events(tmp_path: Path) -> None:
    EventLog(tmp_path / "events").notify("step.begin", step=1)

    assert read_events(tmp_path / "events") == read_events(tmp_path / "none") == []


@pytest.mark.parametrize("cut_bytes", [1, 2, 20, 60])
def test_a_line_that_a_kill_cut_short_costs_that_event_only(tmp_path: Path, cut_bytes: int) -> None:
    path = tmp_path / "events"
    before = EventLog(path)
    before.emit("first")
    before.emit("second", text="\u4f60\u597d")
    path.write_bytes(path.read_bytes()[:-cut_bytes])

    EventLog(path).emit("third")

    complete = ["first", "second", "third"] if cut_bytes == 1 else ["first", "third"]
    assert [event["event"] for event in read_events(path)] == complete


@pytest.mark.parametrize(
    "text", ["a\nb", "a\u2028b", "a\x85b", "a\x0b\x0c\x1cb", '"', "\\", "\u4f60"]
)
def test_text_comes_back_as_it_was(tmp_path: Path, text: str) -> None:
    EventLog(tmp_path / "events").emit("said", text=text)

    assert [event["text"] for event in read_events(tmp_path / "events")] == [text]


@pytest.mark.root
def test_a_full_disk_is_named(small_disk: Path) -> None:
    log = EventLog(small_disk / "events.jsonl")
    with pytest.raises(DiskFull, match=r"events.jsonl: the disk is full"):
        for _ in range(1000):
            log.emit("step.end", text="x" * 2000)
