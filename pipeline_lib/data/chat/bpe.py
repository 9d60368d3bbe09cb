"""Tokenizes many texts that repeat each other: the same ids as `tokenizers`, several times faster.

Added tokens are cut out of a text before anything else happens to it, so what lies between them can be encoded
piece by piece, and each distinct piece of a batch once. The pieces go through tiktoken where its result is
provably the same, else through `tokenizers`. Besides, samples of every run are compared with `Tokenizer.encode`:
a difference ends the run, which begins anew without this way.
"""

import json
import re
import unicodedata
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import tiktoken
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from pipeline_lib.base.errors import PipelineError
from pipeline_lib.base.redact import redact

# Qwen's rule for what a token never crosses: words, single digits, punctuation, line ends.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The rule of which it is known that both regular expression engines read it alike, for each code point.
_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ],
}
_PLAIN_BPE: Mapping[str, Any] = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}

FIRST_CHECKED = 64  # texts of a run that are compared with tokenizers
CHECK_EVERY = 8  # batches; then one text is
MAX_PIECE_CHARS = 100_000  # tiktoken's regular expressions run out of stack on a million spaces


class NotConvertible(Exception):
    """Why tiktoken would not give the same ids. Never leaves this module: the pieces go through `tokenizers`."""


class WrongIds(PipelineError):
    """The fast way gave other ids than `tokenizers`: nothing that it gave can be used."""


class BatchTokenizer:
    """`Tokenizer.encode(text, add_special_tokens=False)` for batches. `how` says which way it takes."""

    def __init__(self, tokenizer: Tokenizer, description: Mapping[str, Any], fast: bool = True) -> None:
        """Take `tokenizer` and the tokenizer.json that it was made from; unless `fast`, leave all to `tokenizers`."""
        self.how = "tiktoken"
        self._tokenizer = tokenizer
        self._texts = 0
        self._batches = 0
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: _as_bytes([number]) for number, token in added.items()} | {"": b""}
        self._cut = _cutter(list(added.values())) if fast else None
        self._tiktoken: Callable[[str], list[int]] | None = None
        if self._cut is None:
            self.how = "tokenizers, whole texts" + (" (added tokens that take spaces with them)" if fast else "")
            return
        try:
            self._tiktoken = to_tiktoken(tokenizer, description).encode_ordinary
        except NotConvertible as error:
            self.how = f"tokenizers ({error})"

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text, as the bytes of an int32 array: cheap to compare and to join. Raises WrongIds."""
        if self._cut is None:
            return self._encode_whole(texts)
        found = self._encode_cut(texts, self._cut)
        if (text := self._differing(texts, found)) is not None:
            raise WrongIds(f"{self.how} and tokenizers differ on {redact(text)!r:.80}")
        return found

    def _encode_cut(self, texts: Sequence[str], cut: re.Pattern[str]) -> list[bytes]:
        pieces = [cut.split(text) for text in texts]
        ids = dict(self._added)
        others = []
        for piece in {piece for each in pieces for piece in each}.difference(ids):
            if self._tiktoken is not None and is_plain(piece):
                ids[piece] = _as_bytes(self._tiktoken(piece))
            else:
                others.append(piece)
        ids.update(zip(others, self._encode_whole(others), strict=True))
        return [b"".join([ids[piece] for piece in each]) for each in pieces]

    def _encode_whole(self, texts: Sequence[str]) -> list[bytes]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False) if texts else []
        return [_as_bytes(encoding.ids) for encoding in found]

    def _differing(self, texts: Sequence[str], found: Sequence[bytes]) -> str | None:
        """A text among those to be checked that `tokenizers` encodes otherwise."""
        usable = [number for number, text in enumerate(texts) if text]
        chosen = usable[: max(0, FIRST_CHECKED - self._texts)]
        if usable and not chosen and self._batches % CHECK_EVERY == 0:
            chosen = [usable[self._batches // CHECK_EVERY % len(usable)]]
        self._texts += len(usable)
        self._batches += 1
        expected = self._encode_whole([texts[number] for number in chosen])
        return next((texts[n] for n, ids in zip(chosen, expected, strict=True) if found[n] != ids), None)


def _cutter(added: Sequence[AddedToken]) -> re.Pattern[str] | None:
    """Finds added tokens as `tokenizers` does, the longest of those at the leftmost place; None if it cannot."""
    if any(token.normalized or token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    contents = sorted((token.content for token in added), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, contents))})" if contents else "((?!))")


def is_plain(piece: str) -> bool:
    """Whether tiktoken may have `piece`: it is in normal form C already, whatever Unicode version one asks."""
    if len(piece) > MAX_PIECE_CHARS:
        return False
    if piece.isascii():
        return True
    # The form of assigned characters never changes; those that came after this Python's tables may compose.
    return _assigned().fullmatch(piece) is not None and unicodedata.is_normalized("NFC", piece)


@cache
def _assigned() -> re.Pattern[str]:
    """Matches texts all of whose characters this Python's Unicode tables know."""
    known = np.array([unicodedata.category(chr(code)) not in ("Cn", "Cs") for code in range(0x110000)])
    edges = np.flatnonzero(np.diff(known, prepend=False, append=False)).tolist()
    ranges = (f"\\U{first:08x}-\\U{end - 1:08x}" for first, end in zip(edges[::2], edges[1::2], strict=True))
    return re.compile(f"[{''.join(ranges)}]*+")


