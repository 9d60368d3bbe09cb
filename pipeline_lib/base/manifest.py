"""Sealed directories: a manifest.json, written last, lists every file with its size and sha256.

A directory with a manifest whose files all match is complete and verified; any other is as if it
did not exist.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.fsio import list_files, read_json, sha256_file, write_json

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
    return dict(zip(names, _describe_all(root, names), strict=True))


def _describe_all(root: Path, names: Sequence[str]) -> list[FileEntry]:
    """Several at a time: a checkpoint of many ranks takes minutes to hash by one."""
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        return list(pool.map(lambda name: describe_file(root / name), names))


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Seal `root`: from here on it is complete."""
    write_json(root / MANIFEST_NAME, manifest.model_dump())


def read_manifest(root: Path) -> Manifest:
    """The manifest of the sealed directory `root`. Raises IntegrityError if there is none that reads."""
    path = root / MANIFEST_NAME
    remedy = f"delete {root} and run its stage again"
    try:
        content = read_json(path)
    except FileNotFoundError as error:
        raise IntegrityError(f"{root}: not a sealed directory (no {MANIFEST_NAME}); run its stage again") from error
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: damaged ({error}); {remedy}") from error
    schema = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(schema, int) and schema not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise IntegrityError(f"{path}: schema {schema}, this code reads {known}; {remedy}")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "it"
        raise IntegrityError(f"{path}: damaged ({key}: {first['msg']}); {remedy}") from error


def verify(root: Path, sizes_only: bool = False) -> Manifest:
    """Check every file of the sealed directory `root` against its hash. Raises IntegrityError naming the first."""
    manifest = read_manifest(root)
    remedy = f"delete {root} and run its stage again"
    names = {name for name in list_files(root) if name != MANIFEST_NAME}
    for name in sorted(names ^ manifest.files.keys()):
        what = "missing" if name in manifest.files else "not in the manifest"
        raise IntegrityError(f"{root / name}: {what}; {remedy}")
    for name, entry in manifest.files.items():
        size_bytes = (root / name).stat().st_size
        if size_bytes != entry.bytes:
            raise IntegrityError(f"{root / name}: {size_bytes} bytes, sealed with {entry.bytes}; {remedy}")
    if sizes_only:
        return manifest
    found = _describe_all(root, list(manifest.files))
    for (name, entry), now in zip(manifest.files.items(), found, strict=True):
        if now != entry:
            raise IntegrityError(f"{root / name}: content differs from what was sealed; {remedy}")
    return manifest


def verify_file(root: Path, name: str) -> Path:
    """The path of one file of the sealed directory `root`, checked against its hash. Raises IntegrityError."""
    path, entry = root / name, read_manifest(root).files.get(name)
    if entry is None or not path.is_file() or describe_file(path) != entry:
        raise IntegrityError(f"{path}: not what was sealed; delete {root} and run its stage again")
    return path
