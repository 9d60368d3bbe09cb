"""The state of an experiment, from what real processes and real stages left."""

import io
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline_lib.config.compile import Experiment
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.halving import Reached, decide, decision_path, write_record
from pipeline_lib.core.errors import CONTINUES, ConfigError, Interrupted, PipelineError
from pipeline_lib.core.files import write_json
from pipeline_lib.core.stage import run_stage
from pipeline_lib.core.text import cut
from pipeline_lib.launch.outcome import explain
from pipeline_lib.launch.rank_report import Reporting
from pipeline_lib.records.record import to_json
from pipeline_lib.status.watch import show
from tests.complete import plan_document, training_json
from tests.status.conftest import Hold, Queue
from tests.status.stubs import Desk, row

# of logs from before there were exit codes
OLD_CONTINUES = "run the same command again to continue"


def test_the_first_stage_that_is_missing_is_shown(desk: Desk) -> None:
    demo = desk.freeze()
    found = desk.status()
    assert (found.experiment, found.stage, found.state) == ("demo", "download", "not begun")
    assert (found.reason, found.advice) == (None, None)
    for parts, stage in (
        (("model",), "download"),
        (("data.0",), "tokenize"),
        (("tokenize",), "shard"),
        (("shard",), "plan"),
        (("plan",), "train"),
    ):
        desk.seal(demo, *parts)
        assert (desk.status().stage, desk.status().state) == (stage, "not begun")
    desk.seal(
        demo,
        "train",
        summary=training_json(
            steps=40, final_loss=3.25, tokens_per_s=4000.0, training_time_s=20.0, attempts=2
        ),
    )
    assert desk.status().stage == "merge"
    desk.seal(demo, "merge", "baseline", "evaluate", "report")

    found = desk.status()

    assert (found.stage, found.state) == (None, "done")
    numbers = found.numbers
    assert (numbers.step, numbers.last_step, numbers.loss, numbers.tokens_per_s) == (
        40,
        40,
        3.25,
        4000.0,
    )
    assert (numbers.elapsed_s, numbers.attempt) == (20.0, 2)


def test_a_finished_experiment_needs_its_model_and_nothing_of_what_was_made_on_the_way(
    desk: Desk,
) -> None:
    demo = desk.ready_to_train()
    desk.seal(demo, "train", "merge", "baseline", "evaluate", "report")
    sealed = desk.store.sealed(demo.ref("merge")) / "manifest.json"
    model = sealed.read_text()
    sealed.unlink()

    found = desk.status()

    assert (found.stage, found.state) == ("merge", "not begun")
    assert (found.reason, found.advice) == (
        "its report exists, and its model is missing",
        "run snakemake again",
    )
    sealed.write_text(model)
    for part in ("tokenize", "plan", "data.0"):
        (desk.store.sealed(demo.ref(part)) / "manifest.json").unlink()
    assert desk.status().state == "done"


def test_a_stage_runs_while_a_living_process_holds_its_lock(desk: Desk, hold: Hold) -> None:
    demo = desk.ready_to_train(launched=True)
    desk.event(demo, "run.start", attempt=1, last_step=40)
    desk.train(demo, range(1, 31))
    desk.save(demo, 15)
    desk.save(demo, 30)
    pid = hold(demo, job="77")

    found = desk.status()

    assert (found.stage, found.state, found.job) == ("train", "running", "77")
    assert found.owner is not None and found.owner.startswith(f"process {pid} on ")
    numbers = found.numbers
    assert (numbers.step, numbers.last_step, numbers.attempt, numbers.requeues) == (30, 40, 1, 0)
    assert numbers.loss == pytest.approx(4.7)
    assert numbers.tokens_per_s == 4000.0
    assert numbers.eta_s == pytest.approx(5.0)  # ten steps of half a second
    assert numbers.elapsed_s == 15.0
    assert numbers.peak_memory_bytes == 600_000_030
    assert numbers.checkpoint_step == 30
    assert numbers.checkpoint_age_s is not None and numbers.checkpoint_age_s < 60

    os.kill(pid, signal.SIGKILL)
    psutil.Process(pid).wait(10)

    found = desk.status()

    assert (found.stage, found.state, found.owner) == ("train", "interrupted", None)
    assert (found.numbers.step, found.numbers.eta_s, found.numbers.tokens_per_s) == (30, None, None)
    assert found.reason is not None and "killed" in found.reason
    assert found.advice == "run snakemake again; training resumes from the checkpoint of step 30"


