"""Whether an answer to a question is right, and what is wrong with it whatever it says."""

import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from pipeline_lib.config.benchmarks import Scoring
from pipeline_lib.data.conversations import ENDS_THINKING, OPENS_THINKING
from pipeline_lib.records.benchmark import Fault

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# An answer ends in a loop if its last tokens are so many copies of one piece, and at least so many.
_COPIES = 4
_LOOP_TOKENS = 24
_STOPS = " \t\n.。!！"


def is_right(answer: str, right: Sequence[str], score: Scoring) -> bool:
    """Return whether `answer`, without its thinking, is one of the `right` ones by `score`."""
    said = answer.rpartition(ENDS_THINKING)[2]
    if score == "number":
        number = last_number(said)
        return number is not None and number in [last_number(one) for one in right]
    plain = _plain(said)
    if score == "contains":
        return any(_plain(one) in plain for one in right)
    return plain in [_plain(one) for one in right]


def _plain(text: str) -> str:
    """Return `text` without what does not matter: case, spaces, a full stop at the end."""
    composed = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(composed.split()).strip(_STOPS)


def last_number(text: str) -> Decimal | None:
    """Return the last number in `text`, `1,234.50` as 1234.5; None if there is none."""
    found = _NUMBER.findall(unicodedata.normalize("NFKC", text))
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None


def faults_of(prompt: str, answer: str, tokens: Sequence[int], is_ended: bool) -> tuple[Fault, ...]:
    """Return what is wrong with the answer of `tokens`, whose text is `answer`.

    `prompt` is the rendered prompt, which may open a think tag that the answer has to close.
    """
    found: list[Fault] = []
    if not is_ended:
        found.append("unended")
    if is_loop(tokens):
        found.append("loop")
    if not answer.rpartition(ENDS_THINKING)[2].strip():
        found.append("empty")
    whole = prompt + answer
    if whole.count(OPENS_THINKING) != whole.count(ENDS_THINKING):
        found.append("think")
    return tuple(found)


def is_loop(tokens: Sequence[int]) -> bool:
    """Return whether `tokens` end with _COPIES copies of one piece, of _LOOP_TOKENS or more."""
    for period in range(1, len(tokens) // _COPIES + 1):
        copies = max(_COPIES, -(-_LOOP_TOKENS // period))
        if copies * period > len(tokens):
            continue
        end = list(tokens[-copies * period :])
        if end == end[-period:] * copies:
            return True
    return False
