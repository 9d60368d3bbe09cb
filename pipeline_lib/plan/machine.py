"""GPUs and their data-sheet figures, and the rates of a machine with their uncertainty."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, cached_property

from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.units import from_gbyte_per_s, from_gibibytes, from_gigabytes, from_teraflops
from pipeline_lib.records.plan import Figure, PlannedMachine, Rate

# The catalogue of GPUs, by the names that users write and those that drivers report.
#
# Peaks and bandwidths are NVIDIA's dense figures; where a data sheet gives only sparse ones, they
# are halved. Memory is the size that torch reports and can allocate from, which is less than the
# nominal size.


@dataclass(frozen=True)
class Link:
    """The link between a node's GPUs, with the bus bandwidth that a large collective achieves.

    The band is from `bytes_per_s / factor` to `bytes_per_s * factor`. Bus bandwidth is defined as
    in nccl-tests.
    """

    name: str
    bytes_per_s: float
    factor: float


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Half precision is bf16 and fp16 accumulated in fp32; fp32 is the rate of the plain cores. torch
    does not use TF32 for fp32 products by default. `capability` is the CUDA compute capability;
    `source` says where the figures come from.
    """

    name: str
    capability: float
    memory_bytes: int
    half_flop_s: float
    fp32_flop_s: float
    memory_bytes_per_s: float
    link: Link
    source: str

    @property
    def is_hopper(self) -> bool:
        """Whether it has the architecture of cuDNN's attention kernel (model/attention.py)."""
        return self.capability == _HOPPER

    def computes_in(self, precision: str) -> bool:
        """Return whether the GPU computes products in `bf16`, `fp8`, `fp16` or `fp32`."""
        return self.capability >= _LEAST_CAPABILITY.get(precision, 0.0)

    def peak_flop_s(self, precision: str) -> float | None:
        """Return the peak FLOP/s that MFU refers to; None if the GPU cannot compute `precision`.

        For `fp8` this is the bf16 peak, because attention, head and norms run in bf16.
        """
        if not self.computes_in(precision):
            return None
        return self.fp32_flop_s if precision == "fp32" else self.half_flop_s


def peak_flops(gpu_name: str, precision: str) -> float | None:
    """Return `Gpu.peak_flop_s` of the GPU that the driver calls `gpu_name`, None if unknown."""
    gpu = _match(name_words(gpu_name))
    return None if gpu is None else gpu.peak_flop_s(precision)


@cache
def find_gpu(name: str) -> Gpu | None:
    """Return the GPU called `name` (`h200`, `NVIDIA A100-SXM4-80GB`), or None if it is unknown.

    An ambiguous name means the variant with the least memory, so that no plan is too large. A name
    with a memory size that the GPU does not have is unknown.
    """
    words = name_words(name)
    gpu = _match(words)
    sizes = [
        int(word.removesuffix("gb"))
        for word in words
        if re.fullmatch(r"\d+gb", word) and word != _GRACE_MEMORY
    ]
    less, more = _MORE_OR_LESS
    if gpu is None or any(
        not less < gpu.memory_bytes / from_gigabytes(size) < more for size in sizes
    ):
        return None
    return gpu


def gpu_names() -> tuple[str, ...]:
    """Return the names of all known GPUs, for messages."""
    return tuple(gpu.name for _, gpu in _CATALOGUE)


@cache
def name_words(name: str) -> frozenset[str]:
    """Split a GPU's name into words: `rtx4090` is two; `80 GB`, `80G`, a last `80` are `80gb`."""
    text = re.sub(r"[^a-z0-9]+", " ", name.lower())
    text = re.sub(r"\b(rtx|tesla|nvidia)(?=\w*\d)", r"\1 ", text)
    text = re.sub(r"\b(\d{4})(d|ti)\b", r"\1 \2", text)
    text = re.sub(r"\bsxm\d\b", "sxm", text)
    text = re.sub(r"(?<=\w )(\d{2,3}) *$", r"\1gb", text)
    text = re.sub(r"\b(\d+) ?g(?:i?b)?\b", r"\1gb", text)
    return frozenset(text.split())


def _match(words: frozenset[str]) -> Gpu | None:
    """Return the first entry whose words all occur.

    MIG slices and laptop GPUs match none: their figures differ.
    """
    if words & {"mig", "laptop"}:
        return None
    return next((gpu for needed, gpu in _CATALOGUE if needed <= words), None)


# Ampere and later have bf16; Ada and later have fp8.
_LEAST_CAPABILITY = {"bf16": 8.0, "fp8": 8.9}
_HOPPER = 9.0

