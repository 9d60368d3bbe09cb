"""dvc.yaml as dvc sees it: one stage without outs, compared records, numbers for each run."""

import copy
import csv
import io
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline_lib.config.compile import Experiment, open_experiment, open_experiments
from pipeline_lib.core.errors import ConfigError, PipelineError
from pipeline_lib.core.lock import locked
from pipeline_lib.core.store import Manifest, Store, describe_files, write_manifest
from pipeline_lib.records.record import to_json
from pipeline_lib.report import record
from pipeline_lib.report.overrides import is_copy, overrides_in, refuse_overrides
from pipeline_lib.report.publish import publish
from tests.complete import evaluation

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
DEADLINE_S = 480.0
DVC_FILES = (".dvc/config", ".dvc/.gitignore", ".dvcignore", ".gitignore", "dvc.yaml")
DEMO_DATA = ("config/demo.jsonl", "config/demo-questions.jsonl")
MODEL = {"config.json": "{}", "tokenizer.json": "{}", "README.md": "a model"}
TUNED = (
    "experiment: more\nmodel: {source: local, path: results/current/model}\ndata: {train: "
    "[{source: pydoc}]}\n"
)
LRS = {"first": 0.003, "second": 5e-4}
IN_TURN = {f"turn{number}": 1e-3 + number * 5e-5 for number in range(2)}
ASIDE = {f"aside{number}": 2e-3 + number * 1e-4 for number in range(2)}
QUEUED = [4e-3 + number * 1e-4 for number in range(2)]


def read_yaml(path: Path) -> Any:
    return YAML(typ="safe").load(path)


def test_one_stage_without_outs_and_nothing_but_the_record_is_compared() -> None:
    document = read_yaml(ROOT / "dvc.yaml")
    assert list(document["stages"]) == ["pipeline"]
    stage = document["stages"]["pipeline"]
    assert not {"outs", "metrics", "plots", "deps"} & stage.keys()
    assert stage["always_changed"] is True
    plotted = {path for plot in document["plots"] for path in [*plot.popitem()[1]["y"]]}
    assert {*document["params"], *document["metrics"], *plotted} == {
        *("config/config.yaml", "results/current/metrics.json"),
        *("results/current/curves.csv", "results/current/held_out.csv"),
    }
    assert document["artifacts"]["model"]["path"] == "results/current/model"


