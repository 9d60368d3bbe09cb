"""The record of a finished experiment: rewritten when asked, refused if nothing can be recorded."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline_lib.cli.experiments import config_of
from pipeline_lib.cli.main import parser
from pipeline_lib.config.compile import compile_config, open_experiment, open_experiments
from pipeline_lib.config.content import Content
from pipeline_lib.config.dag import DEFAULT_CONFIG, Dag, link_results
from pipeline_lib.config.load import load_config
from pipeline_lib.config.schema import Config
from pipeline_lib.config.train import RENAMED
from pipeline_lib.core.errors import ConfigError, IntegrityError, PipelineError
from pipeline_lib.core.store import Store
from pipeline_lib.report import record
from pipeline_lib.report.publish import (
    CURRENT,
    FOR_GIT,
    held_out_csv,
    print_summary,
    publish,
    resolved,
    yaml_of,
)
from tests.report.fakes import World, experiment_named, realistic_files


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_publishes_the_small_results_and_nothing_else(finished: World, tmp_path: Path) -> None:
    target = tmp_path / "results" / "current"
    paths = publish(finished.experiment, finished.store, target)
    names = ["config.yaml", "metrics.json", "curves.csv", "held_out.csv"]
    assert [path.name for path in paths] == names
    assert {path.name: text for path, text in paths.items()} == contents(target)
    published = contents(target)
    assert published.keys() == set(names)
    assert {*(CURRENT / name for name in names), Path("dvc.lock")} < set(FOR_GIT)
    assert published["curves.csv"] == (finished.folder("report") / "curves.csv").read_text()
    assert json.loads(published["metrics.json"]) == {
        "eval": {"tuned": {"loss": 2.404}, "base": {"loss": 7.631}},
        "train": {"tokens_per_s": 19_400, "train_s": 52.38, "peak_memory_mb": 612},
        "ran": {
            "experiment": "demo",
            "model": "tiny",
            "method": "full",
            "lr": 0.003,
            "global_batch_tokens": 8192,
        },
    }


def test_the_held_out_losses_stand_in_a_file_without_gaps() -> None:
    curves = "step,loss,held_out_loss\n1,3.0,\n2,2.0,2.5\n3,1.0,\n"
    assert held_out_csv(curves) == "step,held_out_loss\n2,2.5\n"
    assert held_out_csv("step,loss\n1,3.0\n") == "step,held_out_loss\n"


def test_a_model_added_for_the_experiment_before_goes_and_a_folder_of_the_user_stays(
    finished: World, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("mine")
    publish(finished.experiment, finished.store, tmp_path)
    assert contents(model) == {"weights": "mine"}
    (tmp_path / "model.dvc").write_text("outs:")
    publish(finished.experiment, finished.store, tmp_path)
    assert not model.exists()
    assert not (tmp_path / "model.dvc").exists()


def test_publishing_again_restores_whatever_was_changed(finished: World, tmp_path: Path) -> None:
    publish(finished.experiment, finished.store, tmp_path)
    before = contents(tmp_path)
    (tmp_path / "metrics.json").write_text("{}")
    (tmp_path / "config.yaml").unlink()
    publish(finished.experiment, finished.store, tmp_path)
    assert contents(tmp_path) == before


def test_the_published_config_is_whole_in_order_and_reads_back_the_same(
    finished: World, tmp_path: Path
) -> None:
    config_path = next(iter(publish(finished.experiment, finished.store, tmp_path)))
    assert load_config(config_path) == finished.experiment.config
    sections = [
        line.split(":")[0] for line in config_path.read_text().splitlines() if line[0] not in " #-"
    ]
    assert sections == list(type(finished.experiment.config).model_fields)
    assert "  weight_decay: 0.01\n" in config_path.read_text()


def test_what_is_published_and_recorded_has_the_keys_by_their_names_in_a_file(
    finished: World,
) -> None:
    config = finished.experiment.config
    train = config.train.model_copy(update={"recompute": "full", "reshard": True})
    experiment = replace(finished.experiment, config=config.model_copy(update={"train": train}))
    for text in (yaml_of(resolved(experiment.config)), record._as_config(experiment)):
        keys = YAML(typ="safe").load(text)["train"]
        assert {name: keys[name] for name in RENAMED.values()} == {
            "activation_checkpointing": "full",
            "reshard_after_forward": True,
        }
        assert not keys.keys() & RENAMED.keys()


CHAIN = """\
model: {source: tiny}
data: {train: [{source: pydoc, max_rows: 60}]}
train: {method: lora, lora: {rank: 8}}
experiments:
  text: {model: {source: tiny, seed: 1}}
  sft: {model: {source: experiment, name: text}}
  on: {model: {source: experiment, name: sft, adapter: continue}}
