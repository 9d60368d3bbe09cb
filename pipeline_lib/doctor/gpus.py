"""The GPUs as the driver knows them (NVML), and how they are connected (`nvidia-smi topo -m`)."""

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pipeline_lib.doctor.facts import Section, Unmeasured

# Reasons for low clocks that are wrong; that a GPU is idle, or at its power cap while it works, is usual.
WRONG_REASONS = {0x08: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}


@contextmanager
def _nvml() -> Iterator[Any]:
    """The driver's library, ready. Raises Unmeasured without it, or if it refuses what the block asks."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        raise Unmeasured("nvidia-ml-py is not installed") from error
    try:
        nvml.nvmlInit()
        yield nvml
    except nvml.NVMLError as error:
        raise Unmeasured(f"NVML says: {error}") from error


def gpus() -> Section:
    """By number, as the driver counts: name, memory, capability, power limit, clocks; also the driver's version.

    Raises Unmeasured without NVML or a driver.
    """
    with _nvml() as nvml:
        count = nvml.nvmlDeviceGetCount()
        found: Section = {"driver": _text(nvml.nvmlSystemGetDriverVersion())}
        for number in range(count):
            found[str(number)] = _describe(nvml, nvml.nvmlDeviceGetHandleByIndex(number))
    return found


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _describe(nvml: Any, handle: Any) -> Section:
    """What this GPU is. A value that its driver does not give is left out."""
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    found: Section = {"name": _text(nvml.nvmlDeviceGetName(handle)), "capability": f"{major}.{minor}"}
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    found |= {"memory_bytes": int(memory.total), "memory_used_bytes": int(memory.used)}
    more: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("power_limit_w", lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000),
        ("power_limit_default_w", lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000),
        ("sm_clock_most_mhz", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
    )
    for name, ask in more:
        try:
            found[name] = ask()
        except nvml.NVMLError:
            continue
    return found


def clocks(uuid: str) -> Section:
    """Clock, power and wrong slowdowns, now, of the GPU that torch says has this uuid. Raises Unmeasured."""
    with _nvml() as nvml:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return {
            "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "sm_clock_most_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "slowed_down": [text for bit, text in WRONG_REASONS.items() if reasons & bit],
        }


def links(topology: str) -> dict[str, str]:
    """From the text of `nvidia-smi topo -m`: how each pair of GPUs is connected, as `{"0-1": "NV18"}`.

    NV# is that many NVLinks; PIX, PXB, PHB, NODE and SYS are PCIe, from near to far.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s+\S", line)]
    table = {row[0]: row[1:] for row in rows if "X" in row}
    names = list(table)
    return {
        f"{first.removeprefix('GPU')}-{second.removeprefix('GPU')}": table[first][column]
        for row, first in enumerate(names)
        for column, second in enumerate(names)
        if row < column < len(table[first])
    }
