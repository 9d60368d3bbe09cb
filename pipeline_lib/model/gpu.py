"""Checks for Triton and torch.compile on this machine, and deterministic algorithms."""

import functools
import importlib.util
import shutil
import sysconfig
from pathlib import Path

import torch
from torch.utils import deterministic

_COMPILERS = ("gcc", "clang", "cc")
AMPERE = 8  # the compute capability's first number


@functools.cache
def why_no_kernels() -> str:
    """Return the reason why Triton cannot build kernels on this machine; an empty string if it can.

    Triton comes with torch for CUDA. It compiles a C launcher for its kernels, which needs a C
    compiler and Python's headers; containers often lack both.
    """
    if torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return "this torch brings no Triton"
    if not any(map(shutil.which, _COMPILERS)):
        return f"there is no C compiler ({', '.join(_COMPILERS)})"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's headers are not installed (python3-dev)"
    return ""


def why_not_compiled(device: torch.device) -> str:
    """Return the reason not to compile layers for `device`; an empty string if there is none.

    GPUs older than Ampere are refused. If this machine has no GPU `device`, only Triton is checked.
    """
    generation = _generation(device)
    if generation is not None and generation < AMPERE:
        return (
            "this GPU has no kernel for packed documents, and layers would be compiled anew for "
            "other lengths"
        )
    return why_no_kernels()


@functools.cache
def has_triton(device: torch.device) -> bool:
    """Return True if Triton can build kernels for `device`, a GPU of Ampere or later here."""
    if device.type != "cuda" or why_no_kernels():
        return False
    generation = _generation(device)
    return generation is not None and generation >= AMPERE


def _generation(device: torch.device) -> int | None:
    """Return the GPU's major compute capability; None if this machine has no GPU `device`."""
    number = device.index or 0
    return (
        torch.cuda.get_device_properties(number).major
        if number < torch.cuda.device_count()
        else None
    )


def make_deterministic() -> None:
    """Make torch use deterministic algorithms in this process.

    An operator without one raises RuntimeError and names itself. cuBLAS also needs
    CUBLAS_WORKSPACE_CONFIG in the environment before CUDA starts; the launcher sets it.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # slow, and only for debugging


def device_with(free_bytes: int) -> torch.device:
    """Return the first GPU if it has so much free memory, else the CPU."""
    free = free_gpus()
    has_room = bool(free) and free_bytes <= free[0]
    return torch.device("cuda", 0) if has_room else torch.device("cpu")


def free_gpus() -> list[int]:
    """Return the bytes that are free on each GPU."""
    if not torch.cuda.is_available():
        return []
    # memory that torch caches from an earlier model does not count as free
    torch.cuda.empty_cache()
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]
