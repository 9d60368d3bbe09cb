"""What GPUs hold and can do at best, and the rates of a machine with their uncertainty."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any

from pipeline_lib.core.units import from_gbyte_per_s, from_gibibytes, from_gigabytes, from_teraflops

# What GPUs hold and can do at best, by the names that users write and those that their drivers give.
#
# Peaks and bandwidths are NVIDIA's dense figures; where a data sheet gives only those with sparsity, half of them.
# Memory is what torch sees, which is what it can allocate from: less than what the GPU is sold with.


@dataclass(frozen=True)
class Link:
    """What joins the GPUs of a node: the bus bandwidth that a large collective usually achieves over it.

    The band is from `bytes_per_s / factor` to `bytes_per_s * factor`. `bus bandwidth` is meant as nccl-tests means it.
    """

    name: str
    bytes_per_s: float
    factor: float


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. Half precision is bf16 and fp16 summed in fp32; fp32 is that of the plain cores.

    torch does not round fp32 products to TF32 unless told to. `capability` is CUDA's compute capability, `source` is
    where the figures are from.
    """

    name: str
    capability: float
    memory_bytes: int
    half_flop_s: float
    fp32_flop_s: float
    memory_bytes_per_s: float
    link: Link
    source: str

    def computes_in(self, precision: str) -> bool:
        """Whether it has products in `bf16`, `fp8`, `fp16` or `fp32`."""
        return self.capability >= _LEAST_CAPABILITY.get(precision, 0.0)

    @property
    def link_bytes_per_s(self) -> float:
        """Bus bandwidth that a collective within a node usually achieves."""
        return self.link.bytes_per_s

    def peak_flop_s(self, precision: str) -> float | None:
        """Peak FLOP/s that MFU is a part of; None if the GPU has no products in `precision`.

        Under `fp8` too it is that of bf16, in which attention, head and norms are.
        """
        if not self.computes_in(precision):
            return None
        return self.fp32_flop_s if precision == "fp32" else self.half_flop_s


def peak_flops(gpu_name: str, precision: str) -> float | None:
    """Peak FLOP/s of the GPU that the driver calls `gpu_name`, as `Gpu.peak_flop_s` says; None for an unknown one."""
    gpu = _match(name_words(gpu_name))
    return None if gpu is None else gpu.peak_flop_s(precision)


def find_gpu(name: str) -> Gpu | None:
    """The GPU that a user or a driver calls `name`: `h200`, `a100 80gb`, `NVIDIA A100-SXM4-80GB`; None if unknown.

    A name that fits several means the one with the least memory, so that no plan is too large. A name with a size
    that the GPU does not come in is unknown.
    """
    words = name_words(name)
    gpu = _match(words)
    sizes = [int(word.removesuffix("gb")) for word in words if re.fullmatch(r"\d+gb", word) and word != _GRACE_MEMORY]
    less, more = _MORE_OR_LESS
    if gpu is None or any(not less < gpu.memory_bytes / from_gigabytes(size) < more for size in sizes):
        return None
    return gpu


def gpu_names() -> tuple[str, ...]:
    """The names of all that are known, for messages."""
    return tuple(gpu.name for _, gpu in _CATALOGUE)


def name_words(name: str) -> frozenset[str]:
    """The words of a GPU's name, however it is written: `rtx4090` is two, `80 GB`, `80G` and a last `80` are `80gb`."""
    text = re.sub(r"[^a-z0-9]+", " ", name.lower())
    text = re.sub(r"\b(rtx|tesla|nvidia)(?=\w*\d)", r"\1 ", text)
    text = re.sub(r"\b(\d{4})(d|ti)\b", r"\1 \2", text)
    text = re.sub(r"\bsxm\d\b", "sxm", text)
    text = re.sub(r"(?<=\w )(\d{2,3}) *$", r"\1gb", text)
    text = re.sub(r"\b(\d+) ?g(?:i?b)?\b", r"\1gb", text)
    return frozenset(text.split())


def _match(words: frozenset[str]) -> Gpu | None:
    """The first entry whose words are all there. A part of a GPU, or a laptop's, is another GPU than its name says."""
    if words & {"mig", "laptop"}:
        return None
    return next((gpu for needed, gpu in _CATALOGUE if needed <= words), None)


# Ampere has bf16 and Ada fp8, as all after them.
_LEAST_CAPABILITY = {"bf16": 8.0, "fp8": 8.9}

