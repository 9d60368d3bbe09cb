"""The ends of files that other processes append to, whatever state these are in.

What cannot be read is left out: a line that is being written, one that a kill cut short, a file that vanished.
"""

import json
import os
from pathlib import Path
from typing import Any

METRICS_BYTES = 64 * 1024  # some hundred steps
EVENTS_BYTES = 1024 * 1024  # several thousand events
LOG_BYTES = 16 * 1024
_NO_JSON = (ValueError, RecursionError)
_TOO_LARGE = 2**53  # for a number that is counted with


def tail(path: Path, limit_bytes: int) -> tuple[bytes, bool]:
    """The last `limit_bytes` of the file at `path`, from the beginning of a line; and whether that is all of it."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - limit_bytes)
            file.seek(start)
            text = file.read(limit_bytes)
    except OSError:
        return b"", not path.exists()
    return (text[text.find(b"\n") + 1 :] if start else text), start == 0


def objects(text: bytes, holding: bytes = b"", last: int = 0) -> list[dict[str, Any]]:
    """The JSON objects on the whole lines of `text`: of those that hold the bytes `holding`, and of the `last` ones."""
    found = []
    lines = [line for line in text[: text.rfind(b"\n") + 1].split(b"\n") if line and holding in line]
    for line in lines[-last:]:
        try:
            value = json.loads(line)
        except _NO_JSON:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`; empty if there is none, or none that can be read."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, *_NO_JSON):
        return {}
    return value if isinstance(value, dict) else {}


def changed_at(path: Path) -> float | None:
    """When the file at `path` last changed, in seconds since 1970; None if it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def number(value: Any) -> float | None:
    """`value` if it is a finite number, and no absurd one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) < _TOO_LARGE else None


def whole(value: Any) -> int | None:
    """`value` if it is a whole number, not negative."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _TOO_LARGE else None


def text_of(value: Any) -> str | None:
    """`value` as text if it is a text with something in it, or a number, as job ids may be written."""
    if isinstance(value, str):
        return value.strip() or None
    return str(value) if whole(value) is not None else None