class Clone:
    """A git repository with these dvc files and config, where snakemake finds all work done.

    What it finds lies in the store of the repository: a run that looks for it elsewhere has nothing
    to publish.
    """

    def __init__(self, root: Path) -> None:
        """Make it, with a first commit."""
        self.root, self.store = root, Store(root / "store")
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",  # workers of the queue look for dvc there
            "PYTHONPATH": str(ROOT),
            "GIT_CONFIG_GLOBAL": "/dev/null",
        }
        for name in (
            "PIPELINE_STORE",
            "VIRTUAL_ENV",
        ):  # an environment that nobody activated is found too
            self.environment.pop(name, None)
        for name in (*DVC_FILES, "config/config.yaml", *DEMO_DATA):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        for name, script in (("python", f'exec {sys.executable} "$@"'), ("snakemake", "exit 0")):
            command = root / ".venv" / "bin" / name
            command.parent.mkdir(parents=True, exist_ok=True)
            command.write_text(f"#!/bin/sh\n{script}\n")
            command.chmod(0o755)
        for arguments in (
            ["init", "-q"],
            ["config", "user.name", "test"],
            ["config", "user.email", "test@localhost"],
        ):
            self.run("git", *arguments)
        self.commit()

    def finish(self, lr: float) -> Path:
        """Finish an experiment of the default config with that learning rate; its config file."""
        path = self.root / "config" / f"{lr:g}.yaml"
        text = (ROOT / "config" / "config.yaml").read_text()
        assert "lr: 3.0e-3" in text
        path.write_text(text.replace("lr: 3.0e-3", f"lr: {lr!r}"))
        experiment = open_experiment(path, self.store)
        seal(experiment, self.store, "report", report_of(lr))
        seal(experiment, self.store, "merge", {**MODEL, "model.safetensors": f"weights {lr}"})
        return path

    def run(self, *command: str, check: bool = True) -> str:
        """Run `command` there; its output."""
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        if check and done.returncode:
            raise AssertionError(f"{command} gave {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout if check else done.stdout + done.stderr

    def dvc(self, *arguments: str) -> str:
        """Run dvc there; its output."""
        return self.run(str(BIN / "dvc"), *arguments)

    def library(self, *arguments: str, check: bool = True) -> str:
        """Run a command of the library there; its output."""
        return self.run(sys.executable, "-m", "pipeline_lib", *arguments, check=check)

    def commit(self) -> None:
        """Commit everything."""
        self.run("git", "add", "--all")
        self.run("git", "commit", "-q", "-m", "all")

    def rows(self) -> dict[str, dict[str, str]]:
        """The rows of `dvc exp show` by the experiment's name, or else its revision."""
        rows = csv.DictReader(io.StringIO(self.dvc("exp", "show", "--csv")))
        return {row["Experiment"] or row["rev"]: row for row in rows}

    def recorded(self) -> list[str]:
        """The names of the experiments that are saved: refs/exps/BASE/LINE/NAME."""
        parts = [
            ref.split("/")
            for ref in self.run("git", "for-each-ref", "--format=%(refname)", "refs/exps").split()
        ]
        return [part[4] for part in parts if len(part) == 5]


def seal(experiment: Experiment, store: Store, part: str, files: dict[str, str]) -> None:
    """Make `part` finished, with these files."""
    ref = experiment.ref(part)
    folder = store.sealed(ref)
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    write_manifest(
        folder, Manifest(stage=ref.stage, digest=ref.digest, spec={}, files=describe_files(folder))
    )


def report_of(lr: float) -> dict[str, str]:
    """All that is published: a report whose loss tells the learning rate."""
    rows = "".join(f"{step},{3 - step * lr},{lr},1000,1,612\n" for step in (1, 2, 3))
    summary = {
        "eval": {"tuned": {"loss": 2 + lr, "perplexity": 9}, "base": {"loss": 7.0}},
        "train": {"train_s": 60},
    }
    curves = "step,loss,lr,tokens_per_s,grad_norm,peak_memory_mb\n" + rows
    return {"summary.json": json.dumps(summary), "curves.csv": curves}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone where the default config ran and was committed, and reran with another rate.

    It is the learning rate.
    """
    clone = Clone(tmp_path_factory.mktemp("clone"))
    for lr in (*LRS.values(), *IN_TURN.values(), *ASIDE.values(), *QUEUED):
        clone.finish(lr)
    clone.dvc("exp", "run", "--name", "first")
    clone.commit()
    clone.dvc("exp", "run", "--name", "second", "-S", "config/config.yaml:train.lr=5e-4")
    return clone


def test_an_overridden_number_reaches_the_strict_loader_as_a_number(clone: Clone) -> None:
    assert read_yaml(clone.root / "config/config.yaml")["train"]["lr"] == 5e-4
    assert (
        json.loads((clone.root / "results/current/metrics.json").read_text())["eval"]["tuned"][
            "loss"
        ]
        == 2.0005
    )


def test_exp_show_tells_the_runs_apart_by_the_keys_of_the_config(clone: Clone) -> None:
    rows = clone.rows()
    found = {name: (row["train.lr"], row["eval.tuned.loss"]) for name, row in rows.items()}
    assert found["second"] == found["workspace"] == ("0.0005", "2.0005")
    assert ("0.003", "2.003") in found.values()
    assert {(row["train.lr"], row["ran.lr"]) for row in rows.values()} == {
        ("0.003", "0.003"),
        ("0.0005", "0.0005"),
    }
    header = clone.dvc("exp", "show", "--md", "--only-changed").splitlines()[0]
    columns = [title.strip() for title in header.strip("|").split("|")]
    assert "train.lr" in columns
    assert "train.method" not in columns


def test_metrics_params_and_plots_are_compared(clone: Clone) -> None:
    assert "-0.0025" in clone.dvc("metrics", "diff")
    lr = {"old": 0.003, "new": 0.0005, "diff": -0.0025}
    assert json.loads(clone.dvc("params", "diff", "--json"))["config/config.yaml"]["train.lr"] == lr
    whole = json.loads(
        clone.dvc("params", "diff", "--json", "--targets", "results/current/config.yaml")
    )
    assert whole["results/current/config.yaml"] == {"train.lr": lr}
    plots = json.loads(clone.dvc("plots", "diff", "HEAD", "workspace", "--json"))
    assert not plots.get("errors")
    assert plots["data"].keys() == {"loss", "learning rate", "throughput", "memory"}
    assert all(len(drawn[0]["content"]["data"]["values"]) == 6 for drawn in plots["data"].values())


@pytest.mark.parametrize(
    ("file", "where"),
    [
        ("config/0.003.yaml", ()),
        ("mine.yaml", ("--temp",)),
        ("mine.yaml", ()),
        ("results/current/config.yaml", ("--temp",)),
    ],
)
def test_what_no_run_reads_is_refused_with_what_to_type(
    clone: Clone, file: str, where: tuple[str, ...]
) -> None:
    """Of a config that git tracks, of one that it does not, and of a result."""
    (clone.root / "mine.yaml").write_text((clone.root / "config/0.003.yaml").read_text())
    before = {path: path.read_text() for path in clone.root.glob("*/*.yaml")}
    recorded = clone.recorded()
    said = clone.run(
        str(BIN / "dvc"),
        "exp",
        "run",
        *where,
        "--name",
        "wrong",
        "-S",
        f"{file}:train.lr=9e-4",
        check=False,
    )
    assert f"{file} is changed, which this run does not read" in said
    assert "type -S 'config/config.yaml:train.lr=9e-4'" in said
    assert clone.recorded() == recorded
    for path, text in before.items():
        path.write_text(text)
    (clone.root / "mine.yaml").unlink()


def test_the_words_of_a_command_line_name_what_is_set() -> None:
    words = [
        "dvc",
        "exp",
        "run",
        "-S",
        "train.lr=1",
        "-Sa.yaml:x=1",
        "--set-param=b.yaml:+y.z=a:b",
        "--set-param",
    ]
    found = list(
        overrides_in([*words, "c.yaml:~k", "-fS", "d.yaml:k=1", "-qSe.yaml:k=2", "-nS", "-mS=a:b"])
    )
    assert found == [
        *(("", "train.lr=1"), ("a.yaml", "x=1"), ("b.yaml", "+y.z=a:b"), ("c.yaml", "~k")),
        *(("d.yaml", "k=1"), ("e.yaml", "k=2")),
    ]


def test_a_copy_of_the_working_tree_lies_where_dvc_puts_it() -> None:
    assert is_copy(Path("/home/me/clone/.dvc/tmp/exps/tmp8k_2x"))
    assert is_copy(Path("/home/me/clone/.dvc/tmp/exps/standalone/tmp8k_2x/below"))
    assert not any(map(is_copy, (Path("/home/me/exps/clone"), Path("/home/me/.dvc/exps/clone"))))


def test_what_a_queued_run_does_not_read_is_refused_or_named_in_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other edits may be uncommitted ones, if the config that it reads is changed too."""
    copy_of_dvc = tmp_path / ".dvc" / "tmp" / "exps" / "tmp1"
    names = ("config/config.yaml", "mine.yaml", "results/current/config.yaml", "no-config.yaml")
    for name in names:
        (copy_of_dvc / name).parent.mkdir(parents=True, exist_ok=True)
        (copy_of_dvc / name).write_text(
            "a: 1\n" if name == "no-config.yaml" else "experiment: one\n"
        )
    monkeypatch.chdir(copy_of_dvc)
    git = ("git", "-c", "user.name=test", "-c", "user.email=test@localhost")
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-qm", "all")):
        subprocess.run([*git, *arguments], check=True)
    said: list[str] = []
    for name in names[1:]:
        with Path(name).open("a") as file:
            file.write("more: 1\n")
    with pytest.raises(ConfigError) as raised:
        refuse_overrides(said.append)
    [problem] = raised.value.problems
    assert problem.startswith("mine.yaml is changed")
    assert not said
    with Path(names[0]).open("a") as file:
        file.write("more: 1\n")
    refuse_overrides(said.append)
    assert said == [f"warning: dvc exp run: {problem}"]


def test_a_file_is_no_name_of_a_record(clone: Clone) -> None:
    for name in ("config/0.003.yaml", "later.yaml", "dvc.lock"):
        assert "is a file, and no name; type `record NAME" in clone.library(
            "record", name, check=False
        )


def test_the_recorded_parameters_are_those_of_the_config_that_ran_and_come_back_with_it(
    clone: Clone,
) -> None:
    before = clone.root.joinpath("config/config.yaml").read_text()
    lr = IN_TURN["turn0"]
    clone.library("record", "other", f"config/{lr:g}.yaml")
    assert clone.root.joinpath("config/config.yaml").read_text() == before
    assert float(clone.rows()["other"]["train.lr"]) == lr
    refs = clone.run("git", "for-each-ref", "--format=%(refname)", "refs/exps/*/*/other").split()
    shown = clone.run("git", "show", f"{refs[0]}:config/config.yaml")
    applied = clone.root / "applied.yaml"
    applied.write_text(shown)
    one, other = (
        open_experiment(path, clone.store) for path in (applied, clone.root / f"config/{lr:g}.yaml")
    )
    assert one.specs == other.specs
    applied.unlink()


def test_a_run_without_any_change_publishes_again(clone: Clone) -> None:
    (clone.root / "results/current/metrics.json").unlink()
    assert "git add" not in clone.dvc("repro"), "dvc saves these files itself"
    assert (clone.root / "results/current/metrics.json").exists()


def loss(clone: Clone) -> float:
    """The published one."""
    found = json.loads((clone.root / "results/current/metrics.json").read_text())
    return float(found["eval"]["tuned"]["loss"])


def test_a_record_of_the_numbers_of_another_is_refused_and_dropped(
    clone: Clone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(clone.root)
    mine, other = (
        open_experiment(clone.root / f"config/{lr:g}.yaml", clone.store) for lr in LRS.values()
    )

    def overtaken(experiment: Experiment, store: Store) -> dict[Path, str]:
        published = publish(experiment, store)
        publish(other, store)
        return published

    monkeypatch.setattr(record, "publish", overtaken)
    with pytest.raises(PipelineError, match="something else wrote to results/current meanwhile"):
        record.record("overtaken", mine, clone.store, print)
    assert "overtaken" not in clone.recorded()


def test_publish_waits_for_whoever_records(clone: Clone) -> None:
    before = loss(clone)
    command = [sys.executable, "-m", "pipeline_lib", "publish", "config/0.003.yaml"]
    with locked(clone.root / "results/.recording", print):
        waiting = subprocess.Popen(
            command, cwd=clone.root, env=clone.environment, stdout=subprocess.PIPE, text=True
        )
        assert waiting.stdout is not None
        assert "waiting for process" in waiting.stdout.readline()
        assert loss(clone) == before
    waiting.communicate(timeout=DEADLINE_S)
    assert (waiting.returncode, loss(clone)) == (0, 2.003)


def test_of_a_sweep_the_best_is_published(clone: Clone) -> None:
    path = clone.root / "config" / "sweep.yaml"
    path.write_text(
        (ROOT / "config" / "config.yaml").read_text() + "sweep: {train.lr: [3.0e-3, 5.0e-4]}\n"
    )
    assert "no experiment of the sweep is finished" in clone.library(
        "publish", "config/sweep.yaml", check=False
    )
    for experiment in open_experiments(path, clone.store):
        lr = experiment.config.train.lr
        seal(
            experiment,
            clone.store,
            "evaluate",
            {"metrics.json": json.dumps(to_json(evaluation(2 + lr)))},
        )
        seal(experiment, clone.store, "report", report_of(lr))
    said = clone.library("publish", "config/sweep.yaml")
    assert f"of the sweep, {experiment.name!r} has the lowest held-out loss" in said
    assert loss(clone) == 2.0005


def test_every_run_records_its_own_numbers_one_after_another_side_by_side_and_queued(
    clone: Clone,
) -> None:
    """6 of 6, in copies of the working tree and in the tree itself, all in one store."""
    lrs = "config/config.yaml:train.lr={}".format(",".join(map(str, QUEUED)))
    clone.dvc("exp", "run", "--queue", "-S", lrs)
    clone.dvc("queue", "start", "--jobs", "2")

    def aside(name: str) -> str:
        override = f"config/config.yaml:train.lr={ASIDE[name]}"
        return clone.dvc("--wait-for-lock", "exp", "run", "--temp", "--name", name, "-S", override)

    def in_turn(name: str) -> str:
        return clone.library("record", name, f"config/{IN_TURN[name]:g}.yaml")

    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(aside, ASIDE))
        told += pool.map(in_turn, IN_TURN)
    deadline_s = time.monotonic() + DEADLINE_S
    while len(clone.recorded()) < len(QUEUED) + len(told):
        assert time.monotonic() < deadline_s, clone.run(
            str(BIN / "dvc"), "queue", "status", check=False
        )
        time.sleep(0.5)
    clone.dvc("queue", "stop")
    runs = [
        row
        for row in clone.rows().values()
        if row["typ"].startswith("branch") and row["Experiment"] not in ("second", "other")
    ]
    assert sorted(float(row["train.lr"]) for row in runs) == pytest.approx(
        sorted([*ASIDE.values(), *IN_TURN.values(), *QUEUED])
    )
    assert all(
        float(row["eval.tuned.loss"]) == pytest.approx(2 + float(row["train.lr"])) for row in runs
    )


@pytest.fixture(params=["folder", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[list[str]]]:
    """What `dvc remote` needs for a push: a folder, or a bucket of a real server here."""
    if request.param == "folder":
        yield [["add", "--default", "there", str(tmp_path / "there")]]
        return
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    making = urllib.request.Request(f"{url}/models", method="PUT")  # noqa: S310
    urllib.request.urlopen(making, timeout=30).close()  # noqa: S310
    yield [
        ["add", "--default", "there", "s3://models/qwen3"],
        ["modify", "there", "endpointurl", url],
        *(
            ["modify", "--local", "there", key, "test"]
            for key in ("access_key_id", "secret_access_key")
        ),
    ]
    server.stop()


def test_a_recorded_model_comes_back_from_a_remote_and_is_refused_where_it_is_damaged(
    clone: Clone, remote: list[list[str]], tmp_path: Path
) -> None:
    bare = tmp_path / "bare.git"
    for command in (("init", "-q", "--bare", str(bare)), ("push", "-q", str(bare), "HEAD")):
        clone.run("git", *command)
    for arguments in remote:
        clone.dvc("remote", *arguments)
    clone.library("record", "best", "--configfile", "config/0.0005.yaml", "--model", "--force")
    clone.dvc("exp", "push", str(bare), "best")
    clone.run("git", "checkout", "-q", ".dvc/config")
    (clone.root / ".dvc/config.local").unlink(missing_ok=True)

    other = copy.copy(clone)
    other.root = tmp_path / "other"
    clone.run("git", "clone", "-q", str(bare), str(other.root))
    for arguments in remote:
        other.dvc("remote", *arguments)
    other.dvc("exp", "pull", "origin", "best")
    other.dvc("exp", "apply", "best")
    model = other.root / "results/current/model"
    assert (model / "model.safetensors").read_text() == "weights 0.0005"
    (other.root / "tuned.yaml").write_text(TUNED)
    assert "'more' has no finished report" in other.library("publish", "tuned.yaml", check=False)

    cached = next(
        path
        for path in (other.root / ".dvc/cache").rglob("*")
        if path.is_file() and same(path, model)
    )
    cached.chmod(0o644)
    cached.write_text("WEIGHTS 0.0005")
    cached.chmod(0o444)  # dvc trusts what only reads
    shutil.rmtree(model)
    other.dvc("checkout")
    said = other.library("publish", "tuned.yaml", check=False)
    assert "'results/current/model/model.safetensors' does not match manifest.json" in said


def same(path: Path, model: Path) -> bool:
    """Whether the file is the model's weights."""
    return path.read_bytes() == (model / "model.safetensors").read_bytes()


def test_what_git_has_not_committed_is_named_with_the_command_that_commits_it(clone: Clone) -> None:
    clone.commit()
    first, second = (f"config/{IN_TURN[name]:g}.yaml" for name in IN_TURN)
    for command, names_the_model in (
        (["publish", first], None),  # whether a model was recorded before, the tests before decide
        (["record", "told", second, "--model"], True),
        (["record", "without", first], True),  # it takes the model away
        (["record", "again", second], False),
    ):
        *_, named, commit = clone.library(*command).splitlines()
        assert "results/current/config.yaml, " in named
        assert names_the_model in (None, "results/current/model.dvc" in named), (command, named)
        clone.run("sh", "-c", commit)
        assert clone.run("git", "status", "--porcelain") == ""
        assert clone.run("git", "log", "-1", "--format=%s").startswith("Results of ")
