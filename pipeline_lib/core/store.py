"""The store: specs, sealed directories and manifests, pointers, and the verified-file cache."""

import hashlib
import os
import re
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
from pipeline_lib.core.user_cache import NOTHING_KEPT, UserCache

# Specs: what one stage computes. The digest of a spec is the cache key and names everything made
# from it.

DIGEST_CHARS = 16


@dataclass(frozen=True)
class Ref:
    """A reference to a stage instance, by stage name and digest."""

    stage: str
    digest: str


@dataclass(frozen=True)
class Spec:
    """The inputs of one stage's computation: version, settings and digests of what it reads.

    `settings` holds only what differs from the defaults of that stage version, so that a new option
    changes no old digest. `where` is not hashed: the location of content on this machine, and
    settings that do not change the content.
    """

    stage: str
    version: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Ref] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """The hexadecimal digest of everything that decides the result, with inputs' digests."""
        keyed = {key: value for key, value in self.to_json().items() if key != "where"}
        return sha256_text(canonical_json(keyed))[:DIGEST_CHARS]

    @property
    def ref(self) -> Ref:
        """The reference by which other specs name this one."""
        return Ref(self.stage, self.digest)

    def to_json(self) -> dict[str, Any]:
        """Return the spec as plain JSON, the form that is stored."""
        return {
            "stage": self.stage,
            "version": self.version,
            "settings": dict(self.settings),
            "inputs": {
                name: {"stage": ref.stage, "digest": ref.digest}
                for name, ref in self.inputs.items()
            },
            "where": dict(self.where),
        }

    @staticmethod
    def from_json(value: Any, where: str) -> "Spec":
        """Parse the output of `to_json`. Raises IntegrityError naming `where`."""
        try:
            inputs = {
                name: Ref(ref["stage"], ref["digest"]) for name, ref in value["inputs"].items()
            }
            settings = dict(value["settings"])
            places = dict(value["where"])
            return Spec(str(value["stage"]), int(value["version"]), settings, inputs, places)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError(
                f"{where}: not a stage spec ({error!r}); run snakemake to write it anew"
            ) from error


# Verified files: an unchanged file is hashed only once per machine and boot. A mark is an empty
# file in the user's own cache folder, never in a store, where others could forge it. Its name is a
# hash of the boot ID, the file's device, inode, size, mtime and ctime, and its SHA-256. So
# processes need no lock, and a lost mark costs one extra read.

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SMALL_BYTES = 1 << 20  # hashing a smaller file is as fast as looking up its mark
SETTLED_NS = 2 * 10**9  # a younger file could change again within the resolution of its times
# larger, because the disk's clock may be another machine's and differ
SETTLED_BY_OUR_CLOCK_NS = 3600 * 10**9
MOST_MARKS = 4096


