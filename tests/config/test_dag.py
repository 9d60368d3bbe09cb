"""What Snakemake is told, and what it is told again on a cluster node after the YAML was edited."""

import json
from pathlib import Path

import pytest

from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.dag import Dag, link_results
from pipeline_lib.config.schema import Config
from pipeline_lib.core.errors import ConfigError, IntegrityError
from pipeline_lib.core.store import Store

CONFIG = (
    "experiment: demo\nmodel: {source: tiny}\ndata: {train: [{source: pydoc}]}\ntrain: {lr: "
    "1.0e-4}\n"
)


@pytest.fixture
def dag(tmp_path: Path) -> Dag:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return Dag.compile([str(path)], {}, Store(tmp_path / "store"))


def test_a_frozen_experiment_thaws_the_same_after_the_yaml_was_edited(
    dag: Dag, tmp_path: Path
) -> None:
    frozen = dag.freeze()
    (tmp_path / "config.yaml").write_text("no config: at all")
    thawed = Dag.thaw(frozen, dag.store)
    assert thawed == dag
    for spec in dag.experiment.specs.values():
        assert thawed.title(spec.digest) == dag.title(spec.digest)
        assert thawed.pointers_read_by(spec.digest) == dag.pointers_read_by(spec.digest)


def test_the_base_is_evaluated_once_for_a_sweep_after_the_plan_and_not_again_for_another_plan(
    sweep: Dag,
) -> None:
    (base,) = {one.ref("baseline") for one in sweep.experiments}
    assert len({one.ref("evaluate") for one in sweep.experiments}) > 1
    assert "base model" in sweep.title(base.digest) and "shared with" in sweep.title(base.digest)
    inputs = [
        str(sweep.store.pointer(sweep.experiment.ref(part)))
        for part in ("model", "shard", "tokenize")
    ]
    assert sweep.pointers_read_by(base.digest) == [*inputs, sweep.pointer("plan")]
    sweep.store.pointer(base).parent.mkdir(parents=True)
    sweep.store.pointer(base).touch()
    assert sweep.pointers_read_by(base.digest) == inputs


def test_two_experiments_freeze_apart(dag: Dag, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.replace("1.0e-4", "2.0e-4"))
    other = Dag.compile([str(tmp_path / "config.yaml")], {}, dag.store)
    assert other.freeze() != dag.freeze()
    assert Dag.thaw(dag.freeze(), dag.store) == dag


def test_a_frozen_experiment_keeps_its_own_settings_that_are_in_no_digest(
    dag: Dag, tmp_path: Path
) -> None:
    """Also those left at defaults, where another config of the same digests gives others."""
    frozen, limits = dag.freeze(), "tokenize: {max_dropped_fraction: 0.5}\nshard: {shards: 3}\n"
    (tmp_path / "config.yaml").write_text(CONFIG + limits)
    other = Dag.compile([str(tmp_path / "config.yaml")], {}, dag.store)
    digests = {part: spec.digest for part, spec in dag.experiment.specs.items()}
    assert digests == {part: spec.digest for part, spec in other.experiment.specs.items()}
    other.freeze()
    given = {"data.0": {}, "tokenize": {"max_dropped_fraction": 0.5}, "shard": {"shards": 3}}
    for part, where in given.items():
        assert dag.store.read_spec(dag.store.spec_path(digests[part])).where == where
        assert other.unhashed_arguments(digests[part]) == ["--where", json.dumps(where)]
        for one in (dag, Dag.thaw(frozen, dag.store)):
            assert one.unhashed_arguments(digests[part]) == ["--where", "{}"]
    assert dag.unhashed_arguments(digests["merge"]) == []


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


def test_all_asks_for_whatever_results_point_at(dag: Dag) -> None:
    assert dag.products() == [dag.pointer("report"), dag.pointer("merge")]
    assert dag.products(going=()) == []


