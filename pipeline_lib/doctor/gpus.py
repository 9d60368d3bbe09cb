"""GPUs as the driver reports them (NVML), and their connections (`nvidia-smi topo -m`)."""

import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pipeline_lib.doctor.facts import Section, Unmeasured

# Throttle reasons that indicate a problem; an idle GPU, or one at its power cap under load, is
# normal.
WRONG_REASONS = {
    0x08: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}


@contextmanager
def _nvml() -> Iterator[Any]:
    """Yield the initialized NVML.

    Raise Unmeasured if it is missing, or if a call in the block fails.
    """
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
    """Return each GPU by number (name, memory, capability, power, clocks), and the driver.

    Power is the limit; the driver is its version. Numbers are the driver's. Values that a driver
    does not report are missing. Raise Unmeasured without NVML or a driver.
    """
    with _nvml() as nvml:
        found: Section = {"driver": _text(nvml.nvmlSystemGetDriverVersion())}
        for number in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            gpu: Section = {
                "name": _text(nvml.nvmlDeviceGetName(handle)),
                "capability": f"{major}.{minor}",
            }
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            gpu |= {"memory_bytes": int(memory.total), "memory_used_bytes": int(memory.used)}
            with suppress(nvml.NVMLError):
                gpu["power_limit_w"] = nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
            with suppress(nvml.NVMLError):
                gpu["power_limit_default_w"] = (
                    nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000
                )
            with suppress(nvml.NVMLError):
                gpu["sm_clock_most_mhz"] = nvml.nvmlDeviceGetMaxClockInfo(
                    handle, nvml.NVML_CLOCK_SM
                )
            found[str(number)] = gpu
    return found


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def clocks(uuid: str) -> Section:
    """Return the current clock, power and problematic slowdowns of the GPU with torch's `uuid`.

    Raise Unmeasured.
    """
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
    """Return each GPU pair's connection by `nvidia-smi topo -m`, like `{"0-1": "NV18"}`.

    NV# means # NVLinks; PIX, PXB, PHB, NODE and SYS are PCIe connections, from near to far.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s+\S", line)]
    table = {row[0]: row[1:] for row in rows if "X" in row}
    numbers = [name.removeprefix("GPU") for name in table]
    found = {}
    for row, cells in enumerate(table.values()):
        for column in range(row + 1, min(len(cells), len(numbers))):
            found[f"{numbers[row]}-{numbers[column]}"] = cells[column]
    return found
