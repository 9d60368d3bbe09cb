"""Follows a file of JSON objects, one a line, that another process appends to."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

POLL_S = 0.5


def follow(path: Path, is_over: Callable[[], bool]) -> Iterator[list[dict[str, Any]]]:
    """The objects in `path` as they come, in batches, until `is_over` and all is read.

    A line counts once its end is written; one that a kill cut short is left out. A file that has become shorter
    is read anew.
    """
    position = 0
    while True:
        is_last = is_over()
        rows, position = _read_from(path, position)
        if rows:
            yield rows
        if is_last:
            return
        if not rows:
            time.sleep(POLL_S)


def _read_from(path: Path, position: int) -> tuple[list[dict[str, Any]], int]:
    """Objects of the whole lines behind `position`, in bytes, and where they end."""
    if not path.exists():
        return [], 0
    if path.stat().st_size < position:
        position = 0
    with path.open("rb") as file:
        file.seek(position)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    return list(_objects(whole)), position + len(whole)


def _objects(text: bytes) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
