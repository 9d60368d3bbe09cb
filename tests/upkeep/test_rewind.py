"""`qwen3 rewind`: what it moves and refuses, and the end of what it set aside."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.cli.main import parser
from pipeline_lib.config.compile import Experiment, open_experiment, run_digest
from pipeline_lib.core.errors import ConfigError, IntegrityError, Interrupted, PipelineError
from pipeline_lib.core.events import read_events
from pipeline_lib.core.files import write_json
from pipeline_lib.core.lock import locked
from pipeline_lib.core.store import Manifest, describe_files, write_manifest
from pipeline_lib.status.survey import Survey
from tests.upkeep.commands import ROOT, store
from tests.upkeep.stores import CONFIG, LONG_AGO_S, Shop

Captured = pytest.CaptureFixture[str]
STEPS = (3, 6, 9)


@pytest.fixture
def config(shop: Shop) -> Path:
    """A config in the working directory, whose training was interrupted after STEPS were saved."""
    path = shop.folder / "my.yaml"
    path.write_text(CONFIG.format(name="mine", lr=1e-3))
    save(shop, path, *STEPS)
    return path


def experiment(shop: Shop, config: Path) -> Experiment:
    return open_experiment(config, shop.store)


def run_dir(shop: Shop, config: Path) -> Path:
    return shop.store.run_dir(run_digest(experiment(shop, config).specs["train"]))


def save(shop: Shop, config: Path, *steps: int, **state: Any) -> None:
    """Seal checkpoints of these steps, which hold `state`."""
    run = run_dir(shop, config)
    for step in steps:
        folder = run / "checkpoints" / f"step-{step:08d}"
        write_json(folder / "state.json", {"step": step, **state})
        files = describe_files(folder)
        write_manifest(folder, Manifest(stage="checkpoint", digest=run.name, spec={}, files=files))


def rewind(capsys: Captured, *arguments: str) -> str:
    """What the command says; raises what it raises."""
    capsys.readouterr()
    given = parser().parse_args(["rewind", *arguments])
    given.command(given)
    return capsys.readouterr().out


def saved(shop: Shop, config: Path, folder: str = "checkpoints") -> list[str]:
    return sorted(
        path.name.removeprefix("step-0000000")
        for path in (run_dir(shop, config) / folder).glob("*")
    )


def rewound_events(shop: Shop, config: Path) -> list[tuple[int, list[str]]]:
    events = read_events(run_dir(shop, config) / "events.jsonl")
    return [
        (event["step"], event["set_aside"]) for event in events if event["event"] == "run.rewound"
    ]


def test_newer_checkpoints_are_moved_and_each_can_be_brought_back(
    shop: Shop, config: Path, capsys: Captured
) -> None:
    said = rewind(capsys, "my.yaml", "--step", "3")

    assert saved(shop, config) == ["3"]
    assert saved(shop, config, "set-aside") == ["6", "9"]
    assert "snakemake continues from step 3" in said
    assert rewound_events(shop, config) == [(3, ["step-00000009", "step-00000006"])]
    assert "step 3 is the newest checkpoint, so nothing was moved" in rewind(
        capsys, "my.yaml", "--step", "3"
    )
    assert len(rewound_events(shop, config)) == 1
    store(capsys, "restore", str(run_dir(shop, config) / "set-aside" / "step-00000006"))
    assert saved(shop, config) == ["3", "6"]


def test_a_step_that_was_set_aside_before_keeps_its_place(
    shop: Shop, config: Path, capsys: Captured
) -> None:
    rewind(capsys, "my.yaml", "--step", "6")
    save(shop, config, 9, again=True)
    rewind(capsys, "--configfile", "my.yaml", "--step", "6")

    assert saved(shop, config, "set-aside") == ["9", "9.2"]
    store(capsys, "restore", str(run_dir(shop, config) / "set-aside" / "step-00000009.2"))
    assert (
        "again"
        in (run_dir(shop, config) / "checkpoints" / "step-00000009" / "state.json").read_text()
    )


@pytest.mark.parametrize(
    ("step", "text"), [("5", "available steps: 3, 6, 9 "), ("12", "available steps: 3, 6, 9 ")]
)
def test_a_step_without_a_checkpoint_is_refused_with_those_that_exist(
    shop: Shop, config: Path, capsys: Captured, step: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=f"{step}: no checkpoint of this step; {text}") as raised:
        rewind(capsys, "my.yaml", "--step", step)
    assert raised.value.exit_code == 2
    assert saved(shop, config) == ["3", "6", "9"]


def test_a_run_that_saved_nothing_says_so(shop: Shop, capsys: Captured) -> None:
    (shop.folder / "new.yaml").write_text(CONFIG.format(name="new", lr=3e-3))
    with pytest.raises(ConfigError, match="this run has no checkpoints"):
        rewind(capsys, "new.yaml", "--step", "3")


def test_a_run_in_work_is_refused_with_who_works_on_it(
    shop: Shop, config: Path, capsys: Captured
) -> None:
    lock = shop.store.lock_path(run_dir(shop, config).name)
    with (
        locked(lock, print, note={"slurm_job": "4711", "attempt": 2}),
        pytest.raises(
            Interrupted, match=rf"process {os.getpid()} .*SLURM job 4711, attempt 2.*`scancel 4711`"
        ),
    ):
        rewind(capsys, "my.yaml", "--step", "3")
    with (
        locked(lock, print),
        pytest.raises(Interrupted, match=rf"process {os.getpid()} on .* works .*Ctrl-C"),
    ):
        rewind(capsys, "my.yaml", "--step", "3")
    assert saved(shop, config) == ["3", "6", "9"]


def test_a_finished_training_is_refused_with_what_to_do(
    shop: Shop, config: Path, capsys: Captured
) -> None:
    sealed = shop.seal(experiment(shop, config).specs["train"])
    with pytest.raises(
        PipelineError, match=r"is finished.*train\.until_step: 3.*train\.replica.*remove "
    ) as raised:
        rewind(capsys, "my.yaml", "--step", "3")
    assert str(sealed) in str(raised.value)
    assert saved(shop, config) == ["3", "6", "9"]


def test_a_damaged_checkpoint_is_found_before_anything_is_moved(
    shop: Shop, config: Path, capsys: Captured
) -> None:
    path = run_dir(shop, config) / "checkpoints" / "step-00000003" / "state.json"
    path.write_text(path.read_text().replace("3", "4"))
    with pytest.raises(
        IntegrityError,
        match="step 3 is damaged, so nothing was moved; rewind to another step: 6, 9",
    ):
        rewind(capsys, "my.yaml", "--step", "3")
    assert saved(shop, config) == ["3", "6", "9"]


KILLED = """\
import os, signal, sys
from pipeline_lib.cli.main import main
from pipeline_lib.core import run_folder

