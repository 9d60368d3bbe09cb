"""Who uses what of a store: by experiment name, what is its own and what others use too; by stage, how much it is."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.status.catalog import Frozen
from pipeline_lib.upkeep.inventory import DAMAGED, EXPERIMENTS, SEALED, SPECS, SWEEPS, Inventory, folders_in, size_below
from pipeline_lib.upkeep.needs import named


@dataclass(frozen=True)
class Share:
    """What the frozen experiments of one name use: sealed and damaged directories, and bytes.

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
    """One for each name, the one that was used last first."""
    by_name: dict[str, list[Frozen]] = {}
    for experiment in inventory.experiments:
        by_name.setdefault(experiment.name, []).append(experiment)
    users = {digest: {one.name for one in found} for digest, found in inventory.users.items()}
    found = [_share(inventory, name, configs, users) for name, configs in by_name.items()]
    return sorted(found, key=lambda share: (-share.used_at, share.name))


def run_names(inventory: Inventory, experiments: Iterable[Frozen]) -> set[str]:
    """The run folders of the stage instances of `experiments`."""
    return {
        inventory.lock_of(digest) if part == "train" else digest
        for one in experiments
        for part, digest in one.parts.items()
    }


def used_by(inventory: Inventory, names: Sequence[str], where: str) -> tuple[set[str], set[str] | None]:
    """The experiments that `names` mean, all without any, and the digests of their stage instances and runs.

    Without names the digests are None, for all. Raises ConfigError, of `where`, for a name that is not there.
    """
    found = named(inventory.experiments, names, where) if names else list(inventory.experiments)
    digests = {digest for one in found for digest in one.parts.values()} | run_names(inventory, found)
    return {one.name for one in found}, digests if names else None


@dataclass(frozen=True)
class Use:
    """A line of what there is: how many of what, and their bytes."""

    what: str
    count: int
    bytes: int


def by_stage(inventory: Inventory, logs: Path) -> list[Use]:
    """What every stage takes, and what lies beside."""
    stages: dict[str, list[int]] = {}
    for one in inventory.made:
        stages.setdefault(one.ref.stage, []).append(one.bytes)
    sealed = [Use(stage, len(found), sum(found)) for stage, found in stages.items()]
    runs, left = inventory.runs, inventory.leftovers
    small = [folder for folder in folders_in(inventory.store.root) if folder.name in (SPECS, EXPERIMENTS, SWEEPS)]
    return [
        *sorted(sealed, key=lambda use: -use.bytes),
        Use(
            "checkpoints in runs/",
            sum(run.checkpoint_bytes > 0 for run in runs),
            sum(run.checkpoint_bytes for run in runs),
        ),
        Use("other files in runs/", len(runs), sum(run.bytes - run.checkpoint_bytes for run in runs)),
        Use("of other stores in runs/", len(inventory.others), sum(one.bytes for one in inventory.others)),
        Use("left by killed jobs", len(left), sum(one.bytes for one in left)),
        Use("specs, experiments", len(small), sum(size_below(folder)[0] for folder in small)),
        Use(f"logs in {logs}", int(logs.is_dir()), size_below(logs)[0]),
    ]


def _share(
    inventory: Inventory,
    name: str,
    configs: Sequence[Frozen],
    users: Mapping[str, set[str]],
) -> Share:
    digests = {digest for one in configs for digest in one.parts.values()}
    made = [inventory.by_digest[digest] for digest in digests if digest in inventory.by_digest]
    own = [one for one in made if users[one.ref.digest] == {name}]
    return Share(
        name,
        configs,
        len(digests),
        sum(one.state == SEALED for one in made),
        sum(one.state == DAMAGED for one in made),
        sum(one.bytes for one in own),
        sum(one.bytes for one in made) - sum(one.bytes for one in own),
        sum(
            run.checkpoint_bytes
            for run_name in run_names(inventory, configs)
            if (run := inventory.by_run.get(run_name)) is not None
        ),
        max([*(one.frozen_at for one in configs), *(one.used_at for one in own)]),
    )
