"""Which experiments `status` and `summary` show: those that `compare` takes, by the same texts."""

import json
import os
import time
from pathlib import Path

import pytest

from pipeline_lib.cli.main import parser
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.halving import Reached, decide, decision_path, write_record
from pipeline_lib.core.errors import ConfigError, IntegrityError
from pipeline_lib.status.selection import Selector
from tests.status.stubs import CONFIG, Desk


def command(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> str:
    """What a command says, with the store and in the folder of `desk`."""
    monkeypatch.chdir(desk.folder)
    monkeypatch.setenv("PIPELINE_STORE", str(desk.store.root))
    arguments = parser().parse_args(words)
    arguments.command(arguments)
    return capsys.readouterr().out


def named(desk: Desk, *texts: str, all_of_them: bool = False) -> list[str]:
    return [found.experiment for found in desk.survey(*texts, all_of_them=all_of_them).statuses()]


def test_status_takes_names_patterns_digests_config_files_and_other_stores(
    desk: Desk, tmp_path: Path
) -> None:
    for name in ("lr-low", "lr-high", "other"):
        desk.freeze(name)
    digest = desk.freeze("other", lr="1.0e-3").ref("report").digest
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    there = Desk(elsewhere)
    there.freeze("far")

    assert named(desk, "lr-*") == ["lr-high", "lr-low"]
    assert named(desk, "lr-*", "lr-low") == ["lr-high", "lr-low"]  # each once
    assert named(desk, digest[:8]) == named(desk, str(desk.folder / "other.yaml")) == ["other"]
    assert named(desk, "oth*", all_of_them=True) == ["other", "other"]
    assert named(desk, f"{there.store.root}:far", "other") == ["far", "other"]
    with pytest.raises(
        ConfigError, match="lr-lo: no experiment of that name; did you mean 'lr-low'"
    ):
        named(desk, "lr-lo")


def test_a_config_file_that_snakemake_has_not_begun_with_is_not_begun(desk: Desk) -> None:
    dag = desk.sweep()
    text = CONFIG.format(name="swept", lr="1.0e-3").replace(
        "save_every", "validate_every_steps: 5, save_every"
    )
    wider = desk.folder / "wider.yaml"
    wider.write_text(f"{text}sweep: {{train.lr: [1.0e-3, 2.0e-3, 4.0e-3]}}\n")

    found = desk.survey(str(wider)).statuses()

    assert [one.state for one in found] == ["not begun"] * 3
    new = {one.experiment for one in found} - {one.name for one in dag.experiments}
    assert new == {"swept-lr=0.004"}
    assert [one.reason for one in found if one.experiment in new] == [
        "snakemake has not begun with this config"
    ]
    assert [one.to_json()["frozen"] for one in found if one.experiment in new] == [None]


def test_the_command_passes_all_of_this_on(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("lr-low", "lr-high", "other"):
        desk.freeze(name)
    found = json.loads(command(desk, monkeypatch, capsys, "status", "--json", "lr-*"))
    assert [one["experiment"] for one in found] == ["lr-high", "lr-low"]


def test_summary_has_a_line_for_each_of_several_and_knows_who_was_stopped_by_a_sweep(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dag = desk.sweep()
    desk.freeze("other")
    rung = dag.rungs[0]
    reached = {
        one: Reached(rung.step, float(place), False, None)
        for place, one in enumerate(rung.trainings)
    }
    decision = decide(rung, None, reached, {one: dag.names_of(one) for one in reached})
    write_record(decision_path(desk.store, rung.digest), decision)

    def rows(*texts: str) -> list[list[str]]:
        lines = command(desk, monkeypatch, capsys, "summary", *texts).splitlines()
        return [line.split()[:2] for line in lines[1:-1]]

    wanted = [["swept-lr=0.002", "stopped"], ["swept-lr=0.001", "not"]]
    assert rows("swept-*") == rows("swept.yaml") == wanted
    assert rows("swept-*", "other") == [wanted[0], ["other", "not"], wanted[1]]
    alone_s = time.time() + 100  # requested again without the sweep, it is to be trained
    alone = Dag((dag.experiments[1],), desk.store).freeze()
    os.utime(alone, (alone_s, alone_s))
    assert rows("swept-*") == [["swept-lr=0.001", "not"], ["swept-lr=0.002", "not"]]
    with pytest.raises(IntegrityError, match="experiment 'other' has no finished report"):
        rows("other")
    with pytest.raises(ConfigError, match="it chooses from one config file, and 2 were given"):
        rows("a.yaml", "b.yaml", "--experiment", "x")


def test_an_experiment_is_found_whose_sweep_has_lost_another(desk: Desk) -> None:
    """As `store gc --keep-experiments` leaves it."""
    dag = desk.sweep()
    selector = Selector(desk.store)
    kept, lost = (selector.chosen([one.name])[0] for one in dag.experiments)
    lost.frozen.path.unlink()
    opened, experiment = selector.opened(kept)
    assert (experiment.name, len(opened.experiments)) == (kept.frozen.name, 1)
