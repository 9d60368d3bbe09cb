"""Killed anywhere, edited meanwhile, started twice: the same command ends with the same model."""

import json
import os
import shutil
import signal
import time
from itertools import cycle
from pathlib import Path

import psutil
import pytest

from pipeline_lib.core.signals import STOP_SIGNALS
from tests.pipeline.conftest import (
    Project,
    executed,
    kill_tree,
    no_process_left,
    sealed_times,
    wait_until,
)


def stage_runs(project: Project, stage: str) -> bool:
    """Whether a process of the command `stage` is at work in the project."""
    return bool(processes_of(project, stage))


def processes_of(project: Project, command: str) -> list[psutil.Process]:
    """Those of one of our commands that work in the project."""
    found = psutil.process_iter(["cwd", "cmdline"])
    mine = [process for process in found if process.info["cwd"] == str(project.root)]
    return [
        process
        for process in mine
        if (process.info["cmdline"] or [])[1:4] == ["-m", "pipeline_lib", command]
    ]


@pytest.fixture
def undisturbed(small: Project) -> dict[str, str]:
    """Hashes of the model that a run without interruption makes."""
    return small.weights()


@pytest.fixture
def project(small: Project, tmp_path: Path) -> Project:
    """A project that has all that a training needs."""
    made = small.copy_to(tmp_path / "project")
    made.forget_training()
    return made


