"""How the tasks of a job tell their findings: JSON in short lines on standard output.

srun passes lines of up to a kilobyte on as they are; of longer ones, pieces of several tasks get mixed.
"""

import json
from collections.abc import Iterator
from typing import Any

MARK = "@doctor "
PIECE_CHARACTERS = 300  # in a line of up to a kilobyte, escaped


def lines_of(sender: str, number: int, message: dict[str, Any]) -> Iterator[str]:
    """The lines that carry the message `number` of `sender`."""
    text = json.dumps(message)
    pieces = [text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS)]
    for place, piece in enumerate(pieces):
        yield MARK + json.dumps([f"{sender}.{number}", place, len(pieces), piece])


class Inbox:
    """Puts messages together again from lines that arrive in any order."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._pieces: dict[str, dict[int, str]] = {}

    def take(self, line: str) -> dict[str, Any] | None:
        """The message that `line` completes; None if it does not, or is none of ours."""
        if not line.startswith(MARK):
            return None
        try:
            name, place, count, piece = json.loads(line.removeprefix(MARK))
            pieces = self._pieces.setdefault(name, {})
            pieces[place] = piece
            if len(pieces) < count:
                return None
            del self._pieces[name]
            return dict(json.loads("".join(pieces[place] for place in range(count))))
        except (ValueError, KeyError):  # a line that was cut: its message never comes
            return None