# Rings reach about 80 % of what a GPU can send over NVLink (measured: H200 359 to 367 of 450 GB/s; ml-engineering:
# A100 235 of 300; B200 741 of 900, which its switches help with). The switches' own reduction, which only all-reduces
# get, is left out.
_NVLINK_5 = Link("NVLink 5", from_gbyte_per_s(720), 1.3)
_NVLINK_4 = Link("NVLink 4", from_gbyte_per_s(360), 1.3)
_NVLINK_3 = Link("NVLink 3", from_gbyte_per_s(235), 1.3)
_NVLINK_2 = Link("NVLink 2", from_gbyte_per_s(120), 1.3)
_NVLINK_CUT = Link("NVLink of 400 GB/s", from_gbyte_per_s(160), 1.3)  # DeepSeek-V3's report measured 160 on H800
# PCIe depends on the host far more: switches, sockets, bridges of NVLink between pairs, and whether P2P works. Of
# issues of nccl and nccl-tests: A100 20 GB/s between pairs (178), 4090 with P2P 26 (tinygrad's driver, 36).
_PCIE_5 = Link("PCIe 5", from_gbyte_per_s(40), 2.5)
_PCIE_4 = Link("PCIe 4", from_gbyte_per_s(20), 2.5)
_PCIE_NO_P2P = Link("PCIe without P2P", from_gbyte_per_s(5), 3.0)  # through the host's memory
_PCIE_A10 = Link("PCIe without P2P", from_gbyte_per_s(4.3), 2.5)  # two A10s of QwenLM/Qwen3#773

_MORE_OR_LESS = (0.95, 1.08)  # what torch sees of the GB that a GPU is sold with, which some makers count as GiB
_GRACE_MEMORY = "480gb"  # that of a GH200's CPU, which its driver's name has


def _gpu(
    needed: str,
    name: str,
    capability: float,
    sizes: tuple[float, float, float, float],
    link: Link,
    source: str,
) -> tuple[frozenset[str], Gpu]:
    """A row: words that a name must have, and GiB, half-precision TFLOP/s, fp32 TFLOP/s and GB/s of the GPU."""
    memory_gib, half, fp32, memory_gbyte_s = sizes
    gpu = Gpu(
        name,
        capability,
        from_gibibytes(memory_gib),
        from_teraflops(half),
        from_teraflops(fp32),
        from_gbyte_per_s(memory_gbyte_s),
        link,
        source,
    )
    return frozenset(needed.split()), gpu