def test_ranks_that_differ_are_warned_of_while_the_training_runs(desk: Desk, hold: Hold) -> None:
    demo = desk.ready_to_train(launched=True)
    for step in (10, 20, 30):
        reading: dict[str, Any] = {
            "gpu_utilization_of_ranks": [0.97, 0.6],
            "peak_memory_bytes_of_ranks": [7 * 10**8, 8 * 10**8],
        }
        desk.train(demo, range(step - 9, step))
        desk.train(demo, range(step, step + 1), **reading)
    assert desk.status().numbers.warnings == ()  # nobody works on it
    hold(demo)

    found = desk.status()

    assert found.numbers.gpu_utilization == (0.97, 0.6)
    assert found.numbers.peak_memory_bytes == 8 * 10**8
    assert len(found.numbers.warnings) == 3
    stream = io.StringIO()
    show(desk.survey(), stream)
    table, _, notes = stream.getvalue().partition("\n\n")
    assert "60-97%" in table
    assert "running in train" in notes
    assert "warning: GPU utilization stays under 80% on rank 1 (60%)" in notes


def test_stages_that_do_not_train_run_too(desk: Desk, hold: Hold) -> None:
    demo = desk.freeze()
    desk.seal(demo, "model")
    hold(demo, part="data.0")

    assert (desk.status().stage, desk.status().state) == ("download", "running")


def test_the_base_models_evaluation_is_told_from_that_of_the_trained_model(
    desk: Desk, hold: Hold
) -> None:
    demo = desk.ready_to_train()
    hold(demo, part="baseline")

    assert (desk.status().stage, desk.status().state) == ("baseline", "running")

    desk.seal(demo, "train", "merge", "baseline")
    hold(demo, part="evaluate")

    assert (desk.status().stage, desk.status().state) == ("evaluate", "running")


@pytest.mark.parametrize("part", ["tokenize", "train"])
def test_a_stage_whose_log_ends_with_an_error_failed(desk: Desk, part: str) -> None:
    demo = desk.ready_to_train()
    if part == "tokenize":
        for ref in (demo.ref("tokenize"), demo.ref("shard")):
            (desk.store.sealed(ref) / "manifest.json").unlink()
    log = desk.log(
        demo, part, "reading\nerror: rows.jsonl: line 7: not JSON\n  - look there [bold]\n"
    )

    found = desk.status()

    assert (found.stage, found.state) == (part, "failed")
    assert found.reason == "rows.jsonl: line 7: not JSON - look there [bold]"
    assert found.log == str(log)
    assert found.advice is not None and found.advice.startswith(
        "fix the error and run snakemake again"
    )


def test_a_stage_that_was_killed_without_a_word_is_interrupted(desk: Desk) -> None:
    demo = desk.freeze()
    desk.log(demo, "model", "download: reading\n")

    assert (desk.status().stage, desk.status().state) == ("download", "interrupted")


def test_logs_of_another_store_are_not_believed(desk: Desk) -> None:
    demo = desk.freeze()
    digest = demo.ref("model").digest
    log = desk.log(demo, "model", "error: it broke\n")
    os.utime(log, (0, 0))  # from before this store knew of the stage
    assert desk.status().state == "not begun"

    desk.log(demo, "model", f"download: reading\ndownload {digest}: done in 0.1 s\n")
    assert desk.status().state == "not begun"


def test_what_a_stage_says_when_it_is_done_is_known(desk: Desk) -> None:
    """However it says it: what it made may have been deleted since."""
    demo = desk.freeze()
    spec, said = demo.specs["model"], list[str]()
    for _ in range(2):
        run_stage(lambda job: {}, spec, desk.store, said.append)
    shutil.rmtree(desk.store.sealed(spec.ref))
    desk.store.pointer(spec.ref).unlink()

    for line in said:
        desk.log(demo, "model", f"{line}\n")
        assert desk.status().state == "not begun"


