import json
from pathlib import Path

import pytest

from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.files import sha256_file
from pipeline_lib.core.store import MANIFEST_NAME, Manifest, Ref, Spec, Store, write_manifest

SPEC = Spec(
    "tokenize", 1, {"max_tokens": 64}, {"model": Ref("download", "0" * 16)}, {"path": "/here"}
)


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({}, "store"),
        ({"DVC_ROOT": "/dvc"}, "/dvc/store"),
        ({"PIPELINE_STORE": "/big", "DVC_ROOT": "/dvc"}, "/big"),
        ({"PIPELINE_STORE": "", "DVC_ROOT": ""}, "store"),
    ],
)
def test_the_environment_says_where_the_store_is(environ: dict[str, str], root: str) -> None:
    assert Store.from_env(environ).root == Path(root)


def test_places_in_the_store_are_part_of_the_surface(tmp_path: Path) -> None:
    store, ref = Store(tmp_path / "store"), Ref("train", "abcd")

    places = [store.spec_path("abcd"), store.sealed(ref), store.pointer(ref), store.run_dir("abcd")]

    expected = ["store/specs/abcd.json", "store/train/abcd", "store/train/abcd.ok", "runs/abcd"]
    assert [place.relative_to(tmp_path).as_posix() for place in places] == expected


def test_a_spec_reads_back_from_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_specs([SPEC])

    assert store.read_spec(store.spec_path(SPEC.digest)) == SPEC


def test_a_spec_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    """Snakemake compares times: a spec newer than what was made from it reruns the stage."""
    store = Store(tmp_path)
    store.write_specs([SPEC])
    path = store.spec_path(SPEC.digest)
    before = path.stat()

    store.write_specs([SPEC])

    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_content_that_moved_is_looked_for_in_its_new_place(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_specs([SPEC])
    moved = Spec(SPEC.stage, SPEC.version, SPEC.settings, SPEC.inputs, {"path": "/there"})

    store.write_specs([moved])

    assert moved.digest == SPEC.digest
    assert store.read_spec(store.spec_path(SPEC.digest)).where == {"path": "/there"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"stage": "train"}', "\x00"])
def test_a_damaged_spec_is_named_and_written_anew(tmp_path: Path, content: str) -> None:
    store = Store(tmp_path)
    path = store.spec_path(SPEC.digest)
    path.parent.mkdir()
    path.write_text(content)

    with pytest.raises(IntegrityError, match=str(path)):
        store.read_spec(path)
    store.write_specs([SPEC])

    assert store.read_spec(path) == SPEC


def test_a_spec_that_was_edited_by_hand_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_specs([SPEC])
    path = store.spec_path(SPEC.digest)
    path.write_text(json.dumps(SPEC.to_json() | {"settings": {"max_tokens": 65}}))

    with pytest.raises(IntegrityError, match=f"{path}: its content has digest"):
        store.read_spec(path)


def test_a_missing_spec_is_named(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="none.json: cannot read the spec"):
        Store(tmp_path).read_spec(tmp_path / "none.json")


def seal(store: Store, ref: Ref) -> Path:
    path = store.sealed(ref)
    path.mkdir(parents=True)
    write_manifest(path, Manifest(stage=ref.stage, digest=ref.digest, spec={}, files={}))
    store.write_pointer(ref)
    return path


def test_a_pointer_holds_the_hash_of_the_manifest(tmp_path: Path) -> None:
    store, ref = Store(tmp_path), Ref("shard", "ab")
    path = seal(store, ref)

    assert store.pointer(ref).read_text().strip() == sha256_file(path / MANIFEST_NAME)


def test_only_pointers_to_nothing_dangle(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept, dangling, never_made = (Spec("shard", 1, {"seed": seed}) for seed in range(3))
    lost = Spec("shard", 1, {"seed": 3})
    after = Spec("train", 1, {}, {"shard": dangling.ref})
    after_lost = Spec("train", 1, {}, {"shard": lost.ref})
    beside = Spec("train", 1, {}, {"shard": kept.ref})
    for spec in (kept, dangling, after, beside, after_lost):
        seal(store, spec.ref)
    (store.sealed(dangling.ref) / MANIFEST_NAME).unlink()

    found = store.dangling_pointers([kept, dangling, never_made, lost, after, beside, after_lost])

    # Of what was made from what is gone too: Snakemake has to look at it again, also if a pointer
    # is gone as well.
    assert found == [store.pointer(spec.ref) for spec in (dangling, after, after_lost)]