# Rings reach about 80 % of what a GPU can send over NVLink (measured: H200 359 to 367 of 450 GB/s;
# ml-engineering: A100 235 of 300, and B200 741 of 900, with the help of its switches). In-switch
# reduction, which only all-reduces use, is left out.
_NVLINK_5 = Link("NVLink 5", from_gbyte_per_s(720), 1.3)
_NVLINK_4 = Link("NVLink 4", from_gbyte_per_s(360), 1.3)
_NVLINK_3 = Link("NVLink 3", from_gbyte_per_s(235), 1.3)
_NVLINK_2 = Link("NVLink 2", from_gbyte_per_s(120), 1.3)
# the DeepSeek-V3 report measured 160 on H800
_NVLINK_CUT = Link("NVLink of 400 GB/s", from_gbyte_per_s(160), 1.3)
# PCIe depends on the host far more: switches, sockets, NVLink bridges between pairs, and whether
# P2P works. From issues of nccl and nccl-tests: A100 20 GB/s between pairs (178), 4090 with P2P 26
# (tinygrad's driver, 36).
_PCIE_5 = Link("PCIe 5", from_gbyte_per_s(40), 2.5)
_PCIE_4 = Link("PCIe 4", from_gbyte_per_s(20), 2.5)
_PCIE_NO_P2P = Link("PCIe without P2P", from_gbyte_per_s(5), 3.0)  # through the host's memory
_PCIE_A10 = Link("PCIe without P2P", from_gbyte_per_s(4.3), 2.5)  # two A10s of QwenLM/Qwen3#773

# the GB that torch reports per nominal GB, which some vendors count as GiB
_MORE_OR_LESS = (0.95, 1.08)
# the memory of a GH200's CPU, which is part of the name that its driver reports
_GRACE_MEMORY = "480gb"


def _gpu(
    needed: str,
    name: str,
    capability: float,
    sizes: tuple[float, float, float, float],
    link: Link,
    source: str,
) -> tuple[frozenset[str], Gpu]:
    """Build a row: a name's words, and the GPU; `sizes` are GiB, half and fp32 TFLOP/s, GB/s."""
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


