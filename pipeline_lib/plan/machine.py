"""The rates of a machine with their uncertainty, and the machine that has them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.units import from_gigabytes
from pipeline_lib.plan.gpus import find_gpu, name_words
from pipeline_lib.records.plan import Figure, PlannedMachine, Rate

# The rates of a machine, with their uncertainty and sources.
#
# Each prediction is made three times: with all rates as expected, and at the good and the bad end
# of their bands. So the bands of all figures follow from those of the rates, through overlaps too.
# Units: bytes/s, FLOP/s, or seconds.


class End(IntEnum):
    """The end of every rate's band that a prediction uses."""

    BAD = -1
    EXPECTED = 0
    GOOD = 1


def rate_at(rate: Rate, end: End, is_cost: bool) -> float:
    """Return the value for `end`; of a cost in seconds the low end is the good one."""
    ends = {End.BAD: rate.low, End.EXPECTED: rate.value, End.GOOD: rate.high}
    return ends[End(-end)] if is_cost else ends[end]


# A GPU takes as long to attend within a document of n tokens as a kernel at its full rate for n and
# this many. On one H200, by documents of 8,192 and 1,024: cuDNN's kernel 405 and 270 TFLOP/s,
# torch's 253 and 151.
_BESIDE_A_DOCUMENT = 700


def attention_share(document_tokens: float) -> float:
    """Return the fraction of its long-document rate that attention reaches at this length.

    The length is the mean weighted by tokens, see Workload.
    """
    return document_tokens / (document_tokens + _BESIDE_A_DOCUMENT)


def beside_memory(memory_bytes_s: float, on_chip_bytes_s: float) -> float:
    """Return the bytes/s of kernels that take time on the chip beside that in its memory.

    So a card with slow memory reaches more of its bandwidth in them than one with fast memory.
    """
    return 1 / (1 / memory_bytes_s + 1 / on_chip_bytes_s)


# Rates in seconds, of which less is better.
COSTS = frozenset({"launch_s", "in_node_latency_s", "between_latency_s"})


@dataclass(frozen=True)
class Speeds:
    """One value for each rate, as a prediction uses them; bytes/s, FLOP/s and seconds.

    `matmul_flop_s` and `attention_flop_s` are what one GPU achieves at the model's shapes, the
    latter in long documents unless `Machine.speeds_in` says otherwise. `memory_bytes_s` is the
    memory bandwidth of a long stream, `pointwise_bytes_s` that of a layer's small kernels
    (plan/step_time.py counts their bytes). `launch_s` is the host's time to launch one operation of
    a model. `in_node_bytes_s` is the bus bandwidth of a collective within a node, `between_bytes_s`
    what one node sends to others. `copy_bytes_s` is between a GPU and the host, for each GPU;
    `host_bytes_s` is the host's memory and `disk_bytes_s` the store's disk, for each node.
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
    """The cost of a pass through one layer: fixed and per token on the device, and on the host.

    The host issues work ahead of the device, so the slower of the two decides.
    """

    fixed_s: float
    per_token_s: float
    host_s: float

    def device_s(self, tokens: float) -> float:
        """Return the seconds that the device is busy with `tokens` tokens."""
        return self.fixed_s + self.per_token_s * tokens


@dataclass(frozen=True)
class MeasuredPart:
    """A part of the model, timed at its real shapes on one rank: a layer, or all others (`ends`).

    `variant` is passes.variant_of(train) and `shape` passes.shape_of(geometry), so that no
    other model uses it. It was timed on blocks whose documents have a mean length of
    `document_tokens` (defined in Workload), with `supervised_fraction` of the positions supervised.
    `host_s` includes the strategy's work around a layer on one rank.
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
    """The number of ranks, in total and per node, and whether Triton compiles for their GPUs."""

    total: int
    per_node: int
    has_triton: bool = False

    @staticmethod
    def of(machine: "Machine") -> "Ranks":
        """Return the ranks of `machine`."""
        return Ranks(machine.ranks, machine.ranks_per_node, machine.has_triton)

    @staticmethod
    def of_cluster(cluster: Cluster) -> "Ranks":
        """Return the ranks of `cluster`, whose GPUs may be unknown."""
        return Ranks(
            cluster.ranks, cluster.ranks // cluster.nodes, has_triton=cluster.device == "cuda"
        )


