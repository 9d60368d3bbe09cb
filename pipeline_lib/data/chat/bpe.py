"""Tokenizes many texts that repeat each other: the same ids as `tokenizers`, several times faster.

Added tokens are cut out of a text before anything else happens to it, so what lies between them can be encoded
piece by piece, and each distinct piece of a batch once. Pieces go through tiktoken, if its result is provably the
same for this tokenizer; else whole texts go through `tokenizers`. Besides, samples of every run are compared with
`Tokenizer.encode`: a difference ends the run, which begins anew without this way.
"""

import json
import re
import unicodedata
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray
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
    """Why tiktoken would not give the same ids. Never leaves this module: all goes through `tokenizers`."""


class WrongIds(PipelineError):
    """The fast way gave other ids than `tokenizers`: nothing that it gave can be used."""


class BatchTokenizer:
    """`Tokenizer.encode(text, add_special_tokens=False)` for batches. `how` says which way it takes."""

    def __init__(self, tokenizer: Tokenizer, description: Mapping[str, Any], fast: bool = True) -> None:
        """Take `tokenizer` and the tokenizer.json that it was made from; unless `fast`, leave all to `tokenizers`."""
        self.how = "tokenizers, whole texts"
        self._tokenizer = tokenizer
        self._texts = 0
        self._batches = 0
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: _as_bytes([number]) for number, token in added.items()} | {"": b""}
        self._tiktoken: Callable[[str], list[int]] | None = None
        if fast:
            try:
                self._cut = _cutter(list(added.values()))
                self._tiktoken = to_tiktoken(description).encode_ordinary
                self.how = "tiktoken"
            except NotConvertible as error:
                self.how += f" ({error})"

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of each text, as the bytes of an int32 array: cheap to compare and to join. Raises WrongIds."""
        if self._tiktoken is None:
            return self._encode_whole(texts)
        found = self._encode_pieces(texts, self._tiktoken)
        if (text := self._differing(texts, found)) is not None:
            raise WrongIds(f"{self.how} and tokenizers differ on {redact(text)!r:.80}")
        return found

    def _encode_pieces(self, texts: Sequence[str], encode: Callable[[str], list[int]]) -> list[bytes]:
        pieces = [self._cut.split(text) for text in texts]
        ids = dict(self._added)
        others = []
        for piece in {piece for each in pieces for piece in each}.difference(ids):
            if is_plain(piece):
                ids[piece] = _as_bytes(encode(piece))
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


def _cutter(added: Sequence[AddedToken]) -> re.Pattern[str]:
    """Finds added tokens as `tokenizers` does, the longest of those at the leftmost place. Raises NotConvertible."""
    if any(token.normalized or token.lstrip or token.rstrip or token.single_word for token in added):
        raise NotConvertible("it has added tokens that depend on the text around them")
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
    """Matches texts all of whose characters this Python's Unicode tables know, below the planes that nobody uses."""
    known = np.array([unicodedata.category(chr(code)) not in ("Cn", "Cs") for code in range(0x40000)])
    edges = np.flatnonzero(np.diff(known, prepend=False, append=False)).tolist()
    ranges = (f"\\U{first:08x}-\\U{end - 1:08x}" for first, end in zip(edges[::2], edges[1::2], strict=True))
    return re.compile(f"[{''.join(ranges)}]*+")


def to_tiktoken(description: Mapping[str, Any]) -> tiktoken.Encoding:
    """An encoding with the same ids as a tokenizer.json, for text in normal form C without added tokens.

    tiktoken joins the pair of neighbours whose joint bytes are the token of lowest id; `tokenizers` the pair that
    comes first in a list. These are the same if the list is in the order of ids, and if each token, encoded by
    itself, becomes that token: then its bytes cannot come together from another pair, since all that happens
    inside them before is the same (by induction over ids). Raises NotConvertible if anything is otherwise.
    """
    model = description["model"]
    # A key that an older file lacks has this default.
    if any(model.get(key, value) != value for key, value in _PLAIN_BPE.items()) or "merges" not in model:
        raise NotConvertible("not a plain BPE")
    if description.get("normalizer") != {"type": "NFC"}:
        raise NotConvertible("its normalizer is not NFC")
    if not _is_known(description.get("pre_tokenizer")):
        raise NotConvertible("it splits texts in another way than Qwen")
    vocab = dict(model["vocab"])
    for token in description.get("added_tokens", ()):  # these never reach the BPE
        vocab.pop(token["content"], None)
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]  # older files: "a b"
    _check_merges(vocab, pairs)
    joined = "".join(vocab).translate(_bytes_by_letter()).encode("latin-1")
    ends = accumulate(map(len, vocab), initial=0)
    ranks = {joined[start:end]: number for (start, end), number in zip(pairwise(ends), vocab.values(), strict=True)}
    return tiktoken.Encoding("converted", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})


