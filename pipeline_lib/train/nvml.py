"""How busy, full and hot a GPU is while it trains, as the driver sees it (NVML)."""

import importlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

EVERY_S = 1.0
Sample = dict[str, float]


class GpuSampler:
    """Samples in a thread of its own, about once a second; `take` gives the means since it was last asked.

    Where no sample can be taken, `take` gives nothing.
    """

    def __init__(self, sample: Callable[[], Sample] | None, every_s: float = EVERY_S) -> None:
        """Take samples with `sample`, which raises OSError when there are none any more; None takes none."""
        self._sample, self._every_s = sample, every_s
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._taken: list[Sample] = []
        self._latest: Sample = {}
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def __enter__(self) -> "GpuSampler":
        """Start sampling."""
        if self._sample is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop sampling."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(self._every_s + 1.0)

    def take(self) -> Sample:
        """The mean of each value since the last call; the latest values if there were no samples in between."""
        with self._lock:
            taken, self._taken = self._taken, []
        if taken:
            self._latest = {key: round(sum(one[key] for one in taken) / len(taken), 3) for key in taken[0]}
        return dict(self._latest)

    def _run(self) -> None:
        while self._sample is not None and not self._stopped.is_set():
            try:
                sample = self._sample()
            except OSError:
                self._sample = None
                return
            with self._lock:
                self._taken.append(sample)
            self._stopped.wait(self._every_s)


def gpu_sampler(device: torch.device | None) -> GpuSampler:
    """A sampler of `device`, which samples nothing if that is None or a CPU, or without NVML."""
    return GpuSampler(_nvml_of(device) if device is not None and device.type == "cuda" else None)


def _nvml_of(device: torch.device) -> Callable[[], Sample] | None:
    """What takes a sample of the GPU that torch calls `device`, whichever of the machine's it is."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:  # nvidia-ml-py is not needed to train
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        _sample(nvml, handle)
    except (nvml.NVMLError, AttributeError):  # no driver, or a part of a GPU, which has no such values
        return None

    def sample() -> Sample:
        try:
            return _sample(nvml, handle)
        except nvml.NVMLError as error:
            raise OSError(str(error)) from error

    return sample


def _sample(nvml: Any, handle: Any) -> Sample:
    """Fractions of time and of memory, watts and degrees Celsius. Raises NVMLError."""
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {
        "gpu_utilization": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "gpu_memory_used_bytes": float(memory.used),
        "gpu_power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "gpu_temperature_c": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    }