def test_the_rank_that_failed_first_is_quoted_when_there_is_no_log(desk: Desk) -> None:
    demo = desk.ready_to_train(launched=True)
    desk.train(demo, range(1, 6))
    errors = desk.run_dir(demo) / "errors"
    write_json(
        errors / "rank-0.json", {"rank": 0, "exit_code": 75, "message": "lost a peer; run again"}
    )
    write_json(
        errors / "rank-1.json", {"rank": 1, "exit_code": 70, "message": "gave up at step 6\x1b[2J"}
    )
    (errors / "rank-2.json").write_text('{"rank": 2, "exi')

    found = desk.status()

    assert (found.state, found.reason) == ("failed", "rank 1: gave up at step 6 [2J")
    assert found.numbers.step == 5


def reported(desk: Desk, demo: Experiment, *errors: PipelineError) -> None:
    """Let the ranks from 0 on fail so."""
    for rank, error in enumerate(errors):
        with pytest.raises(type(error)), Reporting(desk.run_dir(demo), rank):
            raise error


def test_an_agreed_stop_is_an_interruption(desk: Desk) -> None:
    demo = desk.ready_to_train(launched=True)
    desk.save(demo, 6)
    stopped = Interrupted(f"stopped by a signal after step 6, which is saved; {CONTINUES}")
    reported(desk, demo, stopped, stopped)
    error = explain("srun", 75, None, 2, desk.run_dir(demo))
    log = desk.log(
        demo, "train", f"error: {error}\nnot queued again: cluster.max_requeues allows 20 times\n"
    )

    assert desk.status().state == "interrupted"

    log.unlink()
    assert (desk.status().state, desk.status().reason) == ("interrupted", f"rank 0: {stopped}")


def test_the_ranks_know_better_than_the_words_of_the_log_what_is_a_failure(desk: Desk) -> None:
    demo = desk.ready_to_train(launched=True)
    reported(desk, demo, Interrupted("stopped, in other words"))
    desk.log(demo, "train", "error: rank 0: stopped, in other words\n")
    assert desk.status().state == "interrupted"

    # of a later call, which began no rank
    desk.log(demo, "train", "error: plan.json: not the bytes that were sealed\n")
    assert desk.status().state == "failed"


def test_a_rewound_run_is_not_what_it_stopped_as_before(desk: Desk) -> None:
    """Neither the stop's log, however recent, nor its ranks' reports are about the run now."""
    demo = desk.ready_to_train(launched=True)
    desk.save(demo, 3)
    reported(desk, demo, PipelineError("gave up at step 6"))
    log = desk.log(demo, "train", "error: rank 0: gave up at step 6\nexit code: 1\n")
    assert (desk.status().state, desk.status().reason) == ("failed", "rank 0: gave up at step 6")
    desk.event(demo, "run.rewound", step=3, set_aside=["step-00000006"])
    stopped_s = (desk.run_dir(demo) / "events.jsonl").stat().st_mtime - 1
    os.utime(log, (stopped_s, stopped_s))

    status = desk.status()

    assert (status.state, status.reason, status.log) == ("interrupted", "rewound to step 3", None)
    assert status.advice == "run snakemake again; training resumes from the checkpoint of step 3"
    # of a call since
    desk.log(demo, "train", "error: plan.json: not the bytes that were sealed\nexit code: 66\n")
    later_s = stopped_s + 2
    os.utime(log, (later_s, later_s))
    assert (desk.status().state, desk.status().reason) == (
        "failed",
        "plan.json: not the bytes that were sealed",
    )


def test_a_long_reason_that_the_launcher_cut_is_found_in_the_log(desk: Desk) -> None:
    demo = desk.ready_to_train()
    whole = "stopped by a signal " * 30
    desk.event(demo, "run.launched", attempt=1)
    desk.event(demo, "run.interrupted", attempt=1, reason=cut(whole, 500), exit_code=75)
    desk.log(demo, "train", f"error: {whole}\n")
    assert desk.status().state == "interrupted"


