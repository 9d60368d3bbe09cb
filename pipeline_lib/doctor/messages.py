"""Messages of the job's tasks: JSON in short lines on standard output.

srun passes lines of up to a kilobyte unchanged; longer lines of several tasks get interleaved.
"""

import json
from collections.abc import Iterator
from typing import Any

MARK = "@doctor "
PIECE_CHARACTERS = 300  # fits a line of up to a kilobyte even after escaping


def lines_of(sender: str, number: int, message: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that transmit `message`, the message `number` of `sender`."""
    text = json.dumps(message)
    pieces = [
        text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS)
    ]
    for place, piece in enumerate(pieces):
        yield MARK + json.dumps([f"{sender}.{number}", place, len(pieces), piece])


class Inbox:
    """A receiver that reassembles messages from lines in any order."""

    def __init__(self) -> None:
        """Create an empty inbox."""
        self._pieces: dict[str, dict[int, str]] = {}

    def take(self, line: str) -> dict[str, Any] | None:
        """Return the message that `line` completes; None if none, or if it is no message line."""
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
        except (ValueError, KeyError):  # a truncated line: its message is lost
            return None
