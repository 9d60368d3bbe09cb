"""The contents of a store, which experiments use them, and what is being worked on."""

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pipeline_lib.config.compile import WHERE_KEYS, run_digest
from pipeline_lib.config.halving import DECISIONS, RUNGS
from pipeline_lib.core.errors import ConfigError, IntegrityError, Unreadable
from pipeline_lib.core.files import STAGE_PREFIX, TRASH_PREFIX
from pipeline_lib.core.lock import describe, holder
from pipeline_lib.core.run_folder import CHECKPOINTS, SET_ASIDE, sealed_steps
from pipeline_lib.core.store import DIGEST_CHARS, MANIFEST_NAME, Manifest, Ref, Spec, Store, read_manifest
from pipeline_lib.core.text import did_you_mean
from pipeline_lib.slurm.job import QueuedJob
from pipeline_lib.status.catalog import Catalog, Frozen, changed_at, json_object
from pipeline_lib.status.run import shown

# The contents of a store: experiments, stage directories, run folders, specs, and leftovers of killed writers.
#
# Sizes of sealed directories are those that their manifests record; all others are measured. Nothing is changed, and
# nothing that cannot be read hides the rest: it is listed, with the reason.

SEALED, DAMAGED, UNREADABLE, UNFINISHED = "sealed", "damaged", "unreadable", "unfinished"
SPECS, EXPERIMENTS, SWEEPS, REHEARSALS = "specs", "experiments", "sweeps", "rehearse"
LOCKS = "locks"
OWN_FOLDERS = (SPECS, EXPERIMENTS, SWEEPS, REHEARSALS, RUNGS, DECISIONS)
# Of versions that kept them in the store; nothing reads them here.
OLD_CACHES = ("architectures.json", "hashes.json", "revisions.json")
_AT_ONCE = 8  # files that are read at a time, since a file server answers each with a delay
_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARS}}}")
# What a writer began or set aside, `.stage-NAME-0123456789ab`, and a probe of a disk's clock, `.stage-ab12cd_4`.
_LEFT = re.compile(
    rf"(?:{re.escape(STAGE_PREFIX)}|{re.escape(TRASH_PREFIX)})+(.+?)(?:-[0-9a-f]{{12}})+"
    rf"|{re.escape(STAGE_PREFIX)}[a-z0-9_]{{8}}"
)

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
class Leftover:
    """A file or folder that a killed writer left, of the stage instance `digest` if its name contains one.

    Also a checkpoint that was set aside, of the run `digest`, and a file of OLD_CACHES.
    """

    path: Path
    digest: str | None
    bytes: int
    used_at: float