@pytest.mark.parametrize(
    ("log", "state", "reason"),
    [
        ("SLURM did not answer\nexit code: 75\n", "interrupted", "SLURM did not answer"),
        # The exit code decides, and no words do; without one, as in older logs, the words do.
        (
            f"says: {CONTINUES}\nin SLURM job 7\nexit code: 65\n",
            "failed",
            f"says: {CONTINUES} in SLURM job 7",
        ),
        (f"stopped; {OLD_CONTINUES}\n", "interrupted", f"stopped; {OLD_CONTINUES}"),
        ("https://me:s3cret@host/x refused\n", "failed", "https://me:***@host/x refused"),
    ],
)
def test_the_error_that_ends_a_log_says_what_is_a_failure(
    desk: Desk, log: str, state: str, reason: str
) -> None:
    desk.log(desk.freeze(), "model", f"error: {log}")

    assert (desk.status().state, desk.status().reason) == (state, reason)


@pytest.mark.parametrize(
    ("name", "state"), [("run.interrupted", "interrupted"), ("run.failed", "failed")]
)
def test_the_launchers_last_word_decides(desk: Desk, name: str, state: str) -> None:
    demo = desk.ready_to_train(launched=True)
    write_json(
        desk.run_dir(demo) / "errors" / "rank-0.json",
        {"rank": 0, "exit_code": 75, "message": "lost a peer"},
    )
    desk.event(demo, name, attempt=1, reason="rank 1:\n  it is over", exit_code=1)
    assert (desk.status().state, desk.status().reason) == (state, "rank 1: it is over")

    log = desk.log(demo, "train", "train: ddp\nerror: rank 1:\n  it is over\nSLURM job 7\n")
    assert (desk.status().state, desk.status().reason) == (state, "rank 1: it is over SLURM job 7")

    log.unlink()
    desk.event(demo, "run.launched", attempt=2)
    (desk.run_dir(demo) / "errors" / "rank-0.json").unlink()
    found = desk.status()
    assert found.state == "interrupted"
    assert found.reason is not None and found.reason.startswith(
        "its process is gone and left no message"
    )


def test_after_a_rehearsal_the_run_itself_is_not_begun(desk: Desk) -> None:
    """It shares the folder of the run, whose last event then is that it ended."""
    demo = desk.ready_to_train(launched=True)
    desk.event(demo, "run.start", attempt=1, last_step=2)
    desk.train(demo, range(1, 3))
    desk.save(demo, 2)
    desk.event(demo, "run.end", attempt=1, step=2)

    found = desk.status()

    assert found.state == "not begun"
    assert (found.numbers.step, found.numbers.last_step, found.numbers.checkpoint_step) == (
        2,
        40,
        2,
    )

    desk.log(demo, "train", "train: ddp\n")
    assert desk.status().state == "interrupted"


def test_a_job_that_waits_in_the_queue(desk: Desk, queue: Queue) -> None:
    demo = desk.ready_to_train()
    queue("31|PENDING|Resources|2026-11-22T09:00:00", demo.ref("train").digest)

    found = desk.status()

    assert (found.stage, found.state, found.job) == ("train", "waiting", "31")
    assert found.job_state == "PENDING (Resources)"
    assert (
        found.reason
        == "SLURM job 31: PENDING (Resources), expected to start at 2026-11-22T09:00:00"
    )
    assert (found.numbers.step, found.numbers.last_step) == (None, 40)


def test_a_job_that_was_queued_again_waits_to_go_on(desk: Desk, queue: Queue) -> None:
    demo = desk.ready_to_train()
    desk.event(demo, "run.launched", attempt=1, job="31")
    desk.train(demo, range(1, 10))
    desk.save(demo, 9)
    desk.event(demo, "run.requeued", attempt=1, job="31", step=9, reason="stopped by a signal")
    desk.log(demo, "train", "launch: SLURM job 31 is queued again\n")
    assert desk.status().state == "requeued"  # SLURM cannot be asked

    queue("31|PENDING|BeginTime|N/A", demo.ref("train").digest)
    found = desk.status()
    assert (found.state, found.job, found.numbers.requeues) == ("requeued", "31", 1)
    assert found.reason == "stopped by a signal; SLURM job 31: PENDING (BeginTime)"

    queue("")
    found = desk.status()
    assert found.state == "interrupted"
    assert found.advice == "run snakemake again; training resumes from the checkpoint of step 9"


