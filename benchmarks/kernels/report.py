"""The lines of a run as they come, and the ways in which each part of a step can be computed."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch

from benchmarks.kernels.clock import Call, Clock, sets_for
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.plan.gpus import Gpu


@dataclass(frozen=True)
class Line:
    """One operation.

    `flops` and `moved_bytes` are the least that a call needs; `calls` are those of a step.
    """

    group: str
    name: str
    seconds: float
    flops: float
    moved_bytes: float
    calls: float


@dataclass
class Report:
    """What is measured for a model and micro-batch of `tokens`; only the rank `speaks` prints.

    `ways[part][name]` are seconds of a step that `part` takes if it is computed in the way `name`.
    `heat` says how many times longer products take one after the other for seconds than each
    measured by itself.
    """

    clock: Clock
    gpu: Gpu
    geometry: Geometry
    tokens: int
    speaks: bool = True
    lines: list[Line] = field(default_factory=list)
    ways: dict[str, dict[str, float]] = field(default_factory=dict)
    heat: float = 1.0

    @property
    def device(self) -> torch.device:
        """Where all of it runs."""
        return self.clock.device

    def say(self, text: str) -> None:
        """Print a line at once."""
        if self.speaks:
            print(text)
            sys.stdout.flush()

    def measure(
        self,
        group: str,
        name: str,
        make: Callable[[], Call],
        flops: float = 0.0,
        moved_bytes: float = 0.0,
        calls: float = 0.0,
        share: float = 1.0,
    ) -> float:
        """Seconds of what `make` gives with its own inputs; infinite if it fails or is late."""
        if time.monotonic() > self.clock.until_s:
            self.say(f"{group:<12} {name:<44} left out: the time is up")
            return math.inf
        try:
            seconds = self.clock.seconds([make() for _ in range(sets_for(moved_bytes))], share)
        except (
            Exception
        ) as error:  # of kernels from many libraries, whose errors have no type in common
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.say(f"{group:<12} {name:<44} failed: {type(error).__name__}: {reason[:120]}")
            return math.inf
        return self.add(Line(group, name, seconds, flops, moved_bytes, calls))

    def add(self, line: Line) -> float:
        """Keep and print a line; returns its seconds."""
        self.lines.append(line)
        self.say(self._text(line))
        return line.seconds

    def way(self, part: str, name: str, seconds: float) -> None:
        """Note that `part` takes so many seconds of a step if it is computed that way."""
        if math.isfinite(seconds):
            self.ways.setdefault(part, {})[name] = seconds

    def best(self, part: str) -> float:
        """Seconds of the fastest way; infinite if none was measured."""
        return min(self.ways.get(part, {}).values(), default=math.inf)

    def _text(self, line: Line) -> str:
        flop_s, bytes_s = line.flops / line.seconds, line.moved_bytes / line.seconds
        of_math, of_memory = flop_s / self.gpu.half_flop_s, bytes_s / self.gpu.memory_bytes_per_s
        rate = f"{flop_s / 1e12:7.1f} TFLOP/s {of_math:6.1%}" if of_math >= of_memory else ""
        rate = rate or f"{bytes_s / 1e12:7.2f} TB/s    {of_memory:6.1%}"
        in_step = (
            f"  x {line.calls:g} = {1000 * line.calls * line.seconds:8.2f} ms a step"
            if line.calls
            else ""
        )
        return f"{line.group:<12} {line.name:<44} {1000 * line.seconds:9.4f} ms {rate}{in_step}"

    def json(self) -> dict[str, object]:
        """All of it."""
        return {
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "tokens": self.tokens,
            "geometry": {
                key: value
                for key, value in asdict(self.geometry).items()
                if not key.endswith("_layers")
            },
            "lines": [asdict(line) for line in self.lines],
            "ways_s": self.ways,
            "heat": self.heat,
        }


def random(*shape: int, device: torch.device, trained: bool = False) -> torch.Tensor:
    """Normal numbers in bf16: zeros would be multiplied faster."""
    return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_(trained)


def gradients(
    work: Callable[..., torch.Tensor | Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
) -> Call:
    """`work(*inputs)` and the gradients of `inputs` that have one, from random output ones."""

    def outputs() -> list[torch.Tensor]:
        found = work(*inputs)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    given = [torch.randn_like(output) for output in outputs()]
    return lambda: torch.autograd.grad(outputs(), wanted, given)
