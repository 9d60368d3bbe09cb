"""Finding what may go from a store when some experiments are kept.

Promises: what a kept experiment or live work needs stays; a kill at any moment leaves nothing that
looks sealed and is not; the same command again goes on. Everything is removed under its lock, after
a last look at the frozen experiments.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.config.stages import PRODUCTS, STAGES
from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.store import Store
from pipeline_lib.slurm.queue import QueuedJob
from pipeline_lib.status.catalog import Frozen, by_name, changed_at, newest_with, unreadable
from pipeline_lib.upkeep.inventory import (
    OWN_FOLDERS,
    Inventory,
    Leftover,
    Made,
    RunFolder,
    folders_in,
    is_digest,
    runs_beside,
    specs_in,
)
from pipeline_lib.upkeep.live import RECENT_S, Live, find_live
from pipeline_lib.upkeep.needs import Needs, named, unmatched

_LAST_FIRST = tuple(reversed(STAGES))


@dataclass(frozen=True)
class CleanupRequest:
    """A request: name patterns to keep (None: all), if only newest configs, and an age in s.

    The newest configs are those of each name.
    """

    keep: tuple[str, ...] | None = None
    newest_only: bool = False
    older_than_s: float = 0.0


@dataclass(frozen=True)
class Garbage:
    """What goes and what stays.

    `spared` are experiments that stay without being asked for, with the reason. `unmatched` are
    patterns of names to keep that match none.
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


def find_garbage(
    inventory: Inventory, request: CleanupRequest, jobs: Sequence[QueuedJob], now_s: float
) -> Garbage:
    """Return what may go.

    Raises ConfigError for an unknown name, IntegrityError if a need cannot be read. Raises
    Unreadable if the system does not let a frozen experiment be read. A pattern of names to keep
    may match none as long as another name or pattern does: otherwise nothing would be kept.
    """
    _refuse_unreadable(inventory.experiments)
    no_match = unmatched(inventory.experiments, request.keep or ())
    asked = _asked(inventory, request, no_match)
    live = find_live(inventory, jobs, now_s)
    spared = _spared(inventory, asked, live, now_s - request.older_than_s)
    kept = [one for one in inventory.experiments if one.path in asked or one.path in spared]
    needs = needs_of(inventory, kept, live)
    oldest_s = now_s - max(RECENT_S, request.older_than_s)
    runs, leftovers, staying = _in_runs(inventory, needs, live, oldest_s)
    lonely = _without_directory(inventory)
    return Garbage(
        inventory,
        kept,
        spared,
        experiments=[one for one in inventory.experiments if one not in kept],
        made=_made_that_go(inventory, needs, oldest_s),
        runs=runs,
        leftovers=leftovers,
        specs=_specs_that_go(inventory, needs, staying, oldest_s),
        pointers=[path for path in lonely if _is_old(path, needs, oldest_s)],
        unmatched=no_match,
    )


def _refuse_unreadable(experiments: Iterable[Frozen]) -> None:
    broken = []
    for experiment in experiments:
        if experiment.unreadable:
            raise unreadable(experiment)
        if not experiment.parts:
            broken.append(experiment)
    if broken:
        raise IntegrityError(
            "nothing was removed, because these experiments cannot be read; delete their files, or "
            "restore them:\n"
            + "\n".join(f"  - {one.path}: not a valid experiment file" for one in broken)
        )


def _asked(inventory: Inventory, request: CleanupRequest, no_match: Sequence[str]) -> set[Path]:
    experiments = list(inventory.experiments)
    if request.keep is not None:
        names = [name for name in request.keep if name not in no_match] or request.keep
        experiments = named(experiments, names, "store gc --keep-experiments")
    if request.newest_only:
        newest: list[Frozen] = []
        for configs in by_name(experiments).values():
            newest += _newest(configs, inventory.store)
        experiments = newest
    return {one.path for one in experiments}


def _newest(configs: Sequence[Frozen], store: Store) -> list[Frozen]:
    """Return the newest of one name's configs, and the newest finished one, which users mean.

    The latter is what the name means to users.
    """
    newest_first = sorted(configs, key=lambda one: one.frozen_at, reverse=True)
    finished = [newest_with(part, newest_first, store) for part in PRODUCTS]
    return newest_first[:1] + finished


def _spared(
    inventory: Inventory, asked: set[Path], live: Live, newest_unused_s: float
) -> dict[Path, str]:
    """Return the experiments that stay without being asked for, with the reason.

    They are live, or were used after `newest_unused_s` (in s since 1970).
    """
    spared = {path: why for path, why in live.experiments.items() if path not in asked}
    for experiment in inventory.experiments:
        if experiment.path in asked or experiment.path in spared:
            continue
        if _used_at(inventory, experiment) > newest_unused_s:
            spared[experiment.path] = "used more recently than --older-than"
    return spared