# The first entry whose words are all in the name matches: special models stand before the plain
# one.
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
    _gpu(
        "gh200 144gb",
        "GH200 144GB",
        9.0,
        (139.8, 989.4, 67, 4900),
        _NVLINK_4,
        "GH200 data sheet, with HBM3e",
    ),
    _gpu("gh200", "GH200", 9.0, (94.5, 989.4, 67, 4000), _NVLINK_4, "GH200 data sheet, with HBM3"),
    _gpu("h100 nvl", "H100 NVL", 9.0, (93.0, 835.5, 60, 3900), _PCIE_5, "H100 data sheet"),
    _gpu("h100 pcie", "H100 PCIe", 9.0, (79.1, 756.5, 51, 2000), _PCIE_5, "H100 data sheet"),
    _gpu("h100", "H100 SXM", 9.0, (79.1, 989.4, 67, 3350), _NVLINK_4, "H100 data sheet"),
    _gpu(
        "h800 pcie",
        "H800 PCIe",
        9.0,
        (79.1, 756.5, 51, 2000),
        _PCIE_5,
        "H100 data sheet; has slower NVLink",
    ),
    _gpu(
        "h800",
        "H800 SXM",
        9.0,
        (79.1, 989.4, 67, 3350),
        _NVLINK_CUT,
        "H100 data sheet; has slower NVLink",
    ),
    _gpu(
        "h20 3e",
        "H20-3e",
        9.0,
        (139.8, 148, 44, 4800),
        _NVLINK_4,
        "NVIDIA's partners; it has no public data sheet",
    ),
    _gpu(
        "h20",
        "H20",
        9.0,
        (95.0, 148, 44, 4000),
        _NVLINK_4,
        "NVIDIA's partners; it has no public data sheet",
    ),
    _gpu(
        "a100 80gb pcie", "A100 80GB PCIe", 8.0, (79.1, 312, 19.5, 1935), _PCIE_4, "A100 data sheet"
    ),
    _gpu("a100 80gb", "A100 80GB SXM", 8.0, (79.1, 312, 19.5, 2039), _NVLINK_3, "A100 data sheet"),
    _gpu("a100 pcie", "A100 40GB PCIe", 8.0, (39.4, 312, 19.5, 1555), _PCIE_4, "A100 data sheet"),
    _gpu("a100", "A100 40GB SXM", 8.0, (39.4, 312, 19.5, 1555), _NVLINK_3, "A100 data sheet"),
    _gpu(
        "a800 pcie",
        "A800 80GB PCIe",
        8.0,
        (79.1, 312, 19.5, 1935),
        _PCIE_4,
        "A100 data sheet; has slower NVLink",
    ),
    _gpu(
        "a800",
        "A800 80GB SXM",
        8.0,
        (79.1, 312, 19.5, 2039),
        _NVLINK_CUT,
        "A100 data sheet; has slower NVLink",
    ),
    _gpu("a40", "A40", 8.6, (44.4, 149.7, 37.4, 696), _PCIE_4, "A40 data sheet"),
    _gpu("a30", "A30", 8.0, (23.5, 165, 10.3, 933), _PCIE_4, "A30 data sheet"),
    _gpu("a10", "A10", 8.6, (22.0, 125, 31.2, 600), _PCIE_A10, "A10 data sheet"),
    _gpu(
        "a10g",
        "A10G",
        8.6,
        (22.0, 70, 31.5, 600),
        _PCIE_NO_P2P,
        "A10G data sheet: the model that AWS has",
    ),
    _gpu("a6000", "RTX A6000", 8.6, (47.4, 154.8, 38.7, 768), _PCIE_4, "RTX A6000 data sheet"),
    _gpu("l40s", "L40S", 8.9, (44.4, 362.05, 91.6, 864), _PCIE_4, "L40S data sheet"),
    _gpu("l40", "L40", 8.9, (44.4, 181.05, 90.5, 864), _PCIE_4, "L40 data sheet"),
    _gpu(
        "l20",
        "L20",
        8.9,
        (44.4, 119.5, 59.8, 864),
        _PCIE_4,
        "NVIDIA's partners; it has no public data sheet",
    ),
    _gpu("l4", "L4", 8.9, (22.0, 121, 30.3, 300), _PCIE_NO_P2P, "L4 data sheet"),
    _gpu(
        "3090 ti",
        "RTX 3090 Ti",
        8.6,
        (23.5, 80, 40, 1008),
        _PCIE_NO_P2P,
        "GA102 white paper, summed in fp32",
    ),
    _gpu(
        "3090",
        "RTX 3090",
        8.6,
        (23.5, 71.2, 35.6, 936),
        _PCIE_NO_P2P,
        "GA102 white paper, summed in fp32",
    ),
    _gpu(
        "3060 ti",
        "RTX 3060 Ti",
        8.6,
        (7.7, 32.4, 16.2, 448),
        _PCIE_NO_P2P,
        "its cores and clock, summed in fp32",
    ),
    _gpu(
        "3060",
        "RTX 3060",
        8.6,
        (11.7, 25.5, 12.7, 360),
        _PCIE_NO_P2P,
        "its cores and clock, summed in fp32",
    ),
    _gpu(
        "4080",
        "RTX 4080",
        8.9,
        (15.7, 97.5, 48.7, 717),
        _PCIE_NO_P2P,
        "AD103 white paper, summed in fp32",
    ),
    _gpu(
        "4090 d",
        "RTX 4090 D",
        8.9,
        (23.5, 147.1, 73.5, 1008),
        _PCIE_NO_P2P,
        "AD102 white paper, by its fewer cores",
    ),
    _gpu(
        "4090",
        "RTX 4090",
        8.9,
        (23.5, 165.2, 82.6, 1008),
        _PCIE_NO_P2P,
        "AD102 white paper, summed in fp32",
    ),
    _gpu(
        "5090",
        "RTX 5090",
        12.0,
        (31.3, 209.5, 104.8, 1792),
        _PCIE_NO_P2P,
        "GB202 white paper, summed in fp32",
    ),
    _gpu(
        "v100 pcie 32gb",
        "V100 32GB PCIe",
        7.0,
        (31.7, 112, 14, 900),
        _PCIE_NO_P2P,
        "V100 data sheet",
    ),
    _gpu("v100 pcie", "V100 16GB PCIe", 7.0, (15.7, 112, 14, 900), _PCIE_NO_P2P, "V100 data sheet"),
    _gpu("v100 32gb", "V100 32GB SXM", 7.0, (31.7, 125, 15.7, 900), _NVLINK_2, "V100 data sheet"),
    _gpu("v100", "V100 16GB SXM", 7.0, (15.7, 125, 15.7, 900), _NVLINK_2, "V100 data sheet"),
    _gpu("t4", "T4", 7.5, (14.5, 65, 8.1, 320), _PCIE_NO_P2P, "T4 data sheet"),
)


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


# Host memory that is assumed of a node where cluster.memory_gb does not give it: for cards of
# desktops, known by their names, that of a usual desktop; for all others so much for each GPU, and
# at most that of a usual server.
_CONSUMER_WORDS = frozenset({"geforce", "rtx"})
_CONSUMER_HOST_GB, _HOST_GB_OF_A_GPU, _MOST_HOST_GB = 64, 192, 2000


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
        if name_words(self.name) & _CONSUMER_WORDS:
            return from_gigabytes(_CONSUMER_HOST_GB)
        return from_gigabytes(min(_HOST_GB_OF_A_GPU * self.ranks_per_node, _MOST_HOST_GB))

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
