"""Sealed directories: a manifest.json, written last, lists every file with its size and sha256.

A directory with a manifest whose files all match is complete and verified; any other is as if it
did not exist.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.fsio import list_files, read_json, sha256_file, unreadable_named, write_json
from pipeline_lib.base.verified import NOTHING_VERIFIED, VerifiedFiles

MANIFEST_NAME = "manifest.json"
SCHEMA = 2
READABLE = (1, SCHEMA)  # 1 had no machine and no job
HASHED_AT_ONCE = 8  # files; hashing leaves the interpreter alone


def _is_below(name: str) -> str:
    """`name`, if it is one of a file in the folder. Raises ValueError."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError("a file outside the folder")
    return name


FileName = Annotated[str, AfterValidator(_is_below)]


class FileEntry(BaseModel):
    """Size and hash of one sealed file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    bytes: int = Field(ge=0, lt=2**63)
    sha256: str


class InputEntry(BaseModel):
    """A directory that was read: which stage instance, and the sha256 of its manifest as it was then."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    stage: str
    digest: str
    manifest_sha256: str


class Manifest(BaseModel):
    """What a sealed directory holds and how it came to be. Durations are in seconds, memory in bytes.

    `machine` is in words, and names no host; `job` is the number of the SLURM job.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: int = SCHEMA
    stage: str
    digest: str
    spec: dict[str, Any]
    inputs: dict[str, InputEntry] = {}
    files: dict[FileName, FileEntry]
    counts: dict[str, Any] = {}
    versions: dict[str, str] = {}
    machine: str = ""
    job: str = ""
    started_at: str = ""
    duration_s: FiniteFloat = 0.0
    peak_rss_bytes: int = 0


def describe_file(path: Path) -> FileEntry:
    """Size and sha256 of the file at `path`."""
    return FileEntry(bytes=path.stat().st_size, sha256=sha256_file(path))


def describe_files(root: Path) -> dict[str, FileEntry]:
    """Size and sha256 of every file below `root` but the manifest."""
    names = [name for name in list_files(root) if name != MANIFEST_NAME]
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        return dict(zip(names, pool.map(lambda name: describe_file(root / name), names), strict=True))


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Seal `root`: from here on it is complete."""
    write_json(root / MANIFEST_NAME, manifest.model_dump())


def read_manifest(root: Path) -> Manifest:
    """The manifest of the sealed directory `root`. Raises IntegrityError if there is none that parses, Unreadable."""
    path = root / MANIFEST_NAME
    try:
        with unreadable_named(path):
            content = read_json(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise IntegrityError(f"{root}: not a sealed directory (no {MANIFEST_NAME}); run snakemake again") from error
    except (IsADirectoryError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: damaged ({error}); {_remedy(root)}") from error
    schema = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(schema, int) and schema not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise IntegrityError(f"{path}: schema {schema}, this code reads {known}; {_remedy(root)}")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "it"
        raise IntegrityError(f"{path}: damaged ({key}: {first['msg']}); {_remedy(root)}") from error


def verify(root: Path, verified: VerifiedFiles = NOTHING_VERIFIED) -> Manifest:
    """Check every file of the sealed directory `root` against its hash. Raises IntegrityError naming the first.

    Raises Unreadable where a file cannot be read. Those that `verified` knows are not read again.
    """
    manifest = verify_sizes(root)
    verify_content(root, manifest, manifest.files, verified)
    return manifest


def verify_sizes(root: Path) -> Manifest:
    """Check that `root` holds the files that were sealed, in their sizes, and no other. Raises as `verify`."""
    manifest = read_manifest(root)
    with unreadable_named(root):
        names = {name for name in list_files(root) if name != MANIFEST_NAME}
        for name in sorted(names ^ manifest.files.keys()):
            what = "missing" if name in manifest.files else "not in the manifest"
            raise IntegrityError(f"{root / name}: {what}; {_remedy(root)}")
        for name, entry in manifest.files.items():
            size_bytes = (root / name).stat().st_size
            if size_bytes != entry.bytes:
                raise IntegrityError(f"{root / name}: {size_bytes} bytes, sealed with {entry.bytes}; {_remedy(root)}")
    return manifest


def verify_content(root: Path, manifest: Manifest, names: Iterable[str], verified: VerifiedFiles) -> None:
    """Check the files `names` of `root` against their hashes in its `manifest`. Raises as `verify`.

    Several at a time: a checkpoint of many ranks takes minutes to hash by one.
    """

    def check(name: str) -> None:
        path = root / name
        try:
            with unreadable_named(path):
                is_same = verified.has_sha256(path, manifest.files[name].sha256, beside=root.parent)
        except FileNotFoundError as error:
            raise IntegrityError(f"{path}: missing; {_remedy(root)}") from error
        if not is_same:
            raise IntegrityError(f"{path}: content differs from what was sealed; {_remedy(root)}")

    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        for _ in pool.map(check, names):
            pass


def _remedy(root: Path) -> str:
    return f"delete {root} and run snakemake again"
