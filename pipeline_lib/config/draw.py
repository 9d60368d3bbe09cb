"""Random values for a sweep: each a pure function of the seed, the name of its key and the number of its experiment.

So a further experiment, or a further key, changes nothing of what was drawn before. Values have few digits, to be
read in names; and the same ones on every machine, however its `exp` rounds.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

DIGITS = 3
SCALES = ("linear", "log")
_RANGE_KEYS = ("low", "high", "scale")


def draw(seed: int, name: str, index: int, choices: Any) -> Any:
    """The value of the key `name` in experiment `index`, from a list, or from a range that has no problem."""
    at = _uniform(seed, name, index)
    if isinstance(choices, Sequence):
        return choices[int(at * len(choices))]
    low, high, is_log = choices["low"], choices["high"], choices.get("scale") == "log"
    is_whole = isinstance(low, int) and isinstance(high, int)
    if is_whole and not is_log:
        return low + int(at * (high - low + 1))
    value = low * math.exp(at * math.log(high / low)) if is_log else low + at * (high - low)
    value = round(value) if is_whole else float(f"{value:.{DIGITS}g}")
    return min(max(value, low), high)


def range_problem(choices: Mapping[str, Any]) -> str | None:
    """What is wrong with `{low: .., high: .., scale: ..}`."""
    if unknown := [key for key in choices if key not in _RANGE_KEYS]:
        close = get_close_matches(str(unknown[0]), _RANGE_KEYS, n=1)
        return f"unknown key {unknown[0]!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    if missing := [key for key in ("low", "high") if key not in choices]:
        return f"{' and '.join(missing)} missing; a range is {{low: 1.0e-5, high: 1.0e-3, scale: log}}"
    low, high, scale = choices["low"], choices["high"], choices.get("scale", "linear")
    for value in (low, high):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{json.dumps(value)} is not a number"
    if scale not in SCALES:
        return f"scale {json.dumps(scale)} is not one of {', '.join(SCALES)}"
    if low >= high:
        return f"low {low} is not below high {high}"
    return f"scale log, and low is {low}; it has to be above 0" if scale == "log" and low <= 0 else None


def _uniform(seed: int, name: str, index: int) -> float:
    """From 0 up to, and without, 1."""
    digest = hashlib.sha256(json.dumps([seed, name, index]).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)
