"""What somebody works on, or is about to: by its locks, by SLURM's queue, and by what was written just now.

A local snakemake leaves no trace between two stages but what the one before has written, and a job that waits in the
queue has no lock yet. So whatever changed within RECENT_S counts as live, and so does all that one snakemake makes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.base.lock import describe, holder
from pipeline_lib.base.spec import DIGEST_CHARS
from pipeline_lib.slurm.queue import QueuedJob
from pipeline_lib.status.catalog import Frozen
from pipeline_lib.status.tail import json_object
from pipeline_lib.upkeep.inventory import EXPERIMENTS, LOCKS, SWEEPS, Inventory, is_digest

RECENT_S = 600.0
DAY_S = 86400.0
_DIGESTS = re.compile(rf"(?<![0-9a-f])[0-9a-f]{{{DIGEST_CHARS}}}(?![0-9a-f])")


@dataclass(frozen=True)
class Live:
    """Digests of stage instances and runs that are worked on, and frozen experiments by path, each with the reason."""

    digests: Mapping[str, str]
    experiments: Mapping[Path, str]


def find_live(inventory: Inventory, jobs: Sequence[QueuedJob], now_s: float) -> Live:
    """What is live at `now_s`, in seconds since 1970, `jobs` are those in SLURM's queue."""
    digests: dict[str, str] = {}
    for digest, why in (*_held(inventory), *_queued(jobs), *_written(inventory, now_s)):
        digests.setdefault(digest, why)
        digests.setdefault(inventory.lock_of(digest), why)  # of a training to a rung of halving: the whole one's run
    experiments: dict[Path, str] = {}
    for experiment in inventory.experiments:
        if reason := _reason(inventory, experiment, digests, now_s):
            experiments[experiment.path] = reason
    known = {experiment.path for experiment in inventory.experiments}  # of an older sweep some may be gone
    for _, swept in sweeps(inventory.store.root):
        if live := next((path for path in swept if path in experiments), None):
            for path in known.intersection(swept):
                experiments.setdefault(path, f"of one sweep with an experiment that is live ({experiments[live]})")
    return Live(digests, experiments)


def sweeps(root: Path) -> Iterator[tuple[Path, list[Path]]]:
    """The frozen sweeps of the store at `root`, and the experiments of each: one snakemake makes them all."""
    for path in sorted((root / SWEEPS).glob("*.json")):
        names = json_object(path).get("experiments")
        if isinstance(names, list):
            yield path, [root / EXPERIMENTS / name for name in names if isinstance(name, str)]


def _reason(inventory: Inventory, experiment: Frozen, digests: Mapping[str, str], now_s: float) -> str | None:
    if now_s - experiment.frozen_at < RECENT_S:
        return f"frozen {ago(now_s - experiment.frozen_at)}"
    used = [*experiment.parts.values()]
    if train := experiment.parts.get("train"):
        used.append(inventory.lock_of(train))
    return next((digests[digest] for digest in used if digest in digests), None)


def _held(inventory: Inventory) -> Iterable[tuple[str, str]]:
    for path in sorted((inventory.store.root.parent / "runs" / LOCKS).glob("*")):
        if is_digest(path.name) and (owner := holder(path)) is not None:
            yield path.name, f"{describe(owner)} works on {path.name}"


def _queued(jobs: Iterable[QueuedJob]) -> Iterable[tuple[str, str]]:
    for job in jobs:
        for digest in _DIGESTS.findall(job.comment):
            yield digest, f"SLURM job {job.id} is to make {digest}: {job.shown}"


def _written(inventory: Inventory, now_s: float) -> Iterable[tuple[str, str]]:
    for one in inventory.made:
        if now_s - one.used_at < RECENT_S:
            yield one.ref.digest, f"{one.ref.stage} {one.ref.digest} was written {ago(now_s - one.used_at)}"
    for run in inventory.runs:
        if now_s - run.used_at < RECENT_S:
            yield run.name, f"{run.path} was written to {ago(now_s - run.used_at)}"


def ago(age_s: float) -> str:
    """How long ago, roughly: `5 d ago`, `3 h ago`, `0 min ago`."""
    for unit, size_s in (("d", DAY_S), ("h", 3600.0)):
        if age_s >= 2 * size_s:
            return f"{int(age_s // size_s)} {unit} ago"
    return f"{max(0, int(age_s // 60))} min ago"