def to_tiktoken(tokenizer: Tokenizer, description: Mapping[str, Any]) -> tiktoken.Encoding:
    """An encoding with the same ids for text in normal form C without added tokens.

    tiktoken joins the pair of neighbours whose joint bytes are the token of lowest id; `tokenizers` the pair that
    comes first in a list. These are the same if the list is in the order of ids, and if each token, encoded by
    itself, becomes that token: then its bytes cannot come together from another pair, since all that happens
    inside them before is the same (by induction over ids). Raises NotConvertible if anything is otherwise.
    """
    model = description["model"]
    # A key that an older file lacks has this default.
    if any(model.get(key, value) != value for key, value in _PLAIN_BPE.items()):
        raise NotConvertible("not a plain BPE")
    if description.get("normalizer") != {"type": "NFC"}:
        raise NotConvertible("its normalizer is not NFC")
    if not _is_known(description.get("pre_tokenizer")):
        raise NotConvertible("it splits texts in another way than Qwen")
    made = [model["vocab"]["".join(pair).replace(" ", "")] for pair in model["merges"]]  # older files write "a b"
    added = {token["content"] for token in description.get("added_tokens", ())}  # these never reach the BPE
    vocab = {text: number for text, number in model["vocab"].items() if text not in added}
    byte_of = _bytes_by_letter()
    if len(made) != len(vocab) - len(byte_of) or not byte_of.keys() <= vocab.keys():
        raise NotConvertible("its tokens are not all made of bytes, each in one way")
    if any(first >= second for first, second in pairwise(made)):
        raise NotConvertible("its merges are not in the order of ids")
    bpe = tokenizer.model
    if any([token.id for token in bpe.tokenize(text)] != [number] for text, number in vocab.items()):
        raise NotConvertible("it has tokens that it never makes")
    ranks = {bytes(map(byte_of.__getitem__, text)): number for text, number in vocab.items()}
    return tiktoken.Encoding("converted", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})


def _is_known(pre_tokenizer: Any) -> bool:
    found = json.loads(json.dumps(pre_tokenizer))
    try:
        found["pretokenizers"][1].pop("trim_offsets", None)  # says where tokens lie, not what they are
    except (TypeError, LookupError):
        return False
    return bool(found == _PRE_TOKENIZER)


@cache
def _bytes_by_letter() -> dict[str, int]:
    """Byte-level BPE writes each byte as a visible letter: printable latin-1 as itself, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    if letters.keys() != set(pre_tokenizers.ByteLevel.alphabet()):
        raise NotConvertible("tokenizers writes bytes in letters that are not known here")
    return letters


def _as_bytes(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()
