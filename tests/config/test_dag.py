"""What Snakemake is told, and what it is told again on a cluster node after the YAML was edited."""

from pathlib import Path

import pytest

from pipeline_lib.base.errors import ConfigError, IntegrityError
from pipeline_lib.base.store import Store
from pipeline_lib.config.dag import Dag

CONFIG = "experiment: demo\nmodel: {source: tiny}\ndata: {train: [{source: pydoc}]}\ntrain: {lr: 1.0e-4}\n"


@pytest.fixture
def dag(tmp_path: Path) -> Dag:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return Dag.compile([str(path)], {}, Store(tmp_path / "store"))


def test_a_frozen_experiment_thaws_the_same_after_the_yaml_was_edited(dag: Dag, tmp_path: Path) -> None:
    frozen = dag.freeze()
    (tmp_path / "config.yaml").write_text("no config: at all")
    thawed = Dag.thaw(frozen, dag.store)
    assert thawed == dag
    for spec in dag.experiment.specs.values():
        assert thawed.title(spec.digest) == dag.title(spec.digest)
        assert thawed.pointers_read_by(spec.digest) == dag.pointers_read_by(spec.digest)


def test_two_experiments_freeze_apart(dag: Dag, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.replace("1.0e-4", "2.0e-4"))
    other = Dag.compile([str(tmp_path / "config.yaml")], {}, dag.store)
    assert other.freeze() != dag.freeze()
    assert Dag.thaw(dag.freeze(), dag.store) == dag


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"config": {}, "parts": {}}'])
def test_a_damaged_frozen_experiment_is_named(dag: Dag, content: str) -> None:
    frozen = dag.freeze()
    frozen.write_text(content)
    with pytest.raises(IntegrityError, match=frozen.name):
        Dag.thaw(frozen, dag.store)


def test_a_digest_of_another_experiment_is_refused(dag: Dag) -> None:
    with pytest.raises(IntegrityError, match="0123456789abcdef: no stage of experiment 'demo'"):
        dag.pointers_read_by("0123456789abcdef")


def test_what_would_be_ignored_is_refused(dag: Dag, tmp_path: Path) -> None:
    path = str(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="train: not read; edit the YAML"):
        Dag.compile([path], {"train": 1}, dag.store)
    with pytest.raises(ConfigError, match="one file is read, not 2"):
        Dag.compile([path, path], {}, dag.store)


def test_pointers_to_what_somebody_deleted_are_dropped(dag: Dag, tmp_path: Path) -> None:
    pointer = Path(dag.pointer("train"))
    pointer.parent.mkdir(parents=True)
    pointer.write_text("x")
    Dag.compile([str(tmp_path / "config.yaml")], {}, dag.store)
    assert not pointer.exists()
