"""What a person sees of a running training: a line every few seconds, and metrics.jsonl growing."""

import json
import time
from pathlib import Path
from typing import Any

from pipeline_lib.base.events import Observer
from pipeline_lib.base.stage import Say

EVERY_S = 5.0


def print_progress(say: Say, last_step: int) -> Observer:
    """An observer that says loss, speed and time left: every EVERY_S seconds, and at the last step."""
    shown_s = -EVERY_S
    recent: list[float] = []

    def observe(name: str, fields: dict[str, Any]) -> None:
        nonlocal shown_s
        if name != "step.end":
            return
        recent.append(fields["step_s"])
        del recent[:-20]
        if time.monotonic() - shown_s < EVERY_S and fields["step"] != last_step:
            return
        shown_s = time.monotonic()
        left_s = (last_step - fields["step"]) * sum(recent) / len(recent)
        say(
            f"step {fields['step']}/{last_step}  loss {fields['loss']:.4f}  lr {fields['lr']:.2e}  "
            f"grad {fields['grad_norm']:.2f}  {fields['tokens_per_s']:,.0f} tokens/s  "
            f"{fields['peak_memory_bytes'] / 1e9:.2f} GB  ETA {clock(left_s)}"
        )

    return observe


def append_metrics(path: Path) -> Observer:
    """An observer that adds each step's row to the file at `path`, for anyone who watches meanwhile."""

    def observe(name: str, fields: dict[str, Any]) -> None:
        if name == "step.end":
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(fields) + "\n")

    return observe


def clock(seconds: float) -> str:
    """`seconds` as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
