"""The contents of a store: experiments, stages, runs, specs, and leftovers of killed writers.

Stages and runs are their directories and folders. Sizes of sealed directories are those that their
manifests record; all others are measured. Nothing is changed, and nothing that cannot be read hides
the rest: it is listed, with the reason. Stores that lie side by side have their own directories,
and share their runs and locks.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.halving import DECISIONS, RUNGS
from pipeline_lib.core.errors import IntegrityError, Unreadable
from pipeline_lib.core.files import STAGE_PREFIX, TRASH_PREFIX
from pipeline_lib.core.run_folder import CHECKPOINTS, SET_ASIDE, sealed_steps
from pipeline_lib.core.store import (
    DIGEST_CHARS,
    MANIFEST_NAME,
    Manifest,
    Ref,
    Spec,
    Store,
    read_manifest,
)
from pipeline_lib.status.catalog import Catalog, Frozen, changed_at

SEALED, DAMAGED, UNREADABLE, UNFINISHED = "sealed", "damaged", "unreadable", "unfinished"
SPECS, EXPERIMENTS, SWEEPS, REHEARSALS = "specs", "experiments", "sweeps", "rehearse"
LOCKS = "locks"
OWN_FOLDERS = (SPECS, EXPERIMENTS, SWEEPS, REHEARSALS, RUNGS, DECISIONS)
# Of versions that kept them in the store; nothing reads them here.
OLD_CACHES = ("architectures.json", "hashes.json", "revisions.json")
_AT_ONCE = 8  # files that are read at a time, since a file server answers each with a delay
_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARS}}}")
# What a writer began or set aside, `.stage-NAME-0123456789ab`, and a probe of a disk's clock,
# `.stage-ab12cd_4`.
_LEFT = re.compile(
    rf"(?:{re.escape(STAGE_PREFIX)}|{re.escape(TRASH_PREFIX)})+(.+?)(?:-[0-9a-f]{{12}})+"
    rf"|{re.escape(STAGE_PREFIX)}[a-z0-9_]{{8}}"
)

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Made:
    """The directory of a stage instance.

    `used_at` is when it, or its pointer, was last written, in s since 1970.
    """

    ref: Ref
    path: Path
    state: str
    bytes: int
    used_at: float
    manifest: Manifest | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Leftover:
    """A file or folder left by a killed writer, of the stage instance `digest` if its name has one.

    Also a checkpoint that was set aside, of the run `digest`, and a file of OLD_CACHES.
    """

    path: Path
    digest: str | None
    bytes: int
    used_at: float


@dataclass(frozen=True)
class RunFolder:
    """A folder of working state in runs/.

    `wanted_by` are stage instances that wait for what was fetched into it. `reason` says why its
    sealed `checkpoints` cannot be listed, if so. `set_aside` are those that `rewind` moved.
    """

    name: str
    path: Path
    bytes: int
    checkpoint_bytes: int
    used_at: float
    wanted_by: tuple[str, ...] = ()
    checkpoints: tuple[Path, ...] = ()
    reason: str | None = None
    set_aside: tuple[Leftover, ...] = ()

    @cached_property
    def names(self) -> frozenset[str]:
        """Its own name, and those of the stage instances that wait."""
        return frozenset([self.name, *self.wanted_by])


@dataclass(frozen=True)
class Inventory:
    """The contents of a store at one moment. `foreign` is what no stage makes; it is left alone.

    `in_runs` are the run folders, and `left` the leftovers of killed writers, of all stores that
    lie side by side: they share one runs/.
    """

    store: Store
    experiments: Sequence[Frozen]
    made: Sequence[Made]
    in_runs: Sequence[RunFolder]
    left: Sequence[Leftover]
    foreign: Sequence[Path]
    # read so far, by digest
    _specs: dict[str, Spec] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def read(store: Store) -> "Inventory":
        """Read the contents of `store` once."""
        stages = [path for path in folders_in(store.root) if path.name not in OWN_FOLDERS]
        entries: list[os.DirEntry[str]] = []
        for stage in stages:
            entries += _entries(stage)
        run_folders = [path for path in folders_in(runs_in(store)) if is_digest(path.name)]
        return Inventory(
            store,
            experiments=Catalog(store).experiments(all_of_them=True),
            made=_all_made(entries),
            in_runs=each(_run_folder, run_folders),
            left=_all_left(store, stages),
            foreign=sorted(Path(entry.path) for entry in entries if _is_foreign(entry)),
        )

    @cached_property
    def by_digest(self) -> Mapping[str, Made]:
        """The stage directories by digest."""
        return {one.ref.digest: one for one in self.made}

    @cached_property
    def run_names(self) -> frozenset[str]:
        """The names that run folders of this store can have, from its specs and directories."""
        digests = set(specs_in(self.store))
        digests |= {one.ref.digest for one in self.made if one.ref.stage == "train"}
        others = self.by_digest.keys() - digests
        return frozenset(each(self.lock_of, digests)) | others

    @cached_property
    def runs(self) -> Sequence[RunFolder]:
        """The run folders of this store."""
        return [run for run in self.in_runs if self._is_own(run)]

    @cached_property
    def leftovers(self) -> Sequence[Leftover]:
        """The leftovers of this store's killed writers."""
        return [left for left in self.left if self._is_own(left)]

    @cached_property
    def others(self) -> Sequence[RunFolder | Leftover]:
        """The entries in runs/ of another store, or of a stage that is no longer known here."""
        lying: list[RunFolder | Leftover] = [*self.in_runs, *self.left]
        return [one for one in lying if not self._is_own(one)]

    def _is_own(self, one: RunFolder | Leftover) -> bool:
        """Return whether it is in this store, is named after an instance, or only those wait.

        An instance is a stage instance of this store.
        """
        if isinstance(one, Leftover):
            return one.path.parent != runs_in(self.store) or one.digest in self.run_names
        if one.name in self.run_names:
            return True
        return bool(one.wanted_by) and self.run_names.issuperset(one.wanted_by)

    @cached_property
    def by_run(self) -> Mapping[str, RunFolder]:
        """The run folders by name."""
        return {run.name: run for run in self.runs}

    @cached_property
    def users(self) -> Mapping[str, list[Frozen]]:
        """The frozen experiments by each digest that they name."""
        found: dict[str, list[Frozen]] = {}
        for experiment in self.experiments:
            for digest in dict.fromkeys(experiment.parts.values()):
                found.setdefault(digest, []).append(experiment)
        return found

    def spec(self, digest: str) -> Spec:
        """Return the spec of a stage instance: from its manifest, else the frozen one.

        Raises IntegrityError.
        """
        if digest in self._specs:
            return self._specs[digest]
        made = self.by_digest.get(digest)
        spec = None
        if made is not None and made.manifest is not None:  # saves reading another file
            with suppress(IntegrityError):
                spec = Spec.from_json(made.manifest.spec, str(made.path / MANIFEST_NAME))
        if spec is None or spec.digest != digest:
            spec = self.frozen_spec(digest)
        self._specs[digest] = spec
        return spec

    def frozen_spec(self, digest: str) -> Spec:
        """Return the frozen spec. Raises IntegrityError if it cannot be read."""
        path = self.store.spec_path(digest)
        try:
            return self.store.read_spec(path)
        except RecursionError as error:
            raise IntegrityError(
                f"{path}: cannot read the spec ({error}); run snakemake to write it anew"
            ) from error

    def lock_of(self, digest: str) -> str:
        """Return the `run_name` of a stage instance; the digest if its spec is unreadable."""
        with suppress(IntegrityError):
            return run_name(self.spec(digest))
        return digest

    def names_of(self, digest: str) -> set[str]:
        """Return the digest, and the name of its lock and run folder."""
        return {digest, self.lock_of(digest)}


