"""Usage of a store: by experiment name, its own and shared bytes; by stage, the total."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.status.catalog import Frozen
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
    by_name: dict[str, list[Frozen]] = {}
    for experiment in inventory.experiments:
        by_name.setdefault(experiment.name, []).append(experiment)
    found = []
    for name, configs in by_name.items():
        digests = {digest for one in configs for digest in one.parts.values()}
        made = [inventory.by_digest[digest] for digest in digests if digest in inventory.by_digest]
        own = [
            one
            for one in made
            if all(user.name == name for user in inventory.users[one.ref.digest])
        ]
        own_bytes = sum(one.bytes for one in own)
        runs = [
            inventory.by_run[run]
            for run in run_names(inventory, configs)
            if run in inventory.by_run
        ]
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


def used_by(
    inventory: Inventory, names: Sequence[str], where: str
) -> tuple[set[str], set[str] | None]:
    """Return the experiments that match `names` (all if empty), and the digests they use.

    Without `names` the digests are None, which means all. Raises ConfigError, with `where` as its
    place, for an unknown name.
    """
    found = named(inventory.experiments, names, where) if names else list(inventory.experiments)
    digests = {digest for one in found for digest in one.parts.values()} | run_names(
        inventory, found
    )
    return {one.name for one in found}, digests if names else None


def by_stage(inventory: Inventory, logs: Path) -> list[tuple[str, int, int]]:
    """Return what takes space, with count and bytes: every stage, then all beside the stages."""
    stages: dict[str, list[int]] = {}
    for one in inventory.made:
        stages.setdefault(one.ref.stage, []).append(one.bytes)
    runs = inventory.runs
    left = inventory.leftovers
    others = inventory.others
    small = [
        folder
        for folder in folders_in(inventory.store.root)
        if folder.name in (SPECS, EXPERIMENTS, SWEEPS)
    ]
    saved = [run.checkpoint_bytes for run in runs if run.checkpoint_bytes > 0]
    aside = [one.bytes for run in runs for one in run.set_aside]
    return [
        *sorted(
            ((stage, len(made), sum(made)) for stage, made in stages.items()),
            key=lambda use: -use[2],
        ),
        ("checkpoints in runs/", len(saved), sum(saved)),
        ("checkpoints set aside in runs/", len(aside), sum(aside)),
        (
            "other files in runs/",
            len(runs),
            sum(run.bytes - run.checkpoint_bytes for run in runs) - sum(aside),
        ),
        ("of other stores in runs/", len(others), sum(one.bytes for one in others)),
        ("left by killed jobs", len(left), sum(one.bytes for one in left)),
        ("specs, experiments", len(small), sum(size_below(folder)[0] for folder in small)),
        (f"logs in {logs}", int(logs.is_dir()), size_below(logs)[0]),
    ]
