"""What goes and what stays, when nothing else happens meanwhile."""

import json
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

from pipeline_lib.config.compile import Experiment, run_digest
from pipeline_lib.config.dag import link_results
from pipeline_lib.config.schema import LocalModel
from pipeline_lib.core.errors import ConfigError, IntegrityError, Interrupted, PipelineError
from pipeline_lib.core.files import STAGE_PREFIX, canonical_json, replace_link
from pipeline_lib.core.store import Spec, verify
from tests.status.stubs import stub_squeue
from tests.upkeep.commands import store
from tests.upkeep.stores import LONG_AGO_S, Shop

Captured = pytest.CaptureFixture[str]


def files(folder: Path) -> set[str]:
    """All that lies in `folder` but logs and locks, whose folders stay."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if "locks" not in path.parts
    }


def is_there(shop: Shop, experiment: Experiment) -> bool:
    """Whether all that it is made of is whole."""
    for spec in experiment.specs.values():
        if not (shop.store.sealed(spec.ref)).exists():
            return False
        verify(shop.store.sealed(spec.ref))
        assert shop.store.pointer(spec.ref).exists()
        assert shop.store.read_spec(shop.store.spec_path(spec.digest)) == spec
    return shop.store.run_dir(run_digest(experiment.specs["train"])).is_dir()


def test_what_only_others_use_goes_and_what_is_shared_stays(shop: Shop, capsys: Captured) -> None:
    a, b, c = shop.finished("a", "b", "c")
    before = files(shop.folder)

    would = store(capsys, "gc", "--keep-experiments", "a", "--dry-run")
    assert files(shop.folder) == before
    said = store(capsys, "gc", "--keep-experiments", "a")

    assert would.splitlines()[-1] == "nothing was removed: --dry-run"
    # which names each directory, and the sum
    assert said.splitlines()[:-1] == would.splitlines()[:-1]
    assert (
        "1 experiment kept; 2 experiments, 10 directories, 2 runs, 0 leftovers, 10 specs go: "
        in said
    )
    assert is_there(shop, a)
    for gone in (b, c):
        assert not any((shop.store.root / "train").glob(f"*{gone.specs['train'].digest}*"))
        assert not shop.store.run_dir(run_digest(gone.specs["train"])).exists()
        assert shop.store.sealed(gone.specs["shard"].ref).is_dir()
    assert len(list((shop.store.root / "experiments").iterdir())) == 1
    assert (
        store(capsys, "gc", "--keep-experiments", "a")
        .splitlines()[-1]
        .startswith("removed 0 directories")
    )


def test_without_names_experiments_stay_and_what_none_of_them_names_goes(
    shop: Shop, capsys: Captured
) -> None:
    [a] = shop.finished("a")
    orphan = shop.seal(Spec("merge", 1, {"of": "nothing"}))
    run_name = run_digest(a.specs["train"])
    left = [
        shop.store.root / "train" / f".stage-{a.specs['train'].digest}-0123456789ab",
        shop.store.root / "merge" / ".trash-0123456789abcdef-0123456789ab",
        shop.store.root / "specs" / ".stage-0123456789abcdef.json-0123456789ab",
        shop.store.root / "hashes.json",
        shop.store.root / "revisions.json",
        shop.store.root / "architectures.json",
        shop.folder / "runs" / f".trash-{run_name}-0123456789ab",
        shop.folder / "runs" / f".trash-.trash-{run_name}-ba9876543210-0123456789ab",
    ]
    for path in left:
        shop.write(
            path if path.parent.name in ("specs", "store") else path / "weights", "half", LONG_AGO_S
        )
        shop.age(path, LONG_AGO_S)
    for folder in (shop.store.root / "train", shop.folder / "runs" / "locks"):
        folder.mkdir(exist_ok=True)
        with NamedTemporaryFile(prefix=STAGE_PREFIX, dir=folder, delete=False) as probe:
            left.append(Path(probe.name))
        shop.age(left[-1], LONG_AGO_S)
    young = shop.store.root / "train" / ".stage-fedcba9876543210-0123456789ab"
    young.mkdir()
    odd = "na\u200bme \x1b[31m\n"
    mine = [
        shop.store.root / "train" / "notes.txt",
        shop.store.root / "mine" / odd,
        shop.store.root / "README",
    ]
    for path in mine:
        shop.write(path, "mine", LONG_AGO_S)
    elsewhere = shop.store.root / "shard" / ("0" * 16)
    elsewhere.symlink_to(shop.folder)  # a directory moved to another disk

    said, listed = store(capsys, "gc"), store(capsys, "ls", "--all")

    assert "all experiments are kept: --keep-experiments was not given" in said
    assert [path for path in (orphan, orphan.with_suffix(".ok"), *left) if path.exists()] == []
    assert is_there(shop, a)
    assert young.is_dir()  # somebody may be filling it
    assert elsewhere.is_symlink()
    assert all(path.exists() for path in mine)
    assert f"not made by any stage: {mine[0]}" in listed
    assert "\x1b" not in listed


def test_after_any_gc_each_kept_experiment_is_whole(shop: Shop, capsys: Captured) -> None:
    """Over random stores: some share stages, are half made, or have names with many configs."""
    for seed in range(6):
        chance = random.Random(seed)
        part = Shop(shop.folder / f"store-{seed}")
        os.environ["PIPELINE_STORE"] = str(part.store.root)  # the fixture puts it back
        made = part.variants(chance.choice("abcdefg") for _ in range(8))
        for experiment in made:
            parts = list(experiment.specs)[: chance.randint(1, len(experiment.specs))]
            part.add(experiment, *parts)
            if chance.random() < 0.5:
                part.train(experiment)
        kept = chance.sample(sorted({one.name for one in made}), 2)
        there = {
            path
            for one in made
            if one.name in kept
            for spec in one.specs.values()
            for path in (
                part.store.sealed(spec.ref),
                part.store.pointer(spec.ref),
                part.store.spec_path(spec.digest),
                part.store.run_dir(run_digest(spec) if spec.stage == "train" else spec.digest),
            )
            if path.exists()
        }
        everything = {path for stage in part.store.root.iterdir() for path in stage.iterdir()}

        store(capsys, "gc", "--keep-experiments", *kept)

        assert all(path.exists() for path in there), seed
        left = {path for stage in part.store.root.iterdir() for path in stage.iterdir()}
        experiments = {path for path in left if path.parent.name == "experiments"}
        assert {
            json.loads(path.read_text())["config"]["experiment"] for path in experiments
        } == set(kept)
        assert left - experiments == there & everything, seed  # and nothing else is left
        store(capsys, "verify")


def test_a_name_that_is_not_there_is_refused_with_the_nearest(shop: Shop, capsys: Captured) -> None:
    """A pattern may match none as long as others keep some."""
    shop.finished("a", "b", "c")
    before = files(shop.folder)
    pattern = r"'lr-\*': no experiment of that name; known: a, b, c"

    for names, message in (
        (("a", "aa"), "'aa': no experiment of that name; did you mean 'a'"),
        (("lr-*", "aa"), "'aa': no experiment of that name"),
        (("lr-*",), pattern),
        (("lr-*", "x?"), pattern),
    ):
        with pytest.raises(ConfigError, match=message):
            store(capsys, "gc", "--keep-experiments", *names)
        assert files(shop.folder) == before


def test_patterns_and_frozen_files_name_experiments_too(shop: Shop, capsys: Captured) -> None:
    a, b, c = shop.finished("a", "b", "c")
    frozen = next(
        path for path in (shop.store.root / "experiments").iterdir() if '"c"' in path.read_text()
    )

    said = store(capsys, "gc", "--keep-experiments", "lr-*", "[a]", frozen.stem)

    assert "warning: no experiment matches 'lr-*', so this pattern keeps nothing" in said
    assert is_there(shop, a)
    assert is_there(shop, c)
    assert not shop.store.sealed(b.specs["train"].ref).exists()


def test_of_a_kept_name_all_configs_stay_unless_only_the_newest_is_wanted(
    shop: Shop, capsys: Captured
) -> None:
    old, new = shop.variants(["a", "a"])
    shop.add(old, age_s=3 * LONG_AGO_S)
    shop.add(new)
    for experiment in (old, new):
        shop.train(experiment)

    store(capsys, "gc", "--keep-experiments", "a")
    assert is_there(shop, old)
    store(capsys, "gc", "--keep-experiments", "a", "--newest")

    assert is_there(shop, new)
    assert not shop.store.sealed(old.specs["train"].ref).exists()


def test_what_was_used_within_the_days_stays(shop: Shop, capsys: Captured) -> None:
    young, _ = shop.finished("young", "kept")
    *_, old = shop.variants(["-", "-", "old"])
    shop.add(old, age_s=9 * LONG_AGO_S)
    shop.train(old, age_s=9 * LONG_AGO_S)

    said = store(capsys, "gc", "--keep-experiments", "kept", "--older-than", "5")

    assert "also kept: young" in said
    assert is_there(shop, young)
    assert not shop.store.sealed(old.specs["train"].ref).exists()


def test_the_model_that_a_kept_experiment_begins_from_stays(shop: Shop, capsys: Captured) -> None:
    """It is another's result, named in the config as `results/NAME/model`; its link still works."""
    base, later = shop.variants(["base", "later"])
    shop.add(base)
    link_results(base, shop.store)
    model = Spec(
        "download", 2, {"kind": "model"}, where={"path": str(Path("results/base/model").absolute())}
    )
    shop.add(Experiment(later.config, {**later.specs, "model": model}))

    store(capsys, "gc", "--keep-experiments", "later")

    verify(shop.store.sealed(base.specs["merge"].ref))
    assert Path("results/base/model/content.txt").exists()
    assert not shop.store.sealed(base.specs["train"].ref).exists()
    assert not Path("results/base/report.html").is_symlink()  # led nowhere


