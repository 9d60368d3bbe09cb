"""Garbage collection of a store: what may go, its removal beside running jobs, and the lines to print."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pipeline_lib.config.compile import PRODUCTS
from pipeline_lib.core.errors import IntegrityError, Interrupted, PipelineError
from pipeline_lib.core.files import remove_dir, sweep
from pipeline_lib.core.lock import locked
from pipeline_lib.core.store import Store
from pipeline_lib.core.units import columns, count, size
from pipeline_lib.slurm.job import QueuedJob
from pipeline_lib.status.at_rest import shown
from pipeline_lib.status.catalog import Catalog, Frozen, by_name, changed_at, newest_with, unreadable
from pipeline_lib.upkeep.inventory import (
    EXPERIMENTS,
    OWN_FOLDERS,
    Inventory,
    Leftover,
    Made,
    RunFolder,
    chosen,
    folders_in,
    is_digest,
    runs_beside,
    specs_in,
)
from pipeline_lib.upkeep.live import RECENT_S, Live, ago, find_live, sweeps
from pipeline_lib.upkeep.needs import Needs, named, unmatched
from pipeline_lib.upkeep.usage import Share, by_stage

# Finding what may go from a store when some experiments are kept.
#
# Promises: what a kept experiment or live work needs stays; a kill at any moment leaves nothing that looks sealed and
# is not; the same command again goes on. Everything is removed under its lock, after a last look at the frozen
# experiments.

_ORDER = ("report", "evaluate", "merge", "train", "plan", "shard", "tokenize", "download")


@dataclass(frozen=True)
class CleanupRequest:
    """A request: patterns of names to keep (None: all), whether only the newest configs of each, and an age in s."""

    keep: tuple[str, ...] | None = None
    newest_only: bool = False
    older_than_s: float = 0.0


@dataclass(frozen=True)
class Garbage:
    """What goes and what stays. `spared` are experiments that stay without being asked for, with the reason.

    `unmatched` are patterns of names to keep that match none.
    """

    inventory: Inventory
    kept: Sequence[Frozen]
    spared: Mapping[Path, str]
    experiments: Sequence[Frozen]
    made: Sequence[Made]
    runs: Sequence[RunFolder]
    leftovers: Sequence[Leftover]
    specs: Sequence[Path]
    pointers: Sequence[Path]
    unmatched: Sequence[str]


def find_garbage(inventory: Inventory, request: CleanupRequest, jobs: Sequence[QueuedJob], now_s: float) -> Garbage:
    """Return what may go. Raises ConfigError for an unknown name, IntegrityError if a need cannot be read.

    Raises Unreadable if the system does not let a frozen experiment be read. A pattern of names to keep may match none
    as long as another name or pattern does: otherwise nothing would be kept.
    """
    if unread := next((one for one in inventory.experiments if one.unreadable), None):
        raise unreadable(unread)
    if broken := [one for one in inventory.experiments if not one.parts]:
        raise IntegrityError(
            "nothing was removed, because these experiments cannot be read; delete their files, or restore them:\n"
            + "\n".join(f"  - {one.path}: not a valid experiment file" for one in broken)
        )
    no_match = unmatched(inventory.experiments, request.keep or ())
    asked = _asked(inventory, request, no_match)
    live = find_live(inventory, jobs, now_s)
    spared = {path: why for path, why in live.experiments.items() if path not in asked}
    for experiment in inventory.experiments:
        if experiment.path not in asked and _used_at(inventory, experiment) > now_s - request.older_than_s:
            spared.setdefault(experiment.path, "used more recently than --older-than")
    kept = [one for one in inventory.experiments if one.path in asked or one.path in spared]
    needs = needs_of(inventory, kept, live)
    oldest_s = now_s - max(RECENT_S, request.older_than_s)

    def is_old(path: Path) -> bool:
        return path.name.partition(".")[0] not in needs.digests and (changed_at(path) or oldest_s) < oldest_s

    made = [one for one in inventory.made if one.ref.digest not in needs.digests and one.used_at < oldest_s]
    runs, leftovers, staying = _in_runs(inventory, needs, live, oldest_s)
    specs = map(inventory.store.spec_path, specs_in(inventory.store))
    return Garbage(
        inventory,
        kept,
        spared,
        experiments=[one for one in inventory.experiments if one not in kept],
        made=sorted(made, key=_last_first),
        runs=runs,
        leftovers=leftovers,
        specs=[path for path in specs if is_old(path) and not inventory.names_of(path.stem) & staying],
        pointers=[path for path in _without_directory(inventory) if is_old(path)],
        unmatched=no_match,
    )


def _asked(inventory: Inventory, request: CleanupRequest, no_match: Sequence[str]) -> set[Path]:
    experiments = list(inventory.experiments)
    if request.keep is not None:
        names = [name for name in request.keep if name not in no_match] or request.keep
        experiments = named(experiments, names, "store gc --keep-experiments")
    if request.newest_only:
        experiments = [one for configs in by_name(experiments).values() for one in _newest(configs, inventory.store)]
    return {one.path for one in experiments}


def _newest(configs: Sequence[Frozen], store: Store) -> list[Frozen]:
    """Return the newest of one name's configs, and the newest that is finished: what its name means to users."""
    newest_first = sorted(configs, key=lambda one: one.frozen_at, reverse=True)
    return [newest_first[0], *(newest_with(part, newest_first, store) for part in PRODUCTS)]


