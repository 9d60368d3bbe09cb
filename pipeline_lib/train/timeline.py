"""What a GPU did in a span of time, from the intervals of its kernels: computing, exchanging, copying, nothing."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

Interval = tuple[float, float]


@dataclass(frozen=True)
class Shares:
    """Seconds of a span that add up to it. Each moment counts once, for the first of these that went on in it.

    `exposed_communication_s` and `exposed_copy_s` are the parts that no computation ran beside;
    `hidden_communication_s` is the rest of the communication, which took place within `compute_s`.
    """

    compute_s: float
    exposed_communication_s: float
    exposed_copy_s: float
    idle_s: float
    hidden_communication_s: float


def kind_of(kernel: str) -> str:
    """`communication`, `copy` or `compute`: what the kernel or memory operation of that name does."""
    lowered = kernel.lower()
    if "nccl" in lowered:
        return "communication"
    return "copy" if lowered.startswith(("memcpy", "memset")) else "compute"


def shares_of(kernels: Iterable[tuple[str, Interval]], span: Interval) -> Shares:
    """How `span` was used, by named intervals in the same unit, seconds; what lies outside of it does not count."""
    found: dict[str, list[Interval]] = {"compute": [], "communication": [], "copy": []}
    for name, (begin, end) in kernels:
        clipped = max(begin, span[0]), min(end, span[1])
        if clipped[0] < clipped[1]:
            found[kind_of(name)].append(clipped)
    compute, communication = length(found["compute"]), length(found["communication"])
    used = length(chain(found["compute"], found["communication"]))
    busy = length(chain.from_iterable(found.values()))
    return Shares(
        compute_s=compute,
        exposed_communication_s=used - compute,
        exposed_copy_s=busy - used,
        idle_s=span[1] - span[0] - busy,
        hidden_communication_s=communication - (used - compute),
    )


def length(intervals: Iterable[Interval]) -> float:
    """What the union of `intervals` covers."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
