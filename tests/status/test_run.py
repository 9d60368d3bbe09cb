"""The numbers of a run, from the ends of its files."""

import json
import os
import time
from pathlib import Path

import pytest

from pipeline_lib.core.events import EventLog
from pipeline_lib.core.files import write_json
from pipeline_lib.core.run_record import EVENTS_BYTES, METRICS_BYTES, RunRecord, objects, tail
from pipeline_lib.status.progress import finished_numbers, newest_checkpoint, numbers_of
from pipeline_lib.train.metrics import print_progress
from tests.complete import training_json
from tests.status.stubs import row


def write_rows(folder: Path, *attempts: tuple[int, range]) -> None:
    with (folder / "metrics.jsonl").open("w") as file:
        for attempt, steps in attempts:
            for step in steps:
                file.write(json.dumps(row(step, attempt, 0.5 * (step - steps.start + 1))) + "\n")


def test_only_the_end_of_a_file_is_read_from_the_beginning_of_a_line(tmp_path: Path) -> None:
    write_rows(tmp_path, (1, range(1, 1001)))
    path = tmp_path / "metrics.jsonl"
    assert path.stat().st_size > 2 * METRICS_BYTES

    text, is_all = tail(path, METRICS_BYTES)

    rows = objects(text)
    assert not is_all
    assert METRICS_BYTES - 1000 < len(text) <= METRICS_BYTES
    assert [each["step"] for each in rows] == list(range(1001 - len(rows), 1001))


@pytest.mark.parametrize("cut", range(0, 700, 7))
def test_a_file_cut_anywhere_gives_whole_rows(tmp_path: Path, cut: int) -> None:
    lines = [json.dumps(row(step)) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""])[: -cut or None])

    assert [each["step"] for each in RunRecord.read_ends(tmp_path).rows] == [1, 2][
        : 2 if cut == 0 else 1 if cut <= len(lines[1]) + 1 else 0
    ]


def test_the_eta_is_that_of_the_progress_line(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl", attempt=1).emit("run.launched")
    EventLog(tmp_path / "events.jsonl", attempt=1).emit("run.start", last_step=400)
    said: list[str] = []
    observe = print_progress(said.append, last_step=400)
    elapsed_s = 0.0
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 61):
            elapsed_s += 30.0 if step == 1 else 0.4 + 0.05 * (step % 7)
            fields = row(step, 1, round(elapsed_s, 3))
            file.write(json.dumps(fields) + "\n")
            observe("step.end", fields | ({"step": 400} if step == 400 else {}))
    told_s = numbers_of(RunRecord.read_ends(tmp_path), is_alive=True).eta_s

    recent = [0.4 + 0.05 * (step % 7) for step in range(41, 61)]
    assert told_s == pytest.approx(340 * sum(recent) / 20, rel=1e-3)
    # of the first step, which says so: one step of 30 s, 399 left
    assert said[0].endswith("ETA 3:19:30")


def test_an_attempt_that_took_up_but_made_no_step_stands_where_it_took_up(tmp_path: Path) -> None:
    first, second = (EventLog(tmp_path / "events.jsonl", attempt=attempt) for attempt in (1, 2))
    first.emit("run.launched")
    first.emit("run.start", last_step=40)
    write_rows(tmp_path, (1, range(1, 18)))
    second.emit("run.launched")

    starting = numbers_of(RunRecord.read_ends(tmp_path), is_alive=True)

    assert (starting.attempt, starting.step, starting.loss, starting.tokens_per_s) == (
        2,
        None,
        None,
        None,
    )
    assert (starting.eta_s, starting.elapsed_s) == (None, None)

    second.emit("run.start", last_step=40)
    second.emit("run.resumed", step=15, checkpoint="step-00000015")
    resumed = numbers_of(RunRecord.read_ends(tmp_path), is_alive=True)
    assert (resumed.step, resumed.last_step, resumed.eta_s) == (15, 40, None)
    # killed again: the last step made
    assert numbers_of(RunRecord.read_ends(tmp_path), is_alive=False).step == 17

    write_rows(tmp_path, (1, range(1, 18)), (2, range(16, 21)))
    numbers = numbers_of(RunRecord.read_ends(tmp_path), is_alive=True)
    assert (numbers.step, numbers.elapsed_s, numbers.eta_s) == (20, 2.5, 10.0)


def test_a_step_that_was_refused_has_no_loss_to_show(tmp_path: Path) -> None:
    rows = [row(1, loss=4.0), row(2, loss=900.0, verdict="skip")]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))

    assert numbers_of(RunRecord.read_ends(tmp_path), is_alive=True).loss == 4.0


def test_a_run_without_a_step_for_long_has_no_eta(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl", attempt=1).emit("run.start", last_step=40)
    write_rows(tmp_path, (1, range(1, 31)))
    assert numbers_of(RunRecord.read_ends(tmp_path), is_alive=True).eta_s == 5.0

    long_ago = time.time() - 300
    os.utime(tmp_path / "metrics.jsonl", (long_ago, long_ago))
    numbers = numbers_of(RunRecord.read_ends(tmp_path), is_alive=True)

    assert numbers.is_stalled
    assert numbers.eta_s is None
    assert numbers.since_step_s == pytest.approx(300, abs=20)


def test_a_run_that_is_at_its_end_is_not_stalled(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl", attempt=1).emit("run.start", last_step=30)
    write_rows(tmp_path, (1, range(1, 31)))
    os.utime(tmp_path / "metrics.jsonl", (0, 0))

    assert not numbers_of(RunRecord.read_ends(tmp_path), is_alive=True).is_stalled


def test_requeues_are_not_guessed_when_the_events_are_too_many(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", attempt=1)
    log.emit("run.launched")
    log.emit("run.requeued", step=3, reason="a signal")
    assert numbers_of(RunRecord.read_ends(tmp_path), is_alive=False).requeues == 1

    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "checkpoint.saved", "attempt": 1}\n' * (EVENTS_BYTES // 40))
    EventLog(tmp_path / "events.jsonl", attempt=5).emit("run.launched")

    numbers = numbers_of(RunRecord.read_ends(tmp_path), is_alive=False)
    assert (numbers.attempt, numbers.requeues) == (5, None)


def test_speed_and_time_of_a_run_whose_summary_has_none_come_from_its_steps(tmp_path: Path) -> None:
    summary = training_json(steps=8)
    del summary["tokens_per_s"], summary["training_time_s"]
    write_json(tmp_path / "summary.json", summary)
    assert finished_numbers(tmp_path / "nowhere").tokens_per_s is None

    write_rows(tmp_path, (1, range(1, 6)), (2, range(6, 9)))
    numbers = finished_numbers(tmp_path)

    assert (numbers.step, numbers.tokens_per_s, numbers.elapsed_s) == (8, 4000.0, 2.5 + 1.5)


def test_only_sealed_checkpoints_count(tmp_path: Path) -> None:
    for name, is_sealed in (("step-00000003", True), ("step-00000012", True), ("rejected-step-00000020", True),
                            (".stage-step-00000015-ab", True), ("step-00000015", False)):  # fmt: skip
        (tmp_path / name).mkdir()
        if is_sealed:
            (tmp_path / name / "manifest.json").write_text("{}")

    assert newest_checkpoint(tmp_path)[0] == 12
    assert newest_checkpoint(tmp_path / "nowhere") == (None, None)
