"""What can be had of a GPU beside torch itself, and the same bits each time."""

import functools
import importlib.util
import shutil
import sysconfig
from pathlib import Path

import torch
from torch.utils import deterministic

# What can be had of a GPU beside torch itself.

_COMPILERS = ("gcc", "clang", "cc")
_AMPERE = 8


@functools.cache
def why_no_kernels() -> str:
    """Why Triton cannot make kernels on this machine; empty if it can. It comes with torch for CUDA.

    Triton builds a piece of C around its kernels, and containers often lack what that takes.
    """
    if torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return "this torch brings no Triton"
    if not any(map(shutil.which, _COMPILERS)):
        return f"there is no C compiler ({', '.join(_COMPILERS)})"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's headers are not installed (python3-dev)"
    return ""


def why_not_compiled(device: torch.device) -> str:
    """Why layers are better not compiled for the GPU `device`; empty if they may be, and if there is no such GPU."""
    is_there = (device.index or 0) < torch.cuda.device_count()
    if is_there and torch.cuda.get_device_properties(device).major < _AMPERE:
        return "this GPU has no kernel for packed documents, and layers would be compiled anew for other lengths"
    return why_no_kernels()


@functools.cache
def has_triton(device: torch.device) -> bool:
    """Whether Triton makes kernels for `device`: a GPU from Ampere on."""
    return device.type == "cuda" and not why_no_kernels() and torch.cuda.get_device_properties(device).major >= _AMPERE


# The same bits each time, where a GPU's fastest algorithms give others.


def make_deterministic() -> None:
    """Let torch take algorithms that give the same bits each time, for the whole process.

    An operator that has none raises RuntimeError and names itself. cuBLAS wants CUBLAS_WORKSPACE_CONFIG in the
    environment before CUDA starts; the launcher puts it there.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it finds mistakes, and costs time