@dataclass(frozen=True)
class RunFolder:
    """A folder of working state in runs/. `wanted_by` are stage instances that wait for what was fetched into it.

    `reason` says why its sealed `checkpoints` cannot be listed, if so. `set_aside` are those that `rewind` moved.
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

    `in_runs` are the run folders, and `left` the leftovers of killed writers, of all stores that lie side by side: they
    share one runs/.
    """

    store: Store
    experiments: Sequence[Frozen]
    made: Sequence[Made]
    in_runs: Sequence[RunFolder]
    left: Sequence[Leftover]
    foreign: Sequence[Path]
    _specs: dict[str, Spec] = field(default_factory=dict, repr=False, compare=False)  # read so far, by digest

    @staticmethod
    def read(store: Store) -> "Inventory":
        """Read the contents of `store` once."""
        stages = [path for path in folders_in(store.root) if path.name not in OWN_FOLDERS]
        entries = [entry for stage in stages for entry in _entries(stage)]
        found = (Path(entry.path) for entry in entries if entry.name.endswith(".ok"))
        pointers = {path: changed_at(path) or 0.0 for path in found}
        folders = [entry for entry in entries if is_digest(entry.name) and entry.is_dir(follow_symlinks=False)]
        made = each(lambda entry: _made(entry, pointers), folders)
        runs_root = runs_in(store)
        run_folders = [path for path in folders_in(runs_root) if is_digest(path.name)]
        left = []
        for folder in (store.root, runs_root, runs_root / LOCKS, *(store.root / name for name in OWN_FOLDERS), *stages):
            for entry in _entries(folder):
                if (match := _LEFT.fullmatch(entry.name)) is not None:
                    first = (match[1] or "").partition(".")[0]
                    digest = first if is_digest(first) else None
                    left.append(Leftover(Path(entry.path), digest, *size_below(entry.path)))
        for path in (store.root / name for name in OLD_CACHES):
            if path.exists():
                left.append(Leftover(path, None, *size_below(path)))
        return Inventory(
            store,
            Catalog(store).experiments(all_of_them=True),
            sorted(made, key=lambda one: (one.ref.stage, one.ref.digest)),
            each(_run_folder, run_folders),
            left,
            sorted(Path(entry.path) for entry in entries if _is_foreign(entry)),
        )

    @cached_property
    def by_digest(self) -> Mapping[str, Made]:
        """The stage directories by digest."""
        return {one.ref.digest: one for one in self.made}

    @cached_property
    def run_names(self) -> frozenset[str]:
        """The names that run folders of this store can have, from its specs and directories."""
        digests = {*specs_in(self.store), *(one.ref.digest for one in self.made if one.ref.stage == "train")}
        return frozenset([*each(self.lock_of, digests), *(self.by_digest.keys() - digests)])

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
        """The entries in runs/ that belong to another store, or to a stage that is not known here any more."""
        lying: list[RunFolder | Leftover] = [*self.in_runs, *self.left]
        return [one for one in lying if not self._is_own(one)]

    def _is_own(self, one: RunFolder | Leftover) -> bool:
        """Return whether it is in this store, is named after one of its stage instances, or only those wait for it."""
        if isinstance(one, Leftover):
            return one.path.parent != runs_in(self.store) or one.digest in self.run_names
        return one.name in self.run_names or (bool(one.wanted_by) and self.run_names.issuperset(one.wanted_by))

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
        """Return the spec of a stage instance: from its manifest, else the frozen one. Raises IntegrityError."""
        if digest in self._specs:
            return self._specs[digest]
        made, spec = self.by_digest.get(digest), None
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
            raise IntegrityError(f"{path}: cannot read the spec ({error}); run snakemake to write it anew") from error

    def lock_of(self, digest: str) -> str:
        """Return the `run_name` of a stage instance; the digest itself if its spec cannot be read."""
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
    """Return the stage directories and run folders of this store; with `digests` only those that have one of them."""
    made = [one for one in inventory.made if digests is None or one.ref.digest in digests]
    return made, [run for run in inventory.runs if digests is None or run.name in digests]


def specs_in(store: Store) -> list[str]:
    """Return the digests whose specs are frozen in `store`."""
    return sorted(path.stem for path in (store.root / SPECS).glob("*.json") if is_digest(path.stem))


def folders_in(folder: Path) -> list[Path]:
    """Return the visible folders in `folder`, without links; none if it does not exist or may not be read."""
    found = [entry for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]
    return sorted(Path(entry.path) for entry in found if not entry.name.startswith("."))


def size_below(path: str | Path) -> tuple[int, float]:
    """Return the bytes of the files below `path`, or of the file there, and the newest modification time."""
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


def _made(entry: "os.DirEntry[str]", pointers: Mapping[Path, float]) -> Made:
    path = Path(entry.path)
    ref = Ref(path.parent.name, path.name)
    used_at = max(changed_at(path) or 0.0, pointers.get(path.with_name(f"{path.name}.ok"), 0.0))
    try:
        manifest = read_manifest(path)
    except IntegrityError as error:
        is_damaged = os.path.lexists(path / MANIFEST_NAME)
        state, reason = (DAMAGED, str(error)) if is_damaged else (UNFINISHED, None)
        return Made(ref, path, state, size_below(path)[0], used_at, reason=reason)
    except Unreadable as error:
        return Made(ref, path, UNREADABLE, size_below(path)[0], used_at, reason=str(error))
    state, reason = SEALED, None
    if (manifest.stage, manifest.digest) != (ref.stage, ref.digest):
        state = DAMAGED
        reason = f"{path}: sealed as {manifest.stage} {manifest.digest}; delete it and run snakemake again"
    recorded = sum(file.bytes for file in manifest.files.values() if file.bytes > 0)
    return Made(ref, path, state, recorded, used_at, manifest=manifest, reason=reason)