def needs_of(inventory: Inventory, kept: Iterable[Frozen], live: Live) -> Needs:
    """Return what `kept` and all live work need. Raises IntegrityError naming everything that cannot be read."""
    needs = Needs(inventory)
    for experiment in kept:
        needs.add_experiment(experiment)
    for digest in live.digests:
        needs.add_digest(digest)
    if needs.problems:
        raise IntegrityError(
            "nothing was removed, because specs of kept experiments cannot be read; run snakemake again with their "
            "configs, which writes these specs, or keep other experiments:\n"
            + "\n".join(f"  - {problem}" for problem in needs.problems)
        )
    return needs


def _used_at(inventory: Inventory, experiment: Frozen) -> float:
    """Return when it was frozen, or something that only it uses was last written, in seconds since 1970."""
    own = {digest for digest in experiment.parts.values() if len(inventory.users[digest]) == 1}
    runs = own | {inventory.lock_of(digest) for digest in own}
    made = (inventory.by_digest.get(digest) for digest in own)
    begun = (inventory.by_run.get(run) for run in runs)
    return max([experiment.frozen_at, *(one.used_at for one in (*made, *begun) if one is not None)])


def _in_runs(
    inventory: Inventory, needs: Needs, live: Live, oldest_s: float
) -> tuple[list[RunFolder], list[Leftover], set[str]]:
    """Return the run folders and leftovers that go, and the names of what stays in runs/ or will be made there.

    The specs of such names stay: only they show that an entry belongs to this store. A training to a rung of halving
    uses the name of the full training's run.
    """
    beside = runs_beside(inventory.store) if inventory.runs else frozenset()
    own = [run for run in inventory.runs if not run.names & beside]
    runs = [run for run in own if not run.names & (needs.runs | needs.digests) and run.used_at < oldest_s]
    lying = [*inventory.leftovers, *(one for run in own if run not in runs for one in run.set_aside)]
    leftovers = [left for left in lying if left.used_at < oldest_s and left.digest not in live.digests]
    staying = {name for run in own if run not in runs for name in run.names}
    staying |= {left.digest for left in inventory.leftovers if left.digest and left not in leftovers}
    return runs, leftovers, needs.runs | staying


def _last_first(one: Made) -> tuple[int, bool, str]:
    """Return a sort key that puts results before what they are made from, also of the same stage."""
    inputs = one.manifest.inputs.values() if one.manifest else ()
    reads_own_stage = any(entry.stage == one.ref.stage for entry in inputs)
    place = _ORDER.index(one.ref.stage) if one.ref.stage in _ORDER else -1
    return place, not reads_own_stage, one.ref.digest