def test_the_model_that_a_kept_experiment_begins_from_stays_though_another_users_copy_is_in_the_spec(
    shop: Shop, capsys: Captured
) -> None:
    """Both have equal files, so one digest: the spec has the path of whoever froze it last."""
    base, later = shop.variants(["base", "later"])
    shop.add(base)
    link_results(base, shop.store)
    ours = LocalModel(source="local", path=str(Path("results/base/model").absolute()))
    model = Spec("download", 2, {"kind": "model"}, where={"path": ours.path})
    config = later.config.model_copy(update={"model": ours})
    shop.add(Experiment(config, {**later.specs, "model": model}))
    shop.store.write_specs([replace(model, where={"path": "/home/other/model"})])

    store(capsys, "gc", "--keep-experiments", "later")

    verify(shop.store.sealed(base.specs["merge"].ref))
    assert Path("results/base/model/content.txt").exists()


def test_links_that_lead_nowhere_afterwards_go_and_what_is_the_users_stays(
    shop: Shop, capsys: Captured
) -> None:
    a, b, _ = shop.finished("a", "b", "c")
    for experiment in (a, b):
        link_results(experiment, shop.store)
    replace_link(Path("results/mine/model"), shop.folder / "elsewhere")

    store(capsys, "gc", "--keep-experiments", "a")

    assert files(Path("results")) == {"a", "a/model", "a/report.html", "mine", "mine/model"}


