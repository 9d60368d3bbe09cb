"""Examines the machine within BUDGET_S, each part under a deadline of its own."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.doctor import machine, probes, software
from pipeline_lib.doctor.facts import Facts, Section, Unmeasured, measured

BUDGET_S = 28.0
CPU_RANKS = 2

Within = Callable[[float], float]


def deadline(budget_s: float) -> Within:
    """A function that shortens what a part may take to what is left of `budget_s`."""
    end_s = time.monotonic() + budget_s
    return lambda most_s: min(most_s, end_s - time.monotonic())


def look(store: Path, environ: Mapping[str, str], within: Within, say: Callable[[str], None]) -> Facts:
    """What one process finds out about its machine, and about the disk of `store` as seen from there."""
    facts: Facts = {
        "versions": software.versions(),
        "out of range": measured(software.out_of_range),
        "variables": software.variables(environ),
        "processors": measured(machine.processors),
        "memory": measured(machine.memory),
        "limits": measured(machine.limits),
    }
    say("doctor: looking at the GPUs and at the disk")
    facts["GPUs"] = measured(lambda: probes.probe("gpus", environ, within(5)))
    facts["torch"] = measured(lambda: probes.probe("torch", environ, within(12)))
    facts["links"] = measured(_links(facts, within))
    facts["disk"] = measured(lambda: probes.probe("disk", environ, within(10), "--store", str(store.absolute())))
    return facts


def _links(facts: Facts, within: Within) -> Callable[[], Section]:
    def links() -> Section:
        if facts["torch"].get("gpus", 0) < 2:
            raise Unmeasured("there are fewer than two GPUs")
        return probes.topology(within(4))

    return links


@dataclass(frozen=True)
class Examination:
    """What to look at: the store's disk, and as many ranks as asked for; None takes one for each GPU."""

    store: Path
    ranks: int | None
    environ: Mapping[str, str]

    def facts(self, say: Callable[[str], None]) -> Facts:
        """All sections, in the order of the report."""
        within = deadline(BUDGET_S)
        facts = look(self.store, self.environ, within, say)
        ranks, device = self._ranks(facts)
        facts["run"] = {"ranks": ranks, "device": device}
        say(f"doctor: {ranks} ranks exchange data")
        facts["exchange"] = measured(lambda: probes.exchange(self.environ, device, ranks, within(18)))
        return facts

    def _ranks(self, facts: Facts) -> tuple[int, str]:
        gpus = facts["torch"].get("gpus", 0) if facts["torch"].get("cuda_works") else 0
        if gpus:
            return min(self.ranks or gpus, gpus), "cuda"
        return self.ranks or CPU_RANKS, "cpu"
