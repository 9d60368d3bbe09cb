"""A real snakemake, watched from outside while it works, when it is killed, and to its end."""

import io
import json
import os
import shutil
import signal
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.cli.main import main
from pipeline_lib.config.compile import run_digest
from pipeline_lib.core.errors import CONTINUES
from pipeline_lib.core.events import read_events
from tests.pipeline.conftest import Project, kill_tree, wait_until

pytestmark = pytest.mark.slow

DEADLINE_S = 900.0
LOOK_S = 0.2
ORDER = ["download", "tokenize", "shard", "plan", "train", "merge", "evaluate", "report", None]


def look(project: Project) -> dict[str, Any]:
    """What the command says of the only experiment; it never fails, even during writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.root)
        patch.setattr(sys, "argv", ["pipeline_lib", "status", "--json"])
        patch.setenv("PATH", str(Path(sys.executable).parent))  # none of a SLURM that may be up
        patch.delenv("PIPELINE_STORE", raising=False)
        shown, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(shown), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
            main()
    assert (ended.value.code, errors.getvalue()) == (0, ""), shown.getvalue() + errors.getvalue()
    return dict((json.loads(shown.getvalue()) or [{"state": None}])[0])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """One for all tests, which share its data stages."""
    project = Project(tmp_path_factory.mktemp("followed"))
    project.edit("epochs: 2", "epochs: 8")
    return project


def test_a_run_is_followed_from_its_start_over_a_kill_to_its_end(project: Project) -> None:
    seen: list[dict[str, Any]] = []
    end_s = time.monotonic() + DEADLINE_S
    process = project.start()
    while not (seen and (seen[-1].get("checkpoint_step") or 0) >= 6):
        assert time.monotonic() < end_s and process.poll() is None, (
            project.root / "started.log"
        ).read_text()
        seen.append(look(project))
        time.sleep(LOOK_S)
    assert (seen[-1]["stage"], seen[-1]["state"], seen[-1]["attempt"]) == ("train", "running", 1)
    assert (project.root / seen[-1]["log"]).exists()
    kill_tree(process)

    killed = look(project)

    assert (killed["stage"], killed["state"]) == ("train", "interrupted")
    assert killed["step"] >= seen[-1]["step"]
    assert killed["checkpoint_step"] % 3 == 0 and killed["checkpoint_step"] >= 6
    assert killed["advice"].endswith(f"checkpoint of step {killed['checkpoint_step']}")

    process = project.start()
    after: list[dict[str, Any]] = []
    while not (after and after[-1]["state"] == "done"):
        assert time.monotonic() < end_s, (project.root / "started.log").read_text()
        after.append(look(project))
        time.sleep(LOOK_S)
    process.wait(300)

    running = [
        found for found in after if found["stage"] == "train" and found["state"] == "running"
    ]
    counted = [
        found["step"] for found in running if found["step"] is not None and found["attempt"] == 2
    ]
    assert counted and counted == sorted(counted)
    assert min(counted) >= killed["checkpoint_step"]
    timed = [found for found in running if found["eta_s"] is not None]
    assert timed and all(found["tokens_per_s"] > 0 and found["loss"] > 0 for found in timed)
    begun = [found["stage"] for found in [*seen, killed, *after] if found["state"] is not None]
    # that is made at any time
    of_the_training = [ORDER.index(stage) for stage in begun if stage != "baseline"]
    assert of_the_training == sorted(of_the_training)
    summary = json.loads((project.sealed("train") / "summary.json").read_text())
    assert (after[-1]["step"], after[-1]["loss"]) == (summary["steps"], summary["final_loss"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_run_that_is_stopped_is_interrupted_and_its_reason_is_kept(
    project: Project, number: signal.Signals
) -> None:
    """The second goes on where the first was stopped."""
    if "epochs: 8" in project.config.read_text():
        project.edit("epochs: 8", "epochs: 200")
    run_dir = project.store.run_dir(run_digest(project.experiment().specs["train"]))
    saved = set(run_dir.glob("checkpoints/step-*"))
    process = project.start()
    wait_until(
        lambda: bool(set(run_dir.glob("checkpoints/step-*")) - saved), process, "a new checkpoint"
    )
    os.killpg(process.pid, number)
    assert process.wait(300) != 0
    end_s = time.monotonic() + 300
    while (found := look(project))[
        "state"
    ] == "running":  # the ranks save, and snakemake does not wait for them
        assert time.monotonic() < end_s, (project.root / "started.log").read_text()
        time.sleep(LOOK_S)

    assert (found["stage"], found["state"]) == ("train", "interrupted")
    assert "stopped by " in found["reason"] and found["reason"].endswith(CONTINUES)
    assert (
        found["advice"]
        == f"run snakemake again; training resumes from the checkpoint of step {found['step']}"
    )
    last = read_events(run_dir / "events.jsonl")[-1]
    assert (last["event"], last["exit_code"], last["reason"]) == (
        "run.interrupted",
        75,
        found["reason"],
    )
    # SIGTERM ends tee too, whose log is then not the last word
    shutil.rmtree(project.root / "logs")
    assert (look(project)["state"], look(project)["reason"]) == ("interrupted", found["reason"])