def test_the_runs_of_a_store_beside_it_stay(
    shop: Shop, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stores in one folder have their runs in the same place."""
    [a] = shop.finished("a")
    beside = Shop(shop.folder, "store-b")
    _, x, y = beside.variants(["-", "x", "y"])
    for experiment in (x, y):
        beside.add(experiment)
        beside.train(experiment)
    fetched = shop.write(
        shop.folder / "runs" / ("0" * 16) / "jobs" / ("1" * 16), "", LONG_AGO_S
    ).parents[1]
    left = shop.write(
        shop.folder / "runs" / f".trash-{run_digest(x.specs['train'])}-0123456789ab", "", LONG_AGO_S
    )
    for path in (fetched, fetched / "jobs"):
        shop.age(path, LONG_AGO_S)

    listed, taken, said = store(capsys, "ls", "--all"), store(capsys, "du"), store(capsys, "gc")

    assert is_there(beside, x)
    assert is_there(beside, y)
    assert fetched.is_dir()
    assert left.exists()
    assert "not removed from runs/, of another store or an unknown stage: 4, " in said
    assert f"of another store or an unknown stage: {fetched}, 0 B" in listed
    assert re.search("of other stores in runs/ +4 ", taken)
    assert "12 sealed directories are whole" in store(capsys, "verify")

    monkeypatch.setenv("PIPELINE_STORE", str(beside.store.root))
    store(capsys, "gc", "--keep-experiments", "x")
    assert is_there(beside, x)
    assert not beside.store.run_dir(run_digest(y.specs["train"])).exists()
    assert not left.exists()
    assert is_there(shop, a)


def test_a_run_of_two_stores_goes_with_the_last(
    shop: Shop, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same training has the same folder, whichever store it was asked for in."""
    shops = shop, Shop(shop.folder, "store-b")
    for one in shops:
        kept, gone = one.variants(["kept", "gone"])
        one.add(kept)
        one.add(gone)
    run = shop.train(gone)
    monkeypatch.chdir(shop.folder)

    for one, is_left in zip(shops, (True, False), strict=True):
        monkeypatch.setenv("PIPELINE_STORE", one.name)
        store(capsys, "gc", "--keep-experiments", "kept")
        assert not one.store.sealed(gone.specs["train"].ref).exists()
        assert run.exists() == is_left


def test_what_stays_for_now_can_be_removed_later(shop: Shop, capsys: Captured) -> None:
    """Only its spec tells that a run folder is of this store, so that stays as long."""
    a, b = shop.variants(["a", "b"])
    shop.add(a, age_s=9 * LONG_AGO_S)
    frozen = shop.add(b, "model", "data.0", "tokenize", "shard", age_s=9 * LONG_AGO_S)
    run = shop.train(b, age_s=2 * LONG_AGO_S)
    frozen.unlink()

    store(capsys, "gc", "--older-than", "5")
    assert run.is_dir()
    store(capsys, "gc")

    assert not run.exists()
    assert not shop.store.spec_path(b.specs["train"].digest).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"parts": {"report": 3}, "config": {}}'])
