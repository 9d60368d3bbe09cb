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
from pipeline_lib.slurm.job import QueuedJob
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
    if unread := next((one for one in inventory.experiments if one.unreadable), None):
        raise unreadable(unread)
    if broken := [one for one in inventory.experiments if not one.parts]:
        raise IntegrityError(
            "nothing was removed, because these experiments cannot be read; delete their files, or "
            "restore them:\n"
            + "\n".join(f"  - {one.path}: not a valid experiment file" for one in broken)
        )
    no_match = unmatched(inventory.experiments, request.keep or ())
    asked = _asked(inventory, request, no_match)
    live = find_live(inventory, jobs, now_s)
    spared = {path: why for path, why in live.experiments.items() if path not in asked}
    for experiment in inventory.experiments:
        if (
            experiment.path not in asked
            and _used_at(inventory, experiment) > now_s - request.older_than_s
        ):
            spared.setdefault(experiment.path, "used more recently than --older-than")
    kept = [one for one in inventory.experiments if one.path in asked or one.path in spared]
    needs = needs_of(inventory, kept, live)
    oldest_s = now_s - max(RECENT_S, request.older_than_s)

    def is_old(path: Path) -> bool:
        return (
            path.name.partition(".")[0] not in needs.digests
            and (changed_at(path) or oldest_s) < oldest_s
        )

    made = [
        one
        for one in inventory.made
        if one.ref.digest not in needs.digests and one.used_at < oldest_s
    ]
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
        specs=[
            path for path in specs if is_old(path) and not inventory.names_of(path.stem) & staying
        ],
        pointers=[path for path in _without_directory(inventory) if is_old(path)],
        unmatched=no_match,
    )


def _asked(inventory: Inventory, request: CleanupRequest, no_match: Sequence[str]) -> set[Path]:
    experiments = list(inventory.experiments)
    if request.keep is not None:
        names = [name for name in request.keep if name not in no_match] or request.keep
        experiments = named(experiments, names, "store gc --keep-experiments")
    if request.newest_only:
        experiments = [
            one
            for configs in by_name(experiments).values()
            for one in _newest(configs, inventory.store)
        ]
    return {one.path for one in experiments}


def _newest(configs: Sequence[Frozen], store: Store) -> list[Frozen]:
    """Return the newest of one name's configs, and the newest finished one, which users mean.

    The latter is what the name means to users.
    """
    newest_first = sorted(configs, key=lambda one: one.frozen_at, reverse=True)
    return [newest_first[0], *(newest_with(part, newest_first, store) for part in PRODUCTS)]


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
    runs = own | {inventory.lock_of(digest) for digest in own}
    made = (inventory.by_digest.get(digest) for digest in own)
    begun = (inventory.by_run.get(run) for run in runs)
    return max([experiment.frozen_at, *(one.used_at for one in (*made, *begun) if one is not None)])


def _in_runs(
    inventory: Inventory, needs: Needs, live: Live, oldest_s: float
) -> tuple[list[RunFolder], list[Leftover], set[str]]:
    """Return the run folders and leftovers that go, and what names stay or will be in runs/.

    The specs of such names stay: only they show that an entry belongs to this store. A training to
    a rung of halving uses the name of the full training's run.
    """
    beside = runs_beside(inventory.store) if inventory.runs else frozenset()
    own = [run for run in inventory.runs if not run.names & beside]
    runs = [
        run
        for run in own
        if not run.names & (needs.runs | needs.digests) and run.used_at < oldest_s
    ]
    lying = [
        *inventory.leftovers,
        *(one for run in own if run not in runs for one in run.set_aside),
    ]
    leftovers = [
        left for left in lying if left.used_at < oldest_s and left.digest not in live.digests
    ]
    staying = {name for run in own if run not in runs for name in run.names}
    staying |= {
        left.digest for left in inventory.leftovers if left.digest and left not in leftovers
    }
    return runs, leftovers, needs.runs | staying


def _last_first(one: Made) -> tuple[int, bool, str]:
    """Return a sort key: results before what they are made from, also within a stage."""
    inputs = one.manifest.inputs.values() if one.manifest else ()
    reads_own_stage = any(entry.stage == one.ref.stage for entry in inputs)
    place = _LAST_FIRST.index(one.ref.stage) if one.ref.stage in STAGES else -1
    return place, not reads_own_stage, one.ref.digest


def _without_directory(inventory: Inventory) -> Iterator[Path]:
    """Yield pointers and pages whose directory is missing.

    Results of rehearsals and rungs stay: they are small.
    """
    for folder in folders_in(inventory.store.root):
        for path in sorted(folder.glob("*.*")) if folder.name not in OWN_FOLDERS else ():
            digest = path.name.partition(".")[0]
            if is_digest(digest) and digest not in inventory.by_digest:
                yield path