def _check_merges(vocab: Mapping[str, int], pairs: Sequence[Sequence[str]]) -> None:
    """Raise NotConvertible unless `pairs`, joined in this order, make all of `vocab` but the bytes, in its order."""
    letters = {chr(letter) for letter in _bytes_by_letter()}
    made = [text for text in sorted(vocab, key=vocab.__getitem__) if text not in letters]
    if len(made) != len(pairs) or not letters <= vocab.keys():
        raise NotConvertible("its tokens are not all made of bytes, each in one way")
    if len(set(vocab.values())) != len(vocab):
        raise NotConvertible("it has tokens that share an id")
    if made != [first + second for first, second in pairs]:
        raise NotConvertible("its merges are not in the order of ids")
    try:
        first, second = (np.array([vocab[pair[side]] for pair in pairs], dtype=np.int64) for side in (0, 1))
    except KeyError as error:
        raise NotConvertible(f"it merges the added token {error}") from error
    if not _makes_each(first, second, np.array([vocab[text] for text in made], dtype=np.int64)):
        raise NotConvertible("it has tokens that it never makes")


def _makes_each(first: NDArray[np.int64], second: NDArray[np.int64], made: NDArray[np.int64]) -> bool:
    """Whether joining `first` and `second` to `made` (ids, ascending) is what happens to each token's own text.

    It is, if what is joined last is never joined too soon. So the two halves are taken apart again at the border
    between them, always where the later join was: two neighbours across it must not be a pair that would
    have been joined before that one.
    """
    size = 1 + max(made.max(), first.max(), second.max()) if len(made) else 0
    left_of, right_of, when = (np.full(size, -1) for _ in range(3))  # -1: a byte, which is there from the beginning
    left_of[made], right_of[made], when[made] = first, second, made
    pairs = first * size + second
    order = np.argsort(pairs)
    pairs, joins = pairs[order], made[order]
    if np.any(np.maximum(when[first], when[second]) >= made):
        return False
    left, right, before = first, second, made  # what is joined from `before` on comes too late to matter
    while len(left):
        pair = left * size + right
        place = np.minimum(np.searchsorted(pairs, pair), len(pairs) - 1)
        if np.any((pairs[place] == pair) & (joins[place] < before)):
            return False
        is_divisible = np.maximum(when[left], when[right]) >= 0
        left, right = left[is_divisible], right[is_divisible]
        is_left_later = when[left] > when[right]  # of equal joins the left one comes first
        before = np.where(is_left_later, left, right + 1)
        left, right = np.where(is_left_later, right_of[left], left), np.where(is_left_later, right, left_of[right])
    return True


def _is_known(pre_tokenizer: Any) -> bool:
    found = json.loads(json.dumps(pre_tokenizer))
    try:
        found["pretokenizers"][1].pop("trim_offsets", None)  # says where tokens lie, not what they are
    except (TypeError, LookupError):
        return False
    return bool(found == _PRE_TOKENIZER)


@cache
def _bytes_by_letter() -> dict[int, int]:
    """Byte-level BPE writes each byte as a visible letter: printable latin-1 as itself, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: byte for byte in printable} | {256 + n: byte for n, byte in enumerate(others)}
    if letters.keys() != set(map(ord, pre_tokenizers.ByteLevel.alphabet())):
        raise NotConvertible("tokenizers writes bytes in letters that are not known here")
    return letters


def _as_bytes(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()
