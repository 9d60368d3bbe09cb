"""Text for people: masked credentials, shortened text, progress lines."""

import io
import re
import time
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TextIO

from pipeline_lib.core.language import _

# Redaction and shortening. Text in the form of a known token is masked anywhere; text after a name
# like `password=` is masked in any form. Excerpts of data, errors and warnings pass through here,
# and no output for programs.

MASK = "***"
REASON_CHARS = 500

_NAMES = (
    r"password|passwd|pwd|secret|token|api[_-]?key|access[_-]?key(?:[_-]id)?|private[_-]?key"
    r"|x-amz-(?:signature|credential)"
)
_QUOTE = r"""\\?["']"""
_PATTERNS = (
    # user:password@ of a URL, and a token in the place of both
    re.compile(
        r"(?P<kept>[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s/:@\"']{0,200}:)[^\s/@\"']{1,500}(?=@)"
    ),
    re.compile(r"(?P<kept>\bhttps?://)[^\s/:@\"']{1,500}(?=@)", re.IGNORECASE),
    # signatures of URLs that need no other password: Azure, Google, CloudFront
    re.compile(r"(?P<kept>[?&](?:sig|signature|x-goog-signature|key)=)[^\s\"'&#]+", re.IGNORECASE),
    # private keys, whole or cut off
    re.compile(
        r"(?P<kept>-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----)(?!\*\*\*)(?:[^-]|-(?!----END)){1,20000}"
        r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----)?"
    ),
    # Authorization: Bearer ...
    re.compile(r"(?P<kept>\bbearer\s{1,4})[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE),
    # Authorization: Basic ...; only after that name, because `basic` is an ordinary word
    re.compile(
        rf"(?P<kept>\bauthorization(?:{_QUOTE})?\s{{0,4}}[=:]\s{{0,4}}(?:{_QUOTE})?basic\s{{1,4}})[A-Za-z0-9._~+/=-]+",
        re.IGNORECASE,
    ),
    # JSON web tokens, complete or truncated
    re.compile(r"(?P<kept>(?<![A-Za-z0-9_-])eyJ)[A-Za-z0-9_.-]{12,}"),
    # Hugging Face, OpenAI and APIs with keys like its own, ModelScope, GitHub, AWS, Google, Slack,
    # GitLab, Stripe, npm, PyPI, Docker
    re.compile(r"(?P<kept>(?<![A-Za-z0-9])hf_)[A-Za-z0-9]{8,}"),
    re.compile(r"(?P<kept>(?<![A-Za-z0-9])sk-)[A-Za-z0-9_-]{16,}"),
    re.compile(r"(?P<kept>(?<![A-Za-z0-9])ms-)[0-9A-Fa-f]{8}[0-9A-Fa-f-]{8,}"),
    re.compile(r"(?P<kept>(?<![A-Za-z0-9])(?:gh[a-z]|github_pat)_)[A-Za-z0-9_]{16,}"),
    re.compile(r"(?P<kept>(?<![A-Za-z0-9])(?:AKIA|ASIA))[0-9A-Z]{16}"),
    re.compile(r"(?P<kept>(?<![A-Za-z0-9])AIza)[0-9A-Za-z_-]{20,}"),
    re.compile(r"(?P<kept>(?<![A-Za-z0-9])xox[a-z]-)[0-9A-Za-z-]{10,}"),
    re.compile(
        r"(?P<kept>(?<![A-Za-z0-9])gl(?:pat|dt|rt|cbt|ptt|ft|soat|agent|imt|oas|ffct)-)[0-9A-Za-z_.-]{16,}"
    ),
    re.compile(r"(?P<kept>(?<![A-Za-z0-9])(?:[sr]k|whsec)_(?:live_|test_)?)[0-9A-Za-z]{16,}"),
    re.compile(
        r"(?P<kept>(?<![A-Za-z0-9])(?:npm_|pypi-|dckr_pat_|dop_v1_|ya29\.))[0-9A-Za-z_-]{16,}"
    ),
    # "api_key": "...", TOKEN=..., password: ...
    re.compile(
        rf"(?P<kept>(?<![A-Za-z])(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?:{_NAMES})(?:{_QUOTE})?\s{{0,4}}[=:]\s{{0,4}}(?:{_QUOTE})?)"
        r"(?!\*\*\*|Bearer\b)[^\s\"'\\,;&}]+",
        re.IGNORECASE,
    ),
)


