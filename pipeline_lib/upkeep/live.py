"""What is being worked on, or is about to be: by locks, by SLURM's queue, and by recent writes.

Between two stages a local snakemake leaves no trace but what the first one wrote, and a job that
waits in the queue has no lock yet. So whatever changed within RECENT_S counts as live, and so does
everything that one snakemake makes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.core.lock import describe, holder
from pipeline_lib.core.store import DIGEST_CHARS
from pipeline_lib.slurm.queue import QueuedJob
from pipeline_lib.status.catalog import json_object
from pipeline_lib.upkeep.inventory import EXPERIMENTS, LOCKS, SWEEPS, Inventory, is_digest

RECENT_S = 600.0
DAY_S = 86400.0
_DIGESTS = re.compile(rf"(?<![0-9a-f])[0-9a-f]{{{DIGEST_CHARS}}}(?![0-9a-f])")


@dataclass(frozen=True)
class Live:
    """The digests of instances and runs in work, and live experiments by path, with reasons."""

    digests: Mapping[str, str]
    experiments: Mapping[Path, str]


def find_live(inventory: Inventory, jobs: Sequence[QueuedJob], now_s: float) -> Live:
    """Return what is live at `now_s`, in seconds since 1970; `jobs` are those in SLURM's queue."""
    digests: dict[str, str] = {}
    for digest, why in _live_digests(inventory, jobs, now_s):
        digests.setdefault(digest, why)
        # a training to a rung of halving: the full one's run
        digests.setdefault(inventory.lock_of(digest), why)
    experiments: dict[Path, str] = {}
    for experiment in inventory.experiments:
        used = list(experiment.parts.values())
        if train := experiment.parts.get("train"):
            used.append(inventory.lock_of(train))
        reason = next((digests[digest] for digest in used if digest in digests), None)
        if now_s - experiment.frozen_at < RECENT_S:
            reason = f"snakemake was started with it {ago(now_s - experiment.frozen_at)}"
        if reason:
            experiments[experiment.path] = reason
    # some of an older sweep may be gone
    known = {experiment.path for experiment in inventory.experiments}
    for _, swept in sweeps(inventory.store.root):
        if live := next((path for path in swept if path in experiments), None):
            for path in known.intersection(swept):
                experiments.setdefault(
                    path, f"in one sweep with an experiment that is in use ({experiments[live]})"
                )
    return Live(digests, experiments)


def _live_digests(
    inventory: Inventory, jobs: Iterable[QueuedJob], now_s: float
) -> Iterator[tuple[str, str]]:
    """Yield digests of instances and runs with the reason: locked, queued, written to lately."""
    for path in sorted((inventory.store.root.parent / "runs" / LOCKS).glob("*")):
        if is_digest(path.name) and (owner := holder(path)) is not None:
            yield path.name, f"{describe(owner)} works on {path.name}"
    for job in jobs:
        for digest in _DIGESTS.findall(job.comment):
            yield digest, f"SLURM job {job.id} makes {digest}: {job.shown}"
    for one in inventory.made:
        if now_s - one.used_at < RECENT_S:
            written = ago(now_s - one.used_at)
            yield one.ref.digest, f"{one.ref.stage} {one.ref.digest} was written {written}"
    for run in inventory.runs:
        if now_s - run.used_at < RECENT_S:
            yield run.name, f"{run.path} was written to {ago(now_s - run.used_at)}"


def sweeps(root: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Yield the frozen sweeps of the store at `root`, each with its experiments.

    One snakemake makes them all.
    """
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
