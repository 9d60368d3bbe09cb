"""What the machines can do: rates with their uncertainty and where they are from.

A prediction is made three times, with every rate as expected, as good and as bad as it may be; so the bands of all
figures follow from those of the rates, also through overlaps. Rates are bytes a second, FLOPs a second, or seconds.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any

from pipeline_lib.plan.gpus import find_gpu


class Luck(IntEnum):
    """Which end of every band a prediction takes."""

    BAD = -1
    EXPECTED = 0
    GOOD = 1


@dataclass(frozen=True)
class Rate:
    """A value with the band that it is expected in, and its source. `low` <= `value` <= `high`."""

    value: float
    low: float
    high: float
    source: str

    @staticmethod
    def around(value: float, fraction: float, source: str) -> "Rate":
        """`value` give or take that fraction of it, as a factor: from value / (1 + f) to value * (1 + f)."""
        return Rate(value, value / (1 + fraction), value * (1 + fraction), source)

    def at(self, luck: Luck, is_cost: bool) -> float:
        """The end of the band that `luck` means; of a cost in seconds the low end is the good one."""
        ends = {Luck.BAD: self.low, Luck.EXPECTED: self.value, Luck.GOOD: self.high}
        return ends[Luck(-luck)] if is_cost else ends[luck]


# Names of rates that are seconds, so that less is better.
COSTS = frozenset({"launch_s", "in_node_latency_s", "between_latency_s"})


@dataclass(frozen=True)
class Speeds:
    """One value for each rate: what a prediction computes with.

    `matmul_flop_s` and `attention_flop_s` are what one GPU achieves at the model's shapes, `memory_bytes_s` what its
    memory gives to a long stream, `pointwise_bytes_s` to the small kernels of a layer (plan/compute.py counts their
    bytes), `launch_s` what the host takes to launch one operation of a model. `in_node_bytes_s`
    is the bus bandwidth of a collective within a node, `between_bytes_s` what a node sends to another. Copies between
    GPU and host are for each GPU, `host_bytes_s` is the host's memory, and `disk_bytes_s` the store's, for a node.
    """

    matmul_flop_s: float
    attention_flop_s: float
    memory_bytes_s: float
    pointwise_bytes_s: float
    launch_s: float
    in_node_bytes_s: float
    in_node_latency_s: float
    between_bytes_s: float
    between_latency_s: float
    copy_bytes_s: float
    host_bytes_s: float
    disk_bytes_s: float


@dataclass(frozen=True)
class Pass:
    """What one pass through one layer costs: on the device so much and so much for each token, and on the host.

    The host issues work ahead of the device: whichever of the two takes longer decides.
    """

    fixed_s: float
    per_token_s: float
    host_s: float

    def device_s(self, tokens: float) -> float:
        """Seconds that the device is busy with `tokens` tokens."""
        return self.fixed_s + self.per_token_s * tokens


@dataclass(frozen=True)
class MeasuredPart:
    """A part of the model, timed at its real shapes on one rank: one decoder layer, or all that is no layer (`ends`).

    `variant` is compute.variant_of(train), `shape` compute.shape_of(geometry), so that no other model takes it. It was
    fed blocks whose documents have a mean length of `document_tokens` (as Workload counts it), with that fraction of
    the positions supervised. What a strategy does around a layer on one rank is within `host_s`.
    """

    part: str
    shape: tuple[int, ...]
    variant: str
    document_tokens: float
    supervised_fraction: float
    forward: Pass
    backward: Pass


@dataclass(frozen=True)
class Ranks:
    """How many ranks there are, how many of them share a machine, and whether Triton makes kernels for their GPUs."""

    total: int
    per_node: int
    has_triton: bool = False

    @staticmethod
    def of(machine: "Machine") -> "Ranks":
        """All those of `machine`."""
        return Ranks(machine.ranks, machine.ranks_per_node, machine.has_triton)


@dataclass(frozen=True)
class Machine:
    """Nodes of equal GPUs, or of CPU ranks.

    `gpu_memory_bytes` is None where it is not known, as on CPUs; `host_memory_bytes`, of a node, where nobody says it.
    """

    name: str
    is_gpu: bool
    nodes: int
    ranks_per_node: int
    gpu_memory_bytes: int | None
    peak_flop_s: float | None
    host_memory_bytes: int | None
    rates: Mapping[str, Rate]
    measured: tuple[MeasuredPart, ...] = ()

    @property
    def ranks(self) -> int:
        """World size."""
        return self.nodes * self.ranks_per_node

    @property
    def has_triton(self) -> bool:
        """Whether Triton makes kernels: on GPUs from Ampere on, where all documents attend in one kernel too.

        A GPU that is not in the catalogue counts as one.
        """
        known = find_gpu(self.name)
        return self.is_gpu and (known is None or known.computes_in("bf16"))

    def speeds(self, luck: Luck = Luck.EXPECTED) -> Speeds:
        """All rates at one end of their bands."""
        return Speeds(**{name: rate.at(luck, name in COSTS) for name, rate in self.rates.items()})

    def with_rate(self, name: str, value: float) -> "Machine":
        """The same with another value of one rate, for questions of the kind what if; its band moves along."""
        old = self.rates[name]
        factor = value / old.value
        rate = Rate(value, old.low * factor, old.high * factor, "what if")
        return replace(self, rates={**self.rates, name: rate})

    def as_json(self) -> dict[str, Any]:
        """For plan.json."""
        return {
            "name": self.name,
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "gpu_memory_bytes": self.gpu_memory_bytes,
            "peak_flop_s": self.peak_flop_s,
            "host_memory_bytes": self.host_memory_bytes,
            "rates": {name: asdict(rate) for name, rate in self.rates.items()},
        }


@dataclass(frozen=True)
class Figure:
    """A predicted number and its band, from `low` to `high`."""

    value: float
    low: float
    high: float

    @staticmethod
    def of(values: Mapping[Luck, float]) -> "Figure":
        """From the three predictions; which of them is the smallest depends on the figure."""
        return Figure(values[Luck.EXPECTED], min(values.values()), max(values.values()))

    @staticmethod
    def around(value: float, fraction: float) -> "Figure":
        """`value` give or take that fraction of it."""
        return Figure(value, value * (1 - fraction), value * (1 + fraction))

    def holds(self, measured: float) -> bool:
        """Whether `measured` is within the band."""
        return self.low <= measured <= self.high
