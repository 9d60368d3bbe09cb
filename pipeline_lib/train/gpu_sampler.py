"""Utilization, memory, power and temperature of a GPU during training, from the driver (NVML)."""

import importlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

EVERY_S = 1.0
Sample = dict[str, float]


class GpuSampler:
    """A thread that samples about once a second; `take` returns the means since its last call.

    If no sample can be taken, `take` returns nothing.
    """

    def __init__(self, sample: Callable[[], Sample] | None, every_s: float = EVERY_S) -> None:
        """Take samples with `sample`, which raises OSError once none are left; None takes none."""
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop sampling."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(self._every_s + 1.0)

    def take(self) -> Sample:
        """Return each value's mean since the last call, or the last means without new samples."""
        with self._lock:
            taken = self._taken
            self._taken = []
        if taken:
            self._latest = {
                key: round(sum(sample[key] for sample in taken) / len(taken), 3) for key in taken[0]
            }
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
    """Return a sampler of `device`; it samples nothing if that is None or a CPU, or without NVML.

    A sample has the utilization as a fraction of time, memory in bytes, watts and degrees Celsius.
    """
    if device is None or device.type != "cuda":
        return GpuSampler(None)
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:  # an installation from before it was required
        return GpuSampler(None)

    def sample() -> Sample:
        try:
            return {
                "gpu_utilization": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
                "gpu_memory_used_bytes": float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
                "gpu_power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                "gpu_temperature_c": float(
                    nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
                ),
            }
        except nvml.NVMLError as error:
            raise OSError(str(error)) from error

    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        )
        sample()
    except (
        nvml.NVMLError,
        OSError,
        AttributeError,
    ):  # no driver, or a MIG slice of a GPU, which has no such values
        return GpuSampler(None)
    return GpuSampler(sample)
