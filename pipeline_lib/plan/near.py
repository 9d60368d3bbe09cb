"""The near miss: the fastest way to train that lacks little to fit, and what it lacks."""

import math
from dataclasses import dataclass, replace

from pipeline_lib.core.language import _
from pipeline_lib.core.units import brief, from_gigabytes, gib, gigabytes
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.predict import (
    Prediction,
    host_bytes_of_node,
    lacks_host_memory,
    usable_fraction,
)
from pipeline_lib.records.plan import Lacks, PlannedNearMiss

# A way is near if it needs at most so much more than a GPU, or the host, has. More is allowed where
# the host's memory is assumed, since users may know better.
NEAR, NEAR_ASSUMED = 0.1, 3.0


@dataclass(frozen=True)
class NearMiss:
    """A way that does not fit, and the bytes that a GPU and a node's host lack; 0 if they suffice.

    What a GPU lacks includes the margin that predictions keep free: `is_margin` if it lacks no more
    than that.
    """

    way: Prediction
    gpu_bytes: int
    host_bytes: int
    is_margin: bool

    def planned(self) -> PlannedNearMiss:
        """Return its entry in plan.json."""
        lacks = Lacks(self.gpu_bytes, self.host_bytes, self.is_margin)
        return PlannedNearMiss(lacks, replace(self.way.planned(), segments=()))

    def briefly(self, machine: Machine) -> str:
        """Return what it lacks, in a few words."""
        lacking = []
        if self.gpu_bytes:
            needs = self.way.memory.total_bytes
            has = machine.gpu_memory_bytes or 0
            text = _("too large by {size} a GPU").format(size=gib(needs - has))
            if self.is_margin:
                text = _("tight: {size} short of the margin").format(size=gib(self.gpu_bytes))
            lacking.append(text)
        if self.host_bytes:
            size = gigabytes(self.host_bytes)
            lacking.append(_("a node lacks {size} of host memory").format(size=size))
        return _(" and ").join(lacking)

    def in_words(self, machine: Machine, chosen: Prediction, limit_in_words: str) -> str:
        """Return its time, beside that of the chosen way if that fits, and what it lacks.

        `limit_in_words` is the memory that a host has.
        """
        memory = self.way.memory
        step_s = self.way.step_s.value
        time = _("{value} a step").format(value=brief(step_s))
        if chosen.fits:
            ratio = chosen.step_s.value / step_s
            time += _(", {ratio:.2f} times as fast").format(ratio=ratio)
        said = [time]
        if self.gpu_bytes:
            text = _(
                "a GPU needs {needed} of {has}, and {free:.0%} are kept free, as the prediction "
                "may be {error:.0%} off: {size} too much"
            ).format(
                needed=gib(memory.total_bytes),
                has=gib(machine.gpu_memory_bytes or 0),
                free=1 - usable_fraction(memory),
                error=memory.error,
                size=gib(self.gpu_bytes),
            )
            said.append(_("only the margin lacks: ") + text if self.is_margin else text)
        if self.host_bytes:
            needed = host_bytes_of_node(memory, machine)
            text = _(
                "a node needs {needed} of host memory, and {has}: set cluster.memory_gb: "
                "{at_least}, if the nodes have as much"
            ).format(
                needed=gigabytes(needed),
                has=limit_in_words,
                at_least=math.ceil(needed / from_gigabytes(1)),
            )
            said.append(text)
        return _("; ").join(said)


def missed(way: Prediction, machine: Machine) -> NearMiss:
    """Return what a way that does not fit lacks."""
    # CPUs have no memory but the host's
    has = machine.gpu_memory_bytes
    needs = way.memory.total_bytes
    too_much = 0 if has is None else max(0, needs - math.floor(has * usable_fraction(way.memory)))
    host = host_bytes_of_node(way.memory, machine) - (machine.host_limit_bytes or 0)
    lacks_host = lacks_host_memory(way.memory, machine)
    is_margin = has is not None and too_much > 0 and needs <= has
    return NearMiss(way, too_much, host if lacks_host else 0, is_margin)