"""


@pytest.mark.parametrize("of_file", [resolved, None], ids=["published", "recorded"])
def test_of_a_chain_all_is_published_and_recorded_that_its_last_is_made_of(
    tmp_path: Path, of_file: Callable[[Config], Any] | None
) -> None:
    (tmp_path / "chain.yaml").write_text(CHAIN)
    *_, last = open_experiments(tmp_path / "chain.yaml", Store(tmp_path / "store"))
    text = yaml_of(of_file(last.config)) if of_file else record._as_config(last)
    (tmp_path / "config.yaml").write_text(text)

    again = open_experiment(tmp_path / "config.yaml", Store(tmp_path / "store"), "on")
    assert again.specs == last.specs


@pytest.mark.parametrize("strategy", ["ddp", "auto"])
def test_the_published_config_compiles_to_the_same_stages(
    finished: World, tmp_path: Path, strategy: str
) -> None:
    raw = finished.experiment.config.model_dump(mode="json", exclude_unset=True)
    train = {**raw["train"], "strategy": strategy, "recompute": "full"}
    content = Content(model={}, data=({}, {}))
    before = compile_config(
        Config.model_validate_json(json.dumps({**raw, "train": train})), content
    )
    (tmp_path / "config.yaml").write_text(yaml_of(resolved(before.config)))
    assert compile_config(load_config(tmp_path / "config.yaml"), content).specs == before.specs


def test_an_unfinished_experiment_is_refused_and_the_record_left_alone(
    world: World, tmp_path: Path
) -> None:
    target = tmp_path / "current"
    target.mkdir()
    (target / "metrics.json").write_text("earlier")
    world.seal_inputs()
    with pytest.raises(
        IntegrityError, match="experiment 'demo' has no finished report; run `snakemake`"
    ):
        publish(world.experiment, world.store, target)
    assert contents(target) == {"metrics.json": "earlier"}


@pytest.mark.parametrize("name", ["summary.json", "curves.csv", "report.html"])
def test_a_damaged_report_is_refused_by_name(finished: World, tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / "store")
    report = store.sealed(finished.experiment.ref("report"))
    shutil.copytree(finished.folder("report"), report)
    path = report / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(IntegrityError, match=f"{name}: content differs"):
        publish(finished.experiment, store, tmp_path / "current")
    assert not (tmp_path / "current").exists()


def test_links_lead_to_the_store_and_follow_the_experiment(finished: World, tmp_path: Path) -> None:
    results = tmp_path / "results"
    stale = results / "demo" / "model"
    stale.parent.mkdir(parents=True)
    stale.symlink_to("nowhere")
    links = link_results(finished.experiment, finished.store, results)
    assert links == {"report": results / "demo" / "report.html", "model": stale}
    assert links["report"].resolve() == (finished.folder("report") / "report.html").resolve()
    assert links["model"].resolve() == finished.folder("merge").resolve()
    assert not any(link.readlink().is_absolute() for link in links.values())
    assert link_results(finished.experiment, finished.store, results) == links
    assert sorted(path.name for path in (results / "demo").iterdir()) == ["model", "report.html"]


def test_links_that_lead_to_nothing_or_into_another_store_are_removed(
    finished: World, tmp_path: Path
) -> None:
    results, other = tmp_path / "results", Store(tmp_path / "other")
    links = link_results(finished.experiment, finished.store, results)
    assert link_results(finished.experiment, other, results) == {}
    assert not [link for link in links.values() if link.is_symlink()]
    # a directory that is gone
    links["model"].symlink_to(other.sealed(finished.experiment.ref("merge")))
    links["report"].symlink_to("mine.html")
    assert link_results(finished.experiment, other, results) == {}
    assert not links["model"].is_symlink()
    assert links["report"].is_symlink(), "a link of the user's own"


def test_a_link_of_the_user_to_a_model_elsewhere_is_left_alone(
    world: World, tmp_path: Path
) -> None:
    link, mine = tmp_path / "results" / "demo" / "model", tmp_path / "merge" / "v1"
    for folder in (link.parent, mine):
        folder.mkdir(parents=True)
    link.symlink_to(mine)

    link_results(world.experiment, world.store, tmp_path / "results")

    assert link.readlink() == mine


@pytest.mark.parametrize("name", ["report.html", "model"])
def test_a_file_or_folder_of_the_user_is_never_replaced(
    finished: World, tmp_path: Path, name: str
) -> None:
    mine = tmp_path / "demo" / name
    mine.mkdir(parents=True)
    (mine / "precious.txt").write_text("mine")
    links = link_results(finished.experiment, finished.store, tmp_path)
    assert contents(mine) == {"precious.txt": "mine"}
    assert {link.name for link in links.values()} == {"report.html", "model"} - {name}


def test_the_summary_says_what_came_out_how_long_it_took_and_where(
    finished: World,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    print_summary(finished.experiment, finished.store)
    said = capsys.readouterr().out
    for shown in (
        "2.404 nats/token, perplexity 11.1",
        "7.631 nats/token",
        "936,000 tokens",
        "604,000 tokens",
        "7 of 8 figures are within their bands",
        "1 min 29 s",
    ):
        assert shown in said, shown
    assert all(part in said for part in finished.experiment.specs)
    assert "report  results/demo/report.html" in said
    assert "model   results/demo/model" in said
    assert said.splitlines()[-1] == "chat    qwen3 chat results/demo/model"


def test_the_summary_ends_with_a_command_that_works_where_the_environment_is_not_activated(
    finished: World,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv" / "bin" / "python"))
    print_summary(finished.experiment, finished.store)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == "chat    .venv/bin/qwen3 chat results/demo/model"


def test_the_summary_takes_what_compare_takes(
    world: World,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of another store the paths there are shown, and no link is made."""
    monkeypatch.chdir(tmp_path)
    world.seal_inputs()
    world.seal_report()
    world.store.write_specs(world.experiment.specs.values())
    Dag((world.experiment,), world.store).freeze()

    def said(store: Path, *texts: str) -> str:
        monkeypatch.setenv("PIPELINE_STORE", str(store))
        arguments = parser().parse_args(["summary", *texts])
        arguments.command(arguments)
        return capsys.readouterr().out

    elsewhere = said(tmp_path / "another", f"{world.store.root}:demo")
    assert f"report  {world.folder('report')}/report.html" in elsewhere
    assert f"model   {world.folder('merge')}" in elsewhere
    assert not (tmp_path / "results").exists()
    for text in ("demo", "de*", world.experiment.ref("report").digest[:6]):
        assert "report  results/demo/report.html" in said(world.store.root, text)


