"""GPUs and their data-sheet figures, by the names that users write and those that drivers report.

A name means exactly one card, or none: a word that the catalogue does not know makes another card
of it (`RTX A6000` and `RTX 6000 Ada`), so that no plan is of a card that nobody has.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from pipeline_lib.config.schema import GpuSheet
from pipeline_lib.core.units import (
    from_gbyte_per_s,
    from_gibibytes,
    from_gigabytes,
    from_teraflops,
)

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

    @property
    def is_geforce(self) -> bool:
        """Whether it is a card of desktops, whose products in half precision are summed at half rate.

        Of these the peak of half precision is twice that of plain fp32, of all others more.
        """
        return self.name.startswith("RTX") and self.half_flop_s < 2.5 * self.fp32_flop_s

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
    """Return `Gpu.peak_flop_s` of the GPU that the driver calls `gpu_name`, None if unknown.

    The size of its memory does not matter: the cores are the same.
    """
    words = name_words(gpu_name)
    gpu = _match(words) or _match(words - _sizes(words))
    return None if gpu is None else gpu.peak_flop_s(precision)


@cache
def find_gpu(name: str) -> Gpu | None:
    """Return the GPU called `name` (`h200`, `NVIDIA A100-SXM4-80GB`), or None if it is unknown.

    A name without a size of memory means the variant with the least, so that no plan is too large.
    A name with a word or a size that no GPU of the catalogue has is unknown.
    """
    return _match(name_words(name))


def gpu_names() -> tuple[str, ...]:
    """Return the names of all known GPUs, for messages."""
    return tuple(gpu.name for _, gpu in _CATALOGUE)


def near_names(name: str) -> str:
    """Return which GPU may be meant by `name`, that none has, in words."""
    words = name_words(name) - _PLAIN_WORDS
    models = {
        word for word in words - _sizes(words) - _SLOT_WORDS if len(word) > 2 or word in _SHORT
    }
    same = [known for known in gpu_names() if models & name_words(known)]
    by_lower = {known.lower(): known for known in gpu_names()}
    close = same or [
        by_lower[known] for known in get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
    ]
    if not close:
        return f"known are {', '.join(gpu_names())}"
    return f"did you mean {'one of ' if len(close) > 1 else ''}{', '.join(close)}"


def described(sheet: GpuSheet) -> Gpu:
    """Return the GPU that a config describes by hand: one with bf16, as from Ampere on.

    The rate of its plain cores is not asked for: fp32 counts as an eighth of bf16, as little as any
    GPU of the catalogue with bf16 has but those of data centres.
    """
    half_flop_s = from_teraflops(sheet.bf16_tflops)
    link = Link("as described", from_gbyte_per_s(sheet.link_gb_s), _DESCRIBED_LINK_FACTOR)
    return Gpu(
        name=sheet.name,
        capability=_AMPERE,
        memory_bytes=from_gigabytes(sheet.memory_gb),
        half_flop_s=half_flop_s,
        fp32_flop_s=half_flop_s / _DESCRIBED_FP32,
        memory_bytes_per_s=from_gbyte_per_s(sheet.memory_gb_s),
        link=link,
        source="cluster.gpu",
    )


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


def _sizes(words: frozenset[str]) -> frozenset[str]:
    """Return the words that are sizes of memory, as `80gb`."""
    sizes = (word for word in words if re.fullmatch(r"\d+gb", word))
    return frozenset(sizes) - {_GRACE_MEMORY}


def _match(words: frozenset[str]) -> Gpu | None:
    """Return the first entry whose words all occur, beside words that any such card may have."""
    for needed, gpu in _CATALOGUE:
        board = _SOCKET_WORDS if "NVLink" in gpu.link.name else _SLOT_WORDS
        sizes = _sizes(words) - needed
        others = words - needed - sizes - _PLAIN_WORDS - board
        if "gh200" in needed:
            others -= {_GRACE_MEMORY}
        if needed <= words and not others and all(_has_size(gpu, size) for size in sizes):
            return gpu
    return None


def _has_size(gpu: Gpu, size: str) -> bool:
    nominal_bytes = from_gigabytes(int(size.removesuffix("gb")))
    less, more = _MORE_OR_LESS
    return less < gpu.memory_bytes / nominal_bytes < more


# Words that a name may have or lack: of makers and series, of a kind of memory, and of boards.
_PLAIN_WORDS = frozenset(
    {"nvidia", "geforce", "rtx", "tesla", "gpu", "graphics", "generation", "edition", "ac"}
    | {"blackwell", "workstation", "server"}
    | {"hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6", "gddr6x", "gddr7"}
)
_SHORT = frozenset({"l4", "t4"})  # models of two letters; others of two are parts of a name
_SOCKET_WORDS, _SLOT_WORDS = frozenset({"sxm"}), frozenset({"pcie"})
# Of a GPU described by hand
_DESCRIBED_LINK_FACTOR, _DESCRIBED_FP32 = 1.5, 8
# Ampere and later have bf16; Ada and later have fp8.
_AMPERE, _ADA, _HOPPER = 8.0, 8.9, 9.0
_LEAST_CAPABILITY = {"bf16": _AMPERE, "fp8": _ADA}

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
# one. GeForce cards sum in fp32 at half rate, and their sheets give the other; peaks of fp8 and fp4
# in sheets are sparse, so 1457 / 4 is a quarter of that for fp8. A800 and H800 have A100's and
# H100's figures and slower links; NVIDIA's partners tell those of cards without a public sheet.
# Blackwell's boards have more memory than their sheets say, and less bandwidth: nvidia-smi shows
# 275,040 MiB of B300, 189,471 of GB200 and 183,359 of B200, of which torch reports 0.4 % less; the
# driver says 7,680 bits at 3,996 MHz (pytorch/ao#4002). "Cores and clock": NVIDIA's count of cores
# times the boost clock, as resellers' pages have them, for cards without a sheet of tensor rates.
_CATALOGUE: tuple[tuple[frozenset[str], Gpu], ...] = (
    _gpu("b300", "B300", 10.3, (267.4, 2250, 75, 7672), _NVLINK_5, "HGX B300 sheet / 8"),
    _gpu("gb200", "GB200", 10.0, (184.2, 2500, 80, 8000), _NVLINK_5, "GB200 NVL72 sheet / 72"),
    _gpu("b200", "B200", 10.0, (178.3, 2250, 75, 7672), _NVLINK_5, "HGX B200 sheet / 8"),
    _gpu("h200 nvl", "H200 NVL", 9.0, (139.8, 835.5, 60, 4800), _PCIE_5, "H200 data sheet"),
    _gpu("h200", "H200", 9.0, (139.8, 989.4, 67, 4800), _NVLINK_4, "H200 data sheet"),
    _gpu(
        "gh200 144gb", "GH200 144GB", 9.0, (139.8, 989.4, 67, 4900), _NVLINK_4, "GH200 data sheet"
    ),
    _gpu("gh200", "GH200", 9.0, (94.5, 989.4, 67, 4000), _NVLINK_4, "GH200 data sheet"),
    _gpu("h100 nvl", "H100 NVL", 9.0, (93.0, 835.5, 60, 3900), _PCIE_5, "H100 data sheet"),
    _gpu("h100 pcie", "H100 PCIe", 9.0, (79.1, 756.5, 51, 2000), _PCIE_5, "H100 data sheet"),
    _gpu("h100", "H100 SXM", 9.0, (79.1, 989.4, 67, 3350), _NVLINK_4, "H100 data sheet"),
    _gpu("h800 pcie", "H800 PCIe", 9.0, (79.1, 756.5, 51, 2000), _PCIE_5, "H100 data sheet"),
    _gpu("h800", "H800 SXM", 9.0, (79.1, 989.4, 67, 3350), _NVLINK_CUT, "H100 data sheet"),
    _gpu("h20 3e", "H20-3e", 9.0, (139.8, 148, 44, 4800), _NVLINK_4, "NVIDIA's partners"),
    _gpu("h20", "H20", 9.0, (95.0, 148, 44, 4000), _NVLINK_4, "NVIDIA's partners"),
    _gpu(
        "a100 80gb pcie", "A100 80GB PCIe", 8.0, (79.1, 312, 19.5, 1935), _PCIE_4, "A100 data sheet"
    ),
    _gpu("a100 80gb", "A100 80GB SXM", 8.0, (79.1, 312, 19.5, 2039), _NVLINK_3, "A100 data sheet"),
    _gpu("a100 pcie", "A100 40GB PCIe", 8.0, (39.4, 312, 19.5, 1555), _PCIE_4, "A100 data sheet"),
    _gpu("a100", "A100 40GB SXM", 8.0, (39.4, 312, 19.5, 1555), _NVLINK_3, "A100 data sheet"),
    _gpu("a800 pcie", "A800 80GB PCIe", 8.0, (79.1, 312, 19.5, 1935), _PCIE_4, "A100 data sheet"),
    _gpu("a800", "A800 80GB SXM", 8.0, (79.1, 312, 19.5, 2039), _NVLINK_CUT, "A100 data sheet"),
    _gpu("a40", "A40", 8.6, (44.4, 149.7, 37.4, 696), _PCIE_4, "A40 data sheet"),
    _gpu("a30", "A30", 8.0, (23.5, 165, 10.3, 933), _PCIE_4, "A30 data sheet"),
    _gpu("a10", "A10", 8.6, (22.0, 125, 31.2, 600), _PCIE_A10, "A10 data sheet"),
    _gpu("a10g", "A10G", 8.6, (22.0, 70, 31.5, 600), _PCIE_NO_P2P, "A10G data sheet"),
    _gpu("a4000", "RTX A4000", 8.6, (15.6, 76.7, 19.2, 448), _PCIE_4, "cores and clock"),
    _gpu("a4500", "RTX A4500", 8.6, (19.6, 94.6, 23.7, 640), _PCIE_4, "cores and clock"),
    _gpu("a5000", "RTX A5000", 8.6, (23.5, 111.1, 27.8, 768), _PCIE_4, "RTX A5000 data sheet"),
    _gpu("a6000", "RTX A6000", 8.6, (47.4, 154.8, 38.7, 768), _PCIE_4, "RTX A6000 data sheet"),
    _gpu("6000 ada", "RTX 6000 Ada", 8.9, (47.3, 364.2, 91.1, 960), _PCIE_4, "its sheet: 1457 / 4"),
    _gpu("pro 6000", "RTX PRO 6000", 12.0, (94.5, 500, 125, 1792), _PCIE_5, "its sheet: 4000 / 8"),
    _gpu("l40s", "L40S", 8.9, (44.4, 362.05, 91.6, 864), _PCIE_4, "L40S data sheet"),
    _gpu("l40", "L40", 8.9, (44.4, 181.05, 90.5, 864), _PCIE_4, "L40 data sheet"),
    _gpu("l20", "L20", 8.9, (44.4, 119.5, 59.8, 864), _PCIE_4, "NVIDIA's partners"),
    _gpu("l4", "L4", 8.9, (22.0, 121, 30.3, 300), _PCIE_NO_P2P, "L4 data sheet"),
    _gpu("3090 ti", "RTX 3090 Ti", 8.6, (23.5, 80, 40, 1008), _PCIE_NO_P2P, "GA102 white paper"),
    _gpu("3090", "RTX 3090", 8.6, (23.5, 71.2, 35.6, 936), _PCIE_NO_P2P, "GA102 white paper"),
    _gpu("3060 ti", "RTX 3060 Ti", 8.6, (7.7, 32.4, 16.2, 448), _PCIE_NO_P2P, "cores and clock"),
    _gpu("3060", "RTX 3060", 8.6, (11.7, 25.5, 12.7, 360), _PCIE_NO_P2P, "cores and clock"),
    _gpu("3080", "RTX 3080", 8.6, (9.7, 59.5, 29.8, 760), _PCIE_NO_P2P, "GA102 white paper"),
    _gpu("4070 ti", "RTX 4070 Ti", 8.9, (11.6, 80.2, 40.1, 504), _PCIE_NO_P2P, "cores and clock"),
    _gpu("5080", "RTX 5080", 12.0, (15.4, 112.6, 56.3, 960), _PCIE_NO_P2P, "its sheet: 1801 / 16"),
    _gpu("4080", "RTX 4080", 8.9, (15.7, 97.5, 48.7, 717), _PCIE_NO_P2P, "AD103 white paper"),
    _gpu(
        "4090 d", "RTX 4090 D", 8.9, (23.5, 147.1, 73.5, 1008), _PCIE_NO_P2P, "AD102, fewer cores"
    ),
    _gpu("4090", "RTX 4090", 8.9, (23.5, 165.2, 82.6, 1008), _PCIE_NO_P2P, "AD102 white paper"),
    _gpu("5090", "RTX 5090", 12.0, (31.3, 209.5, 104.8, 1792), _PCIE_NO_P2P, "GB202 white paper"),
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
