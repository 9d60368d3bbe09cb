"""The update of fp32 weights: gradient norm, clipping, AdamW; by billion parameters of a rank."""

import torch
from torch import Tensor, nn

from benchmarks.kernels.clock import Call
from benchmarks.kernels.report import Report

BILLION = 1e9
MOST = {"cuda": 4e8, "cpu": 4e6}  # parameters that are measured; four copies of them are held
# read and written for a parameter
_BYTES = {"norm of gradients": 4, "clipping": 8, "fused AdamW": 28}


def measure_update(report: Report, ranks: int) -> None:
    """Lines for a billion parameters; ways for `update`, of a model sharded over `ranks`."""
    tensors = _tensors(report)
    parameters = sum(tensor.numel() for tensor in tensors)
    of_rank, total_s = report.geometry.parameters / ranks, 0.0
    for name, moved in _BYTES.items():
        seconds = report.measure(
            "update",
            f"{name}, {parameters / BILLION:.2f} billion",
            lambda name=name: _call(name, tensors),  # type: ignore[misc]
            moved_bytes=moved * parameters,
            calls=round(of_rank / parameters, 3),
        )
        total_s += seconds / parameters * of_rank
    report.way("update", f"over {ranks} ranks", total_s)


def _tensors(report: Report) -> list[Tensor]:
    """In the shapes of the model's layers, which an update takes in one kernel or a few."""
    found, left = list[Tensor](), MOST[report.device.type]
    for name, shape in report.geometry.shapes().items():
        if ".layers." in name and left > 0:
            found.append(torch.randn(shape, device=report.device))
            left -= found[-1].numel()
    return found


def _call(name: str, tensors: list[Tensor]) -> Call:
    if name == "norm of gradients":
        return lambda: nn.utils.get_total_norm(tensors)
    if name == "clipping":
        return lambda: torch._foreach_mul_(tensors, 0.999)
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.AdamW(parameters, lr=1e-5, betas=(0.9, 0.95), fused=True).step