def test_an_experiment_that_cannot_be_read_stops_it(
    shop: Shop, capsys: Captured, text: str
) -> None:
    """What it needs is not known, so nothing is safe to remove."""
    shop.finished("a", "b", "c")
    path = shop.write(shop.store.root / "experiments" / "bad.json", text, LONG_AGO_S)
    before = files(shop.folder)

    with pytest.raises(IntegrityError, match=f"{path}: not a valid experiment file"):
        store(capsys, "gc", "--keep-experiments", "a")

    assert files(shop.folder) == before
    assert "not a valid experiment file" in store(capsys, "ls")


def test_a_kept_experiment_whose_run_is_not_known_stops_it(shop: Shop, capsys: Captured) -> None:
    [a] = shop.variants(["a"])
    # its training has checkpoints and is not sealed
    shop.add(a, "model", "data.0", "tokenize", "shard")
    run = shop.train(a)
    shop.store.spec_path(a.specs["train"].digest).write_text('{"stage": "train"')

    with pytest.raises(IntegrityError, match="train of 'a': .*run snakemake to write it anew"):
        store(capsys, "gc", "--keep-experiments", "a")

    assert run.is_dir()


def test_a_spec_of_another_version_is_read_as_it_was(shop: Shop, capsys: Captured) -> None:
    """Older code froze it; its digest is still that of its content, and so is that of its run."""
    [a] = shop.variants(["a"])
    old = Spec("train", 1, {"until_step": 7, "removed_option": True}, a.specs["train"].inputs)
    older = Experiment(a.config, {**a.specs, "train": old})
    shop.add(older)
    run = shop.train(older)

    store(capsys, "gc", "--keep-experiments", "a")

    assert run.is_dir()
    assert run.name != old.digest
    assert is_there(shop, older)


