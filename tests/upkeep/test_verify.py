"""What `store verify` finds: bytes, pointers, specs and references that are not what was sealed."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline_lib.config.compile import Experiment
from pipeline_lib.config.dag import Dag
from pipeline_lib.core.errors import ConfigError, IntegrityError, Unreadable
from pipeline_lib.core.files import sha256_file
from pipeline_lib.core.store import MANIFEST_NAME, Store, read_manifest
from pipeline_lib.status.catalog import Catalog
from tests.core.unreadable import endless_link, no_permission
from tests.upkeep.commands import begin, finished, store
from tests.upkeep.stores import LONG_AGO_S, Shop

Captured = pytest.CaptureFixture[str]
Damage = Callable[[Shop, Experiment], Path]


def folder_of(shop: Shop, experiment: Experiment, part: str) -> Path:
    return shop.store.sealed(experiment.specs[part].ref)


def at(part: str, name: str, damage: Callable[[Path], object]) -> Damage:
    """Damage to the file `name` of `part`, to its pointer (`.ok`) or its frozen spec (`spec`).

    The file is in the directory of that part.
    """

    def apply(shop: Shop, experiment: Experiment) -> Path:
        spec = experiment.specs[part]
        own = {".ok": shop.store.pointer(spec.ref), "spec": shop.store.spec_path(spec.digest)}
        path = own.get(name, shop.store.sealed(spec.ref) / name)
        damage(path)
        return path

    return apply


def lying(pattern: str, damage: Callable[[Path], object]) -> Damage:
    """Damage to the file in the shop's folder that matches `pattern`."""

    def apply(shop: Shop, _: Experiment) -> Path:
        path = next(shop.folder.glob(pattern))
        damage(path)
        return path

    return apply


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def put_a_folder_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


def cut(path: Path) -> None:
    path.write_text(path.read_text()[:50])


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


flip_the_model = at("merge", "content.txt", flip_a_byte)
cut_the_manifest = at("train", MANIFEST_NAME, cut)
change_a_spec = at("train", "spec", lambda path: edit(path, '"version":4', '"version":5'))
garble_the_pointer = at("plan", ".ok", lambda path: path.write_bytes(b"\xff\x00 no hash"))


def begin_the_training(shop: Shop, experiment: Experiment, started_at: str) -> Path:
    """Edit its manifest by hand, with its pointer, so that only what was made from it tells."""
    path = folder_of(shop, experiment, "train") / MANIFEST_NAME
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "counts": {"steps": 7}, "started_at": started_at}))
    shop.store.pointer(experiment.specs["train"].ref).write_text(sha256_file(path) + "\n")
    return path


def edit_the_manifest(shop: Shop, experiment: Experiment) -> Path:
    return begin_the_training(shop, experiment, "2025-12-31T00:00:00+00:00")


def swap_directories(shop: Shop, experiment: Experiment) -> Path:
    merge, evaluate = (folder_of(shop, experiment, part) for part in ("merge", "evaluate"))
    merge.rename(merge.parent / "away")
    evaluate.rename(merge)
    (merge.parent / "away").rename(evaluate)
    return merge


def lose_the_directory(shop: Shop, experiment: Experiment) -> Path:
    folder_of(shop, experiment, "report").rename(shop.folder / "elsewhere")
    return shop.store.pointer(experiment.specs["report"].ref)


def lose_the_model(shop: Shop, experiment: Experiment) -> Path:
    """Its directory and its pointer."""
    path = folder_of(shop, experiment, "merge")
    path.rename(shop.folder / "elsewhere")
    shop.store.pointer(experiment.specs["merge"].ref).unlink()
    return path


def put_a_file_in_place_of_a_directory(shop: Shop, experiment: Experiment) -> Path:
    lose_the_directory(shop, experiment)
    return shop.write(folder_of(shop, experiment, "report"), "", LONG_AGO_S)


def one(shop: Shop) -> Experiment:
    [experiment] = shop.finished("a")
    return experiment


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip_the_model, "content differs from what was sealed; delete"),
        (at("shard", "content.txt", Path.unlink), "missing; delete"),
        (at("shard", "extra", Path.touch), "not in the manifest; delete"),
        (at("shard", "content.txt", put_a_folder_in_its_place), "missing; delete"),
        (cut_the_manifest, "damaged"),
        (edit_the_manifest, "not the manifest that"),
        (
            at(
                "report",
                MANIFEST_NAME,
                lambda path: edit(path, '"experiment": "a"', '"experiment": "b"'),
            ),
            "its spec has",
        ),
        (swap_directories, "sealed as evaluate"),
        (at("plan", ".ok", lambda path: path.write_text("0" * 64)), "does not match the manifest"),
        (garble_the_pointer, "contains no hash; run snakemake again"),
        (lose_the_directory, "its directory is missing; run snakemake"),
        (lose_the_model, "missing for experiment a; run snakemake again"),
        (change_a_spec, "its content has digest"),
        (at("train", "spec", lambda path: path.write_text("[" * 100_000)), "cannot read the spec"),
        (lying("store/experiments/*", cut), "not a valid experiment file; run snakemake again"),
        (
            lying("runs/*/checkpoints/*/state.json", lambda path: path.write_text("{}")),
            "bytes, sealed with",
        ),
        (put_a_file_in_place_of_a_directory, "not made by any stage"),
    ],
)
def test_damage_is_named_with_what_to_do(
    shop: Shop, capsys: Captured, damage: Damage, said: str
) -> None:
    experiment = one(shop)
    assert store(capsys, "verify") == f"{shop.store.root}: 12 sealed directories are whole\n"
    path = damage(shop, experiment)

    with pytest.raises(IntegrityError) as raised:
        store(capsys, "verify")

    lines = [line for line in str(raised.value).splitlines() if str(path) in line]
    assert any(said in line for line in lines), raised.value
    assert store(capsys, "ls", "--all")  # which goes on beside it