def _without_directory(inventory: Inventory) -> Iterator[Path]:
    """Yield pointers and pages whose directory is missing. Results of rehearsals and rungs stay: they are small."""
    for folder in folders_in(inventory.store.root):
        for path in sorted(folder.glob("*.*")) if folder.name not in OWN_FOLDERS else ():
            digest = path.name.partition(".")[0]
            if is_digest(digest) and digest not in inventory.by_digest:
                yield path


# Removing it, beside jobs that begin and end meanwhile.
#
# Experiments go first, so that a snakemake that wants them writes them anew, which is detected. Then each directory
# goes under its lock: the pointer first, then the directory is renamed to a hidden name, and only then are files
# deleted. Specs go last: without them the same command, after a kill, could not tell what in runs/ belongs to this
# store.

LINKS = ("report.html", "model")


@dataclass
class Meanwhile:
    """The experiments frozen since `garbage` was found, including those to be removed that were frozen again."""

    garbage: Garbage
    _names: frozenset[str] = frozenset()
    _wanted: frozenset[str] = frozenset()

    def wanted(self) -> frozenset[str]:
        """Return the digests and run folders that they need by now. Raises IntegrityError if one cannot be read."""
        store = self.garbage.inventory.store
        try:
            frozen = os.listdir(store.root / EXPERIMENTS)  # noqa: PTH208 - for each directory
        except FileNotFoundError:
            frozen = []
        names = {name for name in frozen if name.endswith(".json") and not name.startswith(".")} - self._expected
        if names == self._names:
            return self._wanted
        needs = Needs(self.garbage.inventory)
        for experiment in Catalog(store).experiments(all_of_them=True):
            if experiment.path.name in names:
                needs.add_experiment(experiment)
        if needs.problems:
            raise IntegrityError(
                "a new experiment cannot be read, so nothing more was removed:\n" + "\n".join(needs.problems)
            )
        self._names, self._wanted = frozenset(names), frozenset(needs.digests | needs.runs)
        return self._wanted

    @cached_property
    def _expected(self) -> frozenset[str]:
        going = {experiment.path for experiment in self.garbage.experiments}
        return frozenset(one.path.name for one in self.garbage.inventory.experiments if one.path not in going)


@dataclass(frozen=True)
class Removal:
    """The removal of `garbage`, and its outcome.

    `left` are items that came into use meanwhile, `failed` those that could not be removed.
    """

    garbage: Garbage
    results: Path
    removed: list[Made | RunFolder | Leftover] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Remove everything that is not needed by now."""
        self.forget()
        self.remove()

    def forget(self) -> None:
        """Remove the frozen experiments, except those frozen again since, and the sweeps that have none left."""
        for experiment in self.garbage.experiments:
            if changed_at(experiment.path) == experiment.frozen_at:
                self._unlink(experiment.path)
        for path, experiments in sweeps(self.garbage.inventory.store.root):
            if experiments and not any(os.path.lexists(one) for one in experiments):
                self._unlink(path)

    def remove(self) -> None:
        """Remove what was not asked for since `garbage` was found."""
        garbage, inventory = self.garbage, self.garbage.inventory
        for one in garbage.made:
            self._remove(one, inventory.lock_of(one.ref.digest))
        for run in garbage.runs:
            self._remove(run, run.name)
        for leftover in garbage.leftovers:
            self._remove(leftover, inventory.lock_of(leftover.digest) if leftover.digest else None)
        self._drop_links()
        for path in garbage.pointers:
            if path.name.partition(".")[0] not in self._meanwhile.wanted():
                self._unlink(path)
        still_there = {name for run in garbage.runs if os.path.lexists(run.path) for name in run.names}
        still_there |= {left.digest for left in garbage.leftovers if left.digest and os.path.lexists(left.path)}
        for path in garbage.specs:
            if not inventory.names_of(path.stem) & (self._meanwhile.wanted() | still_there):
                self._unlink(path)

    def raise_failed(self) -> None:
        """Raise PipelineError listing what could not be removed, if there is anything."""
        if self.failed:
            raise PipelineError("\n".join(["these could not be removed:", *(f"  - {line}" for line in self.failed)]))

    @cached_property
    def _meanwhile(self) -> Meanwhile:
        return Meanwhile(self.garbage)

    def _remove(self, what: Made | RunFolder | Leftover, lock: str | None) -> None:
        """Remove `what`, unless its lock is taken or an experiment needs it by now.

        Debris without a stage's name needs no lock (None).
        """
        names = what.names if isinstance(what, RunFolder) else {what.path.name}
        path = self.garbage.inventory.store.lock_path(lock) if lock is not None else None
        try:
            with locked(path, _refuse) if path else nullcontext():
                if {*names, lock} & self._meanwhile.wanted():
                    self.left.append(f"{what.path}: an experiment that was started meanwhile needs it")
                elif os.path.lexists(what.path):
                    _delete(what.path)
                    self.removed.append(what)
        except Interrupted as busy:
            self.left.append(str(busy))
        except OSError as error:
            self.failed.append(f"{error.filename or what.path}: {error.strerror or error}")

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self.failed.append(f"{path}: {error.strerror or error}")

    def _drop_links(self) -> None:
        root = self.garbage.inventory.store.root.resolve()
        for link in [folder / name for folder in folders_in(self.results) for name in LINKS]:
            if link.is_symlink() and not link.exists() and link.resolve().is_relative_to(root):
                self._unlink(link)
                with suppress(OSError):  # holds something of the user's
                    link.parent.rmdir()


def _delete(path: Path) -> None:
    """Delete what is at `path`, after the pointer and the page that refer to it."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for suffix in (".ok", ".html"):
        path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)
    remove_dir(path)
    sweep(path.parent, path.name)
    for left in path.parent.glob(f".*{path.name}-*"):
        raise PermissionError(13, "you may not delete all of it; its owner can", str(left))