# The first entry counts whose words are all in the name: special models stand before the plain one.
_CATALOGUE: tuple[tuple[frozenset[str], Gpu], ...] = (
    _gpu(
        "b200",
        "B200",
        10.0,
        (178.3, 2250, 75, 8000),
        _NVLINK_5,
        "HGX B200 data sheet, an eighth of the board's figures",
    ),
    _gpu("h200 nvl", "H200 NVL", 9.0, (139.8, 835.5, 60, 4800), _PCIE_5, "H200 data sheet"),
    _gpu("h200", "H200", 9.0, (139.8, 989.4, 67, 4800), _NVLINK_4, "H200 data sheet"),
    _gpu("gh200 144gb", "GH200 144GB", 9.0, (139.8, 989.4, 67, 4900), _NVLINK_4, "GH200 data sheet, with HBM3e"),
    _gpu("gh200", "GH200", 9.0, (94.5, 989.4, 67, 4000), _NVLINK_4, "GH200 data sheet, with HBM3"),
    _gpu("h100 nvl", "H100 NVL", 9.0, (93.0, 835.5, 60, 3900), _PCIE_5, "H100 data sheet"),
    _gpu("h100 pcie", "H100 PCIe", 9.0, (79.1, 756.5, 51, 2000), _PCIE_5, "H100 data sheet"),
    _gpu("h100", "H100 SXM", 9.0, (79.1, 989.4, 67, 3350), _NVLINK_4, "H100 data sheet"),
    _gpu("h800 pcie", "H800 PCIe", 9.0, (79.1, 756.5, 51, 2000), _PCIE_5, "H100 data sheet; has slower NVLink"),
    _gpu("h800", "H800 SXM", 9.0, (79.1, 989.4, 67, 3350), _NVLINK_CUT, "H100 data sheet; has slower NVLink"),
    _gpu("h20 3e", "H20-3e", 9.0, (139.8, 148, 44, 4800), _NVLINK_4, "NVIDIA's partners; it has no public data sheet"),
    _gpu("h20", "H20", 9.0, (95.0, 148, 44, 4000), _NVLINK_4, "NVIDIA's partners; it has no public data sheet"),
    _gpu("a100 80gb pcie", "A100 80GB PCIe", 8.0, (79.1, 312, 19.5, 1935), _PCIE_4, "A100 data sheet"),
    _gpu("a100 80gb", "A100 80GB SXM", 8.0, (79.1, 312, 19.5, 2039), _NVLINK_3, "A100 data sheet"),
    _gpu("a100 pcie", "A100 40GB PCIe", 8.0, (39.4, 312, 19.5, 1555), _PCIE_4, "A100 data sheet"),
    _gpu("a100", "A100 40GB SXM", 8.0, (39.4, 312, 19.5, 1555), _NVLINK_3, "A100 data sheet"),
    _gpu("a800 pcie", "A800 80GB PCIe", 8.0, (79.1, 312, 19.5, 1935), _PCIE_4, "A100 data sheet; has slower NVLink"),
    _gpu("a800", "A800 80GB SXM", 8.0, (79.1, 312, 19.5, 2039), _NVLINK_CUT, "A100 data sheet; has slower NVLink"),
    _gpu("a40", "A40", 8.6, (44.4, 149.7, 37.4, 696), _PCIE_4, "A40 data sheet"),
    _gpu("a30", "A30", 8.0, (23.5, 165, 10.3, 933), _PCIE_4, "A30 data sheet"),
    _gpu("a10", "A10", 8.6, (22.0, 125, 31.2, 600), _PCIE_A10, "A10 data sheet"),
    _gpu("a10g", "A10G", 8.6, (22.0, 70, 31.5, 600), _PCIE_NO_P2P, "A10G data sheet: the model that AWS has"),
    _gpu("a6000", "RTX A6000", 8.6, (47.4, 154.8, 38.7, 768), _PCIE_4, "RTX A6000 data sheet"),
    _gpu("l40s", "L40S", 8.9, (44.4, 362.05, 91.6, 864), _PCIE_4, "L40S data sheet"),
    _gpu("l40", "L40", 8.9, (44.4, 181.05, 90.5, 864), _PCIE_4, "L40 data sheet"),
    _gpu("l20", "L20", 8.9, (44.4, 119.5, 59.8, 864), _PCIE_4, "NVIDIA's partners; it has no public data sheet"),
    _gpu("l4", "L4", 8.9, (22.0, 121, 30.3, 300), _PCIE_NO_P2P, "L4 data sheet"),
    _gpu("3090 ti", "RTX 3090 Ti", 8.6, (23.5, 80, 40, 1008), _PCIE_NO_P2P, "GA102 white paper, summed in fp32"),
    _gpu("3090", "RTX 3090", 8.6, (23.5, 71.2, 35.6, 936), _PCIE_NO_P2P, "GA102 white paper, summed in fp32"),
    _gpu("4090 d", "RTX 4090 D", 8.9, (23.5, 147.1, 73.5, 1008), _PCIE_NO_P2P, "AD102 white paper, by its fewer cores"),
    _gpu("4090", "RTX 4090", 8.9, (23.5, 165.2, 82.6, 1008), _PCIE_NO_P2P, "AD102 white paper, summed in fp32"),
    _gpu("5090", "RTX 5090", 12.0, (31.3, 209.5, 104.8, 1792), _PCIE_NO_P2P, "GB202 white paper, summed in fp32"),
    _gpu("v100 pcie 32gb", "V100 32GB PCIe", 7.0, (31.7, 112, 14, 900), _PCIE_NO_P2P, "V100 data sheet"),
    _gpu("v100 pcie", "V100 16GB PCIe", 7.0, (15.7, 112, 14, 900), _PCIE_NO_P2P, "V100 data sheet"),
    _gpu("v100 32gb", "V100 32GB SXM", 7.0, (31.7, 125, 15.7, 900), _NVLINK_2, "V100 data sheet"),
    _gpu("v100", "V100 16GB SXM", 7.0, (15.7, 125, 15.7, 900), _NVLINK_2, "V100 data sheet"),
    _gpu("t4", "T4", 7.5, (14.5, 65, 8.1, 320), _PCIE_NO_P2P, "T4 data sheet"),
)


# What the machines can do: rates with their uncertainty and where they are from.
#
# A prediction is made three times, with every rate as expected, as good and as bad as it may be; so the bands of all
# figures follow from those of the rates, also through overlaps. Rates are bytes a second, FLOPs a second, or seconds.


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
    memory gives to a long stream, `pointwise_bytes_s` to the small kernels of a layer (plan/step_time.py counts their
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
