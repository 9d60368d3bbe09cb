"""What halving does with the trainings of a store: which it let go no further, and which are on their way to a rung.

A stop counts as long as its sweep is what the experiment was last asked for in: snakemake touches what it froze, and
decides anew when another experiment is added.
"""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pipeline_lib.base.errors import IntegrityError, Unreadable
from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.halving import RUNG_LOGS, decision_path, read_decision, read_halving, rung_digests
from pipeline_lib.slurm.queue import QueuedJob
from pipeline_lib.status.catalog import Catalog, Frozen
from pipeline_lib.status.tail import changed_at, json_object

_JOB_TO_RUNG = re.compile(r"rule_rung_stage_wildcards_([0-9a-f]+)")


@dataclass
class Sweeps:
    """What one look knows of the sweeps. `logs` is the folder of logs, `jobs` are SLURM's."""

    catalog: Catalog
    logs: Path
    jobs: list[QueuedJob]
    _stopped: dict[Path, dict[str, str]] = field(default_factory=dict)

    def to_rungs(self, training: str) -> list[str]:
        """The digests of the trainings to a rung, of a whole one, that wrote a log or are in SLURM's queue."""
        return self._to_rungs.get(training, [])

    def why_stopped(self, experiment: Frozen) -> str | None:
        """Why its sweep let the training of `experiment` go no further; None if it did not, or was not asked last."""
        asked = next((one for one in self._newest_first if experiment.path.name in one[2]), None)
        if asked is None or asked[0] < experiment.frozen_at:
            return None
        _, path, names = asked
        if path not in self._stopped:
            self._stopped[path] = self._stopped_by(path, names)
        return self._stopped[path].get(experiment.parts.get("train", ""))

    def _stopped_by(self, path: Path, names: dict[str, None]) -> dict[str, str]:
        """By whole training, why the sweep at `path` let it go no further; what cannot be read is no reason."""
        halving, _ = read_halving(json_object(path).get("halving"))
        if halving is None:
            return {}
        swept = [frozen for name in names if (frozen := self.catalog.frozen(name)) is not None]
        trainings = list(dict.fromkeys(one.parts["train"] for one in swept if "train" in one.parts))
        found: dict[str, str] = {}
        with suppress(IntegrityError, Unreadable):
            for _, digest in rung_digests(halving, trainings):
                decision = read_decision(decision_path(self.catalog.store, digest))
                for one in decision.competitors:
                    if not one.goes_on:
                        found[str(one.training)] = f"at step {decision.step} of its sweep: {one.why}"
                if decision.next_step is None:
                    break
        return found

    @cached_property
    def _newest_first(self) -> list[tuple[float, Path, dict[str, None]]]:
        """When each sweep was asked for last, its file, and the files of its experiments, in order."""
        found = []
        for path in (self.catalog.store.root / "sweeps").glob("*.json"):
            names = json_object(path).get("experiments")
            if isinstance(names, list) and (asked_at := changed_at(path)) is not None:
                found.append((asked_at, path, dict.fromkeys(name for name in names if isinstance(name, str))))
        return sorted(found, key=lambda one: one[0], reverse=True)

    @cached_property
    def _to_rungs(self) -> dict[str, list[str]]:
        digests = {path.stem for path in (self.logs / RUNG_LOGS).glob("*.log")}
        digests |= {digest for job in self.jobs for digest in _JOB_TO_RUNG.findall(job.comment)}
        found: dict[str, list[str]] = {}
        for digest in sorted(digests):
            with suppress(IntegrityError, RecursionError):
                found.setdefault(run_digest(self.catalog.spec(digest)), []).append(digest)
        return found
