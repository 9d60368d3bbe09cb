"""`qwen3 run`: the right snakemake from any folder, a line for each stage, and where the result is."""

import argparse
import io
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from snakemake.common import NOTHING_TO_BE_DONE_MSG
from snakemake_interface_logger_plugins.common import LogEvent

from pipeline_lib.cli import run
from pipeline_lib.cli.main import DESCRIPTION, parser
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.load import Overrides, load_sweep
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Store
from pipeline_lib.workflow.stage_lines import StageLines
from tests.config import test_sweep


@pytest.mark.parametrize(
    ("argv", "words", "options"),
    [
        (["run", "my.yaml"], [], []),
        (["run", "my.yaml", "train", "-n"], ["train"], []),
        (["run", "-n", "my.yaml", "train.lr=1", "shard"], ["train.lr=1", "shard"], []),
        (["train", "my.yaml", "-n", "train.lr=1"], ["train.lr=1", "train"], []),
        (["run", "my.yaml", "--", "--cores", "4"], [], ["--cores", "4"]),
    ],
)
def test_words_and_options_may_stand_in_any_order(
    argv: list[str], words: list[str], options: list[str]
) -> None:
    assert run.is_run(argv)
    arguments = run.parse(argv)
    assert arguments.config == Path("my.yaml")
    assert (arguments.words, arguments.options) == (words, options)


@pytest.mark.parametrize(
    "argv",
    [["train", "--spec", "s", "--plan", "p"], ["plan", "my.yaml"], ["rehearse", "--frozen", "f"]],
)
def test_commands_of_rules_and_the_plan_stay_what_they_are(argv: list[str]) -> None:
    assert not run.is_run(argv)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "missing.yaml"], "missing.yaml"),
        (["run", "tabs.yaml"], "line 2"),
        (["run", "good.yaml", "trian"], "did you mean 'train'?"),
        (["run", "good.yaml", "train", "merge"], "one stage is the last to run, not 2"),
        (["rnu", "good.yaml"], "did you mean 'run'?"),
    ],
)
def test_a_slip_is_told_without_a_traceback(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "tabs.yaml").write_text("a:\n\t- b\n")
    (tmp_path / "good.yaml").write_text(test_sweep.BASE)
    done = subprocess.run(
        [sys.executable, "-m", "pipeline_lib", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def record(message: str, level: int = logging.INFO, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("snakemake", level, "", 0, message, None, None)
    made.__dict__.update(fields)
    return made


def test_stages_are_counted_and_the_rest_is_left_to_the_log() -> None:
    shown = io.StringIO()
    concluded = []
    lines = StageLines(shown, lambda: concluded.append(1))
    jobs = {"train_stage": 1, "evaluate_stage": 1, "rehearse": 1, "all": 1, "merge": 1, "total": 5}
    lines.emit(record("Job stats", event=LogEvent.RUN_INFO, stats=jobs))
    lines.emit(record("", event=LogEvent.JOB_INFO, rule_msg="demo: train"))
    lines.emit(record("", event=LogEvent.JOB_INFO, rule_msg=None))  # of `all`
    lines.emit(record("Provided cores: 2", event=LogEvent.RESOURCES_INFO))
    lines.emit(record("it is late", logging.WARNING))
    lines.emit(record("", event=LogEvent.JOB_INFO, rule_msg="demo: evaluate"))
    assert shown.getvalue() == "[1/3] demo: train\nit is late\n[2/3] demo: evaluate\n"
    assert not concluded
    lines.emit(record(NOTHING_TO_BE_DONE_MSG))
    assert concluded


def config_at(folder: Path, more: str = "") -> Path:
    path = folder / "config.yaml"
    path.write_text(test_sweep.BASE + more)
    return path


def test_values_of_the_command_line_make_an_experiment_of_their_own(tmp_path: Path) -> None:
    path = config_at(tmp_path)
    given = {"set": ["train.lr=3.0e-5", "train.activation_checkpointing=full"]}
    dag = Dag.compile([str(path)], given, Store(tmp_path / "store"))
    plain = Dag.compile([str(path)], {}, dag.store)
    assert dag.experiment.name == "demo-lr=3.0e-5-recompute=full"
    assert dag.experiment.config.train.lr == 3.0e-5
    assert plain.experiment.name == "demo"
    assert dag.experiment.ref("train") != plain.experiment.ref("train")
    assert dag.experiment.ref("shard") == plain.experiment.ref("shard")


def test_a_name_that_is_given_is_the_name(tmp_path: Path) -> None:
    overrides = Overrides(["experiment=mine", "train.seed=3"], flag="", in_names=True)
    loaded = load_sweep(config_at(tmp_path), overrides)
    assert [config.experiment for config in loaded.configs] == ["mine"]


def test_in_a_sweep_they_stand_before_what_differs(tmp_path: Path) -> None:
    path = config_at(tmp_path, "sweep: {train.seed: [1, 2]}\n")
    loaded = load_sweep(path, Overrides(["train.lr=3.0e-5"], flag="", in_names=True))
    names = [config.experiment for config in loaded.configs]
    assert names == ["demo-lr=3.0e-5-seed=1", "demo-lr=3.0e-5-seed=2"]
    assert loaded.name == "demo-lr=3.0e-5"


def test_a_wrong_one_is_named_as_it_was_typed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Dag.compile([str(config_at(tmp_path))], {"set": ["train.lrr=1"]}, Store(tmp_path / "s"))
    assert caught.value.problems == ["train.lrr=1: train.lrr: unknown key; did you mean 'lr'?"]


def test_the_help_names_every_command_of_people_and_no_other() -> None:
    root = parser()
    kind = argparse._SubParsersAction
    (commands,) = (action for action in root._actions if isinstance(action, kind))
    of_people = {action.dest for action in commands._get_subactions()}
    named = [line.split()[0] for line in DESCRIPTION.splitlines() if line.startswith("  ")]
    assert sorted(named) == sorted(of_people)
    assert named[0] == "run"
