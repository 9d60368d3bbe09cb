"""What a person sees of a running training: a line every few seconds, and metrics.jsonl growing.

How a run's speed and time come from its steps stands here too, for all that show them.
"""

import json
import statistics
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline_lib.base.events import Observer, end_cut_line
from pipeline_lib.base.fsio import disk_full_named
from pipeline_lib.base.stage import Say
from pipeline_lib.plan.units import gib

EVERY_S = 5.0
_NOTABLE_WAIT = 0.02  # of the step's time
_RECENT_STEPS = 20


def print_progress(say: Say, last_step: int) -> Observer:
    """An observer that says how it goes: every EVERY_S seconds and at the last step, and at once what is special."""
    shown_s = -EVERY_S
    ends_s: deque[float] = deque(maxlen=_RECENT_STEPS + 1)  # of the last steps, with all that is between them

    def observe(name: str, fields: dict[str, Any]) -> None:
        nonlocal shown_s
        special = _special_line(name, fields)
        if special is not None:
            say(special)
        if name != "step.end":
            return
        ends_s.append(fields["elapsed_s"])
        if time.monotonic() - shown_s < EVERY_S and fields["step"] != last_step:
            return
        shown_s = time.monotonic()
        each_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) if len(ends_s) > 1 else fields["elapsed_s"]
        left_s = (last_step - fields["step"]) * each_s
        say(f"step {fields['step']}/{last_step}  {'  '.join(_values(fields))}  ETA {clock(left_s)}")

    return observe


def _values(fields: dict[str, Any]) -> list[str]:
    """What the line of a step says, in order."""
    values = [
        f"loss {number(fields['loss'], '.4f')}",
        f"lr {fields['lr']:.2e}",
        f"grad {number(fields['grad_norm'], '.2f')}",
        f"{fields['tokens_per_s']:,.0f} tokens/s",
    ]
    if "mfu" in fields:
        values.append(f"MFU {fields['mfu']:.1%}")
    values.append(gib(fields["peak_memory_bytes"]))
    if "gpu_power_w" in fields:
        values.append(f"{fields['gpu_power_w']:.0f} W")
    for what in ("data", "checkpoint"):
        wait_s = fields.get(f"{what}_wait_s", 0.0)
        if wait_s > _NOTABLE_WAIT * fields["step_s"]:
            values.append(f"{what} wait {wait_s:.2f} s")
    return values


def _special_line(name: str, fields: dict[str, Any]) -> str | None:
    """What is said at once: a validation, a step refused, a way back, a profile."""
    if name == "step.end" and "validation_loss" in fields:
        return f"step {fields['step']}: held-out loss {number(fields['validation_loss'], '.4f')}"
    if name == "step.skipped":
        return f"step {fields['step']}: not applied: {fields['reason']}"
    if name == "run.rolled_back":
        return f"step {fields['step']}: back to what was learned by step {fields['to_step']}"
    if name == "profile.left_out":
        return f"train.profile_every_steps: {fields['reason']}"
    if name == "step.profiled":
        return f"step {fields['step']}: {_profile(fields)}"
    return None


def _profile(fields: dict[str, Any]) -> str:
    if "problem" in fields:
        return str(fields["problem"])
    shares = {
        "computing": fields["compute_fraction"],
        "exchanging": fields["exposed_communication_fraction"],
        "copying": fields["exposed_copy_fraction"],
        "idle": fields["idle_fraction"],
    }
    return f"{fields['step_s']:.3f} s profiled: " + ", ".join(f"{share:.1%} {what}" for what, share in shares.items())


def append_metrics(path: Path) -> Observer:
    """An observer that adds each step's row to the file at `path`, for anyone who watches meanwhile."""
    if path.exists():
        end_cut_line(path)

    def observe(name: str, fields: dict[str, Any]) -> None:
        if name == "step.end":
            with disk_full_named(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(fields) + "\n")

    return observe


def speed(steps_tokens_per_s: Iterable[float | None]) -> float | None:
    """The tokens per second of a run: the median of its steps. None if none is known.

    A step's are of all ranks together, padding not counted, and over the wait for its data; saving is not in them.
    """
    known = [value for value in steps_tokens_per_s if value is not None]
    return float(statistics.median(known)) if known else None


def training_time_s(steps: Iterable[tuple[int | None, float | None]]) -> float | None:
    """The time of a run from its first step to its last, with saving and validating, over all its attempts.

    `steps` are the attempt and `elapsed_s` of each, in order. None if no time is known.
    """
    last_s = {attempt: elapsed_s for attempt, elapsed_s in steps if elapsed_s is not None}
    return sum(last_s.values()) if last_s else None


def number(value: float | None, digits: str) -> str:
    """`value` with so many digits; None stands for one that is not finite."""
    return "not finite" if value is None else format(value, digits)


def clock(seconds: float) -> str:
    """`seconds` as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