def _refuse(text: str) -> None:
    raise Interrupted(text)


# Lines for a terminal: the contents of a store, their sizes, and what goes.

LARGEST = 20  # experiments that `du` shows without being asked for
NAMES = 3  # of experiments that use a directory
OTHERS = "of another store or an unknown stage"


def experiment_lines(found: Sequence[Share], inventory: Inventory, now_s: float) -> list[str]:
    """Return a line for each experiment name, and one for what no experiment names."""
    rows: list[tuple[str, ...]] = [("experiment", "configs", "stages", "own", "shared", "checkpoints", "used", "")]
    for share in found:
        problem = f"{_directories(share.damaged)} damaged" if share.damaged else ""
        if any(one.unreadable for one in share.configs):
            problem = "its file cannot be read"
        elif not share.parts:
            problem = "not a valid experiment file; delete it and run snakemake again"
        counts = (str(len(share.configs)), f"{share.sealed}/{share.parts}")
        sizes = (size(share.own), size(share.shared), size(share.checkpoints))
        rows.append((shown(share.name), *counts, *sizes, ago(now_s - share.used_at), problem))
    orphans = [one for one in inventory.made if one.ref.digest not in inventory.users]
    lines = columns(rows) if found else [f"{inventory.store.root}: no experiments"]
    if orphans or inventory.leftovers:
        total = size(sum(one.bytes for one in orphans) + sum(left.bytes for left in inventory.leftovers))
        left = count(len(inventory.leftovers), "leftovers of killed jobs")
        lines.append(f"used by no experiment: {_directories(len(orphans))} and {left}, {total}")
    return lines


def directory_lines(inventory: Inventory, digests: set[str] | None, now_s: float) -> list[str]:
    """Return a line for each stage directory, run folder and leftover; with `digests` only for those."""
    rows = [("what", "digest", "size", "state", "used", "by")]
    made, runs = chosen(inventory, digests)
    for one in made:
        used = ago(now_s - one.used_at)
        rows.append((one.ref.stage, one.ref.digest, size(one.bytes), one.state, used, _by(inventory, one)))
    for run in runs:
        saved = f"{size(run.checkpoint_bytes)} of checkpoints" if run.checkpoint_bytes else ""
        rows.append(("run", run.name, size(run.bytes), "", ago(now_s - run.used_at), saved))
    lines = columns(rows)
    lines += [f"set aside by rewind: {_path(one.path)}, {size(one.bytes)}" for run in runs for one in run.set_aside]
    if digests is None:
        lines += [f"left by a killed job: {_path(left.path)}, {size(left.bytes)}" for left in inventory.leftovers]
        lines += [f"{OTHERS}: {_path(other.path)}, {size(other.bytes)}" for other in inventory.others]
        lines += [f"not made by any stage: {_path(path)}" for path in inventory.foreign]
    return lines + [f"{one.state}: {shown(one.reason)}" for one in made if one.reason]