def _run_folder(path: Path) -> RunFolder:
    total, newest = size_below(path)
    saved, _ = size_below(path / CHECKPOINTS)
    wanted_by = tuple(entry.name for entry in _entries(path / "jobs"))
    try:
        checkpoints, reason = tuple(step for _, step in sealed_steps(path / CHECKPOINTS)), None
    except Unreadable as error:
        checkpoints, reason = (), str(error)
    aside = sorted(entry.path for entry in _entries(path / SET_ASIDE))
    set_aside = tuple(Leftover(Path(one), path.name, *size_below(one)) for one in aside)
    return RunFolder(
        path.name,
        path,
        bytes=total,
        checkpoint_bytes=saved,
        used_at=newest,
        wanted_by=wanted_by,
        checkpoints=checkpoints,
        reason=reason,
        set_aside=set_aside,
    )


# Stores that lie side by side: each has its own directories, and all share their runs and locks.


def runs_beside(store: Store) -> frozenset[str]:
    """Return the names of run folders of the other stores beside `store`; the same training has the same in each."""
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
    """Return the name of the lock and of the run folder of a stage instance; trainings share those of their run."""
    return run_digest(spec) if spec.stage == "train" else spec.digest


# What is being worked on, or is about to be: by locks, by SLURM's queue, and by recent writes.
#
# Between two stages a local snakemake leaves no trace but what the first one wrote, and a job that waits in the queue
# has no lock yet. So whatever changed within RECENT_S counts as live, and so does everything that one snakemake makes.

RECENT_S = 600.0
DAY_S = 86400.0
_DIGESTS = re.compile(rf"(?<![0-9a-f])[0-9a-f]{{{DIGEST_CHARS}}}(?![0-9a-f])")


@dataclass(frozen=True)
class Live:
    """The digests of stage instances and runs in work, and the live experiments by path, each with the reason."""

    digests: Mapping[str, str]
    experiments: Mapping[Path, str]


def find_live(inventory: Inventory, jobs: Sequence[QueuedJob], now_s: float) -> Live:
    """Return what is live at `now_s`, in seconds since 1970; `jobs` are those in SLURM's queue."""
    digests: dict[str, str] = {}
    for digest, why in _live_digests(inventory, jobs, now_s):
        digests.setdefault(digest, why)
        digests.setdefault(inventory.lock_of(digest), why)  # a training to a rung of halving: the full one's run
    experiments: dict[Path, str] = {}
    for experiment in inventory.experiments:
        used = [*experiment.parts.values()]
        if train := experiment.parts.get("train"):
            used.append(inventory.lock_of(train))
        reason = next((digests[digest] for digest in used if digest in digests), None)
        if now_s - experiment.frozen_at < RECENT_S:
            reason = f"snakemake was started with it {ago(now_s - experiment.frozen_at)}"
        if reason:
            experiments[experiment.path] = reason
    known = {experiment.path for experiment in inventory.experiments}  # some of an older sweep may be gone
    for _, swept in sweeps(inventory.store.root):
        if live := next((path for path in swept if path in experiments), None):
            for path in known.intersection(swept):
                experiments.setdefault(path, f"in one sweep with an experiment that is in use ({experiments[live]})")
    return Live(digests, experiments)


def _live_digests(inventory: Inventory, jobs: Iterable[QueuedJob], now_s: float) -> Iterator[tuple[str, str]]:
    """Yield digests of stage instances and runs with the reason: locked, in the queue, written to recently."""
    for path in sorted((inventory.store.root.parent / "runs" / LOCKS).glob("*")):
        if is_digest(path.name) and (owner := holder(path)) is not None:
            yield path.name, f"{describe(owner)} works on {path.name}"
    for job in jobs:
        for digest in _DIGESTS.findall(job.comment):
            yield digest, f"SLURM job {job.id} makes {digest}: {job.shown}"
    for one in inventory.made:
        if now_s - one.used_at < RECENT_S:
            yield one.ref.digest, f"{one.ref.stage} {one.ref.digest} was written {ago(now_s - one.used_at)}"
    for run in inventory.runs:
        if now_s - run.used_at < RECENT_S:
            yield run.name, f"{run.path} was written to {ago(now_s - run.used_at)}"