@dataclass(frozen=True)
class VerifiedFiles:
    """The cache of verified files, marked in `cache`; without one, each file is always read."""

    cache: UserCache = NOTHING_KEPT

    def has_sha256(self, path: Path, sha256: str, beside: Path) -> bool:
        """Return whether the content of the file at `path` has the hash `sha256`.

        `beside` is a folder on the same disk. A temporary file in it gives the time by the disk's
        clock, which decides whether the file is old enough to be marked. If nothing can be written
        there, this machine's clock is used. Raises OSError.
        """
        if self.is_marked(path, sha256):
            return True
        found, status = self._read(path, beside)
        if found == sha256 and status is not None:
            self._make_mark(status, sha256)
        return found == sha256

    def is_marked(self, path: Path, sha256: str) -> bool:
        """Return whether the file at `path` is known to have the hash `sha256` without reading it.

        Raises OSError.
        """
        with path.open(
            "rb"
        ) as file:  # over NFS the status of an opened file is asked for, and not remembered
            mark = self._mark(os.fstat(file.fileno()), sha256)
        if mark is None:
            return False
        try:
            os.utime(mark)
        except OSError:  # there is no such mark
            return False
        return True

    def sha256(self, path: Path, beside: Path) -> str:
        """Return the SHA-256 of the file at `path`, which is read. `beside` is as in `has_sha256`.

        Raises OSError.
        """
        sha256, status = self._read(path, beside)
        if status is not None:
            self._make_mark(status, sha256)
        return sha256

    def _read(self, path: Path, beside: Path) -> tuple[str, os.stat_result | None]:
        """Return a file's hash, and the status for a mark of it; None if it may change unseen."""
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            is_settled = self._mark(before, "") is not None and _is_settled(before, beside)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            is_unchanged = _identity(os.fstat(file.fileno())) == _identity(before)
        return sha256, before if is_settled and is_unchanged else None

    def mark_own(self, path: Path, sha256: str, before: os.stat_result | None = None) -> None:
        """Mark the file at `path`, whose hash this process knows, even if it has just changed.

        It must be a file that this process wrote in a folder of its own, or one that was marked
        when its status was `before`, and of which this process has made or removed a link since:
        that changes the ctime. Any other change in those microseconds shows in the mtime, unless
        that was set back within them too. Raises OSError.
        """
        now = path.stat()
        is_expected = before is None or _identity(before)[:-1] == _identity(now)[:-1]
        # Times of whole seconds could not show a change within the same second.
        if is_expected and now.st_ctime_ns % 10**9:
            self._make_mark(now, sha256)

    def _make_mark(self, status: os.stat_result, sha256: str) -> None:
        """Create such a file's mark; delete the older half of the marks if MOST_MARKS exist."""
        mark = self._mark(status, sha256)
        if mark is None:
            return
        with suppress(OSError):
            marks = list(mark.parent.iterdir())
            if len(marks) >= MOST_MARKS:
                marks.sort(key=lambda path: path.lstat().st_mtime_ns)
                for old in marks[: len(marks) // 2]:
                    old.unlink(missing_ok=True)
            mark.touch(mode=0o600)

    def _mark(self, status: os.stat_result, sha256: str) -> Path | None:
        """Return the path of the mark for such a file; None if the file is not to be cached."""
        if status.st_size < SMALL_BYTES or not self._boot_id:
            return None
        return self.cache.file(sha256_text(f"{self._boot_id} {_identity(status)} {sha256}"))

    @cached_property
    def _boot_id(self) -> str:
        """The boot ID of this machine: device numbers are valid only until the next boot."""
        try:
            return BOOT_ID.read_text(encoding="ascii").strip()
        except OSError:
            return ""


NOTHING_VERIFIED = VerifiedFiles()


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_settled(status: os.stat_result, beside: Path) -> bool:
    """Return whether the file is old enough, by its disk's clock, that changes alter its times."""
    changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
    try:
        with TemporaryFile(dir=beside) as probe:
            now = os.fstat(probe.fileno())
    except OSError:  # not writable: another user's store
        return time.time_ns() - changed_ns >= SETTLED_BY_OUR_CLOCK_NS
    return now.st_dev == status.st_dev and now.st_mtime_ns - changed_ns >= SETTLED_NS


# Sealed directories: a manifest.json, written last, lists every file with its size and SHA-256. A
# directory without a manifest counts as missing, one whose files do not match its manifest as
# damaged.

MANIFEST_NAME = "manifest.json"
SCHEMA = 2
HASHED_AT_ONCE = 8  # files; hashlib releases the GIL


def _is_below(name: str) -> str:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError("a file outside the folder")
    return name


class FileEntry(BaseModel):
    """The size in bytes and SHA-256 of one sealed file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    bytes: int = Field(ge=0, lt=2**63)
    sha256: str


class InputEntry(BaseModel):
    """An input of a stage: the stage instance and the SHA-256 of its manifest when it was read."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    stage: str
    digest: str
    manifest_sha256: str


class Manifest(BaseModel):
    """The content of a sealed directory and how it was made.

    Durations are in seconds, memory in bytes. `machine` describes the hardware and names no host;
    `job` is the number of the SLURM job.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: int = SCHEMA
    stage: str
    digest: str
    spec: dict[str, Any]
    inputs: dict[str, InputEntry] = {}
    files: dict[Annotated[str, AfterValidator(_is_below)], FileEntry]
    counts: dict[str, Any] = {}
    versions: dict[str, str] = {}
    machine: str = ""
    job: str = ""
    started_at: str = ""
    duration_s: FiniteFloat = 0.0
    peak_rss_bytes: int = 0


def describe_file(path: Path) -> FileEntry:
    """Return the size and SHA-256 of the file at `path`."""
    return FileEntry(bytes=path.stat().st_size, sha256=sha256_file(path))


def describe_files(root: Path, known: Mapping[str, str] = {}) -> dict[str, FileEntry]:
    """Return the size and SHA-256 of every file below `root` except the manifest, by relative path.

    `known` has the hashes of files, by the same paths, that did not change since they were hashed;
    these are not read.
    """

    def describe(name: str) -> FileEntry:
        if name in known:
            return FileEntry(bytes=(root / name).stat().st_size, sha256=known[name])
        return describe_file(root / name)

    names = [name for name in list_files(root) if name != MANIFEST_NAME]
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        return dict(zip(names, pool.map(describe, names), strict=True))


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write the manifest of `root`, which seals it: from here on it counts as complete."""
    write_json(root / MANIFEST_NAME, manifest.model_dump())


def read_manifest(root: Path) -> Manifest:
    """Return the manifest of `root`.

    Raises IntegrityError if it is missing or does not parse, Unreadable.
    """
    path = root / MANIFEST_NAME
    try:
        with unreadable_named(path):
            content = read_json(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise IntegrityError(
            f"{root}: not a sealed directory (no {MANIFEST_NAME}); run snakemake again"
        ) from error
    except (IsADirectoryError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: damaged ({error}); {_remedy(root)}") from error
    schema = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(schema, int) and schema != SCHEMA:
        raise IntegrityError(f"{path}: schema {schema}, this code reads {SCHEMA}; {_remedy(root)}")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "it"
        raise IntegrityError(f"{path}: damaged ({key}: {first['msg']}); {_remedy(root)}") from error


def verify(root: Path, verified: VerifiedFiles = NOTHING_VERIFIED) -> Manifest:
    """Check every file of the sealed directory `root` against its hash; return the manifest.

    Files that `verified` knows are not read again. Raises IntegrityError naming the first bad file,
    and Unreadable if a file cannot be read.
    """
    manifest = verify_sizes(root)
    verify_content(root, manifest, manifest.files, verified)
    return manifest


def verify_sizes(root: Path) -> Manifest:
    """Check that `root` holds exactly the sealed files, in their sizes; return the manifest.

    Raises as `verify` does.
    """
    manifest = read_manifest(root)
    with unreadable_named(root):
        names = {name for name in list_files(root) if name != MANIFEST_NAME}
        for name in sorted(names ^ manifest.files.keys()):
            what = "missing" if name in manifest.files else "not in the manifest"
            raise IntegrityError(f"{root / name}: {what}; {_remedy(root)}")
        for name, entry in manifest.files.items():
            size_bytes = (root / name).stat().st_size
            if size_bytes != entry.bytes:
                raise IntegrityError(
                    f"{root / name}: {size_bytes} bytes, sealed with {entry.bytes}; {_remedy(root)}"
                )
    return manifest


def verify_content(
    root: Path, manifest: Manifest, names: Iterable[str], verified: VerifiedFiles
) -> None:
    """Check the files `names` of `root` against the hashes in `manifest`. Raises as `verify` does.

    Several files are hashed in parallel: hashing a checkpoint of many ranks serially takes minutes.
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


@dataclass(frozen=True)
class Store:
    """A folder of sealed directories, `STAGE/DIGEST/`, each with a pointer file `STAGE/DIGEST.ok`.

    The pointers are Snakemake's declared outputs. Snakemake deletes outputs when a job starts,
    fails or is rerun, and sealed data must survive that.
    """

    root: Path
    cache: UserCache = field(default=NOTHING_KEPT, compare=False)

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> "Store":
        """Return the store at `$PIPELINE_STORE`, else `$DVC_ROOT/store`, else `./store`."""
        root = Path(environ.get("DVC_ROOT") or "", "store")
        given = environ.get("PIPELINE_STORE")
        return Store(Path(given) if given else root, UserCache.from_env(environ))

    @staticmethod
    def around(frozen: Path, environ: Mapping[str, str]) -> "Store":
        """Return the store that contains `frozen`, the file of a frozen spec or experiment."""
        return Store(frozen.parent.parent, UserCache.from_env(environ))

    @cached_property
    def verified(self) -> VerifiedFiles:
        """The user's cache of verified files."""
        return VerifiedFiles(self.cache.within("verified"))

    def remembered(self, name: str) -> Path | None:
        """Return the path of the user's own file `name` for this store; None if nothing is kept."""
        return self.cache.within(
            "stores", sha256_text(str(self.root.resolve()))[:DIGEST_CHARS]
        ).file(name)

    def require_writable(self) -> None:
        """Raise ConfigError if the store's path is not writable, or has a brace (a wildcard).

        Snakemake reads braces as wildcards.
        """
        if set("{}") & set(str(self.root)):
            text = (
                "its path holds a brace, which Snakemake takes for a wildcard; set "
                "PIPELINE_STORE to one without"
            )
            raise ConfigError(f"the store {self.root}", [text])
        if problem := unwritable(self.root):
            raise ConfigError(
                f"the store {self.root}", [f"{problem}; set PIPELINE_STORE to a folder that can be"]
            )

    def blamed(self, error: OSError) -> ConfigError:
        """Return the ConfigError for `error`; for a store path it suggests PIPELINE_STORE."""
        file = Path(os.fsdecode(error.filename or ""))
        if file.absolute().is_relative_to(self.root.absolute()):
            remedy = "set PIPELINE_STORE to a folder that can be written"
            return ConfigError(f"the store {self.root}", [f"{error}; {remedy}"])
        where = error.filename or f"the store {self.root}, or the folder of this output"
        return ConfigError(str(where), [error.strerror or str(error)])

    def spec_path(self, digest: str) -> Path:
        """Return the path of a stage instance's frozen spec."""
        return self.root / "specs" / f"{digest}.json"

    def sealed(self, ref: Ref) -> Path:
        """Return the path of a stage instance's sealed directory."""
        return self.root / ref.stage / ref.digest

    def is_sealed(self, ref: Ref) -> bool:
        """Return whether the sealed directory of `ref` has a manifest; checks no content.

        Raises Unreadable.
        """
        path = self.sealed(ref) / MANIFEST_NAME
        with unreadable_named(path):
            return is_there(path)

    def pointer(self, ref: Ref) -> Path:
        """Return the path of the pointer file: it tells Snakemake that the directory is sealed."""
        return self.root / ref.stage / f"{ref.digest}.ok"

    def run_dir(self, digest: str) -> Path:
        """Return the folder of unsealed state: open checkpoints, events, quarantined rows."""
        return self.root.parent / "runs" / digest

    def lock_path(self, digest: str) -> Path:
        """Return the path of the lock for the one process that works on `digest`."""
        return self.root.parent / "runs" / "locks" / digest

    def write_specs(self, specs: Iterable[Spec]) -> None:
        """Freeze `specs`.

        Queued jobs read the frozen files, so later edits of the YAML do not affect them.
        """
        for spec in specs:
            path = self.spec_path(spec.digest)
            try:
                known = Spec.from_json(read_json(path), str(path))
            except (OSError, ValueError, IntegrityError):
                known = None
            if known != spec:
                write_json(path, spec.to_json())

    def read_spec(self, path: Path) -> Spec:
        """Return the spec frozen at `path`.

        Raises IntegrityError if it does not match the digest in its name.
        """
        try:
            spec = Spec.from_json(read_json(path), str(path))
        except (OSError, ValueError) as error:
            raise IntegrityError(
                f"{path}: cannot read the spec ({error}); run snakemake to write it anew"
            ) from error
        if spec.digest != path.stem:
            raise IntegrityError(
                f"{path}: its content has digest {spec.digest}; delete it and run snakemake again"
            )
        return spec

    def write_pointer(self, ref: Ref) -> None:
        """Write the pointer of `ref`: it tells Snakemake that its sealed directory is complete."""
        write_text(self.pointer(ref), sha256_file(self.sealed(ref) / MANIFEST_NAME) + "\n")

    def dangling_pointers(self, specs: Iterable[Spec]) -> list[Path]:
        """Return the pointers without a sealed directory, and those of stages that depend on it.

        Without them Snakemake reruns these stages. If it lacked only the pointers of missing
        directories, it could still find the final result and do nothing. Pointers that hold no hash
        are returned too: their stage verifies its directory and writes them again. `specs` must be
        in the order of the stages.
        """
        lost: set[Ref] = set()
        dangling = []
        for spec in specs:
            pointer = self.pointer(spec.ref)
            with unreadable_named(pointer):
                has_pointer = is_there(pointer)
                is_garbled = has_pointer and not is_hash(pointer.read_bytes())
            if not self.is_sealed(spec.ref) or lost & set(spec.inputs.values()):
                lost.add(spec.ref)
            if has_pointer and (spec.ref in lost or is_garbled):
                dangling.append(pointer)
        return dangling


def is_hash(content: bytes) -> bool:
    """Return whether the content of a pointer is a SHA-256 as `write_pointer` writes it."""
    return re.fullmatch(rb"[0-9a-f]{64}\n?", content) is not None
