import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.store import (
    MANIFEST_NAME,
    SCHEMA,
    InputEntry,
    Manifest,
    describe_files,
    verify,
    verify_sizes,
    write_manifest,
)


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A sealed directory with a file at its top and one below."""
    root = tmp_path / "sealed"
    (root / "deep").mkdir(parents=True)
    (root / "a.txt").write_text("alpha")
    (root / "deep" / "b.bin").write_bytes(bytes(range(256)))
    write_manifest(root, manifest_of(root))
    return root


def manifest_of(root: Path) -> Manifest:
    return Manifest(
        stage="tokenize",
        digest="0123456789abcdef",
        spec={"stage": "tokenize"},
        inputs={"model": InputEntry(stage="download", digest="f" * 16, manifest_sha256="e" * 64)},
        files=describe_files(root),
        counts={"rows": 3, "reasons": {"empty": 1}},
        versions={"python": "3.11.7"},
        started_at="2025-01-01T00:00:00+00:00",
        duration_s=1.5,
        peak_rss_bytes=1 << 40,
    )


def test_a_manifest_reads_back_as_it_was_written(sealed: Path) -> None:
    assert verify(sealed) == manifest_of(sealed)


def test_it_lists_every_file_but_itself(sealed: Path) -> None:
    files = verify(sealed).files

    assert {name: entry.bytes for name, entry in files.items()} == {"a.txt": 5, "deep/b.bin": 256}
    assert (
        files["a.txt"].sha256 == "8ed3f6ad685b959ead7022518e1af76cd816f8e8ec7ccdda1ed4018e8f2223f8"
    )


B = "deep/b.bin"
DAMAGE: list[tuple[Callable[[Path], object], str, str]] = [
    (lambda root: (root / B).unlink(), B, "missing"),
    (
        lambda root: (root / "deep" / "stray.txt").write_text(""),
        "deep/stray.txt",
        "not in the manifest",
    ),
    (lambda root: (root / B).write_bytes(bytes(range(255))), B, "255 bytes, sealed with 256"),
    (
        lambda root: (root / B).write_bytes(bytes(range(255)) + b"\xfe"),
        B,
        "content differs from what was sealed",
    ),
]


@pytest.mark.parametrize(("damage", "culprit", "what"), DAMAGE, ids=[what for _, _, what in DAMAGE])
def test_damage_is_named_with_its_remedy(
    sealed: Path, damage: Callable[[Path], object], culprit: str, what: str
) -> None:
    damage(sealed)

    with pytest.raises(IntegrityError) as raised:
        verify(sealed)

    assert (
        str(raised.value) == f"{sealed / culprit}: {what}; delete {sealed} and run snakemake again"
    )


@pytest.mark.parametrize("size", [0, 255, 257])
def test_a_file_of_another_size_is_seen_without_reading_it(sealed: Path, size: int) -> None:
    (sealed / B).write_bytes(bytes(size))

    with pytest.raises(IntegrityError, match=f"{B}: {size} bytes, sealed with 256"):
        verify_sizes(sealed)


def test_a_file_swapped_for_a_folder_is_missing(sealed: Path) -> None:
    (sealed / "a.txt").unlink()
    (sealed / "a.txt").mkdir()

    with pytest.raises(IntegrityError, match="a.txt: missing"):
        verify(sealed)


def test_a_directory_without_a_manifest_is_not_sealed(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="not a sealed directory"):
        verify(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"3", b"null", b"{}", b"[" * 100_000],
    ids=["empty", "cut", "not UTF-8", "list", "number", "null", "no keys", "deep"],
)
def test_a_manifest_that_does_not_read_is_damaged(sealed: Path, content: bytes) -> None:
    (sealed / MANIFEST_NAME).write_bytes(content)

    with pytest.raises(IntegrityError, match="damaged") as raised:
        verify(sealed)

    assert str(sealed / MANIFEST_NAME) in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("files", {"a.txt": {"bytes": "many", "sha256": "0"}}, "files.a.txt.bytes"),
        ("surplus", 1, "surplus"),
    ],
)
def test_a_wrong_entry_of_the_manifest_is_named(
    sealed: Path, key: str, value: object, named: str
) -> None:
    edit_manifest(sealed, key, value)

    with pytest.raises(IntegrityError, match=rf"damaged \({named}: "):
        verify(sealed)


def test_a_manifest_of_another_schema_is_refused_even_if_it_has_other_keys(sealed: Path) -> None:
    edit_manifest(sealed, "schema_version", SCHEMA + 1)
    edit_manifest(sealed, "invented_later", True)

    with pytest.raises(IntegrityError, match=f"schema {SCHEMA + 1}, this code reads {SCHEMA}"):
        verify(sealed)


def test_the_schema_version_changes_only_with_the_fields() -> None:
    """Code that does not know a field calls the manifest damaged, unless SCHEMA differs.

    SCHEMA then says that it is of other code.
    """
    assert SCHEMA == 2
    assert set(Manifest.model_fields) == {
        "schema_version",
        "stage",
        "digest",
        "spec",
        "inputs",
        "files",
        "counts",
        "versions",
        "machine",
        "job",
        "started_at",
        "duration_s",
        "peak_rss_bytes",
    }


def edit_manifest(root: Path, key: str, value: object) -> None:
    path = root / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("../a.txt", {"bytes": 5, "sha256": "0"}),
        ("/etc/passwd", {"bytes": 5, "sha256": "0"}),
        ("a.txt", {"bytes": 10**400, "sha256": "0"}),
        ("a.txt", {"bytes": -1, "sha256": "0"}),
    ],
)
def test_nonsense_about_a_file_is_damage(sealed: Path, name: str, entry: dict[str, object]) -> None:
    edit_manifest(sealed, "files", {name: entry})
    with pytest.raises(IntegrityError, match="damaged"):
        verify(sealed)
