"""What lies in a store: experiments, directories of stages, run folders, specs, and what killed writers left.

Sizes of sealed directories are those that their manifests record; all others are measured. Nothing is changed, and
nothing that cannot be read hides the rest: it is in the list, with the reason.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pipeline_lib.base.errors import IntegrityError, Unreadable
from pipeline_lib.base.fsio import STAGE_PREFIX, TRASH_PREFIX
from pipeline_lib.base.manifest import MANIFEST_NAME, Manifest, read_manifest
from pipeline_lib.base.run_folder import CHECKPOINTS, sealed_steps
from pipeline_lib.base.spec import DIGEST_CHARS, Ref, Spec
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.halving import DECISIONS, RUNGS
from pipeline_lib.status.catalog import Catalog, Frozen
from pipeline_lib.status.tail import changed_at

SEALED, DAMAGED, UNREADABLE, UNFINISHED = "sealed", "damaged", "unreadable", "unfinished"
SPECS, EXPERIMENTS, SWEEPS, REHEARSALS = "specs", "experiments", "sweeps", "rehearse"
LOCKS = "locks"
OWN_FOLDERS = (SPECS, EXPERIMENTS, SWEEPS, REHEARSALS, RUNGS, DECISIONS)
_AT_ONCE = 8  # files that are read at a time: a file server answers each of them late
_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARS}}}")
_LEFT = re.compile(rf"(?:{re.escape(STAGE_PREFIX)}|{re.escape(TRASH_PREFIX)})+(.+?)(?:-[0-9a-f]{{12}})+")

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Made:
    """The directory of a stage instance. `used_at` is when it, or its pointer, was last written, in s since 1970."""

    ref: Ref
    path: Path
    state: str
    bytes: int
    used_at: float
    manifest: Manifest | None = None
    reason: str | None = None


@dataclass(frozen=True)
class RunFolder:
    """Working state in runs/. `wanted_by` are stage instances that wait for what was fetched into it.

    `reason` says why its sealed `checkpoints` cannot be listed, if so.
    """

    name: str
    path: Path
    bytes: int
    checkpoint_bytes: int
    used_at: float
    wanted_by: tuple[str, ...] = ()
    checkpoints: tuple[Path, ...] = ()
    reason: str | None = None

    @cached_property
    def names(self) -> frozenset[str]:
        """Its own, and those of the stage instances that wait."""
        return frozenset([self.name, *self.wanted_by])


@dataclass(frozen=True)
class Leftover:
    """What a killed writer left, of the stage instance `digest` if its name tells one."""

    path: Path
    digest: str | None
    bytes: int
    used_at: float


@dataclass(frozen=True)
class Inventory:
    """All of a store, as one look found it. `foreign` is what nothing here has made; it is left alone.

    `in_runs` are the run folders, and `left` is what killed writers left, of all stores that lie side by side: they
    have their runs in one place.
    """

    store: Store
    experiments: Sequence[Frozen]
    made: Sequence[Made]
    in_runs: Sequence[RunFolder]
    left: Sequence[Leftover]
    foreign: Sequence[Path]

    @staticmethod
    def read(store: Store) -> "Inventory":
        """Look at everything once."""
        stages = [path for path in folders_in(store.root) if path.name not in OWN_FOLDERS]
        entries = [entry for stage in stages for entry in _entries(stage)]
        found = (Path(entry.path) for entry in entries if entry.name.endswith(".ok"))
        pointers = {path: changed_at(path) or 0.0 for path in found}
        folders = [entry for entry in entries if is_digest(entry.name) and entry.is_dir(follow_symlinks=False)]
        made = each(lambda entry: _made(entry, pointers), folders)
        runs_root = runs_in(store)
        run_folders = [path for path in folders_in(runs_root) if is_digest(path.name)]
        left_in = [store.root, runs_root, *(store.root / name for name in OWN_FOLDERS), *stages]
        return Inventory(
            store,
            Catalog(store).experiments(all_of_them=True),
            sorted(made, key=lambda one: (one.ref.stage, one.ref.digest)),
            each(_run_folder, run_folders),
            [left for folder in left_in for left in leftovers_in(folder)],
            sorted(Path(entry.path) for entry in entries if _is_foreign(entry)),
        )

    @cached_property
    def _specs(self) -> dict[str, Spec]:
        """Those that were read: a digest has one."""
        return {}

    @cached_property
    def by_digest(self) -> Mapping[str, Made]:
        """The directories by digest."""
        return {one.ref.digest: one for one in self.made}

    @cached_property
    def run_names(self) -> frozenset[str]:
        """The names that run folders of this store have: those of its specs and directories."""
        digests = {*specs_in(self.store), *(one.ref.digest for one in self.made if one.ref.stage == "train")}
        return frozenset([*each(self.lock_of, digests), *(self.by_digest.keys() - digests)])

    @cached_property
    def runs(self) -> Sequence[RunFolder]:
        """The run folders of this store."""
        return [run for run in self.in_runs if self._is_own(run)]

    @cached_property
    def leftovers(self) -> Sequence[Leftover]:
        """What killed writers of this store left."""
        return [left for left in self.left if self._is_own(left)]

    @cached_property
    def others(self) -> Sequence[RunFolder | Leftover]:
        """What lies in runs/ and is of another store, or of a stage that nothing here knows any more."""
        lying: list[RunFolder | Leftover] = [*self.in_runs, *self.left]
        return [one for one in lying if not self._is_own(one)]

    def _is_own(self, one: RunFolder | Leftover) -> bool:
        """Whether it lies in this store, has the name of a stage instance of it, or is what only such ones wait for."""
        if isinstance(one, Leftover):
            return one.path.parent != runs_in(self.store) or one.digest in self.run_names
        return one.name in self.run_names or (bool(one.wanted_by) and self.run_names.issuperset(one.wanted_by))

    @cached_property
    def by_run(self) -> Mapping[str, RunFolder]:
        """The run folders by name."""
        return {run.name: run for run in self.runs}

    @cached_property
    def users(self) -> Mapping[str, list[Frozen]]:
        """The frozen experiments that name a digest."""
        found: dict[str, list[Frozen]] = {}
        for experiment in self.experiments:
            for digest in dict.fromkeys(experiment.parts.values()):
                found.setdefault(digest, []).append(experiment)
        return found

    def spec(self, digest: str) -> Spec:
        """The spec of a stage instance: that in its manifest, else the frozen one. Raises IntegrityError."""
        if digest not in self._specs:
            self._specs[digest] = self._sealed_spec(digest) or self.frozen_spec(digest)
        return self._specs[digest]

    def frozen_spec(self, digest: str) -> Spec:
        """The spec that lies in the store. Raises IntegrityError."""
        path = self.store.spec_path(digest)
        try:
            return self.store.read_spec(path)
        except RecursionError as error:
            raise IntegrityError(f"{path}: cannot read the spec ({error}); run snakemake to write it anew") from error

    def _sealed_spec(self, digest: str) -> Spec | None:
        """That in the manifest, which saves reading another file, if it is there and the right one."""
        made = self.by_digest.get(digest)
        if made is None or made.manifest is None:
            return None
        try:
            spec = Spec.from_json(made.manifest.spec, str(made.path / MANIFEST_NAME))
        except IntegrityError:
            return None
        return spec if spec.digest == digest else None

    def lock_of(self, digest: str) -> str:
        """The name of the lock, and of the run folder, of a stage instance: trainings share those of their run."""
        try:
            spec = self.spec(digest)
        except IntegrityError:
            return digest
        return run_digest(spec) if spec.stage == "train" else digest

    def names_of(self, digest: str) -> set[str]:
        """A digest, and the name of its lock and run folder."""
        return {digest, self.lock_of(digest)}


def is_digest(name: str) -> bool:
    """Whether `name` may be the digest of a stage instance or of a run."""
    return _DIGEST.fullmatch(name) is not None


def each(function: Callable[[Item], Found], items: Iterable[Item]) -> list[Found]:
    """`function` of each of `items`, several at a time, in their order."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(function, items))


