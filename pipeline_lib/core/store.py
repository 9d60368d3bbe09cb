"""The store: specs, sealed directories with their manifests, pointers, and which files were verified."""

import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from pipeline_lib.core.errors import ConfigError, IntegrityError
from pipeline_lib.core.files import (
    canonical_json,
    is_there,
    list_files,
    read_json,
    sha256_file,
    sha256_text,
    unreadable_named,
    unwritable,
    write_json,
    write_text,
)

# A spec says what one stage computes; its digest is the cache key and names everything made from it.

DIGEST_CHARS = 16


@dataclass(frozen=True)
class Ref:
    """A stage instance, by name and digest."""

    stage: str
    digest: str


@dataclass(frozen=True)
class Spec:
    """The settings that decide what a stage computes, its version, and the digests of what it reads.

    `settings` holds only what differs from the defaults of that stage version, so that a new option
    changes no old digest. `where` tells where the content lies on this machine; it is not hashed.
    """

    stage: str
    version: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Ref] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of all that decides what is computed, the digests of the inputs included."""
        keyed = {key: value for key, value in self.to_json().items() if key != "where"}
        return sha256_text(canonical_json(keyed))[:DIGEST_CHARS]

    @property
    def ref(self) -> Ref:
        """How other specs name this one."""
        return Ref(self.stage, self.digest)

    def to_json(self) -> dict[str, Any]:
        """The spec as plain JSON, the form that is stored."""
        return {
            "stage": self.stage,
            "version": self.version,
            "settings": dict(self.settings),
            "inputs": {name: {"stage": ref.stage, "digest": ref.digest} for name, ref in self.inputs.items()},
            "where": dict(self.where),
        }

    @staticmethod
    def from_json(value: Any, where: str) -> "Spec":
        """Parse what `to_json` made; raises IntegrityError naming `where`."""
        try:
            inputs = {name: Ref(ref["stage"], ref["digest"]) for name, ref in value["inputs"].items()}
            settings, places = dict(value["settings"]), dict(value["where"])
            return Spec(str(value["stage"]), int(value["version"]), settings, inputs, places)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError(f"{where}: not a stage spec ({error!r}); run snakemake to write it anew") from error


# Which files were read in full and had the right sha256, so that an unchanged one is read once on a machine.
#
# A mark is an empty file in the user's own cache folder, never in a store, where others could forge it. Its name is a
# hash of the boot of this machine, of what tells that a file was changed (device, inode, size, mtime, ctime), and of
# its sha256. So processes need no lock, and a mark that is lost costs one reading.

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SMALL_BYTES = 1 << 20  # a smaller file is read as fast as its mark is found
SETTLED_NS = 2 * 10**9  # a younger file could change again without a change of its times
SETTLED_BY_OUR_CLOCK_NS = 3600 * 10**9  # the clock of the disk may be another machine's, and another time
MOST_MARKS = 4096


@dataclass(frozen=True)
class VerifiedFiles:
    """The marks in `folder`; without one nothing is remembered and every file is read."""

    folder: Path | None = None

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> "VerifiedFiles":
        """In `$XDG_CACHE_HOME`, else in `~/.cache`."""
        home = environ.get("HOME", "")
        cache = Path(environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else ""))
        return VerifiedFiles(cache / "qwen3-pipeline" / "verified" if cache.is_absolute() else None)

    def has_sha256(self, path: Path, sha256: str, beside: Path) -> bool:
        """Whether the content of the file at `path` has that hash.

        `beside` is a folder on the same disk, whose clock tells the age of the file; where nothing can be written,
        this machine's has to do. Raises OSError.
        """
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            mark = self._mark(before, sha256)
            if mark is not None and _renew(mark):
                return True
            is_settled = mark is not None and _is_settled(before, beside)
            is_same = hashlib.file_digest(file, "sha256").hexdigest() == sha256
            if mark is not None and is_same and is_settled and _identity(os.fstat(file.fileno())) == _identity(before):
                _make(mark)
            return is_same

    def _mark(self, status: os.stat_result, sha256: str) -> Path | None:
        """Where the mark of such a file is, or would be; None if it is not to be remembered."""
        if self.folder is None or status.st_size < SMALL_BYTES or not self._boot_id or not self._is_private:
            return None
        return self.folder / sha256_text(f"{self._boot_id} {_identity(status)} {sha256}")

    @cached_property
    def _boot_id(self) -> str:
        """Of this machine since it was started: device numbers mean nothing on another, nor after that."""
        try:
            return BOOT_ID.read_text(encoding="ascii").strip()
        except OSError:
            return ""

    @cached_property
    def _is_private(self) -> bool:
        """Whether the folder is there, or could be made, and nobody else may write or read it."""
        if self.folder is None:
            return False
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.folder.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


NOTHING_VERIFIED = VerifiedFiles()


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_settled(status: os.stat_result, beside: Path) -> bool:
    """Whether the file is old enough, by the clock of its disk, that a change from now on shows in its times."""
    changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
    try:
        with TemporaryFile(dir=beside) as probe:
            now = os.fstat(probe.fileno())
    except OSError:  # another user's store
        return time.time_ns() - changed_ns >= SETTLED_BY_OUR_CLOCK_NS
    return now.st_dev == status.st_dev and now.st_mtime_ns - changed_ns >= SETTLED_NS


def _renew(mark: Path) -> bool:
    """Whether `mark` is there; it then counts as just made."""
    try:
        os.utime(mark)
    except OSError:
        return False
    return True


def _make(mark: Path) -> None:
    """Leave `mark`; where there are too many, the older half goes."""
    with suppress(OSError):
        marks = list(mark.parent.iterdir())
        if len(marks) >= MOST_MARKS:
            marks.sort(key=lambda path: path.lstat().st_mtime_ns)
            for old in marks[: len(marks) // 2]:
                old.unlink(missing_ok=True)
        mark.touch(mode=0o600)


# Sealed directories: a manifest.json, written last, lists every file with its size and sha256.
#
# A directory with a manifest whose files all match is complete and verified; any other is as if it
# did not exist.

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


# Where everything lies: sealed directories and their pointers in the store, working state beside it.


@dataclass(frozen=True)
class Store:
    """A folder of sealed directories, `STAGE/DIGEST/`, each with a pointer file `STAGE/DIGEST.ok`.

    Snakemake's declared outputs are the pointers: it deletes outputs when a job starts, fails or is rerun,
    and sealed data must survive exactly that.
    """

    root: Path
    verified: VerifiedFiles = field(default=NOTHING_VERIFIED, compare=False)

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> "Store":
        """`$PIPELINE_STORE`, else `$DVC_ROOT/store`, else `./store`."""
        dvc_root = environ.get("DVC_ROOT")
        root = environ.get("PIPELINE_STORE") or (Path(dvc_root) / "store" if dvc_root else "store")
        return Store(Path(root), VerifiedFiles.from_env(environ))

    @staticmethod
    def around(frozen: Path, environ: Mapping[str, str]) -> "Store":
        """That in which `frozen` lies, a spec or an experiment."""
        return Store(frozen.parent.parent, VerifiedFiles.from_env(environ))

    def require_writable(self) -> None:
        """Raise ConfigError if nothing can be written where the store is or will be, or if its path has a wildcard."""
        if set("{}") & set(str(self.root)):
            text = "its path holds a brace, which Snakemake takes for a wildcard; set PIPELINE_STORE to one without"
            raise ConfigError(f"the store {self.root}", [text])
        if problem := unwritable(self.root):
            raise ConfigError(f"the store {self.root}", [f"{problem}; set PIPELINE_STORE to a folder that can be"])

    def blamed(self, error: OSError) -> ConfigError:
        """What to tell of `error`: in the store another store is the remedy, elsewhere the file says enough."""
        file = Path(os.fsdecode(error.filename or ""))
        if file.absolute().is_relative_to(self.root.absolute()):
            remedy = "set PIPELINE_STORE to a folder that can be written"
            return ConfigError(f"the store {self.root}", [f"{error}; {remedy}"])
        where = error.filename or f"the store {self.root}, or the folder of this output"
        return ConfigError(str(where), [error.strerror or str(error)])

    def spec_path(self, digest: str) -> Path:
        """The frozen spec of a stage instance."""
        return self.root / "specs" / f"{digest}.json"

    def sealed(self, ref: Ref) -> Path:
        """The sealed directory of a stage instance."""
        return self.root / ref.stage / ref.digest

    def is_sealed(self, ref: Ref) -> bool:
        """Whether that directory is there, whole unless somebody damaged it since. Raises Unreadable."""
        path = self.sealed(ref) / MANIFEST_NAME
        with unreadable_named(path):
            return is_there(path)

    def pointer(self, ref: Ref) -> Path:
        """The file that tells Snakemake that the sealed directory is there."""
        return self.root / ref.stage / f"{ref.digest}.ok"

    def run_dir(self, digest: str) -> Path:
        """Working state that is not sealed: checkpoints in progress, events, quarantined rows."""
        return self.root.parent / "runs" / digest

    def lock_path(self, digest: str) -> Path:
        """The lock that the one process working on `digest` holds."""
        return self.root.parent / "runs" / "locks" / digest

    def write_specs(self, specs: Iterable[Spec]) -> None:
        """Freeze `specs`; a queued job reads its own, so later edits of the YAML change nothing for it."""
        for spec in specs:
            path = self.spec_path(spec.digest)
            try:
                known = Spec.from_json(read_json(path), str(path))
            except (OSError, ValueError, IntegrityError):
                known = None
            if known != spec:
                write_json(path, spec.to_json())

    def read_spec(self, path: Path) -> Spec:
        """The spec frozen at `path`, checked against the digest that is its name."""
        try:
            spec = Spec.from_json(read_json(path), str(path))
        except (OSError, ValueError) as error:
            raise IntegrityError(f"{path}: cannot read the spec ({error}); run snakemake to write it anew") from error
        if spec.digest != path.stem:
            raise IntegrityError(f"{path}: its content has digest {spec.digest}; delete it and run snakemake again")
        return spec

    def write_pointer(self, ref: Ref) -> None:
        """Tell Snakemake that the sealed directory of `ref` is complete."""
        write_text(self.pointer(ref), sha256_file(self.sealed(ref) / MANIFEST_NAME) + "\n")

    def drop_dangling_pointers(self, specs: Iterable[Spec]) -> None:
        """Remove pointers whose sealed directory is not there, and those of what was made from such a directory.

        Snakemake then makes it again, also where its pointer was lost with it; without the second half it would find
        the end result and do nothing. Pointers that hold no hash go too: their stage verifies its directory and writes
        them anew. `specs` come in the order of the stages.
        """
        lost: set[Ref] = set()
        for spec in specs:
            pointer = self.pointer(spec.ref)
            with unreadable_named(pointer):
                is_garbled = is_there(pointer) and not is_hash(pointer.read_bytes())
            if not self.is_sealed(spec.ref) or lost & set(spec.inputs.values()):
                lost.add(spec.ref)
                pointer.unlink(missing_ok=True)
            elif is_garbled:
                pointer.unlink(missing_ok=True)


def is_hash(content: bytes) -> bool:
    """Whether the content of a pointer is a sha256, as `write_pointer` writes it."""
    return re.fullmatch(rb"[0-9a-f]{64}\n?", content) is not None