def test_a_job_that_slurm_refused_to_queue_again_is_interrupted(desk: Desk, queue: Queue) -> None:
    demo = desk.ready_to_train()
    desk.event(demo, "run.launched", attempt=1, job=31)
    desk.train(demo, range(1, 10))
    desk.event(demo, "run.interrupted", attempt=1, reason="stopped by a signal", exit_code=75)
    desk.event(demo, "run.requeued", attempt=1, job=31, step=9, reason="stopped by a signal")
    desk.event(
        demo,
        "run.requeue_refused",
        attempt=1,
        job=31,
        step=9,
        reason="scontrol requeue 31: disabled",
    )
    for state in ("RUNNING", "COMPLETING", ""):  # SLURM takes a moment to end the job
        queue(f"31|{state}|None|N/A" if state else "", demo.ref("train").digest)
        found = desk.status()
        assert (found.state, found.numbers.requeues) == ("interrupted", 0)
        assert (
            found.reason == "stopped by a signal; not queued again: scontrol requeue 31: disabled"
        )

    queue("32|RUNNING|None|N/A", demo.ref("train").digest)  # a new job, which begins
    assert (desk.status().state, desk.status().job) == ("waiting", "32")

    queue("")
    desk.log(
        demo,
        "train",
        "error: stopped by a signal\nnot queued again: scontrol requeue 31: disabled\n",
    )
    assert desk.status().state == "interrupted"


def test_a_job_whose_node_was_lost_waits_to_go_on(desk: Desk, queue: Queue) -> None:
    """SLURM queues it again by itself; the run could say nothing."""
    demo = desk.ready_to_train()
    desk.event(demo, "run.launched", attempt=1, job="31")
    desk.train(demo, range(1, 10))
    queue("31|PENDING|BeginTime|N/A", demo.ref("train").digest)

    assert (desk.status().state, desk.status().job) == ("requeued", "31")


def test_squeue_is_called_once_for_all(desk: Desk, queue: Queue) -> None:
    for number in range(5):
        desk.freeze(f"demo-{number}", lr=f"{number + 1}.0e-3")
    queue("")

    assert len(desk.survey().statuses()) == 5
    assert (desk.folder / "bin" / "calls").read_text().splitlines() == ["called"]


def test_the_newest_config_of_each_name(desk: Desk) -> None:
    first, second = desk.freeze("a", lr="1.0e-3"), desk.freeze("a", lr="2.0e-3")
    other = desk.freeze("b")
    old, new, beside = (path_of(desk, one.ref("train").digest) for one in (first, second, other))
    os.utime(old, (time.time() - 100,) * 2)

    assert [found.frozen for found in desk.survey().statuses()] == [new.stem, beside.stem]
    assert {
        found.frozen
        for found in desk.survey(all_of_them=True).statuses()
        if found.experiment == "a"
    } == {
        old.stem,
        new.stem,
    }
    assert [found.experiment for found in desk.survey("b").statuses()] == ["b"]
    with pytest.raises(
        ConfigError, match="c: no experiment of that name, and no config file; known: a, b"
    ):
        desk.survey("b", "c").statuses()


def path_of(desk: Desk, train_digest: str) -> Path:
    """The frozen experiment with that training."""
    paths = (desk.store.root / "experiments").glob("*.json")
    return next(
        path for path in paths if json.loads(path.read_text())["parts"]["train"] == train_digest
    )


def test_damaged_experiments_are_shown_as_such_beside_the_others(desk: Desk) -> None:
    desk.freeze()
    contents = ("", "{", "[1]", "null", '{"config": {"experiment": 3}, "parts": []}', "\xff\x00")
    for number, content in enumerate(contents):
        (desk.store.root / "experiments" / f"000{number}.json").write_text(content)

    found = {status.experiment: status.state for status in desk.survey().statuses()}

    assert found == {f"000{number}.json": "unreadable" for number in range(len(contents))} | {
        "demo": "not begun"
    }


def test_a_damaged_spec_is_shown_as_such(desk: Desk) -> None:
    demo = desk.freeze()
    desk.store.spec_path(demo.ref("shard").digest).write_text('{"stage":')

    found = desk.status()

    assert (found.state, found.stage) == ("unreadable", None)
    assert found.reason is not None and f"{demo.ref('shard').digest}.json" in found.reason