def test_what_resists_is_named_and_the_rest_goes(
    shop: Shop, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, b, c = shop.finished("a", "b", "c")
    stuck = shop.store.sealed(b.specs["merge"].ref)

    def rename(path: Path, target: Path) -> Path:
        if path == stuck:
            raise PermissionError(13, "Permission denied", str(path))
        os.rename(path, target)  # noqa: PTH104 - Path.rename is what is replaced
        return Path(target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(
        PipelineError, match=f"(?s)could not be removed:.*{stuck}: Permission denied"
    ):
        store(capsys, "gc", "--keep-experiments", "a")

    assert not shop.store.sealed(c.specs["merge"].ref).exists()
    monkeypatch.undo()
    monkeypatch.setenv("PIPELINE_STORE", str(shop.store.root))
    store(capsys, "gc", "--ignore-queue")
    assert not stuck.exists()


def test_jobs_that_wait_in_the_queue_count_and_a_silent_queue_stops_it(
    shop: Shop, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, b, c = shop.finished("a", "b", "c")
    digest = b.specs["merge"].digest
    stub_squeue(shop.folder / "bin", monkeypatch, "", exit_code=1)
    with pytest.raises(Interrupted, match="squeue does not answer"):
        store(capsys, "gc", "--keep-experiments", "a")
    assert "squeue does not answer" in store(capsys, "gc", "--keep-experiments", "a", "--dry-run")
    line = f"7|PENDING|Priority|N/A|/w|rule_merge_stage_wildcards_{digest}\n"
    stub_squeue(shop.folder / "bin2", monkeypatch, line)

    said = store(capsys, "gc", "--keep-experiments", "a")

    assert f"SLURM job 7 makes {digest}: PENDING (Priority)" in said
    assert is_there(shop, b)
    assert not shop.store.sealed(c.specs["train"].ref).exists()


def test_what_one_snakemake_is_to_make_stays_together(shop: Shop, capsys: Captured) -> None:
    """Of a sweep, experiments wait for their turn with nothing that shows it."""
    _, b, c = shop.finished("a", "b", "c")
    frozen = {
        json.loads(path.read_text())["config"]["experiment"]: path
        for path in (shop.store.root / "experiments").iterdir()
    }
    sweep = {"experiments": ["gone.json", frozen["b"].name, frozen["c"].name]}
    sweep_path = shop.write(
        shop.store.root / "sweeps" / "0123456789abcdef.json", json.dumps(sweep), LONG_AGO_S
    )
    shop.age(shop.store.run_dir(run_digest(b.specs["train"])) / "metrics.jsonl", 60)

    said = store(capsys, "gc", "--keep-experiments", "a")
    assert "was written to 1 min ago" in said
    assert "in one sweep with an experiment that is in use" in said
    assert is_there(shop, b)
    assert is_there(shop, c)

    shop.age(shop.store.run_dir(run_digest(b.specs["train"])) / "metrics.jsonl", LONG_AGO_S)
    store(capsys, "gc", "--keep-experiments", "a")
    assert not sweep_path.exists()


def test_an_experiment_that_was_just_asked_for_stays(shop: Shop, capsys: Captured) -> None:
    _, b, _ = shop.finished("a", "b", "c")
    next(
        path for path in (shop.store.root / "experiments").iterdir() if '"b"' in path.read_text()
    ).touch()

    assert "also kept: b" in store(capsys, "gc", "--keep-experiments", "a")
    assert is_there(shop, b)


def test_the_rungs_of_a_sweep_that_goes_on_stay(
    shop: Shop, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No experiment names a training to a rung: it has its own spec, and the whole one's folder.

    It is the run folder.
    """
    _, b, c = shop.finished("a", "b", "c")
    rungs = [
        Spec("train", whole.version, {**whole.settings, "until_step": 3}, whole.inputs)
        for whole in (b.specs["train"], c.specs["train"])
    ]
    for rung in rungs:
        shop.write(shop.store.spec_path(rung.digest), canonical_json(rung.to_json()), LONG_AGO_S)
    reached = shop.write(shop.store.root / "rungs" / f"{rungs[0].digest}.json", "{}", LONG_AGO_S)
    line = f"7|PENDING|Priority|N/A|/w|rule_rung_stage_wildcards_{rungs[0].digest}\n"
    stub_squeue(shop.folder / "bin", monkeypatch, line)

    store(capsys, "gc", "--keep-experiments", "a")
    store(capsys, "verify")

    assert is_there(shop, b)
    assert [shop.store.spec_path(rung.digest).exists() for rung in rungs] == [True, False]
    assert reached.exists()
