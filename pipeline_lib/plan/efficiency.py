"""What layers of real models reach of a GPU's peak, as named rows: by card, else by class of cards.

A card's data sheet gives the peak at a clock that its power may not allow, or, for GeForce, one
that it exceeds. So what is not known of a card itself is taken from cards of its class:

- data-centre boards at full power, and the same chips on PCIe with less of it;
- workstation cards, and boards for PCIe with the same chips: Ampere's hold their clock, Ada's at
  300 W do not;
- GeForce, whose products in half precision are summed in fp32 at half rate, so that their power
  allows more than the stated clock;
- cut-down cards, with fewer or slower tensor cores than their power and memory would allow.

Fractions are of the dense peak of half precision, in documents so long that attention is at its
best. Bands are relative. "Rows" are those of benchmarks/published.jsonl in the half for fitting;
the other half judges them (`python -m benchmarks.published`).
"""

from dataclasses import dataclass
from typing import Literal

from pipeline_lib.plan.gpus import Gpu

MEASURED_HERE = "measured in layers of this card"
MEASURED_ELSEWHERE = "measured elsewhere on this card"
GUESSED = "guessed from its data sheet"

GpuClass = Literal["data centre", "workstation", "consumer", "cut down"]


@dataclass(frozen=True)
class Efficiency:
    """The fractions of a GPU's peak that layers reach, and what they rest on.

    `flash` is of torch's attention kernel, `cudnn` of cuDNN's, which is for Hopper. `known` is
    MEASURED_HERE, MEASURED_ELSEWHERE or GUESSED; `source` says by what, `date` when it was set.
    """

    products: float
    flash: float
    cudnn: float
    products_band: float
    attention_band: float
    known: str
    source: str
    date: str


# Torch's flash kernel is written for A100. On cards of its kind it was not measured apart; 0.65 of
# products fits the rows of GeForce and of Ampere's workstation cards better than 0.5.
def _without_cudnn(
    products: float, band: float, known: str, source: str, flash: float = 0.65
) -> Efficiency:
    attention = flash * products
    return Efficiency(products, attention, attention, band, 0.35, known, source, "2026-11")


# One H200 (benchmarks/RESULTS.md): products reach 640 to 820 TFLOP/s of 989 alone, and 665 for
# seconds, at the board's limit of 700 W; attention 255 with torch's kernel and 405 to 430 with
# cuDNN's in documents of 8,192. For cuDNN's a value was taken that also suits LoRA's steps on
# documents of 32,768 and 65,536.
_H200 = Efficiency(0.66, 0.278, 0.44, 0.04, 0.1, MEASURED_HERE, "benchmarks/RESULTS.md", "2026-10")
# Between the 0.62 of the rows and our only steps on one (LoRA of 8B), which 0.64 makes 11 % too
# slow; its attention is taken to be H200's, whose chip is the same.
_H100 = Efficiency(0.64, 0.278, 0.44, 0.08, 0.15, MEASURED_HERE, "rows, and RESULTS.md", "2026-10")
# Rows of products; its 0.5 for attention was set before, and rows of torch's kernel agree within a
# third.
_A100 = Efficiency(0.765, 0.5, 0.5, 0.08, 0.15, MEASURED_HERE, "rows of three sources", "2026-11")
# The same chips with 300 and 350 W: the row of H100 PCIe comes to 0.94 of SXM's.
_H100_PCIE = Efficiency(0.6, 0.26, 0.41, 0.15, 0.25, MEASURED_ELSEWHERE, "row of GPT-2", "2026-11")
_A100_PCIE = Efficiency(0.72, 0.47, 0.47, 0.15, 0.25, GUESSED, "as H100's PCIe board", "2026-11")
# 1,696 TFLOP/s of products alone, which would come to 0.64; the row of GPT-2, whose products are
# small, to 0.5.
_B200 = _without_cudnn(0.55, 0.2, MEASURED_ELSEWHERE, "products alone, and GPT-2's row", 0.5)
# H20: 142 TFLOP/s of products alone, and 0.85 of that in layers, as on A100 and H200.
_H20 = Efficiency(0.82, 0.34, 0.55, 0.2, 0.35, MEASURED_ELSEWHERE, "products alone", "2026-11")

