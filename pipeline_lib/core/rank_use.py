"""What each rank of a training used of its GPU and memory, from recorded rows, with warnings.

Every EVERY_STEPS steps, and at the last one, a row of metrics.jsonl holds a list by rank under
UTILIZATION and PEAK_MEMORY. A CPU has no utilization: its rows have no such list, and nothing is
warned of.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline_lib.core.run_record import number
from pipeline_lib.core.units import gib

EVERY_STEPS = 10
UTILIZATION, PEAK_MEMORY = "gpu_utilization_of_ranks", "peak_memory_bytes_of_ranks"
LEAST_UTILIZATION = 0.8
# between ranks: of utilization in points, of memory as a fraction of the largest
MOST_DIFFERENCE = 0.1
LEAST_READINGS = 3  # fewer may all come from the first steps, which choose kernels and compile
RECENT_READINGS = 4  # that warnings about a training in work are from
_NAMED_RANKS = 4


@dataclass(frozen=True)
class RankUse:
    """By rank: its GPU's median utilization, as a fraction of time, and peak memory in bytes.

    Both are empty if they are not known. `readings` is the number of rows that they are from.
    """

    utilization: tuple[float, ...] = ()
    peak_memory_bytes: tuple[float, ...] = ()
    readings: int = 0

    @staticmethod
    def of(rows: Iterable[Mapping[str, Any]]) -> "RankUse":
        """Return the use in `rows`, metrics.jsonl in order, with as many ranks as the last."""
        memories = []
        utilizations = []
        for row in rows:
            if memory := _numbers(row.get(PEAK_MEMORY)):
                memories.append(memory)
                utilizations.append(_numbers(row.get(UTILIZATION)))
        if not memories:
            return RankUse()
        ranks = len(memories[-1])
        memories = [one for one in memories if len(one) == ranks]
        utilizations = [one for one in utilizations if len(one) == ranks]
        return RankUse(
            tuple(statistics.median(of_rank) for of_rank in _by_rank(utilizations)),
            tuple(max(of_rank) for of_rank in _by_rank(memories)),
            len(memories),
        )

    def warnings(self) -> dict[str, str]:
        """Return a sentence, without full stop, for low or differing utilization, by kind.

        Each kind in which ranks differ has a sentence.
        """
        if not self.utilization or self.readings < LEAST_READINGS:
            return {}
        found = {}
        used = self.utilization
        memory = self.peak_memory_bytes
        low = [rank for rank, value in enumerate(used) if value < LEAST_UTILIZATION]
        if low:
            found["low GPU utilization"] = (
                f"GPU utilization stays under {LEAST_UTILIZATION:.0%} on {_ranks(low, used)}; "
                "train.profile_every_steps tells what a step waits for"
            )
        if max(used) - min(used) > MOST_DIFFERENCE:
            found["uneven GPU utilization"] = (
                f"GPU utilization differs between ranks: {_ends(used, '{:.0%}'.format)}. A GPU "
                "that waits for another rank counts as used, so the one that is used less waits "
                "for its own host"
            )
        if max(memory) - min(memory) > MOST_DIFFERENCE * max(memory):
            found["uneven GPU memory"] = f"peak memory differs between ranks: {_ends(memory, gib)}"
        return found


def _numbers(value: Any) -> list[float]:
    """Return `value` if it is a list of plausible numbers, else an empty list."""
    if not isinstance(value, list | tuple):
        return []
    known = []
    for one in value:
        found = number(one)
        if found is None:
            return []
        known.append(found)
    return known


def _by_rank(rows: Sequence[Sequence[float]]) -> Iterator[tuple[float, ...]]:
    """Yield the values of each rank from `rows` [readings][ranks]."""
    yield from zip(*rows, strict=True)


def _ranks(low: Sequence[int], used: Sequence[float]) -> str:
    """Name the ranks `low` with their utilization; of many only their number and the lowest."""
    if len(low) <= _NAMED_RANKS:
        return ", ".join(f"rank {rank} ({used[rank]:.0%})" for rank in low)
    lowest = min(low, key=lambda rank: used[rank])
    return f"{len(low)} of {len(used)} ranks, the lowest is rank {lowest} ({used[lowest]:.0%})"


def _ends(values: Sequence[float], show: Callable[[float], str]) -> str:
    low = values.index(min(values))
    high = values.index(max(values))
    return f"{show(values[low])} on rank {low}, {show(values[high])} on rank {high}"
