"""Text for people: credentials masked, long words shortened, lines of progress."""

import io
import re
import time
from collections.abc import Callable
from typing import TextIO

# Masks credentials in text that is about to be shown or written, and shortens it.
#
# What has the form of a known token is masked wherever it stands; what stands behind a telling name (`password=`)
# is masked whatever its form. Masking too much costs nothing, because only excerpts and messages pass through here.

MASK = "***"

_NAMES = (
    r"password|passwd|pwd|secret|token|api[_-]?key|access[_-]?key(?:[_-]id)?|private[_-]?key"
    r"|x-amz-(?:signature|credential)"
)
_QUOTE = r"""\\?["']"""
_PATTERNS = (
    # user:password@ of a URL
    re.compile(r"(?P<kept>[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s/:@\"']{0,200}:)[^\s/@\"']{1,500}(?=@)"),
    # Authorization: Bearer ...
    re.compile(r"(?P<kept>\bbearer\s{1,4})[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE),
    # Authorization: Basic ..., only there: the word alone is an ordinary one
    re.compile(
        rf"(?P<kept>\bauthorization(?:{_QUOTE})?\s{{0,4}}[=:]\s{{0,4}}(?:{_QUOTE})?basic\s{{1,4}})[A-Za-z0-9._~+/=-]+",
        re.IGNORECASE,
    ),
    # JSON web tokens, whole or cut
    re.compile(r"(?P<kept>(?<![A-Za-z0-9_-])eyJ)[A-Za-z0-9_.-]{12,}"),
    # Hugging Face, OpenAI and those that imitate it, ModelScope, GitHub, AWS, Google, Slack
    re.compile(r"(?P<kept>(?<![A-Za-z0-9])hf_)[A-Za-z0-9]{8,}"),
    re.compile(r"(?P<kept>(?<![A-Za-z0-9])sk-)[A-Za-z0-9_-]{16,}"),
    re.compile(r"(?P<kept>(?<![A-Za-z0-9])ms-)[0-9A-Fa-f]{8}[0-9A-Fa-f-]{8,}"),
    re.compile(r"(?P<kept>(?<![A-Za-z0-9])(?:gh[a-z]|github_pat)_)[A-Za-z0-9_]{16,}"),
    re.compile(r"(?P<kept>(?<![A-Za-z0-9])(?:AKIA|ASIA))[0-9A-Z]{16}"),
    re.compile(r"(?P<kept>(?<![A-Za-z0-9])AIza)[0-9A-Za-z_-]{20,}"),
    re.compile(r"(?P<kept>(?<![A-Za-z0-9])xox[a-z]-)[0-9A-Za-z-]{10,}"),
    # "api_key": "...", TOKEN=..., password: ...
    re.compile(
        rf"(?P<kept>(?<![A-Za-z])(?:{_NAMES})(?:{_QUOTE})?\s{{0,4}}[=:]\s{{0,4}}(?:{_QUOTE})?)"
        r"(?!\*\*\*|Bearer\b)[^\s\"'\\,;&}]+",
        re.IGNORECASE,
    ),
)


def redact(text: str) -> str:
    """`text` with credentials masked; what tells their kind (`hf_`, `password=`) stays."""
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<kept>{MASK}", text)
    return text


def one_line(text: str) -> str:
    """`text` in one line that does nothing to a terminal, credentials masked."""
    return " ".join("".join(char if char.isprintable() else " " for char in redact(text)).split())


def shortened(text: str, most_chars: int) -> str:
    """`text` as `one_line` and `cut` make it: for words of others that are shown to people."""
    return cut(one_line(text), most_chars)


def cut(text: str, most_chars: int) -> str:
    """`text`, or its first whole words and " ..."; at most `most_chars` characters.

    A word is cut, and "..." follows at once, only where less than half of `most_chars` would be left without it.
    """
    if len(text) <= most_chars:
        return text
    begun = text[: most_chars - 3]
    end = max(begun.rfind(" "), begun.rfind("\n"))
    return f"{begun[:end].rstrip()} ..." if end > most_chars // 2 else f"{begun}..."


class RedactedText(io.TextIOWrapper):
    """A stream in the place of another one, to which it passes each line once it is whole, redacted."""

    def __init__(self, stream: TextIO) -> None:
        """Write to where `stream` does."""
        super().__init__(stream.buffer, encoding="utf-8", errors="backslashreplace", write_through=True)
        self._begun = ""

    def write(self, text: str, /) -> int:
        """Take `text`; what follows its last line end waits for the rest of its line, or for `flush`."""
        whole, end, begun = (self._begun + text).rpartition("\n")
        self._begun = begun
        if end:
            super().write(redact(whole) + end)
            super().flush()
        return len(text)

    def flush(self) -> None:
        """Pass on what waits, too."""
        begun, self._begun = self._begun, ""
        if begun:
            super().write(redact(begun))
        super().flush()


# One line every few seconds about long work: how much is done, how fast, and when it will end.

EVERY_S = 5.0


class Progress:
    """Tells `say` about work on `unit`s. Cheap to call for every item."""

    def __init__(self, say: Callable[[str], None], doing: str, unit: str) -> None:
        """Begin now; `doing` names the work."""
        self._say = say
        self._doing = doing
        self._unit = unit
        self._start_s = self._told_s = time.monotonic()

    def update(self, done: int, fraction: float) -> None:
        """Report `done` units, which are `fraction` of all, if it is time to."""
        now_s = time.monotonic()
        if now_s - self._told_s < EVERY_S:
            return
        self._told_s = now_s
        elapsed_s = now_s - self._start_s
        left_s = elapsed_s / fraction - elapsed_s if fraction else float("inf")
        rate = f"{done / elapsed_s:,.0f} {self._unit}/s"
        self._say(f"{self._doing}: {done:,} {self._unit} ({fraction:.0%}), {rate}, {left_s:.0f} s left")