def test_damaged_files_of_a_run_give_no_wrong_numbers(desk: Desk, hold: Hold) -> None:
    demo = desk.ready_to_train()
    hold(demo)
    run_dir = desk.run_dir(demo)
    (run_dir / "events.jsonl").write_bytes(
        b'{"event": "run.launched", "attempt": "x"}\n\xff\xfe\n[1]\n{"event": "run.st'
    )
    rows = [
        json.dumps(row(7, loss=None, tokens_per_s="fast", elapsed_s=3.5)),
        '{"step": -1, "loss": 1}',
        '{"step": true, "loss": 2}',
        '{"step": 9, "loss": NaN, "attempt": 1, "elapsed_s": Infinity}',
        json.dumps(row(10, elapsed_s=5.0))[:-20],
    ]
    (run_dir / "metrics.jsonl").write_text("\n".join(rows))
    (run_dir / "checkpoints" / "step-00000099").mkdir(parents=True)  # not sealed
    (run_dir / "checkpoints" / "step-1000").mkdir()

    found = desk.status()

    assert found.state == "running"
    numbers = found.numbers
    assert (numbers.step, numbers.last_step, numbers.loss, numbers.tokens_per_s) == (
        9,
        40,
        None,
        None,
    )
    assert (numbers.checkpoint_step, numbers.checkpoint_age_s) == (None, None)


def test_folders_and_unreadable_files_in_the_place_of_files(desk: Desk) -> None:
    demo = desk.ready_to_train()
    for name in ("metrics.jsonl", "events.jsonl"):
        (desk.run_dir(demo) / name).mkdir()
    (desk.run_dir(demo) / "checkpoints").write_text("")
    (desk.run_dir(demo) / "errors").write_text("")
    (desk.store.sealed(demo.ref("plan")) / "plan.json").write_text("[]")

    assert desk.status().numbers.step is None


