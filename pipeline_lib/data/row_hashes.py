"""What rows are compared by: hashes of the trained text and the question, and a signature."""

import hashlib
import unicodedata
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from numpy.typing import NDArray

from pipeline_lib.config.schema import Tokenize
from pipeline_lib.core.files import canonical_json
from pipeline_lib.data.conversations import Content, Text
from pipeline_lib.data.duplicates import signature_of
from pipeline_lib.data.encode import Rendered


def samples_hash(content: Content, rendered: Sequence[Rendered]) -> int:
    """Return a 64-bit hash of rendered turns: equal for equal prompts and trained text.

    The row's format does not matter. It covers each turn to be trained on, whether its sample is
    kept or dropped, so equal hashes hide no loss. Without such a turn, it is a hash of the content
    itself.
    """
    turns = [
        (turn.prompt, turn.full, turn.thinking, *filter(None, [turn.drop])) for turn in rendered
    ]
    return _hash(canonical_json(turns or vars(content)))


def prompt_hash(content: Content, shared_system: str | None = None) -> int:
    """Return a 64-bit hash of the first question, or the text; equal within a conversation.

    All its rows and answers share it. A row's own system message is part of the question, because
    it may contain the document that is asked about. `shared_system` is not part of it: rows without
    a system message get it, and must equal rows that contain it. Surrounding whitespace and Unicode
    composition do not matter, because templates trim and tokenizers normalize.
    """
    if isinstance(content, Text):
        return _hash(_composed(content.text))
    question = _composed(
        next(message["content"] for message in content.messages if message["role"] == "user")
    )
    first = content.messages[0]
    system = _composed(first["content"]) if first["role"] == "system" else ""
    is_own = system not in ("", _composed(shared_system or ""))
    return _hash(canonical_json([system, question]) if is_own else question)


def _composed(text: str) -> str:
    """Return `text` stripped and in NFC, in linear time: Python sorts marks in quadratic time."""
    text = text.strip()
    if unicodedata.is_normalized("NFC", text):
        return text
    decomposed = text.translate(
        {ord(letter): unicodedata.normalize("NFD", letter) for letter in set(text)}
    )
    in_order: list[str] = []
    for is_mark, run in groupby(decomposed, key=_is_mark):
        letters = list(run)
        if is_mark:
            letters.sort(key=unicodedata.combining)
        in_order += letters
    return unicodedata.normalize("NFC", "".join(in_order))


def _is_mark(letter: str) -> bool:
    return unicodedata.combining(letter) != 0


class Prints(NamedTuple):
    """What rows are compared by."""

    content: int  # `samples_hash`
    prompt: int  # `prompt_hash`
    signature: NDArray[Any] | None  # of its text, if near duplicates are looked for


def prints_of(content: Content, turns: Sequence[Rendered], settings: Tokenize) -> Prints:
    """Return what a row of `content`, rendered as `turns`, is compared by."""
    signature = None if settings.near_duplicates is None else signature_of(_text_of(content))
    return Prints(samples_hash(content, turns), prompt_hash(content, settings.system), signature)


def _hash(text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little"
    )


def _text_of(content: Content) -> str:
    """Return `content`'s messages, thinking and calls as text, without template text and roles.

    Assistant messages that are not trained on are left out, so that they do not make conversations
    similar.
    """
    if isinstance(content, Text):
        return content.text
    said = []
    for number, message in enumerate(content.messages):
        if message["role"] == "assistant" and number not in content.supervised:
            continue
        said += [message.get("reasoning_content", ""), message["content"]]
        said += [canonical_json(call["function"]) for call in message.get("tool_calls") or ()]
    return "\n".join(text for text in said if text)