def test_each_export_that_is_asked_for_is_a_result(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{CONFIG}export: [gguf-q8_0, gguf-f16]\n")
    store = Store(tmp_path / "store")
    dag = Dag.compile([str(path)], {}, store)
    exports = [dag.pointer("gguf-f16"), dag.pointer("gguf-q8_0")]
    assert dag.products() == [dag.pointer("report"), *exports, dag.pointer("merge")]
    for kind in ("gguf-f16", "gguf-q8_0"):
        spec = dag.experiment.specs[kind]
        assert (spec.stage, spec.settings) == ("export", {"type": kind, "format": 3})
        sealed = store.sealed(spec.ref)
        sealed.mkdir(parents=True)
        (sealed / "manifest.json").write_text("{}")
    links = link_results(dag.experiment, store, tmp_path / "results")
    assert links.keys() == {"gguf-f16", "gguf-q8_0"}
    assert links["gguf-f16"].resolve() == store.sealed(dag.experiment.ref("gguf-f16")).resolve()

    # one that is not asked for any more goes, what its user put there stays
    path.write_text(f"{CONFIG}export: [gguf-f16]\n")
    own = links["gguf-f16"].with_name("fp8")
    own.mkdir()
    left = link_results(Dag.compile([str(path)], {}, store).experiment, store, tmp_path / "results")
    assert left.keys() == {"gguf-f16"}
    assert not links["gguf-q8_0"].is_symlink()
    assert store.sealed(dag.experiment.ref("gguf-q8_0")).is_dir()
    assert own.is_dir()


@pytest.fixture
def sweep(tmp_path: Path) -> Dag:
    path = tmp_path / "sweep.yaml"
    path.write_text(CONFIG + "sweep: {train.lr: [1.0e-4, 2.0e-4], cluster.cpus_per_rank: [1, 2]}\n")
    return Dag.compile([str(path)], {}, Store(tmp_path / "store"))


def test_the_stages_of_a_sweep_belong_to_their_experiments(sweep: Dag) -> None:
    assert len(sweep.experiments) == 4
    counts = {
        stage: len(sweep.pointers(stage))
        for stage in ("download", "shard", "plan", "train", "report")
    }
    assert counts == {"download": 2, "shard": 1, "plan": 4, "train": 2, "report": 4}
    for experiment in sweep.experiments:
        assert sweep.config_of(experiment.ref("report").digest) == experiment.config
        assert sweep.plan_pointer(experiment.ref("plan").digest) in sweep.pointers("plan")
    first, same_training = sweep.experiments[:2]
    digest = same_training.ref("train").digest
    assert digest == first.ref("train").digest
    assert sweep.config_of(digest) == first.config
    assert sweep.plan_pointer(digest) == str(sweep.store.pointer(first.ref("plan")))
    assert "shared with 1 more" in sweep.title(digest)
    assert "shared with 3 more" in sweep.title(first.ref("shard").digest)
    assert "shared" not in sweep.title(first.ref("report").digest)


def test_a_sweep_freezes_each_experiment_and_a_list_of_them(sweep: Dag, tmp_path: Path) -> None:
    frozen = sweep.freeze()
    assert frozen.parent.name == "sweeps"
    assert len(list((sweep.store.root / "experiments").glob("*.json"))) == 4
    (tmp_path / "sweep.yaml").unlink()
    thawed = Dag.thaw(frozen, sweep.store)
    assert thawed == sweep
    assert thawed.titles() == sweep.titles()
    assert sweep.freeze() == frozen
    frozen.write_text('{"experiments": []}')
    with pytest.raises(IntegrityError, match=frozen.name):
        Dag.thaw(frozen, sweep.store)


def test_pointers_to_what_somebody_deleted_and_to_what_was_made_from_it_are_dropped(
    sweep: Dag,
) -> None:
    pointers = [
        Path(pointer) for part in ("shard", "train", "report") for pointer in sweep.pointers(part)
    ]
    for pointer in pointers:
        pointer.parent.mkdir(parents=True, exist_ok=True)
        pointer.write_text("x")
    assert len(sweep.dangling_pointers()) == len(pointers)
    sweep.freeze()
    assert not [pointer for pointer in pointers if pointer.exists()]


def test_what_is_wrong_is_told_at_once_with_its_lines_and_the_experiments_it_is_of(
    tmp_path: Path,
) -> None:
    """Of keys together, of files, and what Snakemake refuses besides; all before compiling."""
    path = tmp_path / "config.yaml"

    def refuse(config: Config) -> None:
        if config.train.lr > 1.5e-4:
            raise ConfigError(
                f"experiment {config.experiment!r}", ["train.lr: too high", "a word of its own"]
            )

    wrong = CONFIG.replace("pydoc", "file, path: nowhere.jsonl").replace(
        "lr: 1.0e-4", "lr: 1.0e-4, shard_ranks: 2"
    )
    path.write_text(f"{wrong}sweep:\n  train.lr: [1.0e-4, 2.0e-4]\n")
    with pytest.raises(ConfigError) as caught:
        Dag.compile([str(path)], {}, Store(tmp_path / "store"), refuse)
    assert caught.value.source == str(path)
    keys, file, lr, own = caught.value.problems
    assert keys.startswith("line 4: train.shard_ranks: works only with train.strategy: hsdp")
    assert file.startswith("line 3: data.train[0].path: no file matches 'nowhere.jsonl'")
    assert lr == "line 6: train.lr: too high (with lr=0.0002)"
    assert own == "a word of its own (with lr=0.0002)"
    path.write_text(CONFIG)
    assert Dag.compile([str(path)], {}, Store(tmp_path / "store"), refuse).name == "demo"


def test_what_shows_only_once_it_is_known_is_refused_then(tmp_path: Path) -> None:
    path, asked = tmp_path / "config.yaml", []

    def refuse(config: Config) -> None:
        asked.append(config)
        if len(asked) == 2:
            raise ConfigError("experiment 'demo'", ["cluster.gpu: too small"])

    path.write_text(CONFIG)
    with pytest.raises(ConfigError, match="cluster.gpu: too small"):
        Dag.compile([str(path)], {}, Store(tmp_path / "store"), refuse)


def test_a_rehearsal_trains_in_the_folder_of_the_run_and_changes_nothing_of_it(dag: Dag) -> None:
    rehearsal, experiment = dag.rehearsal, dag.experiment
    assert rehearsal is not None
    assert (rehearsal.first_step, rehearsal.last_step) == (1, 2)
    run = run_digest(experiment.specs["train"])
    assert {run_digest(rehearsal.first), run_digest(rehearsal.second)} == {run}
    assert not {spec.digest for spec in rehearsal.specs} & {
        spec.digest for spec in experiment.specs.values()
    }
    thawed = Dag.thaw(dag.freeze(), dag.store)
    for each in (dag, thawed):
        assert each.pointers_read_by(rehearsal.second.digest)[-1] == str(
            dag.store.pointer(rehearsal.first.ref)
        )
        assert each.pointers_read_by(rehearsal.first.digest) == each.pointers_read_by(
            experiment.ref("train").digest
        )
        assert str(dag.store.pointer(rehearsal.second.ref)) in each.pointers_read_by(
            rehearsal.merge.digest
        )
        for spec in rehearsal.specs:
            assert each.config_of(spec.digest) == experiment.config
            assert each.plan_pointer(spec.digest) == dag.pointer("plan")
            assert "rehearsal" in each.title(spec.digest)
            assert dag.store.read_spec(dag.store.spec_path(spec.digest)) == spec


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ("local_sgd_steps: 4, save_every_steps: 8", (4, 8)),
        ("until_step: 3", (1, 2)),
        ("until_step: 2", None),
    ],
)
def test_a_rehearsal_stops_where_that_does_not_change_the_result_or_is_none(
    tmp_path: Path, keys: str, steps: tuple[int, int] | None
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("lr:", f"{keys}, lr:"))
    dag = Dag.compile([str(path)], {}, Store(tmp_path / "store"))
    rehearsal = dag.rehearsal
    assert (rehearsal and (rehearsal.first_step, rehearsal.last_step)) == steps
    assert dag.pointers_read_by(dag.experiment.ref("train").digest)