def use_lines(inventory: Inventory, logs: Path, found: Sequence[Share], is_named: bool) -> list[str]:
    """Return lines of the bytes by stage and by experiment, the largest first."""
    lines = []
    if not is_named:
        uses = by_stage(inventory, logs)
        rows = [(what, f"{number:,}", size(taken)) for what, number, taken in uses]
        total = ("together", "", size(sum(taken for _, _, taken in uses)))
        lines = [*columns([("what", "count", "size"), *rows, total]), ""]
    largest = sorted(found, key=lambda share: -share.own - share.checkpoints)
    some = largest if is_named else largest[:LARGEST]
    lines += columns(
        [("experiment", "own", "shared", "checkpoints")]
        + [(shown(one.name), size(one.own), size(one.shared), size(one.checkpoints)) for one in some]
    )
    if others := largest[len(some) :]:
        own = size(sum(one.own + one.checkpoints for one in others))
        lines.append(f"and {count(len(others), 'experiments')} with {own} of their own; give their names to list them")
    return lines


def garbage_lines(garbage: Garbage, is_all_kept: bool) -> Iterator[str]:
    """Yield lines of what goes, what stays without being asked for, and the total."""
    inventory = garbage.inventory
    going = {one.ref.digest for one in garbage.made}
    for experiment in garbage.experiments:
        parts = [inventory.by_digest[digest] for digest in set(experiment.parts.values()) & going]
        name = f"{shown(experiment.name)} ({experiment.path.stem})"
        yield f"experiment {name}: {_directories(len(parts))}, {size(sum(one.bytes for one in parts))}"
    rows = [(one.ref.stage, one.ref.digest, size(one.bytes), _by(inventory, one)) for one in garbage.made]
    rows += [("run", run.name, size(run.bytes), "") for run in garbage.runs]
    rows += [("leftover", _path(left.path), size(left.bytes), "") for left in garbage.leftovers]
    yield from columns(rows)
    for pattern in garbage.unmatched:
        yield f"warning: no experiment matches {shown(pattern)!r}, so this pattern keeps nothing"
    for path, why in garbage.spared.items():
        name = next(one.name for one in inventory.experiments if one.path == path)
        yield f"also kept: {shown(name)} ({path.stem}): {shown(why)}"
    if others := inventory.others:
        yield f"not removed from runs/, {OTHERS}: {len(others):,}, {size(sum(one.bytes for one in others))}"
    if is_all_kept:
        yield "all experiments are kept: --keep-experiments was not given"
    directories: list[Made | RunFolder | Leftover] = [*garbage.made, *garbage.runs, *garbage.leftovers]
    total_bytes = sum(one.bytes for one in directories)
    totals = (
        count(len(garbage.experiments), "experiments"),
        _directories(len(garbage.made)),
        count(len(garbage.runs), "runs"),
        count(len(garbage.leftovers), "leftovers"),
        count(len(garbage.specs), "specs"),
    )
    yield f"{count(len(garbage.kept), 'experiments')} kept; {', '.join(totals)} go: {size(total_bytes)}"


def removal_lines(removal: Removal) -> Iterator[str]:
    """Yield lines of the outcome of a removal."""
    for line in removal.left:
        yield f"left alone: {shown(line)}"
    yield f"removed {_directories(len(removal.removed))}, {size(sum(one.bytes for one in removal.removed))}"


def _by(inventory: Inventory, one: Made) -> str:
    names = list(dict.fromkeys(shown(user.name) for user in inventory.users.get(one.ref.digest, [])))
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more if names else "orphan: no experiment uses it"


def _directories(number: int) -> str:
    return "1 directory" if number == 1 else f"{number:,} directories"


def _path(path: Path) -> str:
    return shown(str(path))
