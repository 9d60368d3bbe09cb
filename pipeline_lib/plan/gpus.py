"""What GPUs can compute at best: their makers' dense figures, by the names that the driver gives them."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class PeakFlops:
    """FLOP/s of one GPU in matrix products without sparsity: half precision (bf16, fp16, summed in fp32), and fp32.

    fp32 is that of the plain cores: torch does not round fp32 products to TF32 unless told to.
    """

    half: float
    fp32: float


# NVIDIA's data sheets; where one gives only figures with sparsity, half of them. The first entry counts whose words
# are all in the name: special models stand before the plain one.
_PEAKS: tuple[tuple[str, PeakFlops], ...] = (
    ("B200", PeakFlops(2250e12, 75e12)),  # HGX B200, an eighth of the board's figures
    ("H200 NVL", PeakFlops(835.5e12, 60e12)),  # H200 data sheet
    ("H200", PeakFlops(989.4e12, 67e12)),
    ("GH200", PeakFlops(989.4e12, 67e12)),
    ("H100 NVL", PeakFlops(835.5e12, 60e12)),  # H100 data sheet
    ("H100 PCIe", PeakFlops(756.5e12, 51e12)),
    ("H100", PeakFlops(989.4e12, 67e12)),
    ("H800 PCIe", PeakFlops(756.5e12, 51e12)),  # an H100 with slower NVLink
    ("H800", PeakFlops(989.4e12, 67e12)),
    ("H20", PeakFlops(148e12, 44e12)),  # as NVIDIA's partners give it; it has no public data sheet
    ("A100", PeakFlops(312e12, 19.5e12)),  # A100 data sheet
    ("A800", PeakFlops(312e12, 19.5e12)),  # an A100 with slower NVLink
    ("A10", PeakFlops(125e12, 31.2e12)),  # A10 data sheet
    ("A10G", PeakFlops(70e12, 31.5e12)),  # the model that AWS has, by its data sheet
    ("L40S", PeakFlops(362.05e12, 91.6e12)),  # L40S data sheet
    ("L40", PeakFlops(181.05e12, 90.5e12)),
    ("L20", PeakFlops(119.5e12, 59.8e12)),
    ("L4", PeakFlops(121e12, 30.3e12)),
    ("3090 Ti", PeakFlops(80e12, 40e12)),  # GA102 and AD102 white papers, products summed in fp32
    ("3090", PeakFlops(71.2e12, 35.6e12)),
    ("4090 D", PeakFlops(147.1e12, 73.5e12)),
    ("4090", PeakFlops(165.2e12, 82.6e12)),
)


def peak_flops(gpu_name: str, precision: str) -> float | None:
    """Peak FLOP/s of the GPU that the driver calls `gpu_name` in `bf16`, `fp16` or `fp32`; None for an unknown one."""
    words = set(re.split(r"[^a-z0-9]+", gpu_name.lower()))
    for name, peaks in _PEAKS:
        if set(name.lower().split()) <= words:
            return peaks.fp32 if precision == "fp32" else peaks.half
    return None
