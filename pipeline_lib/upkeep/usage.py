"""Usage of a store: by experiment name, its own and shared bytes; by stage, the total."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.status.catalog import Frozen, by_name
from pipeline_lib.upkeep.inventory import (
    DAMAGED,
    EXPERIMENTS,
    SEALED,
    SPECS,
    SWEEPS,
    Inventory,
    folders_in,
    size_below,
)
from pipeline_lib.upkeep.needs import named


@dataclass(frozen=True)
class Share:
    """The usage by the frozen experiments of one name: sealed and damaged directories, and bytes.

    `shared` are the bytes that another name uses too, `checkpoints` those in its run folders.
    `used_at` is when it was last frozen or made, in seconds since 1970.
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
    found = []
    for name, configs in by_name(inventory.experiments).items():
        found.append(_share(inventory, name, configs))
    return sorted(found, key=lambda share: (-share.used_at, share.name))


def _share(inventory: Inventory, name: str, configs: Sequence[Frozen]) -> Share:
    digests = _digests(configs)
    made = [inventory.by_digest[digest] for digest in digests if digest in inventory.by_digest]
    used_at = max(one.frozen_at for one in configs)
    own_bytes = 0
    shared_bytes = 0
    for one in made:
        users = {user.name for user in inventory.users[one.ref.digest]}
        if users == {name}:
            own_bytes += one.bytes
            used_at = max(used_at, one.used_at)
        else:
            shared_bytes += one.bytes
    checkpoint_bytes = 0
    for run in run_names(inventory, configs):
        if run in inventory.by_run:
            checkpoint_bytes += inventory.by_run[run].checkpoint_bytes
    return Share(
        name,
        configs,
        parts=len(digests),
        sealed=sum(one.state == SEALED for one in made),
        damaged=sum(one.state == DAMAGED for one in made),
        own=own_bytes,
        shared=shared_bytes,
        checkpoints=checkpoint_bytes,
        used_at=used_at,
    )


def _digests(experiments: Iterable[Frozen]) -> set[str]:
    """Return the digests of the stage instances of `experiments`."""
    digests: set[str] = set()
    for one in experiments:
        digests.update(one.parts.values())
    return digests


def run_names(inventory: Inventory, experiments: Iterable[Frozen]) -> set[str]:
    """Return the names of the run folders of the stage instances of `experiments`."""
    names = set()
    for one in experiments:
        for part, digest in one.parts.items():
            if part == "train":
                names.add(inventory.lock_of(digest))
            else:
                names.add(digest)
    return names


def used_by(
    inventory: Inventory, names: Sequence[str], where: str
) -> tuple[set[str], set[str] | None]:
    """Return the experiments that match `names` (all if empty), and the digests they use.

    Without `names` the digests are None, which means all. Raises ConfigError, with `where` as its
    place, for an unknown name.
    """
    if not names:
        return {one.name for one in inventory.experiments}, None
    found = named(inventory.experiments, names, where)
    return {one.name for one in found}, _digests(found) | run_names(inventory, found)


def by_stage(inventory: Inventory, logs: Path) -> list[tuple[str, int, int]]:
    """Return what takes space, with count and bytes: every stage, then all beside the stages."""
    stages: dict[str, list[int]] = {}
    for one in inventory.made:
        stages.setdefault(one.ref.stage, []).append(one.bytes)
    uses = [(stage, len(sizes), sum(sizes)) for stage, sizes in stages.items()]
    uses.sort(key=lambda use: -use[2])

    saved: list[int] = []
    aside: list[int] = []
    other_bytes = 0
    for run in inventory.runs:
        if run.checkpoint_bytes > 0:
            saved.append(run.checkpoint_bytes)
        of_run = [one.bytes for one in run.set_aside]
        aside += of_run
        other_bytes += run.bytes - run.checkpoint_bytes - sum(of_run)
    uses.append(("checkpoints in runs/", len(saved), sum(saved)))
    uses.append(("checkpoints set aside in runs/", len(aside), sum(aside)))
    uses.append(("other files in runs/", len(inventory.runs), other_bytes))

    others = inventory.others
    uses.append(("of other stores in runs/", len(others), sum(one.bytes for one in others)))
    left = inventory.leftovers
    uses.append(("left by killed jobs", len(left), sum(one.bytes for one in left)))
    folders = folders_in(inventory.store.root)
    small = [folder for folder in folders if folder.name in (SPECS, EXPERIMENTS, SWEEPS)]
    small_bytes = sum(size_below(folder)[0] for folder in small)
    uses.append(("specs, experiments", len(small), small_bytes))
    uses.append((f"logs in {logs}", int(logs.is_dir()), size_below(logs)[0]))
    return uses
