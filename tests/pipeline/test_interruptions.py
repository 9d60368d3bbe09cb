"""Killed anywhere, edited meanwhile, started twice: the same command ends with the same model."""

import json
import os
import signal
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import psutil
import pytest

from pipeline_lib.core.signals import STOP_SIGNALS
from tests.pipeline.conftest import Project, executed, kill_tree, no_process_left, sealed_times, wait_until


def stage_runs(project: Project, stage: str) -> bool:
    """Whether a process of the command `stage` is at work in the project."""
    return bool(processes_of(project, stage))


def processes_of(project: Project, command: str) -> list[psutil.Process]:
    """Those of one of our commands that work in the project."""
    found = psutil.process_iter(["cwd", "cmdline"])
    mine = [process for process in found if process.info["cwd"] == str(project.root)]
    return [process for process in mine if (process.info["cmdline"] or [])[1:4] == ["-m", "pipeline_lib", command]]


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
def test_killed_in_every_stage_the_same_command_continues(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    project = Project(tmp_path)
    stages = ["download", "tokenize", "shard", "plan", "train", "merge", "evaluate", "report"]
    for stage in stages:
        before = sealed_times(project)
        process = project.start()
        wait_until(lambda: stage_runs(project, stage), process, f"the {stage} stage")  # noqa: B023
        kill_tree(process)
        assert before.items() <= sealed_times(project).items(), f"killed in {stage}: finished stages were redone"
    project.snakemake()
    assert project.weights() == undisturbed
    assert no_process_left(project.root)
    assert not list(project.store.root.glob("*/.stage-*"))


def test_killed_in_training_it_resumes_from_the_last_checkpoint(
    project: Project, small: Project, undisturbed: dict[str, str]
) -> None:
    process = project.start(project.target("merge"))
    checkpoints = project.root / "runs"
    wait_until(lambda: any(checkpoints.glob("*/checkpoints/step-00000006")), process, "the second checkpoint")
    kill_tree(process)
    assert "train" in executed(project.snakemake(project.target("merge")).stdout)
    events = [json.loads(line) for line in (project.sealed("train") / "events.jsonl").read_text().splitlines()]
    resumed = [event for event in events if event["event"] == "run.resumed"]
    assert [event["step"] >= 6 for event in resumed] == [True]
    assert json.loads((project.sealed("train") / "summary.json").read_text())["attempts"] == 2
    assert project.weights() == undisturbed
    there = f"{small.store.root}:small"
    compared = json.loads(project.run("python", "-m", "pipeline_lib", "compare", "small", there, "--json").stdout)
    assert compared["identical"] is True


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_signal_saves_says_so_and_the_next_run_continues(project: Project, tmp_path: Path) -> None:
    """Each signal in turn, to all processes, as a terminal, `timeout` and systemd send it, or to snakemake alone."""
    project.edit("epochs: 2", "epochs: 6")  # each may come some steps late
    project.edit("save_every_steps: 3", "save_every_steps: 1000")
    undisturbed = project.copy_to(tmp_path / "undisturbed")
    undisturbed.snakemake(undisturbed.target("merge"))
    saved = []
    sends = dict(zip(STOP_SIGNALS, cycle((os.killpg, os.kill)), strict=False))
    for number, send in [*sends.items(), (signal.SIGTERM, os.killpg)]:
        before = steps_done(project)
        process = project.start(project.target("merge"))
        wait_until(lambda: steps_done(project) >= before + 2, process, "the second step")  # noqa: B023
        send(process.pid, number)
        assert process.wait(60) != 0
        wait_until_no_process_left(project)
        output = (project.root / "started.log").read_text()
        assert "Traceback" not in output
        last = output[output.rindex("WorkflowError") :]  # Snakemake's own end
        assert last.endswith(f"the same command continues: snakemake {project.target('merge')}\n")
        assert "\nstopped: 1 job interrupted\n" in last
        found = sorted(project.root.glob("runs/*/checkpoints/step-*"))
        saved.append(found[-1].name)
        assert f"after step {int(saved[-1].removeprefix('step-'))}, which is saved" in last
    project.snakemake(project.target("merge"))
    events = [json.loads(line) for line in (project.sealed("train") / "events.jsonl").read_text().splitlines()]
    assert [event["checkpoint"] for event in events if event["event"] == "run.resumed"] == saved
    assert project.weights() == undisturbed.weights()


@pytest.mark.slow
def test_a_closed_terminal_saves_unless_nohup_says_otherwise(project: Project, undisturbed: dict[str, str]) -> None:
    project.edit("save_every_steps: 3", "save_every_steps: 1000")
    terminal = project.start_in_terminal("snakemake", project.target("merge"))
    wait_until(lambda: steps_done(project) >= 2, terminal.process, "the second step")
    terminal.close()
    assert terminal.process.wait(60) != 0
    wait_until_no_process_left(project)
    [saved] = project.root.glob("runs/*/checkpoints/step-*")

    terminal = project.start_in_terminal("nohup", "snakemake", project.target("merge"))
    wait_until(lambda: steps_done(project) >= 3, terminal.process, "a step")
    terminal.close()
    terminal.process.wait(300)
    wait_until_no_process_left(project)
    events = [json.loads(line) for line in (project.sealed("train") / "events.jsonl").read_text().splitlines()]
    assert [event["checkpoint"] for event in events if event["event"] == "run.resumed"] == [saved.name]
    project.snakemake(project.target("merge"))
    assert project.weights() == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["to all", "to snakemake"])