def is_digest(name: str) -> bool:
    """Return whether `name` has the form of a digest, of a stage instance or of a run."""
    return _DIGEST.fullmatch(name) is not None


def each(function: Callable[[Item], Found], items: Iterable[Item]) -> list[Found]:
    """Apply `function` to each of `items`, several at a time; return the results in their order."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(function, items))


def runs_in(store: Store) -> Path:
    """Return the folder of the run folders of `store`, and of those of all stores beside it."""
    return store.root.parent / "runs"


def chosen(inventory: Inventory, digests: set[str] | None) -> tuple[list[Made], list[RunFolder]]:
    """Return the stage directories and run folders of this store, or only those of `digests`."""
    made = [one for one in inventory.made if digests is None or one.ref.digest in digests]
    return made, [run for run in inventory.runs if digests is None or run.name in digests]


def specs_in(store: Store) -> list[str]:
    """Return the digests whose specs are frozen in `store`."""
    return sorted(path.stem for path in (store.root / SPECS).glob("*.json") if is_digest(path.stem))


def folders_in(folder: Path) -> list[Path]:
    """Return the visible folders in `folder`, not links; none if it is absent or unreadable."""
    found = [entry for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]
    return sorted(Path(entry.path) for entry in found if not entry.name.startswith("."))


def size_below(path: str | Path) -> tuple[int, float]:
    """Return the bytes of the files below `path`, or of that file, and the newest mtime."""
    total = 0
    newest = 0.0
    waiting = [os.fspath(path)]
    while waiting:
        current = waiting.pop()
        try:
            status = os.lstat(current)
            if stat.S_ISDIR(status.st_mode):
                waiting += [entry.path for entry in os.scandir(current)]
            else:
                total += status.st_size
            newest = max(newest, status.st_mtime)
        except OSError:  # vanished, or not ours to read
            continue
    return total, newest


def _entries(folder: Path) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _is_foreign(entry: "os.DirEntry[str]") -> bool:
    # Stages make digests, their pointers and pages, and hidden entries.
    name, dot, suffix = entry.name.partition(".")
    if entry.name.startswith("."):
        return False
    if not is_digest(name) or (dot and suffix not in ("ok", "html")):
        return True
    return not dot and not entry.is_dir(follow_symlinks=False)


def _all_made(entries: "Sequence[os.DirEntry[str]]") -> list[Made]:
    """Return the stage directories among the entries of the stages' folders."""
    pointers: dict[Path, float] = {}
    folders = []
    for entry in entries:
        path = Path(entry.path)
        if entry.name.endswith(".ok"):
            pointers[path] = changed_at(path) or 0.0
        if is_digest(entry.name) and entry.is_dir(follow_symlinks=False):
            folders.append(path)
    made = each(lambda path: _made(path, pointers), folders)
    return sorted(made, key=lambda one: (one.ref.stage, one.ref.digest))