def redact(text: str) -> str:
    """Return `text` with credentials masked; the prefix of their kind stays.

    Such prefixes are `hf_` and `password=`.
    """
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<kept>{MASK}", text)
    return text


def one_line(text: str) -> str:
    """Return `text` on one line, with credentials masked and no terminal control characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in redact(text)).split())


def shortened(text: str, most_chars: int) -> str:
    """Return `text` after `one_line` and `cut`, for text from outside that people are shown."""
    return cut(one_line(text), most_chars)


def reason_of(error: Exception) -> str:
    """Return `error`'s message for a record: credentials masked, at most REASON_CHARS long."""
    return cut(redact(str(error)), REASON_CHARS)


def cut(text: str, most_chars: int) -> str:
    """Return `text`, or its first whole words and " ..."; at most `most_chars` characters.

    A word is split, and "..." appended to it directly, only if cutting at a word boundary would
    leave less than half of `most_chars`.
    """
    if len(text) <= most_chars:
        return text
    begun = text[: most_chars - 3]
    end = max(begun.rfind(" "), begun.rfind("\n"))
    return f"{begun[:end].rstrip()} ..." if end > most_chars // 2 else f"{begun}..."


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean 'lr'?` for the nearest of the `known` words; empty if none is near."""
    close = get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return _("; did you mean {word!r}?").format(word=close[0]) if close else ""


class RedactedText(io.TextIOWrapper):
    """A replacement for a text stream that passes on each line, redacted, once it is complete."""

    def __init__(self, stream: TextIO) -> None:
        """Write to the buffer of `stream`."""
        super().__init__(
            stream.buffer, encoding="utf-8", errors="backslashreplace", write_through=True
        )
        self._begun = ""

    def write(self, text: str, /) -> int:
        """Write `text`; an incomplete last line waits for its end, or for `flush`."""
        whole, end, begun = (self._begun + text).rpartition("\n")
        self._begun = begun
        if end:
            super().write(redact(whole) + end)
            super().flush()
        return len(text)

    def flush(self) -> None:
        """Pass on an incomplete line too."""
        begun = self._begun
        self._begun = ""
        if begun:
            super().write(redact(begun))
        super().flush()


EVERY_S = 5.0


class Progress:
    """A progress reporter that calls `say` every EVERY_S seconds at most; cheap per item."""

    def __init__(self, say: Callable[[str], None], doing: str, unit: str) -> None:
        """Start the clock now; `doing` names the work and `unit` what is counted."""
        self._say = say
        self._doing = doing
        self._unit = unit
        self._start_s = self._told_s = time.monotonic()

    def update(self, done: int, fraction: float) -> None:
        """Report `done` units, `fraction` of all, unless the last report is too recent."""
        now_s = time.monotonic()
        if now_s - self._told_s < EVERY_S:
            return
        self._told_s = now_s
        elapsed_s = now_s - self._start_s
        left_s = elapsed_s / fraction - elapsed_s if fraction else float("inf")
        rate = f"{done / elapsed_s:,.0f} {self._unit}/s"
        self._say(
            f"{self._doing}: {done:,} {self._unit} ({fraction:.0%}), {rate}, {left_s:.0f} s left"
        )


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of this project, to be typed in its clone."""
    command = f"pip install -e '.[{extra}]'"
    # DeepSpeed looks at the installed torch while it is built, and none of its own CUDA code is
    # used.
    return f"DS_BUILD_OPS=0 {command} --no-build-isolation" if extra == "deepspeed" else command
