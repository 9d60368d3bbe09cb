"""Random values for a sweep.

Each is a pure function of the seed, the name of its key and the index of its experiment: a further
experiment or key does not change earlier draws. Values have few digits, so they are readable in
names and the same on every machine, however its `exp` rounds.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline_lib.core.text import did_you_mean

DIGITS = 3
SCALES = ("linear", "log")
_RANGE_KEYS = ("low", "high", "scale")


def draw(seed: int, name: str, index: int, choices: Any) -> Any:
    """Return the key `name`'s value in experiment `index`, from a list or a valid range."""
    digest = hashlib.sha256(json.dumps([seed, name, index]).encode()).digest()
    at = (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)  # in [0, 1)
    if isinstance(choices, Sequence):
        return choices[int(at * len(choices))]
    low = choices["low"]
    high = choices["high"]
    is_log = choices.get("scale") == "log"
    is_whole = isinstance(low, int) and isinstance(high, int)
    if is_whole and not is_log:
        return low + int(at * (high - low + 1))
    if is_log:
        value = low * math.exp(at * math.log(high / low))
    else:
        value = low + at * (high - low)
    rounded = round(value) if is_whole else float(f"{value:.{DIGITS}g}")
    return min(max(rounded, low), high)


def range_problem(choices: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a range `{low: .., high: .., scale: ..}`; None if it is valid."""
    if unknown := [key for key in choices if key not in _RANGE_KEYS]:
        return f"unknown key {unknown[0]!r}{did_you_mean(str(unknown[0]), _RANGE_KEYS)}"
    if missing := [key for key in ("low", "high") if key not in choices]:
        return (
            f"{' and '.join(missing)} missing; a range is {{low: 1.0e-5, high: 1.0e-3, scale: log}}"
        )
    low = choices["low"]
    high = choices["high"]
    scale = choices.get("scale", "linear")
    for value in (low, high):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{json.dumps(value)} is not a number"
    if scale not in SCALES:
        return f"scale {json.dumps(scale)} is not one of {', '.join(SCALES)}"
    if low >= high:
        return f"low {low} is not below high {high}"
    if scale == "log" and low <= 0:
        return f"scale log, and low is {low}; it has to be above 0"
    return None