def _made(path: Path, pointers: Mapping[Path, float]) -> Made:
    ref = Ref(path.parent.name, path.name)
    used_at = max(changed_at(path) or 0.0, pointers.get(path.with_name(f"{path.name}.ok"), 0.0))
    try:
        manifest = read_manifest(path)
    except IntegrityError as error:
        total, _ = size_below(path)
        if os.path.lexists(path / MANIFEST_NAME):
            return Made(ref, path, DAMAGED, total, used_at, reason=str(error))
        return Made(ref, path, UNFINISHED, total, used_at)
    except Unreadable as error:
        total, _ = size_below(path)
        return Made(ref, path, UNREADABLE, total, used_at, reason=str(error))
    recorded = sum(file.bytes for file in manifest.files.values() if file.bytes > 0)
    if (manifest.stage, manifest.digest) == (ref.stage, ref.digest):
        return Made(ref, path, SEALED, recorded, used_at, manifest=manifest)
    reason = (
        f"{path}: sealed as {manifest.stage} {manifest.digest}; delete it and run snakemake again"
    )
    return Made(ref, path, DAMAGED, recorded, used_at, manifest=manifest, reason=reason)


def _all_left(store: Store, stages: Iterable[Path]) -> list[Leftover]:
    """Return what killed writers and older versions left in the store, its stages and runs/."""
    runs_root = runs_in(store)
    folders = [store.root, runs_root, runs_root / LOCKS]
    folders += [store.root / name for name in OWN_FOLDERS]
    folders += stages
    left = []
    for folder in folders:
        for entry in _entries(folder):
            if (match := _LEFT.fullmatch(entry.name)) is not None:
                name = (match[1] or "").partition(".")[0]
                digest = name if is_digest(name) else None
                left.append(_leftover(Path(entry.path), digest))
    for name in OLD_CACHES:
        path = store.root / name
        if path.exists():
            left.append(_leftover(path, None))
    return left


def _leftover(path: Path, digest: str | None) -> Leftover:
    total, newest = size_below(path)
    return Leftover(path, digest, bytes=total, used_at=newest)


def _run_folder(path: Path) -> RunFolder:
    total, newest = size_below(path)
    saved, _ = size_below(path / CHECKPOINTS)
    wanted_by = tuple(entry.name for entry in _entries(path / "jobs"))
    try:
        checkpoints = tuple(step for _, step in sealed_steps(path / CHECKPOINTS))
        reason = None
    except Unreadable as error:
        checkpoints = ()
        reason = str(error)
    aside = sorted(Path(entry.path) for entry in _entries(path / SET_ASIDE))
    return RunFolder(
        path.name,
        path,
        bytes=total,
        checkpoint_bytes=saved,
        used_at=newest,
        wanted_by=wanted_by,
        checkpoints=checkpoints,
        reason=reason,
        set_aside=tuple(_leftover(one, path.name) for one in aside),
    )


def runs_beside(store: Store) -> frozenset[str]:
    """Return the names of run folders of the stores beside `store`.

    The same training has the same name in each.
    """
    paths: list[Path] = []
    for folder in store.root.parent.iterdir():
        with suppress(OSError):  # not ours to read
            if folder.joinpath(SPECS).is_dir() and not folder.samefile(store.root):
                beside = Store(folder)
                paths += [beside.spec_path(digest) for digest in specs_in(beside)]

    def name_of(path: Path) -> str:
        with suppress(IntegrityError, RecursionError):
            return run_name(Store(path.parent.parent).read_spec(path))
        return path.stem

    return frozenset(each(name_of, paths))


def run_name(spec: Spec) -> str:
    """Return the name of a stage instance's lock and run folder; trainings share a run's."""
    return run_digest(spec) if spec.stage == "train" else spec.digest