def test_the_summary_of_another_experiment_is_refused(finished: World) -> None:
    with pytest.raises(IntegrityError, match="experiment 'other' has no finished report"):
        print_summary(experiment_named("other"), finished.store)


def test_the_summary_of_a_local_model_with_a_generation_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = experiment_named().config.model_dump(mode="json", exclude_unset=True)
    config = Config.model_validate_json(
        json.dumps({**sections, "model": {"source": "local", "path": "base"}})
    )
    content = Content(model={}, data=({}, {}), generation={"generation_config.json": "0"})
    world = World(Store(tmp_path / "store"), compile_config(config, content), realistic_files())
    world.seal_inputs()
    world.seal_report()
    print_summary(world.experiment, world.store)
    assert "generation" in capsys.readouterr().out


@pytest.mark.parametrize("said", ["", "Experiment has been saved", '{"rev": "1"}', '{"ref": '])
def test_what_dvc_says_of_another_version_is_shown_and_not_believed(
    finished: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(record, "_dvc", lambda *_, what: said)
    with pytest.raises(
        PipelineError, match="dvc does not say what it saved, .*record again with --force"
    ):
        record.record("one", finished.experiment, finished.store, print)


@pytest.mark.parametrize("command", [("publish",), ("record", "NAME")])
def test_a_config_may_be_named_as_snakemake_names_it(command: tuple[str, ...]) -> None:
    """Wherever it stands: after other arguments, the missing positional must not replace it."""
    first, *rest = command
    named = ["--configfile", "my.yaml"]
    for arguments in ([first, *named, *rest], [*command, *named], [*command, "my.yaml"]):
        assert config_of(parser().parse_args(arguments)) == Path("my.yaml")
    assert config_of(parser().parse_args(command)) == DEFAULT_CONFIG
    with pytest.raises(ConfigError, match="a config is given already: my.yaml"):
        config_of(parser().parse_args([*command, "my.yaml", "--configfile", "other.yaml"]))