def sweeps(root: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Yield the frozen sweeps of the store at `root`, each with its experiments: one snakemake makes them all."""
    for path in sorted((root / SWEEPS).glob("*.json")):
        names = json_object(path).get("experiments")
        if isinstance(names, list):
            yield path, [root / EXPERIMENTS / name for name in names if isinstance(name, str)]


def ago(age_s: float) -> str:
    """Format an age roughly: `5 d ago`, `3 h ago`, `0 min ago`."""
    for unit, size_s in (("d", DAY_S), ("h", 3600.0)):
        if age_s >= 2 * size_s:
            return f"{int(age_s // size_s)} {unit} ago"
    return f"{max(0, int(age_s // 60))} min ago"


# Selecting experiments by name, and what they and live work need from a store.


def named(experiments: Sequence[Frozen], names: Iterable[str], where: str) -> list[Frozen]:
    """Return the frozen experiments that match `names`: names, patterns (`lr-*`), or what `ls NAME` shows as frozen.

    Raises ConfigError, with `where` as its place, for a name that matches none, with the nearest name.
    """
    found: dict[Path, Frozen] = {}
    problems = []
    for name in names:
        exact = [one for one in experiments if name in (one.name, one.path.stem)]
        meant = exact or [one for one in experiments if fnmatchcase(one.name, name)]
        found |= {one.path: one for one in meant}
        if not meant:
            known = sorted({one.name for one in experiments})
            hint = did_you_mean(name, known) or f"; known: {shown(', '.join(known[:10])) or 'none'}"
            problems.append(f"{name!r}: no experiment of that name{hint}")
    if problems:
        raise ConfigError(where, problems)
    return list(found.values())


def unmatched(experiments: Sequence[Frozen], names: Iterable[str]) -> list[str]:
    """Return the patterns among `names` that match no experiment; a plain name is not a pattern."""
    patterns = [name for name in names if set("*?[") & set(name)]
    return [pattern for pattern in patterns if not any(fnmatchcase(one.name, pattern) for one in experiments)]


@dataclass
class Needs:
    """The needed digests of stage instances, and names of run folders."""

    inventory: Inventory
    digests: set[str] = field(default_factory=set)
    runs: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    _downloads: set[str] = field(default_factory=set)

    def add_experiment(self, experiment: Frozen) -> None:
        """Add all parts of an experiment; what cannot be read is added to `problems`."""
        if not experiment.parts:
            self.problems.append(experiment.unreadable or f"{experiment.path}: not a valid experiment file")
        for path in _paths_of_sources(json_object(experiment.path).get("config")):
            self._add_path(path)
        for part, digest in experiment.parts.items():
            try:
                self._add(self.inventory.spec(digest))
            except IntegrityError as error:
                self.problems.append(f"{part} of {experiment.name!r}: {error}")

    def add_digest(self, digest: str) -> None:
        """Add a stage instance or run in work, with everything that it is made from, as far as that is known."""
        waiting = [digest]
        while waiting:
            current = waiting.pop()
            if current in self.digests and current in self.runs:
                continue
            self.digests.add(current)
            self.runs.add(current)
            try:
                spec = self.inventory.spec(current)
                self._add(spec)
            except IntegrityError:
                continue
            waiting += [ref.digest for ref in spec.inputs.values()]

    def _add(self, spec: Spec) -> None:
        self.digests.add(spec.digest)
        self.runs.add(run_name(spec))
        if spec.stage != "download" or spec.digest in self._downloads:
            return
        # Live work is known by its spec alone. A manifest contains no paths.
        for value in self.inventory.frozen_spec(spec.digest).where.values():
            self._add_path(str(value))
        self._downloads.add(spec.digest)

    def _add_path(self, path: str) -> None:
        """Add what a local model or data path leads to if that is in this store, as `results/NAME/model` is."""
        with suppress(ValueError, OSError, RuntimeError):  # elsewhere, or no path at all
            self.digests.update(Path(path).resolve().relative_to(self.inventory.store.root.resolve()).parts[1:2])


def _paths_of_sources(config: Any) -> Iterator[str]:
    """Yield the local paths in a frozen config, which may be damaged.

    Specs have them too, but another clone with other paths to the same content writes its own to the same specs.
    """
    sections = [config] if isinstance(config, dict) else []
    while sections:
        section = sections.pop()
        for key, value in section.items():
            if key in WHERE_KEYS and isinstance(value, str):
                yield value
            of_key = value if isinstance(value, list) else [value]
            sections += [one for one in of_key if isinstance(one, dict)]


# Usage of a store: by experiment name, its own and shared bytes; by stage, the total.


@dataclass(frozen=True)
class Share:
    """The usage by the frozen experiments of one name: sealed and damaged directories, and bytes.

    `shared` are the bytes that another name uses too, `checkpoints` those in its run folders. `used_at` is when it was
    last frozen or made, in seconds since 1970.
    """

    name: str
    configs: Sequence[Frozen]
    parts: int
    sealed: int
    damaged: int
    own: int
    shared: int
    checkpoints: int
    used_at: float


def shares(inventory: Inventory) -> list[Share]:
    """Return the usage of each name, the most recently used first."""
    by_name: dict[str, list[Frozen]] = {}
    for experiment in inventory.experiments:
        by_name.setdefault(experiment.name, []).append(experiment)
    found = []
    for name, configs in by_name.items():
        digests = {digest for one in configs for digest in one.parts.values()}
        made = [inventory.by_digest[digest] for digest in digests if digest in inventory.by_digest]
        own = [one for one in made if all(user.name == name for user in inventory.users[one.ref.digest])]
        own_bytes = sum(one.bytes for one in own)
        runs = [inventory.by_run[run] for run in run_names(inventory, configs) if run in inventory.by_run]
        share = Share(
            name,
            configs,
            parts=len(digests),
            sealed=sum(one.state == SEALED for one in made),
            damaged=sum(one.state == DAMAGED for one in made),
            own=own_bytes,
            shared=sum(one.bytes for one in made) - own_bytes,
            checkpoints=sum(run.checkpoint_bytes for run in runs),
            used_at=max([*(one.frozen_at for one in configs), *(one.used_at for one in own)]),
        )
        found.append(share)
    return sorted(found, key=lambda share: (-share.used_at, share.name))


def run_names(inventory: Inventory, experiments: Iterable[Frozen]) -> set[str]:
    """Return the names of the run folders of the stage instances of `experiments`."""
    parts = [(part, digest) for one in experiments for part, digest in one.parts.items()]
    return {inventory.lock_of(digest) if part == "train" else digest for part, digest in parts}


def used_by(inventory: Inventory, names: Sequence[str], where: str) -> tuple[set[str], set[str] | None]:
    """Return the names of the experiments that match `names` (all if empty), and the digests of what they use.

    Without `names` the digests are None, which means all. Raises ConfigError, with `where` as its place, for an unknown
    name.
    """
    found = named(inventory.experiments, names, where) if names else list(inventory.experiments)
    digests = {digest for one in found for digest in one.parts.values()} | run_names(inventory, found)
    return {one.name for one in found}, digests if names else None


def by_stage(inventory: Inventory, logs: Path) -> list[tuple[str, int, int]]:
    """Return what takes space, with its count and bytes: every stage, then everything beside the stages."""
    stages: dict[str, list[int]] = {}
    for one in inventory.made:
        stages.setdefault(one.ref.stage, []).append(one.bytes)
    runs, left, others = inventory.runs, inventory.leftovers, inventory.others
    small = [folder for folder in folders_in(inventory.store.root) if folder.name in (SPECS, EXPERIMENTS, SWEEPS)]
    saved = [run.checkpoint_bytes for run in runs if run.checkpoint_bytes > 0]
    aside = [one.bytes for run in runs for one in run.set_aside]
    return [
        *sorted(((stage, len(made), sum(made)) for stage, made in stages.items()), key=lambda use: -use[2]),
        ("checkpoints in runs/", len(saved), sum(saved)),
        ("checkpoints set aside in runs/", len(aside), sum(aside)),
        ("other files in runs/", len(runs), sum(run.bytes - run.checkpoint_bytes for run in runs) - sum(aside)),
        ("of other stores in runs/", len(others), sum(one.bytes for one in others)),
        ("left by killed jobs", len(left), sum(one.bytes for one in left)),
        ("specs, experiments", len(small), sum(size_below(folder)[0] for folder in small)),
        (f"logs in {logs}", int(logs.is_dir()), size_below(logs)[0]),
    ]
