"""The same bits each time, where a GPU's fastest algorithms give others."""

import torch
from torch.utils import deterministic


def make_deterministic() -> None:
    """Let torch take algorithms that give the same bits each time, for the whole process.

    An operator that has none raises RuntimeError and names itself. cuBLAS wants CUBLAS_WORKSPACE_CONFIG in the
    environment before CUDA starts; the launcher puts it there.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it finds mistakes, and costs time
