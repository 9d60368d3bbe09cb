"""Turns an out-of-memory error into one message: what was requested, predicted, and would fit."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import TrainingError
from pipeline_lib.core.events import EventName
from pipeline_lib.core.stage import Say
from pipeline_lib.core.units import gib
from pipeline_lib.model.gpu import has_triton
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import PARTS
from pipeline_lib.plan.remedies import Load, least, remedies
from pipeline_lib.records.plan import Memory
from pipeline_lib.train.dist import World

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_NOTABLE_BYTES = 2**29


@dataclass(frozen=True)
class Shortage:
    """A failed allocation as torch's error describes it, in bytes; None for what it omits."""

    wanted_bytes: int | None
    capacity_bytes: int | None
    used_bytes: int | None
    others_bytes: int

    @staticmethod
    def read(text: str) -> "Shortage":
        """Parse the text of an OutOfMemoryError.

        A memory limit set for the process counts as the device's capacity.
        """

        def sizes(pattern: str) -> list[int]:
            size = r"(\d+(?:\.\d+)?) (bytes|[KMGT]iB)"
            return [
                round(float(number) * _UNITS[unit])
                for number, unit in re.findall(pattern % size, text)
            ]

        def first(*patterns: str) -> int | None:
            return next((size for pattern in patterns for size in sizes(pattern) if size), None)

        return Shortage(
            wanted_bytes=first("[Tt]ried to allocate %s"),
            capacity_bytes=first("%s allowed", "total capacity of %s"),
            used_bytes=first("this process has %s memory in use", "%s is allocated by PyTorch"),
            others_bytes=sum(sizes(r"Process \d+ has %s memory in use")),
        )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether the device's memory was full; some libraries raise RuntimeErrors for it."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


@dataclass
class MemoryWatch:
    """An observer that explains an out-of-memory by the current phase and predicted memory."""

    world: World
    geometry: Geometry
    train: Train
    block_tokens: int
    batch_blocks: int  # of a step, over all ranks
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
    def _load(self) -> Load:
        """The run in the planner's terms."""
        ranks = Ranks(self.world.size, self.world.local_size, has_triton(self.world.device))
        return Load(self.geometry, self.train, ranks, self.block_tokens, self.batch_blocks)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Convert an out-of-memory error inside the block to TrainingError; re-raise others.

        These are RuntimeErrors.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            shortage = Shortage.read(str(error))
            if shortage.capacity_bytes is None:
                raise TrainingError(
                    f"memory is full {self.doing} ({str(error).strip().splitlines()[0]})"
                ) from error
            raise TrainingError(self.explain(shortage, shortage.capacity_bytes)) from error

    def announce(self, say: Say) -> None:
        """Warn, before loading anything, if this rank's GPU has less free than is predicted."""
        if self.world.device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info(self.world.device)
        needed = self._load.memory
        if needed.total_bytes > free:
            advice = "; ".join(self._advice(free, 1.0))
            say(
                f"warning: {gib(needed.total_bytes)} of GPU memory are predicted "
                f"({parts_of(needed)}), "
                f"and {gib(free)} of this GPU's {gib(total)} are free; {advice}"
            )

    def explain(self, shortage: Shortage, capacity_bytes: int) -> str:
        """Return the message: several lines, of which the first alone is enough for a log."""
        predicted = self._load.memory
        used = shortage.used_bytes or 0
        wanted = shortage.wanted_bytes or 0
        ratio = (used + wanted) / predicted.total_bytes
        use = f"{gib(used)} of {gib(capacity_bytes)} in use"
        if shortage.others_bytes > _NOTABLE_BYTES:
            use += f" here and {gib(shortage.others_bytes)} by other processes on this GPU"
        lines = [
            f"GPU memory is full {self.doing}: {gib(wanted)} more were wanted with {use}",
            f"predicted were {gib(predicted.total_bytes)}, at most {predicted.moment}: "
            f"{parts_of(predicted)}",
            *self._advice(capacity_bytes - shortage.others_bytes, ratio),
        ]
        return "\n  ".join(lines)

    def _advice(self, capacity_bytes: int, ratio: float) -> list[str]:
        has_deepspeed = find_spec("deepspeed") is not None
        if fitting := remedies(self._load, capacity_bytes, ratio, has_deepspeed):
            return ["what would fit, the cheapest first:", *(f"- {remedy}" for remedy in fitting)]
        best = least(self._load, ratio, has_deepspeed)
        if best is None:
            return [
                "there is nothing left to change: it takes GPUs with more memory, or a smaller "
                "model"
            ]
        return [
            f"no change is predicted to fit; the least memory is needed by {best}: it takes more "
            "or larger GPUs"
        ]


def parts_of(memory: Memory) -> str:
    """List the parts from the largest to the smallest, without those below 1% of the total."""
    sizes = {part: int(getattr(memory, f"{part}_bytes")) for part in PARTS}
    ordered = sorted(sizes.items(), key=lambda each: -each[1])
    return ", ".join(
        f"{part} {gib(size)}" for part, size in ordered if size >= memory.total_bytes / 100
    )