move = run_folder.set_aside

def move_and_die(path):
    move(path)
    os.kill(os.getpid(), signal.SIGKILL)

run_folder.set_aside = move_and_die
sys.argv[1:] = ["rewind", "my.yaml", "--step", "3"]
main()
"""


def test_killed_in_the_midst_the_same_command_goes_on(
    shop: Shop, config: Path, capsys: Captured
) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=shop.folder, env=environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert saved(shop, config) == ["3", "6"]  # a run that was interrupted before step 9

    rewind(capsys, "my.yaml", "--step", "3")

    assert saved(shop, config) == ["3"]
    assert saved(shop, config, "set-aside") == ["6", "9"]


def test_of_a_sweep_one_experiment_is_named(shop: Shop, capsys: Captured) -> None:
    path = shop.folder / "sweep.yaml"
    path.write_text(CONFIG.format(name="swept", lr=1e-3) + "sweep: {train.lr: [1.0e-3, 2.0e-3]}\n")
    with pytest.raises(
        ConfigError, match="a sweep of 2 experiments; name one with --experiment NAME: (.*)"
    ) as raised:
        rewind(capsys, "sweep.yaml", "--step", "3")
    name = str(raised.value).rpartition(", ")[2]
    run = shop.store.run_dir(run_digest(open_experiment(path, shop.store, name).specs["train"]))
    for step in (3, 6):
        folder = run / "checkpoints" / f"step-{step:08d}"
        write_json(folder / "state.json", {"step": step})
        write_manifest(
            folder, Manifest(stage="checkpoint", digest="", spec={}, files=describe_files(folder))
        )

    rewind(capsys, "sweep.yaml", "--experiment", name, "--step", "3")

    assert [path.name for path in (run / "set-aside").iterdir()] == ["step-00000006"]


def test_what_was_needed_at_the_step_and_is_gone_is_told(
    shop: Shop, config: Path, capsys: Captured
) -> None:
    more = (
        "keep_best: true, validate_every_steps: 1, guards: {rollback_every_steps: 3}, "
        "save_every_steps"
    )
    config.write_text(config.read_text().replace("save_every_steps", more))
    window = {
        "accepted": [],
        "sizes": [],
        "skipped": [4, 5],
        "refused_in_a_row": 0,
        "has_rolled_back": False,
    }
    state = {"window": window, "validations": {"best_step": 2, "best_loss": 1.0}}
    save(shop, config, 6, 9, **state)

    said = rewind(capsys, "my.yaml", "--step", "6")

    assert "warning: step 3, to which the guards would go back" in said
    assert (
        "warning: step 2 had the lowest held-out loss by then, but its checkpoint is gone" in said
    )
    save(shop, config, 2, 9, **state)
    save(shop, config, 3, 9, **state)
    assert "warning" not in rewind(capsys, "my.yaml", "--step", "6")


def test_gc_removes_what_is_set_aside_of_a_kept_experiment_once_it_is_old(
    shop: Shop, config: Path, capsys: Captured
) -> None:
    made = experiment(shop, config)
    shop.add(made, "model", "data.0", "data.1", "tokenize", "shard", "plan")
    run = run_dir(shop, config)
    rewind(capsys, "my.yaml", "--step", "3")
    assert "0 leftovers" in store(capsys, "gc", "--keep-experiments", "mine")
    for path in (run, *run.rglob("*")):
        shop.age(path, LONG_AGO_S)
    assert "checkpoints set aside in runs/" in store(capsys, "du")
    listed = store(capsys, "ls", "mine")
    assert f"set aside by rewind: {run / 'set-aside' / 'step-00000006'}" in listed

    said = store(capsys, "gc", "--keep-experiments", "mine")

    assert str(run / "set-aside" / "step-00000009") in said
    assert saved(shop, config, "set-aside") == []
    assert saved(shop, config) == ["3"]


def test_status_shows_the_step_that_the_run_goes_on_from(
    shop: Shop, config: Path, capsys: Captured
) -> None:
    made = experiment(shop, config)
    shop.add(made, "model", "data.0", "data.1", "tokenize", "shard", "plan")
    rows = (json.dumps({"step": step, "loss": 9.0 - step, "attempt": 1}) for step in range(1, 11))
    (run_dir(shop, config) / "metrics.jsonl").write_text("".join(row + "\n" for row in rows))
    rewind(capsys, "my.yaml", "--step", "6")

    [status] = Survey(shop.store, shop.folder).statuses()

    assert (status.stage, status.state, status.reason) == (
        "train",
        "interrupted",
        "rewound to step 6",
    )
    assert (status.numbers.step, status.numbers.loss, status.numbers.checkpoint_step) == (6, 3.0, 6)
    assert status.advice == "run snakemake again; training resumes from the checkpoint of step 6"
