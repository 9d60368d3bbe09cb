"""The examination of this machine: within BUDGET_S, each part with its own deadline."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline_lib.doctor.facts import UNMEASURED, Facts, measured
from pipeline_lib.doctor.probes import exchange, probe, topology
from pipeline_lib.doctor.resources import limits, memory, processors
from pipeline_lib.doctor.software import out_of_range, variables, versions

BUDGET_S = 28.0
CPU_RANKS = 2

Within = Callable[[float], float]


def deadline(budget_s: float) -> Within:
    """Return a function that limits the seconds of a part to what is left of `budget_s`."""
    end_s = time.monotonic() + budget_s
    return lambda most_s: min(most_s, end_s - time.monotonic())


def measure_machine(
    store: Path, environ: Mapping[str, str], within: Within, say: Callable[[str], None]
) -> Facts:
    """Return the facts that one process can measure about its machine and the disk of `store`."""
    facts: Facts = {
        "versions": versions(),
        "out of range": measured(out_of_range),
        "variables": variables(environ),
        "processors": measured(processors),
        "memory": measured(memory),
        "limits": measured(limits),
    }
    say("doctor: looking at the GPUs and at the disk")
    facts["GPUs"] = measured(lambda: probe("gpus", environ, within(5)))
    facts["torch"] = measured(lambda: probe("torch", environ, within(12)))
    if facts["torch"].get("gpus", 0) < 2:
        facts["links"] = {UNMEASURED: "there are fewer than two GPUs"}
    else:
        facts["links"] = measured(lambda: topology(within(4)))
    facts["disk"] = measured(
        lambda: probe("disk", environ, within(10), "--store", str(store.absolute()))
    )
    return facts


def examine(
    store: Path, ranks: int | None, environ: Mapping[str, str], say: Callable[[str], None]
) -> Facts:
    """Return all facts of this machine, the disk of `store` and `ranks` ranks (None: one per GPU).

    The sections are in the order of the report.
    """
    within = deadline(BUDGET_S)
    facts = measure_machine(store, environ, within, say)
    gpus = facts["torch"].get("gpus", 0) if facts["torch"].get("cuda_works") else 0
    if gpus:
        device = "cuda"
        ranks = min(ranks or gpus, gpus)
    else:
        device = "cpu"
        ranks = ranks or CPU_RANKS
    facts["run"] = {"ranks": ranks, "device": device}
    say(f"doctor: {ranks} ranks exchange data")
    facts["exchange"] = measured(lambda: exchange(environ, device, ranks, within(18)))
    return facts