def runs_in(store: Store) -> Path:
    """Where the run folders of `store` lie, and those of all stores beside it."""
    return store.root.parent / "runs"


def specs_in(store: Store) -> list[str]:
    """The digests whose specs are frozen in `store`."""
    return sorted(path.stem for path in (store.root / SPECS).glob("*.json") if is_digest(path.stem))


def folders_in(folder: Path) -> list[Path]:
    """The visible folders in `folder`; none if it is not there or may not be read. Links are none."""
    found = [entry for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]
    return sorted(Path(entry.path) for entry in found if not entry.name.startswith("."))


def size_below(path: str | Path) -> tuple[int, float]:
    """Bytes of the files below `path`, or of the file there, and when the newest of them changed."""
    total, newest, waiting = 0, 0.0, [os.fspath(path)]
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


def leftovers_in(folder: Path) -> Iterator[Leftover]:
    """What killed writers left in `folder`, where their names are hidden ones."""
    for entry in _entries(folder):
        if (match := _LEFT.fullmatch(entry.name)) is not None:
            first = match[1].partition(".")[0]
            yield Leftover(Path(entry.path), first if is_digest(first) else None, *size_below(entry.path))


def _entries(folder: Path) -> "list[os.DirEntry[str]]":
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _is_foreign(entry: "os.DirEntry[str]") -> bool:
    """Whether no stage makes such a name: digests with a pointer or a page beside them, and what is hidden, it does."""
    name, dot, suffix = entry.name.partition(".")
    if entry.name.startswith("."):
        return False
    if not is_digest(name) or (dot and suffix not in ("ok", "html")):
        return True
    return not dot and not entry.is_dir(follow_symlinks=False)


def _made(entry: "os.DirEntry[str]", pointers: Mapping[Path, float]) -> Made:
    path = Path(entry.path)
    ref = Ref(path.parent.name, path.name)
    used_at = max(changed_at(path) or 0.0, pointers.get(path.with_name(f"{path.name}.ok"), 0.0))
    manifest, state, reason = None, SEALED, None
    try:
        manifest = read_manifest(path)
    except IntegrityError as error:
        state, reason = (DAMAGED, str(error)) if os.path.lexists(path / MANIFEST_NAME) else (UNFINISHED, None)
    except Unreadable as error:
        state, reason = UNREADABLE, str(error)
    if manifest is None:
        return Made(ref, path, state, size_below(path)[0], used_at, None, reason)
    if (manifest.stage, manifest.digest) != (ref.stage, ref.digest):
        state = DAMAGED
        reason = f"{path}: sealed as {manifest.stage} {manifest.digest}; delete it and run snakemake again"
    recorded = sum(file.bytes for file in manifest.files.values() if file.bytes > 0)
    return Made(ref, path, state, recorded, used_at, manifest, reason)


def _run_folder(path: Path) -> RunFolder:
    total, newest = size_below(path)
    saved, _ = size_below(path / CHECKPOINTS)
    wanted_by = tuple(entry.name for entry in _entries(path / "jobs"))
    checkpoints: tuple[Path, ...] = ()
    reason = None
    try:
        checkpoints = tuple(step for _, step in sealed_steps(path / CHECKPOINTS))
    except Unreadable as error:
        reason = str(error)
    return RunFolder(path.name, path, total, saved, newest, wanted_by, checkpoints, reason)
