"""What may go from a store when some experiments are kept, and removing it while others work.

Promise: what a kept experiment or live work needs stays; a kill at any moment leaves nothing that looks sealed and is
not; the same command again goes on. Everything is removed under its lock, and after a last look at what is frozen.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.slurm.queue import QueuedJob
from pipeline_lib.status.catalog import Frozen, unreadable
from pipeline_lib.status.tail import changed_at
from pipeline_lib.upkeep.inventory import (
    OWN_FOLDERS,
    Inventory,
    Leftover,
    Made,
    RunFolder,
    folders_in,
    is_digest,
    specs_in,
)
from pipeline_lib.upkeep.live import RECENT_S, Live, find_live
from pipeline_lib.upkeep.needs import Needs, named, unmatched
from pipeline_lib.upkeep.neighbours import runs_beside

_ORDER = ("report", "evaluate", "merge", "train", "plan", "shard", "tokenize", "download")


@dataclass(frozen=True)
class Request:
    """What is asked for: patterns of names to keep (None: all), of each only the newest config, and an age in s."""

    keep: tuple[str, ...] | None = None
    newest_only: bool = False
    older_than_s: float = 0.0


@dataclass(frozen=True)
class Garbage:
    """What goes. `spared` are experiments that are not asked to be kept and stay all the same, with the reason.

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

    @property
    def bytes(self) -> int:
        """Of directories, runs and leftovers together."""
        sizes = (
            [one.bytes for one in self.made],
            [one.bytes for one in self.runs],
            [one.bytes for one in self.leftovers],
        )
        return sum(map(sum, sizes))


def find_garbage(inventory: Inventory, request: Request, jobs: Sequence[QueuedJob], now_s: float) -> Garbage:
    """What may go. Raises ConfigError for a name that is not there, IntegrityError where a need cannot be read.

    Raises Unreadable where the system does not let a frozen experiment be read.
    A pattern of names to keep may match none as long as another name or pattern does: else nothing would be kept.
    """
    if unread := next((one for one in inventory.experiments if one.unreadable), None):
        raise unreadable(unread)
    if broken := [one for one in inventory.experiments if not one.parts]:
        raise IntegrityError(
            "what these experiments need cannot be read, so nothing is removed; delete their files, or restore them:\n"
            + "\n".join(f"  - {one.path}: not a frozen experiment" for one in broken)
        )
    no_match = unmatched(inventory.experiments, request.keep or ())
    asked = _asked(inventory, request, no_match)
    live = find_live(inventory, jobs, now_s)
    spared = {path: why for path, why in live.experiments.items() if path not in asked}
    for experiment in inventory.experiments:
        if experiment.path not in asked and _used_at(inventory, experiment) > now_s - request.older_than_s:
            spared.setdefault(experiment.path, "used within the days of --older-than")
    kept = [one for one in inventory.experiments if one.path in asked or one.path in spared]
    needs = needs_of(inventory, kept, live)
    oldest_s = now_s - max(RECENT_S, request.older_than_s)
    runs, leftovers, staying = _in_runs(inventory, needs, live, oldest_s)
    specs = map(inventory.store.spec_path, specs_in(inventory.store))
    return Garbage(
        inventory,
        kept,
        spared,
        [one for one in inventory.experiments if one not in kept],
        sorted(_unneeded(inventory.made, needs, oldest_s), key=_last_first),
        runs,
        leftovers,
        [path for path in specs if _is_old(path, needs, oldest_s) and not inventory.names_of(path.stem) & staying],
        [path for path in _beside(inventory) if _is_old(path, needs, oldest_s)],
        no_match,
    )


def needs_of(inventory: Inventory, kept: Iterable[Frozen], live: Live) -> Needs:
    """What `kept` and all that is live need. Raises IntegrityError naming all that cannot be read."""
    needs = Needs(inventory)
    for experiment in kept:
        needs.add_experiment(experiment)
    for digest in live.digests:
        needs.add_digest(digest)
    if needs.problems:
        raise IntegrityError(
            "what is to be kept cannot be read, so nothing is removed; run snakemake with those configs again, which "
            "writes what is missing, or keep others:\n" + "\n".join(f"  - {problem}" for problem in needs.problems)
        )
    return needs


def _asked(inventory: Inventory, request: Request, no_match: Sequence[str]) -> set[Path]:
    """The frozen experiments to be kept; they come newest first. Raises ConfigError where no name means any."""
    experiments = list(inventory.experiments)
    if request.keep is not None:
        names = [name for name in request.keep if name not in no_match] or request.keep
        experiments = named(experiments, names, "store gc --keep-experiments")
    if request.newest_only:
        newest: dict[str, Frozen] = {}
        for one in experiments:
            if newest.setdefault(one.name, one).frozen_at < one.frozen_at:
                newest[one.name] = one
        experiments = list(newest.values())
    return {one.path for one in experiments}


def _used_at(inventory: Inventory, experiment: Frozen) -> float:
    """When it was frozen, or something that only it uses was written, in seconds since 1970."""
    own = {digest for digest in experiment.parts.values() if len(inventory.users[digest]) == 1}
    runs = own | {inventory.lock_of(digest) for digest in own}
    made = (inventory.by_digest.get(digest) for digest in own)
    begun = (inventory.by_run.get(run) for run in runs)
    return max([experiment.frozen_at, *(one.used_at for one in (*made, *begun) if one is not None)])


def _unneeded(made: Iterable[Made], needs: Needs, oldest_s: float) -> Iterator[Made]:
    return (one for one in made if one.ref.digest not in needs.digests and one.used_at < oldest_s)


def _in_runs(
    inventory: Inventory, needs: Needs, live: Live, oldest_s: float
) -> tuple[list[RunFolder], list[Leftover], set[str]]:
    """The run folders and leftovers that go, and the names of what stays in runs/, or is to come there.

    The specs of such names stay: only they tell that it is of this store. A training to a rung of halving has the
    name of the whole one's run.
    """
    beside = runs_beside(inventory.store) if inventory.runs else frozenset()
    own = [run for run in inventory.runs if not run.names & beside]
    runs = [run for run in own if not run.names & (needs.runs | needs.digests) and run.used_at < oldest_s]
    leftovers = [left for left in inventory.leftovers if left.used_at < oldest_s and left.digest not in live.digests]
    staying = {name for run in own if run not in runs for name in run.names}
    staying |= {left.digest for left in inventory.leftovers if left.digest and left not in leftovers}
    return runs, leftovers, needs.runs | staying


def _last_first(one: Made) -> tuple[int, str]:
    """Results before what they are made from."""
    return (_ORDER.index(one.ref.stage) if one.ref.stage in _ORDER else -1, one.ref.digest)


def _is_old(path: Path, needs: Needs, oldest_s: float) -> bool:
    return path.name.partition(".")[0] not in needs.digests and (changed_at(path) or oldest_s) < oldest_s


def _named_by_digest(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.*")) if is_digest(path.name.partition(".")[0])]


def _beside(inventory: Inventory) -> Iterator[Path]:
    """Pointers and pages whose directory is not there. What rehearsals and rungs found stays: it is small."""
    for folder in folders_in(inventory.store.root):
        if folder.name in OWN_FOLDERS:
            continue
        for path in _named_by_digest(folder):
            if path.name.partition(".")[0] not in inventory.by_digest:
                yield path