# Host memory in GB that is assumed of a node where cluster.memory_gb does not give it, for each GPU:
# of cards of desktops, known by their names, that of a usual desktop, which has room for two; of
# all others that of a usual server.
_CONSUMER_WORDS = frozenset({"geforce", "rtx"})
_CONSUMER_HOST_GB, _LEAST_CONSUMER_HOST_GB = 32, 64
_SERVER_HOST_GB, _MOST_SERVER_HOST_GB = 192, 2000


@dataclass(frozen=True)
class Machine:
    """Nodes of equal GPUs, or of CPU ranks.

    `gpu_memory_bytes` is None if unknown, and on CPUs. `host_memory_bytes` is that of a node, or
    None if not given.
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
        """The world size."""
        return self.nodes * self.ranks_per_node

    @property
    def has_triton(self) -> bool:
        """True if Triton compiles kernels: from Ampere on, with one attention for all documents.

        A GPU that is not in the catalogue is assumed to support it.
        """
        known = find_gpu(self.name)
        return self.is_gpu and (known is None or known.computes_in("bf16"))

    @property
    def is_host_assumed(self) -> bool:
        """True if a node's host memory is assumed, not given; on CPUs nothing is assumed."""
        return self.is_gpu and self.host_memory_bytes is None

    @property
    def host_limit_bytes(self) -> int | None:
        """The host memory of a node, given or assumed, in bytes; None if unknown, on CPUs."""
        if not self.is_host_assumed:
            return self.host_memory_bytes
        gpus = self.ranks_per_node
        if name_words(self.name) & _CONSUMER_WORDS:
            return from_gigabytes(max(_LEAST_CONSUMER_HOST_GB, _CONSUMER_HOST_GB * gpus))
        return from_gigabytes(min(_SERVER_HOST_GB * gpus, _MOST_SERVER_HOST_GB))

    def speeds(self, end: End = End.EXPECTED) -> Speeds:
        """Return all rates at one end of their bands."""
        return self._speeds[end]

    def speeds_in(self, document_tokens: float, end: End = End.EXPECTED) -> Speeds:
        """Return `speeds` with attention's in documents of this length (a mean over tokens)."""
        speeds = self.speeds(end)
        share = attention_share(document_tokens) if self.is_gpu else 1.0
        return replace(speeds, attention_flop_s=share * speeds.attention_flop_s)

    @cached_property
    def _speeds(self) -> dict[End, Speeds]:
        return {
            end: Speeds(
                **{name: rate_at(rate, end, name in COSTS) for name, rate in self.rates.items()}
            )
            for end in End
        }

    def with_rate(self, name: str, value: float) -> "Machine":
        """Return the machine with one rate changed, for what-if questions; its band scales too."""
        old = self.rates[name]
        factor = value / old.value
        rate = Rate(value, old.low * factor, old.high * factor, "what if")
        return replace(self, rates={**self.rates, name: rate})

    def planned(self, measured_parts: int, other_parts: int) -> PlannedMachine:
        """Return the machine's entry in plan.json.

        The counts are of measured parts of models of this shape and of others.
        """
        return PlannedMachine(
            name=self.name,
            nodes=self.nodes,
            ranks_per_node=self.ranks_per_node,
            gpu_memory_bytes=self.gpu_memory_bytes,
            peak_flop_s=self.peak_flop_s,
            host_memory_bytes=self.host_memory_bytes,
            assumed_host_memory_bytes=self.host_limit_bytes if self.is_host_assumed else None,
            rates=dict(self.rates),
            measured_parts=measured_parts,
            other_parts=other_parts,
        )


def figure_of(values: Mapping[End, float]) -> Figure:
    """Build a figure from the three predictions; the smallest depends on the figure."""
    return Figure(values[End.EXPECTED], min(values.values()), max(values.values()))