def needs_of(inventory: Inventory, kept: Iterable[Frozen], live: Live) -> Needs:
    """Return what `kept` and all live work need.

    Raises IntegrityError naming everything that cannot be read.
    """
    needs = Needs(inventory)
    for experiment in kept:
        needs.add_experiment(experiment)
    for digest in live.digests:
        needs.add_digest(digest)
    if needs.problems:
        raise IntegrityError(
            "nothing was removed, because specs of kept experiments cannot be read; run snakemake "
            "again with their configs, which writes these specs, or keep other experiments:\n"
            + "\n".join(f"  - {problem}" for problem in needs.problems)
        )
    return needs


def _used_at(inventory: Inventory, experiment: Frozen) -> float:
    """Return when it, or something only it uses, was frozen or written, in s since 1970.

    It was frozen; what only it uses was last written.
    """
    own = {digest for digest in experiment.parts.values() if len(inventory.users[digest]) == 1}
    newest_s = experiment.frozen_at
    for digest in own:
        if digest in inventory.by_digest:
            newest_s = max(newest_s, inventory.by_digest[digest].used_at)
        for run in inventory.names_of(digest):
            if run in inventory.by_run:
                newest_s = max(newest_s, inventory.by_run[run].used_at)
    return newest_s


def _made_that_go(inventory: Inventory, needs: Needs, oldest_s: float) -> list[Made]:
    """Return the stage directories that go: unused since `oldest_s`, and needed by none."""
    unused = [one for one in inventory.made if one.used_at < oldest_s]
    going = [one for one in unused if one.ref.digest not in needs.digests]
    return sorted(going, key=_last_first)


def _in_runs(
    inventory: Inventory, needs: Needs, live: Live, oldest_s: float
) -> tuple[list[RunFolder], list[Leftover], set[str]]:
    """Return the run folders and leftovers that go, and what names stay or will be in runs/.

    The specs of such names stay: only they show that an entry belongs to this store. A training to
    a rung of halving uses the name of the full training's run.
    """
    beside = runs_beside(inventory.store) if inventory.runs else frozenset()
    needed = needs.runs | needs.digests
    going: list[RunFolder] = []
    lying = list(inventory.leftovers)
    staying = set(needs.runs)
    for run in inventory.runs:
        if run.names & beside:
            continue
        if run.used_at < oldest_s and not run.names & needed:
            going.append(run)
        else:
            lying += run.set_aside
            staying |= run.names
    old = [left for left in lying if left.used_at < oldest_s]
    leftovers = [left for left in old if left.digest not in live.digests]
    for left in inventory.leftovers:
        if left.digest and left not in leftovers:
            staying.add(left.digest)
    return going, leftovers, staying


def _specs_that_go(
    inventory: Inventory, needs: Needs, staying: set[str], oldest_s: float
) -> list[Path]:
    """Return the frozen specs that go: no needed one, and none of a name that stays in runs/."""
    going = []
    for digest in specs_in(inventory.store):
        path = inventory.store.spec_path(digest)
        if _is_old(path, needs, oldest_s) and not inventory.names_of(digest) & staying:
            going.append(path)
    return going


def _is_old(path: Path, needs: Needs, oldest_s: float) -> bool:
    """Return whether the spec or pointer `path` is needed by none and unchanged since `oldest_s`."""
    if path.name.partition(".")[0] in needs.digests:
        return False
    return (changed_at(path) or oldest_s) < oldest_s


def _last_first(one: Made) -> tuple[int, bool, str]:
    """Return a sort key: results before what they are made from, also within a stage."""
    inputs = one.manifest.inputs.values() if one.manifest else ()
    reads_own_stage = any(entry.stage == one.ref.stage for entry in inputs)
    place = -1
    if one.ref.stage in STAGES:
        place = _LAST_FIRST.index(one.ref.stage)
    return place, not reads_own_stage, one.ref.digest


def _without_directory(inventory: Inventory) -> Iterator[Path]:
    """Yield pointers and pages whose directory is missing.

    Results of rehearsals and rungs stay: they are small.
    """
    for folder in folders_in(inventory.store.root):
        if folder.name in OWN_FOLDERS:
            continue
        for path in sorted(folder.glob("*.*")):
            digest = path.name.partition(".")[0]
            if is_digest(digest) and digest not in inventory.by_digest:
                yield path