_AMPERE_CARD = _without_cudnn(
    0.78, 0.2, MEASURED_ELSEWHERE, "rows of A40, A6000, A5000, A4500 and A4000"
)
# 300 W do not let AD102 reach more than about 125 TFLOP/s, whatever its sheet says.
_RTX_6000_ADA = _without_cudnn(0.34, 0.2, MEASURED_ELSEWHERE, "rows of two sources")
_L40 = _without_cudnn(0.68, 0.2, GUESSED, "as RTX 6000 Ada, with the same chip and power")
_L40S = _without_cudnn(0.65, 0.2, MEASURED_ELSEWHERE, "row of GPT-2; 269 TFLOP/s alone")
_L4 = _without_cudnn(0.5, 0.2, MEASURED_ELSEWHERE, "row of GPT-2, at 72 W")
_PRO_6000 = _without_cudnn(0.8, 0.2, MEASURED_ELSEWHERE, "414 TFLOP/s alone; rows ask for more")
_GEFORCE = _without_cudnn(0.95, 0.2, MEASURED_ELSEWHERE, "rows of RTX 4090 and RTX 5090")
# torch.mm alone reaches 76.6 TFLOP/s, which would be 0.91 in layers; the rows are of cards that are
# limited to 280 W, and other published steps came to 0.72.
_RTX_3090 = _without_cudnn(0.8, 0.2, MEASURED_ELSEWHERE, "products alone, and two 3090 at 280 W")
# Volta and Turing: 94.8 and 41.9 TFLOP/s alone in fp16, and 0.85 of that in layers.
_V100 = _without_cudnn(0.64, 0.2, MEASURED_ELSEWHERE, "products alone")
_T4 = _without_cudnn(0.55, 0.2, MEASURED_ELSEWHERE, "products alone")

# Products alone: torch.mm in bf16 (V100 and T4: fp16), the best of squares of 1,024 to 10,240, the
# median of the entries for each card: github.com/zzc0721/torch-performance-test-data, database.md,
# read in November 2026. Layers reach 0.83 of it on H200, 0.80 on H100, 0.91 on A100.
# A800 and H800 differ from A100 and H100 in their links only.
_BY_CARD = {
    "H200": _H200,
    "H100 SXM": _H100,
    "H800 SXM": _H100,
    "A100 80GB SXM": _A100,
    "A100 40GB SXM": _A100,
    "A800 80GB SXM": _A100,
    "H100 PCIe": _H100_PCIE,
    "H800 PCIe": _H100_PCIE,
    "A100 80GB PCIe": _A100_PCIE,
    "A100 40GB PCIe": _A100_PCIE,
    "A800 80GB PCIe": _A100_PCIE,
    "B200": _B200,
    "H20": _H20,
    "H20-3e": _H20,
    "A40": _AMPERE_CARD,
    "RTX A6000": _AMPERE_CARD,
    "RTX A5000": _AMPERE_CARD,
    "RTX A4500": _AMPERE_CARD,
    "RTX A4000": _AMPERE_CARD,
    "RTX 6000 Ada": _RTX_6000_ADA,
    "L40": _L40,
    "L40S": _L40S,
    "L4": _L4,
    "RTX PRO 6000": _PRO_6000,
    "RTX 4090": _GEFORCE,
    "RTX 5090": _GEFORCE,
    "RTX 3090": _RTX_3090,
    "V100 16GB SXM": _V100,
    "T4": _T4,
}
# Cards of which nothing is known but the data sheet: GeForce as its class, with a wider band.
_OTHER_GEFORCE = _without_cudnn(0.9, 0.25, GUESSED, "as RTX 4090, RTX 5090 and RTX 3090")
_OTHER = Efficiency(0.66, 0.35, 0.35, 0.3, 0.4, GUESSED, "the middle of all others", "2026-10")
# Plain cores, and cards described by hand
_UNKNOWN = _OTHER

_DATA_CENTRE = ("A100", "A800", "H100", "H800", "H200", "GH200", "B200", "B300", "GB200", "V100")
_CUT_DOWN = ("H20", "H20-3e", "A10G", "A30", "L20", "RTX 4090 D")


def efficiency_of(gpu: Gpu, precision: str) -> Efficiency:
    """Return what layers reach on a GPU, by the best that is known of it."""
    if precision == "fp32":
        return _UNKNOWN
    if gpu.name in _BY_CARD:
        return _BY_CARD[gpu.name]
    return _OTHER_GEFORCE if gpu.is_geforce else _OTHER


def class_of(gpu: Gpu) -> GpuClass:
    """Return the class of a GPU of the catalogue."""
    if gpu.name in _CUT_DOWN:
        return "cut down"
    if gpu.name.split()[0] in _DATA_CENTRE:
        return "data centre"
    return "consumer" if gpu.is_geforce else "workstation"
