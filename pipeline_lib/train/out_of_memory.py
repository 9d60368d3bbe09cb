"""Turns an out-of-memory error into one message: what was requested, what was predicted, and what would fit."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from pipeline_lib.config.schema import Train
from pipeline_lib.core.errors import TrainingError
from pipeline_lib.core.events import EventName
from pipeline_lib.core.stage import Say
from pipeline_lib.core.units import gib
from pipeline_lib.model.geometry import Geometry
from pipeline_lib.model.gpu import has_triton
from pipeline_lib.plan.choose import least, remedies
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import PARTS, Memory, predict
from pipeline_lib.train.dist import World

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|[KMGT]iB)"
_NOTABLE_BYTES = 2**29


@dataclass(frozen=True)
class Shortage:
    """A failed allocation as torch's error describes it, in bytes; None for what the error does not state."""

    wanted_bytes: int | None
    capacity_bytes: int | None
    free_bytes: int | None
    used_bytes: int | None
    others_bytes: int

    @staticmethod
    def read(text: str) -> "Shortage":
        """Parse the text of an OutOfMemoryError. A memory limit set for the process counts as the device's capacity."""
        allowed = _size(rf"{_SIZE} allowed", text)
        return Shortage(
            wanted_bytes=_size(rf"[Tt]ried to allocate {_SIZE}", text),
            capacity_bytes=allowed or _size(rf"total capacity of {_SIZE}", text),
            free_bytes=_size(rf"of which {_SIZE} is free", text),
            used_bytes=_size(rf"this process has {_SIZE} memory in use", text)
            or _size(rf"{_SIZE} is allocated by PyTorch", text),
            others_bytes=sum(_bytes(*found) for found in re.findall(rf"Process \d+ has {_SIZE} memory in use", text)),
        )


def _size(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return _bytes(found[1], found[2]) if found else None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether the device's memory was full; libraries below torch report that in plain RuntimeErrors."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


@dataclass
class MemoryWatch:
    """An observer of the run's events that explains an out-of-memory by the current phase and the predicted memory."""

    world: World
    geometry: Geometry
    train: Train
    block_tokens: int
    doing: str = "while the model was loaded"

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        """Record the phase that the event `name` begins."""
        if name == EventName.RUN_START:
            self.doing = "in the warm-up before the first step"
        elif name == EventName.STEP_BEGIN:
            self.doing = f"in step {fields['step']}"
        elif name == EventName.STEP_END:
            self.doing = f"after step {fields['step']}, when it was saved or validated"

    @property
    def ranks(self) -> Ranks:
        """The world in the planner's terms."""
        return Ranks(self.world.size, self.world.local_size, has_triton(self.world.device))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Convert an out-of-memory error inside the block into a TrainingError; re-raise any other RuntimeError."""
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            shortage = Shortage.read(str(error))
            if shortage.capacity_bytes is None:
                raise TrainingError(f"memory is full {self.doing} ({str(error).strip().splitlines()[0]})") from error
            raise TrainingError(self.explain(shortage, shortage.capacity_bytes)) from error

    def announce(self, say: Say) -> None:
        """Warn, before anything is loaded, if the predicted memory exceeds what is free on this rank's GPU."""
        if self.world.device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info(self.world.device)
        needed = self._predicted()
        if needed.total_bytes > free:
            advice = "; ".join(self._advice(free, 1.0))
            say(
                f"warning: {gib(needed.total_bytes)} of GPU memory are predicted ({parts_of(needed)}), "
                f"and {gib(free)} of this GPU's {gib(total)} are free; {advice}"
            )

    def explain(self, shortage: Shortage, capacity_bytes: int) -> str:
        """Return the message: several lines, of which the first alone is enough for a log."""
        predicted = self._predicted()
        used, wanted = shortage.used_bytes or 0, shortage.wanted_bytes or 0
        ratio = (used + wanted) / predicted.total_bytes
        held = f"{gib(used)} of {gib(capacity_bytes)} in use"
        if shortage.others_bytes > _NOTABLE_BYTES:
            held += f" here and {gib(shortage.others_bytes)} by other processes on this GPU"
        lines = [
            f"GPU memory is full {self.doing}: {gib(wanted)} more were wanted with {held}",
            f"predicted were {gib(predicted.total_bytes)}, at most {predicted.moment}: {parts_of(predicted)}",
            *self._advice(capacity_bytes - shortage.others_bytes, ratio),
        ]
        return "\n  ".join(lines)

    def _predicted(self) -> Memory:
        return predict(self.geometry, self.train, self.ranks, self.block_tokens)

    def _advice(self, capacity_bytes: int, ratio: float) -> list[str]:
        known = (self.geometry, self.train, self.ranks, self.block_tokens)
        has_deepspeed = find_spec("deepspeed") is not None
        found = remedies(*known, capacity_bytes, ratio, has_deepspeed)
        if found:
            return ["what would fit, the cheapest first:", *(f"- {remedy}" for remedy in found)]
        best = least(*known, ratio, has_deepspeed)
        if best is None:
            return ["there is nothing left to change: it takes GPUs with more memory, or a smaller model"]
        return [f"no change is predicted to fit; the least memory is needed by {best}: it takes more or larger GPUs"]


def parts_of(memory: Memory) -> str:
    """List the parts from the largest to the smallest, without those below 1% of the total."""
    sizes = {part: int(getattr(memory, f"{part}_bytes")) for part in PARTS}
    ordered = sorted(sizes.items(), key=lambda each: -each[1])
    return ", ".join(f"{part} {gib(size)}" for part, size in ordered if size >= memory.total_bytes / 100)