def test_a_signal_in_another_stage_says_that_it_was_stopped(tmp_path: Path, send: Callable[[int, int], None]) -> None:
    project = Project(tmp_path)
    process = project.start("shard")
    wait_until(lambda: stage_runs(project, "tokenize"), process, "the tokenize stage")
    send(process.pid, signal.SIGTERM)
    assert process.wait(60) != 0
    wait_until_no_process_left(project)
    output = (project.root / "started.log").read_text()
    assert "Traceback" not in output
    assert "\nstopped: 1 job interrupted\n" in output
    assert "memory" not in output[output.rindex("WorkflowError") :]
    project.snakemake("shard")


def steps_done(project: Project) -> int:
    """Lines of the live metrics."""
    return sum(len(path.read_text().splitlines()) for path in project.root.glob("runs/*/metrics.jsonl"))


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
    """First a rank, then the launcher, whose ranks end with it, and the driver, which leaves the training at work."""
    process = project.start(project.target("merge"))
    wait_until(lambda: any(project.root.glob("runs/*/checkpoints/step-*")), process, "the first checkpoint")
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
    assert (project.sealed("train") / "events.jsonl").read_text().count('"run.launched"') == launched + 1


@pytest.mark.slow
def test_editing_the_yaml_changes_nothing_of_a_run_that_is_on(project: Project, undisturbed: dict[str, str]) -> None:
    before = project.experiment()
    process = project.start(project.target("merge"))
    wait_until(lambda: stage_runs(project, "train"), process, "the training")
    project.edit("lr: 4.0e-3", "lr: 9.0e-3")
    assert process.wait() == 0
    files = project.manifest("merge", before)["files"]
    assert {name: files[name]["sha256"] for name in undisturbed} == undisturbed
    assert not project.sealed("train").exists()


@pytest.mark.slow
def test_two_snakemakes_at_once_compute_everything_once(project: Project, undisturbed: dict[str, str]) -> None:
    first = project.start(project.target("merge"))
    wait_until(lambda: stage_runs(project, "train"), first, "the training")
    second = project.snakemake(project.target("merge"))
    assert first.wait() == 0
    assert "already done, verified" in second.stdout
    assert project.weights() == undisturbed
    attempts = json.loads((project.sealed("train") / "summary.json").read_text())["attempts"]
    assert attempts == 1


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    project: Project, undisturbed: dict[str, str]
) -> None:
    process = project.start(project.target("merge"))
    wait_until(lambda: any(project.root.glob("runs/*/checkpoints/step-00000006")), process, "the second checkpoint")
    kill_tree(process)
    folder = next(project.root.glob("runs/*/checkpoints"))
    newest = sorted(folder.glob("step-*"))[-1]
    flip_a_byte(next(newest.glob("tensors/*.safetensors")))
    project.snakemake(project.target("merge"))
    assert (folder / f"rejected-{newest.name}").exists()
    events = (project.sealed("train") / "events.jsonl").read_text()
    assert "checkpoint.rejected" in events
    assert project.weights() == undisturbed


def flip_a_byte(path: Path) -> None:
    """Damage the last byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_a_pointer_that_another_snakemake_takes_away_for_a_while_is_waited_for(finished: Project) -> None:
    """As it does when it comes to a stage that was done since it began."""
    evaluate, merge = (finished.store.pointer(finished.experiment().ref(part)) for part in ("evaluate", "merge"))
    for pointer in (evaluate, finished.store.pointer(finished.experiment().ref("report"))):
        pointer.unlink()
    process = finished.start()
    wait_until(lambda: stage_runs(finished, "evaluate"), process, "the evaluation")
    merge.rename(merge.with_suffix(".taken"))
    wait_until(evaluate.exists, process, "the end of the evaluation")
    time.sleep(8)  # Snakemake by itself waits for 5 s
    assert process.poll() is None
    merge.with_suffix(".taken").rename(merge)
    assert process.wait(60) == 0