@pytest.mark.slow
def test_killed_in_every_stage_the_same_command_continues(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    project = Project(tmp_path)
    stages = ["download", "tokenize", "shard", "plan", "train", "merge", "evaluate", "report"]
    for stage in stages:
        before = sealed_times(project)
        process = project.start()
        wait_until(lambda: stage_runs(project, stage), process, f"the {stage} stage")  # noqa: B023
        kill_tree(process)
        assert before.items() <= sealed_times(project).items(), (
            f"killed in {stage}: finished stages were redone"
        )
    project.snakemake()
    assert project.weights() == undisturbed
    assert no_process_left(project.root)
    assert not list(project.store.root.glob("*/.stage-*"))


def test_killed_in_training_it_resumes_from_the_last_checkpoint_that_is_whole(
    project: Project, small: Project, undisturbed: dict[str, str]
) -> None:
    """Killed twice: the first time the newest checkpoint is used, the second time it is damaged."""
    checkpoints = project.root / "runs"
    for step in (6, 12):
        process = project.start(project.target("merge"))
        pattern = f"*/checkpoints/step-{step:08}"
        wait_until(lambda: any(checkpoints.glob(pattern)), process, "a checkpoint")  # noqa: B023
        kill_tree(process)
    folder = next(checkpoints.glob("*/checkpoints"))
    *_, before, newest = sorted(folder.glob("step-*"))
    flip_a_byte(next(newest.glob("tensors/*.safetensors")))
    assert "train" in executed(project.snakemake(project.target("merge")).stdout)
    assert (folder / f"rejected-{newest.name}").exists()
    events = [
        json.loads(line)
        for line in (project.sealed("train") / "events.jsonl").read_text().splitlines()
    ]
    first, second = (event for event in events if event["event"] == "run.resumed")
    assert first["step"] >= 6
    assert second["checkpoint"] == before.name
    assert "checkpoint.rejected" in {event["event"] for event in events}
    assert json.loads((project.sealed("train") / "summary.json").read_text())["attempts"] == 3
    assert project.weights() == undisturbed
    there = f"{small.store.root}:small"
    compared = json.loads(
        project.run("python", "-m", "pipeline_lib", "compare", "small", there, "--json").stdout
    )
    assert compared["identical"] is True


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_signal_saves_says_so_and_the_next_run_continues(
    project: Project, tmp_path: Path, forked_programs: Path
) -> None:
    """Each signal in turn, to all, as a terminal, `timeout` and systemd do, or snakemake alone.

    Then a terminal is closed, and one in which nohup says that it does not matter.
    """
    project.take_small_steps(epochs=3)  # each may come some steps late
    project.edit("save_every_steps: 3", "save_every_steps: 1000")
    undisturbed = project.copy_to(tmp_path / "undisturbed").starting_from(forked_programs)
    undisturbed.snakemake(undisturbed.target("merge"))
    saved = []
    sends = dict(zip(STOP_SIGNALS, cycle((os.killpg, os.kill)), strict=False))
    for number, send in [*sends.items(), (signal.SIGTERM, os.killpg)]:
        before = steps_done(project)
        process = project.start(project.target("merge"))
        wait_until(lambda: steps_done(project) >= before + 2, process, "the second step")  # noqa: B023
        send(process.pid, number)
        assert process.wait(300) != 0
        wait_until_no_process_left(project)
        output = (project.root / "started.log").read_text()
        assert "Traceback" not in output
        last = output[output.rindex("WorkflowError") :]  # Snakemake's own end
        assert last.endswith(f"the same command continues: snakemake {project.target('merge')}\n")
        assert "\nstopped: 1 job interrupted\n" in last
        saved.append(newest_checkpoint(project))
        assert f"after step {int(saved[-1].removeprefix('step-'))}, which is saved" in last

    before = steps_done(project)
    terminal = project.start_in_terminal("snakemake", project.target("merge"))
    wait_until(lambda: steps_done(project) >= before + 2, terminal.process, "the second step")
    terminal.close()
    assert terminal.process.wait(300) != 0
    wait_until_no_process_left(project)
    saved.append(newest_checkpoint(project))
    assert int(saved[-1].removeprefix("step-")) >= before + 2

    before = steps_done(project)
    terminal = project.start_in_terminal("nohup", "snakemake", project.target("merge"))
    wait_until(lambda: steps_done(project) > before, terminal.process, "a step")
    terminal.close()
    terminal.process.wait(300)
    wait_until_no_process_left(project)
    events = [
        json.loads(line)
        for line in (project.sealed("train") / "events.jsonl").read_text().splitlines()
    ]
    assert [event["checkpoint"] for event in events if event["event"] == "run.resumed"] == saved
    # a snakemake whose terminal is gone may end before the merge
    project.snakemake(project.target("merge"))
    assert project.weights() == undisturbed.weights()


def newest_checkpoint(project: Project) -> str:
    """The name of the last one of the only training."""
    return sorted(path.name for path in project.root.glob("runs/*/checkpoints/step-*"))[-1]


@pytest.mark.slow
def test_a_signal_in_another_stage_says_that_it_was_stopped(small: Project, tmp_path: Path) -> None:
    """To all processes, and to snakemake alone."""
    project = Project(tmp_path)
    shutil.copytree(small.store.root / "download", project.store.root / "download")
    for send in (os.killpg, os.kill):
        process = project.start("tokenize")
        wait_until(lambda: stage_runs(project, "tokenize"), process, "the tokenize stage")  # noqa: B023
        send(process.pid, signal.SIGTERM)
        assert process.wait(300) != 0
        wait_until_no_process_left(project)
        output = (project.root / "started.log").read_text()
        assert "Traceback" not in output
        assert "\nstopped: 1 job interrupted\n" in output
        assert "memory" not in output[output.rindex("WorkflowError") :]
    project.snakemake("tokenize")


def steps_done(project: Project) -> int:
    """Lines of the live metrics."""
    return sum(
        len(path.read_text().splitlines()) for path in project.root.glob("runs/*/metrics.jsonl")
    )


def wait_until_no_process_left(project: Project) -> None:
    """Ranks save and end a moment after the driver."""
    for _ in range(600):
        if no_process_left(project.root):
            return
        time.sleep(0.1)
    raise AssertionError("processes are left")


@pytest.mark.slow
def test_whichever_process_is_killed_no_rank_is_left_or_the_next_run_waits_for_it(
    project: Project, undisturbed: dict[str, str]
) -> None:
    """First a rank, then the launcher, which ends its ranks, and the driver, which does not.

    It leaves the training at work.
    """
    process = project.start(project.target("merge"))
    wait_until(
        lambda: any(project.root.glob("runs/*/checkpoints/step-*")), process, "the first checkpoint"
    )
    processes_of(project, "rank")[0].kill()
    assert process.wait() != 0
    output = (project.root / "started.log").read_text()
    assert "was killed by SIGKILL" in output
    assert "run the same command again to continue" in output
    assert "Traceback" not in output

    process = project.start(project.target("merge"))
    wait_until(lambda: stage_runs(project, "rank"), process, "the ranks")
    processes_of(project, "train")[0].kill()
    assert process.wait() != 0
    wait_until_no_process_left(project)
    [events] = project.root.glob("runs/*/events.jsonl")
    launched = events.read_text().count('"run.launched"')

    process = project.start(project.target("merge"))
    wait_until(lambda: stage_runs(project, "rank"), process, "the ranks")
    process.kill()
    process.wait()
    output = project.snakemake(project.target("merge")).stdout
    if "train" in executed(output):  # it had not ended before
        assert "waiting for process" in output or "already done, verified" in output
    assert project.weights() == undisturbed
    assert (project.sealed("train") / "events.jsonl").read_text().count(
        '"run.launched"'
    ) == launched + 1


@pytest.mark.slow
def test_two_snakemakes_at_once_compute_everything_once_whatever_the_yaml_says_by_then(
    project: Project, undisturbed: dict[str, str]
) -> None:
    before, target = project.experiment(), project.target("merge")
    first = project.start(target)
    wait_until(lambda: stage_runs(project, "train"), first, "the training")
    second = project.start(target, log="second.log")
    wait_until(lambda: len(processes_of(project, "train")) == 2, second, "that of the second")
    project.edit("lr: 4.0e-3", "lr: 9.0e-3")
    assert first.wait() == second.wait() == 0
    assert "already done, verified" in (project.root / "second.log").read_text()
    files = project.manifest("merge", before)["files"]
    assert {name: files[name]["sha256"] for name in undisturbed} == undisturbed
    assert not project.sealed("train").exists()
    attempts = json.loads((project.sealed("train", before) / "summary.json").read_text())[
        "attempts"
    ]
    assert attempts == 1


def flip_a_byte(path: Path) -> None:
    """Damage the last byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_a_pointer_that_another_snakemake_takes_away_for_a_while_is_waited_for(
    finished: Project,
) -> None:
    """As it does when it comes to a stage that was done since it began."""
    evaluate, merge = (
        finished.store.pointer(finished.experiment().ref(part)) for part in ("evaluate", "merge")
    )
    for pointer in (evaluate, finished.store.pointer(finished.experiment().ref("report"))):
        pointer.unlink()
    process = finished.start()
    wait_until(lambda: stage_runs(finished, "evaluate"), process, "the evaluation")
    merge.rename(merge.with_suffix(".taken"))
    wait_until(evaluate.exists, process, "the end of the evaluation")
    time.sleep(8)  # Snakemake by itself waits for 5 s
    assert process.poll() is None
    merge.with_suffix(".taken").rename(merge)
    assert process.wait(300) == 0