def test_whatever_file_is_damaged_the_experiments_are_shown(desk: Desk, hold: Hold) -> None:
    demo = desk.freeze()
    done = desk.freeze("done", lr="1.0e-3")
    desk.seal_before_train(demo)
    summary = training_json(steps=40)
    desk.seal(done, "train", "merge", "baseline", "evaluate", "report", summary=summary)
    desk.event(demo, "run.launched", attempt=1)
    desk.event(demo, "run.start", attempt=1, last_step=40)
    desk.train(demo, range(1, 10))
    desk.save(demo, 9)
    write_json(
        desk.run_dir(demo) / "errors" / "rank-0.json",
        {"rank": 0, "exit_code": 70, "message": "gave up"},
    )
    desk.log(demo, "train", "error: gave up\n")
    hold(demo)
    files = [
        path
        for path in sorted(desk.folder.rglob("*"))
        if path.is_file() and "no-slurm" not in path.parts
    ]
    assert len(files) > 30
    huge = "9" * 400
    garbage = [
        "[" * 5_000 + "\n",
        f'{{"step": {huge}, "attempt": {huge}}}\n',
        "\x00\xff" * 50,
        "\n" * 9,
        "NaN\n",
        "{}\n",
    ]
    for path in files:
        whole = path.read_bytes()
        for damaged in (
            whole[: len(whole) // 2],
            b"",
            whole.replace(b"1", huge.encode()),
            *(g.encode() for g in garbage),
        ):
            path.write_bytes(damaged)
            found = desk.survey().statuses()
            assert len(found) == 2, path
            assert all(
                isinstance(json.dumps(status.to_json(), allow_nan=False), str) for status in found
            ), path
        path.write_bytes(whole)
    assert {status.state for status in desk.survey().statuses()} == {"running", "done"}


def test_names_that_no_file_can_have(desk: Desk) -> None:
    desk.freeze()
    for number, digest in enumerate(("x" * 300, "\x00", "../../..", "")):
        frozen = {"config": {"experiment": f"odd-{number}"}, "parts": {"report": digest}}
        write_json(desk.store.root / "experiments" / f"odd-{number}.json", frozen)

    states = {status.experiment: status.state for status in desk.survey().statuses()}

    assert states == {"demo": "not begun"} | {f"odd-{number}": "unreadable" for number in range(4)}


def decided(dag: Dag) -> None:
    """The first of the file goes on from the first rung, whatever it came to."""
    rung = dag.rungs[0]
    reached = {
        one: Reached(rung.step, float(place), False, None)
        for place, one in enumerate(rung.trainings)
    }
    decision = decide(rung, None, reached, {one: dag.names_of(one) for one in reached})
    write_record(decision_path(dag.store, rung.digest), decision)


def states(desk: Desk) -> dict[str, str]:
    return {found.experiment: found.state for found in desk.survey().statuses()}


def test_what_its_sweep_let_go_no_further_is_no_failure(desk: Desk) -> None:
    dag = desk.sweep()
    desk.seal_before_train(dag.experiments[0])
    desk.seal(dag.experiments[1], "plan", plan=to_json(plan_document(40)))
    (desk.store.root / "sweeps" / "cut.json").write_text(
        '{"experiments": ["\\u0000", 3, "../x"], "halving": []}'
    )
    assert set(states(desk).values()) == {"not begun"}
    decided(dag)

    one, other = desk.survey().statuses()

    assert (one.state, other.state) == ("not begun", "stopped")
    assert (other.experiment, other.reason) == (
        "swept-lr=0.002",
        "at step 10 of its sweep: place 2 of 2, 1 go on",
    )

    dag.freeze()  # as the same command again does, which decides nothing anew
    assert states(desk)["swept-lr=0.002"] == "stopped"
    decision_path(dag.store, dag.rungs[0].digest).write_text("{")
    assert states(desk)["swept-lr=0.002"] == "not begun"


@pytest.mark.parametrize("again", ["another experiment", "without halving", "alone"])
def test_a_stop_counts_until_the_experiment_is_asked_for_otherwise(desk: Desk, again: str) -> None:
    dag = desk.sweep()
    stopped = dag.experiments[1]
    desk.seal_before_train(dag.experiments[0])
    desk.seal(stopped, "plan", plan=to_json(plan_document(40)))
    decided(dag)
    assert states(desk)[stopped.name] == "stopped"
    then_s = time.time() - 100
    for path in [
        *(desk.store.root / "sweeps").iterdir(),
        *(desk.store.root / "experiments").iterdir(),
    ]:
        os.utime(path, (then_s, then_s))
    assert states(desk)[stopped.name] == "stopped"

    if again == "alone":
        Dag((stopped,), desk.store).freeze()
    else:
        lrs = "1.0e-3, 2.0e-3, 3.0e-3" if again == "another experiment" else "1.0e-3, 2.0e-3"
        desk.sweep(
            sweep=f"{{train.lr: [{lrs}]{', halving: {first_step: 10}' if '3.0' in lrs else ''}}}"
        )

    assert states(desk)[stopped.name] == "not begun"


def test_a_training_to_a_rung_in_the_queue_waits_and_its_logs_are_those_of_the_rung(
    desk: Desk, queue: Queue
) -> None:
    dag = desk.sweep()
    first = dag.experiments[0]
    desk.seal_before_train(first)
    spec = dag.rungs[0].trainings[first.ref("train").digest]
    queue("31|PENDING|Resources|N/A", spec.digest, "rung")

    found = desk.survey(first.name).statuses()[0]
    assert (found.stage, found.state, found.job) == ("train", "waiting", "31")
    assert states(desk)["swept-lr=0.002"] == "not begun"

    queue("")
    desk.event(first, "run.launched", attempt=1, job="31")
    log, slurm_log = (
        desk.folder / "logs" / path for path in (f"rung/{spec.digest}.log", "slurm/rule_rung_stage")
    )
    slurm_log = slurm_log / spec.digest / "31.log"
    for path in (log, slurm_log):
        path.parent.mkdir(parents=True)
        path.write_text("train: ddp\nerror: the disk is full\n")
    desk.log(first, "train", "error: of an earlier whole run\n")
    os.utime(
        desk.folder / "logs" / "train" / f"{first.ref('train').digest}.log", (time.time() - 3,) * 2
    )

    found = desk.survey(first.name).statuses()[0]
    assert (found.state, found.reason) == ("failed", "the disk is full")
    assert (found.log, found.slurm_log) == (str(log), str(slurm_log))

    desk.event(first, "run.end", attempt=1, step=10)
    log.write_text(f"train {spec.digest}: done in 3.0 s\n")
    assert desk.survey(first.name).statuses()[0].state == "not begun"