def test_what_was_read_before_is_read_again(
    shop: Shop, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that forgets leaves the times as they were."""
    monkeypatch.setattr("pipeline_lib.core.store.SMALL_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, memory = flip_the_model(shop, one(shop)), Store.from_env(os.environ).verified
    sha256 = read_manifest(path.parent).files[path.name].sha256
    mark = memory._mark(path.stat(), sha256)
    assert mark is not None
    mark.touch()
    assert memory.has_sha256(path, sha256, path.parent), "as stages believe it"

    with pytest.raises(IntegrityError, match=r"content\.txt: content differs"):
        store(capsys, "verify")


def test_all_of_it_is_told_at_the_end_as_an_error_of_integrity(shop: Shop) -> None:
    experiment = one(shop)
    paths = [
        flip_the_model(shop, experiment),
        cut_the_manifest(shop, experiment),
        change_a_spec(shop, experiment),
    ]

    code, said = finished(begin("verify"))

    assert code == IntegrityError.exit_code
    assert said.startswith(f"error: {shop.store.root}: ")
    assert all(str(path) in said for path in paths)
    assert "Traceback" not in said


@pytest.mark.parametrize(("part", "name"), [("merge", "content.txt"), ("shard", MANIFEST_NAME)])
def test_what_may_not_be_read_is_told_once_and_not_of_all_that_was_made_from_it(
    shop: Shop, capsys: Captured, part: str, name: str
) -> None:
    path = folder_of(shop, one(shop), part) / name
    store(capsys, "verify")  # imports what nobody else may read
    with no_permission(path), pytest.raises(IntegrityError) as raised:
        store(capsys, "verify")
    assert str(raised.value).count(f"{path}: cannot be read (Permission denied)") == 1


def test_a_frozen_experiment_that_cannot_be_read_is_not_to_be_deleted(
    shop: Shop, capsys: Captured
) -> None:
    one(shop)
    path = next((shop.store.root / "experiments").iterdir())
    with endless_link(path):
        assert "its file cannot be read" in store(capsys, "ls")
        with pytest.raises(Unreadable, match=f"{path}: cannot be read") as gc:
            store(capsys, "gc", "--keep-experiments", "b")
        with pytest.raises(IntegrityError, match=f"{path}: cannot be read") as verify:
            store(capsys, "verify")
    assert "delete" not in f"{gc.value} {verify.value}"
    with (
        no_permission(path.parent),
        pytest.raises(Unreadable, match=f"{path.parent}: cannot be read"),
    ):
        Catalog(shop.store).experiments()


def test_a_manifest_that_cannot_be_read_is_no_damage_and_is_not_to_be_deleted(
    shop: Shop, capsys: Captured
) -> None:
    experiment = one(shop)
    checkpoint = next((shop.folder / "runs").glob("*/checkpoints/step-*"))
    for folder in (folder_of(shop, experiment, "merge"), checkpoint):
        path = folder / MANIFEST_NAME
        with endless_link(path):
            with pytest.raises(IntegrityError, match=f"{path}: cannot be read") as raised:
                store(capsys, "verify")
            shown = store(capsys, "ls", "--all")
        assert "1 problem" in str(raised.value)
        assert "delete" not in str(raised.value)
        assert (f"unreadable: {path}" in shown) == (folder != checkpoint)
    assert "are whole" in store(capsys, "verify")


def test_what_snakemake_can_write_again_it_does(shop: Shop, capsys: Captured) -> None:
    """An empty pointer, and a frozen experiment that does not parse: no complaint follows."""
    experiment = one(shop)
    frozen = Dag((experiment,), shop.store).freeze()
    (shop.folder / "store" / "experiments" / frozen.name).write_text("\x00 no JSON")
    garble_the_pointer(shop, experiment)
    with pytest.raises(IntegrityError, match="2 problems"):
        store(capsys, "verify")

    Dag((experiment,), shop.store).freeze()  # as the Snakefile does

    assert "are whole" in store(capsys, "verify")
    left = [
        spec.stage
        for spec in experiment.specs.values()
        if not shop.store.pointer(spec.ref).exists()
    ]
    assert left == ["plan"], "its stage verifies the directory and writes it anew"


def test_only_what_the_named_experiments_use_is_verified(shop: Shop, capsys: Captured) -> None:
    a, b = shop.variants(["a", "b"])
    for experiment in (a, b):
        shop.add(experiment)
    flip_the_model(shop, b)

    assert "11 sealed directories are whole" in store(capsys, "verify", "a")
    with pytest.raises(IntegrityError, match="1 problem"):
        store(capsys, "verify", "b")
    with pytest.raises(ConfigError, match="store verify: 1 problem"):
        store(capsys, "verify", "c")


def test_what_was_deleted_and_made_again_is_no_damage(shop: Shop, capsys: Captured) -> None:
    """What was made from the earlier one is verified and kept, so its record of it is another's."""
    begin_the_training(shop, one(shop), "2026-01-02T00:00:00+00:00")

    assert "are whole" in store(capsys, "verify")


def test_an_empty_store_and_none_at_all(shop: Shop, capsys: Captured) -> None:
    for _ in range(2):
        assert "0 sealed directories are whole" in store(capsys, "verify")
        assert store(capsys, "ls") == f"{shop.store.root}: no experiments\n"
        assert "together" in store(capsys, "du")
        assert "0 experiments kept" in store(capsys, "gc", "--dry-run")
        assert shop.store.root.exists() == os.path.lexists(shop.store.root)
        shop.store.root.mkdir(exist_ok=True)
