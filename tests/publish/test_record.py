"""The record of a finished experiment: rewritten whenever asked, refused while there is nothing to record."""

import json
from pathlib import Path

import pytest

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.config.dag import link_results
from pipeline_lib.config.load import load_config
from pipeline_lib.publish.record import print_summary, publish
from tests.publish.fakes import World, experiment_named


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_publishes_the_small_results_and_nothing_else(finished: World, tmp_path: Path) -> None:
    target = tmp_path / "results" / "current"
    paths = publish(finished.experiment, finished.store, target)
    assert [path.name for path in paths] == ["config.yaml", "metrics.json", "curves.csv"]
    published = contents(target)
    assert published.keys() == {"config.yaml", "metrics.json", "curves.csv"}
    report = finished.folder("report")
    assert published["metrics.json"] == (report / "summary.json").read_text()
    assert published["curves.csv"] == (report / "curves.csv").read_text()
    assert json.loads(published["metrics.json"])["eval"]["tuned"]["loss"] == 2.404


def test_publishing_again_restores_whatever_was_changed(finished: World, tmp_path: Path) -> None:
    publish(finished.experiment, finished.store, tmp_path)
    before = contents(tmp_path)
    (tmp_path / "metrics.json").write_text("{}")
    (tmp_path / "config.yaml").unlink()
    publish(finished.experiment, finished.store, tmp_path)
    assert contents(tmp_path) == before


def test_the_published_config_is_whole_in_order_and_reads_back_the_same(finished: World, tmp_path: Path) -> None:
    config_path = publish(finished.experiment, finished.store, tmp_path)[0]
    assert load_config(config_path) == finished.experiment.config
    sections = [line.split(":")[0] for line in config_path.read_text().splitlines() if line[0] not in " #-"]
    assert sections == list(type(finished.experiment.config).model_fields)
    assert "  weight_decay: 0.01\n" in config_path.read_text()


def test_an_unfinished_experiment_is_refused_and_the_record_left_alone(world: World, tmp_path: Path) -> None:
    target = tmp_path / "current"
    target.mkdir()
    (target / "metrics.json").write_text("earlier")
    world.seal_inputs()
    with pytest.raises(IntegrityError, match="experiment 'demo' has no finished report; run `snakemake`"):
        publish(world.experiment, world.store, target)
    assert contents(target) == {"metrics.json": "earlier"}


@pytest.mark.parametrize("name", ["summary.json", "curves.csv", "report.html"])
def test_a_damaged_report_is_refused_by_name(world: World, tmp_path: Path, name: str) -> None:
    world.seal_inputs()
    path = world.seal_report() / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(IntegrityError, match=f"{name}: content differs"):
        publish(world.experiment, world.store, tmp_path / "current")
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


@pytest.mark.parametrize("name", ["report.html", "model"])
def test_a_file_or_folder_of_the_user_is_never_replaced(finished: World, tmp_path: Path, name: str) -> None:
    mine = tmp_path / "demo" / name
    mine.mkdir(parents=True)
    (mine / "precious.txt").write_text("mine")
    links = link_results(finished.experiment, finished.store, tmp_path)
    assert contents(mine) == {"precious.txt": "mine"}
    assert {link.name for link in links.values()} == {"report.html", "model"} - {name}


def test_the_summary_says_what_came_out_how_long_it_took_and_where(
    finished: World, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    print_summary(finished.experiment, finished.store)
    said = capsys.readouterr().out
    for shown in (
        "2.404 nats/token, perplexity 11.1",
        "7.631 nats/token",
        "936,000 tokens",
        "604,000 tokens",
        "7 of 8 figures within their bands",
        "1 min 04 s",
    ):
        assert shown in said, shown
    assert all(part in said for part in finished.experiment.specs)
    assert "report  results/demo/report.html" in said
    assert "model   results/demo/model" in said


def test_the_summary_of_another_experiment_is_refused(finished: World) -> None:
    with pytest.raises(IntegrityError, match="experiment 'other' has no finished report"):
        print_summary(experiment_named("other"), finished.store)
