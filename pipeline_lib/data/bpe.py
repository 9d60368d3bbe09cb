"""Fast tokenization of batches of repetitive texts: the ids of `tokenizers`, much faster.

Added tokens are cut out of a text before any other step, so the pieces between them can be encoded
separately, and each distinct piece of a batch only once. Pieces go through tiktoken if its result
is provably the same for this tokenizer; else whole texts go through `tokenizers`. In addition, some
texts of every run are compared with `tokenizers`: a difference raises WrongIds, and the stage
starts again with `tokenizers` alone.
"""

import json
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.text import redact

# Qwen's split pattern; tokens never cross the boundaries of words, single digits, punctuation and
# line ends.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The only supported rule: both regular expression engines are known to agree on it for every code
# point.
_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {"Regex": SPLIT_PATTERN},
            "behavior": "Isolated",
            "invert": False,
        },
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

FIRST_CHECKED = 64  # texts at the start of a run that are compared with tokenizers
CHECK_EVERY = 8  # later, one text in this many batches is compared
MAX_PIECE_CHARS = 100_000  # tiktoken's regular expressions run out of stack on a million spaces
# `tokenizers` takes some 200 bytes of memory for each character of a text
MAX_CHECKED_CHARS = 1_000_000
# Borders that no token of SPLIT_PATTERN crosses and that NFC does not touch: a letter or digit
# before an ASCII character that is no letter, or before Chinese punctuation; a digit before any
# ASCII character.
_BORDER = re.compile(
    r"(?<=[0-9A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3])(?=[\x00-@\[-`{-\x7f\u3001\u3002\uff01\uff0c"
    r"\uff1a\uff1b\uff1f])|(?<=[0-9])(?=[\x00-\x7f])"
)


class NotConvertible(Exception):
    """The reason why tiktoken would not give the same ids.

    BatchTokenizer then uses `tokenizers`.
    """


class WrongIds(PipelineError):
    """The error for tiktoken ids that differ from those of `tokenizers`: the run's are unusable."""


class BatchTokenizer:
    """`Tokenizer.encode(text, add_special_tokens=False)` for batches.

    `how` names the implementation in use.
    """

    def __init__(
        self, tokenizer: Tokenizer, description: Mapping[str, Any], fast: bool = True
    ) -> None:
        """Use `tokenizer` and its tokenizer.json, `description`.

        Unless `fast`, do not use tiktoken.
        """
        self.how = "tokenizers, whole texts"
        self._tokenizer = tokenizer
        self._texts = 0
        self._batches = 0
        added = tokenizer.get_added_tokens_decoder()
        self._added = {"": b""}  # what a text is cut into beside pieces to encode
        for number, token in added.items():
            self._added[token.content] = _as_bytes([number])
        self._tiktoken: Callable[[str], list[int]] | None = None
        if fast:
            try:
                self._cut = _cutter(list(added.values()))
                self._tiktoken = to_tiktoken(description).encode_ordinary
                self.how = "tiktoken"
            except NotConvertible as error:
                self.how += f" ({error})"

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Return each text's ids as bytes of an int32 array, which are cheap to compare and join.

        Raises WrongIds if a compared text differs.
        """
        if self._tiktoken is None:
            return self._encode_whole(texts)
        split_texts = [self._split(text) for text in texts]
        ids = dict(self._added)
        others = []
        for piece in set(chain.from_iterable(split_texts)).difference(ids):
            if is_plain(piece):
                ids[piece] = _as_bytes(self._tiktoken(piece))
            else:
                others.append(piece)
        ids.update(zip(others, self._encode_whole(others), strict=True))
        encoded = [b"".join(map(ids.__getitem__, pieces)) for pieces in split_texts]
        text = self._differing(texts, encoded)
        if text is not None:
            raise WrongIds(f"{self.how} and tokenizers differ on {redact(text)!r:.80}")
        return encoded

    def _split(self, text: str) -> list[str]:
        """Return the pieces of `text`, added tokens among them, that can be encoded separately."""
        pieces = self._cut.split(text)
        if len(text) <= MAX_PIECE_CHARS:
            return pieces
        return list(chain.from_iterable(map(short_pieces, pieces)))

    def _encode_whole(self, texts: Sequence[str]) -> list[bytes]:
        if not texts:
            return []
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [_as_bytes(encoding.ids) for encoding in encodings]

    def _differing(self, texts: Sequence[str], encoded: Sequence[bytes]) -> str | None:
        """Choose texts to check; return the first that `tokenizers` encodes otherwise, or None."""
        usable = []
        for number, text in enumerate(texts):
            if 0 < len(text) <= MAX_CHECKED_CHARS:
                usable.append(number)
        chosen = usable[: max(0, FIRST_CHECKED - self._texts)]
        if usable and not chosen and self._batches % CHECK_EVERY == 0:
            chosen = [usable[self._batches // CHECK_EVERY % len(usable)]]
        self._texts += len(usable)
        self._batches += 1
        expected = self._encode_whole([texts[number] for number in chosen])
        for number, ids in zip(chosen, expected, strict=True):
            if encoded[number] != ids:
                return texts[number]
        return None


def _cutter(added: Sequence[AddedToken]) -> re.Pattern[str]:
    """Return a pattern that finds added tokens as `tokenizers` does, leftmost and longest.

    Raises NotConvertible.
    """
    for token in added:
        if token.normalized or token.lstrip or token.rstrip or token.single_word:
            raise NotConvertible("it has added tokens that depend on the text around them")
    if not added:
        return re.compile("((?!))")  # matches nothing
    contents = sorted((token.content for token in added), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, contents))})")


def short_pieces(text: str) -> Iterator[str]:
    """Yield pieces of `text`, at most MAX_PIECE_CHARS if it has borders, with the same ids."""
    start = 0
    while len(text) - start > MAX_PIECE_CHARS and (
        border := _BORDER.search(text, start + MAX_PIECE_CHARS // 2)
    ):
        yield text[start : border.start()]
        start = border.start()
    yield text[start:]


def is_plain(piece: str) -> bool:
    """Return whether tiktoken may encode `piece`: short, and in NFC by every Unicode version."""
    if len(piece) > MAX_PIECE_CHARS:
        return False
    if piece.isascii():
        return True
    # The normalization of assigned characters never changes; characters newer than this Python's
    # tables may compose.
    return _assigned().fullmatch(piece) is not None and unicodedata.is_normalized("NFC", piece)


@cache
def _assigned() -> re.Pattern[str]:
    """Return a pattern for texts of characters below U+40000 that this Python's Unicode has."""
    categories = [unicodedata.category(chr(code)) for code in range(0x40000)]
    is_known = ~np.isin(categories, ("Cn", "Cs"))
    edges = np.flatnonzero(np.diff(is_known, prepend=False, append=False)).tolist()
    ranges = ""
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        ranges += f"\\U{first:08x}-\\U{end - 1:08x}"
    return re.compile(f"[{ranges}]*+")


def to_tiktoken(description: Mapping[str, Any]) -> tiktoken.Encoding:
    """Return a tiktoken encoding with a tokenizer.json's ids, for NFC text without added tokens.

    tiktoken merges the neighbours whose joint bytes are the token of lowest id; `tokenizers` merges
    the pair that comes first in its list of merges. Both are the same if the list is in the order
    of ids and each token, encoded by itself, becomes that token: then its bytes cannot result from
    another pair, because all earlier merges inside them are the same (by induction over ids).
    Raises NotConvertible if one of these conditions does not hold.
    """
    model = description["model"]
    # Older files lack some of these keys; the defaults are the values in _PLAIN_BPE.
    is_plain_bpe = all(model.get(key, value) == value for key, value in _PLAIN_BPE.items())
    if not is_plain_bpe or "merges" not in model:
        raise NotConvertible("not a plain BPE")
    if description.get("normalizer") != {"type": "NFC"}:
        raise NotConvertible("its normalizer is not NFC")
    if not splits_as_qwen(description):
        raise NotConvertible("it splits texts in another way than Qwen")
    vocab = dict(model["vocab"])
    for token in description.get("added_tokens", ()):  # added tokens never reach the BPE
        vocab.pop(token["content"], None)
    # older files: "a b"
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    _check_merges(vocab, pairs)
    return tiktoken.Encoding(
        "converted", pat_str=SPLIT_PATTERN, mergeable_ranks=_ranks(vocab), special_tokens={}
    )


def splits_as_qwen(description: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json splits texts as Qwen's do, before the BPE."""
    pre_tokenizer = json.loads(json.dumps(description.get("pre_tokenizer")))
    with suppress(TypeError, LookupError):
        # affects the offsets of tokens, not their ids
        pre_tokenizer["pretokenizers"][1].pop("trim_offsets", None)
    return bool(pre_tokenizer == _PRE_TOKENIZER)


def _ranks(vocab: Mapping[str, int]) -> dict[bytes, int]:
    """Return the ids of `vocab` by the bytes that its letters stand for, translated at once."""
    joined = "".join(vocab).translate(_bytes_by_letter()).encode("latin-1")
    ranks = {}
    start = 0
    for text, number in vocab.items():
        ranks[joined[start : start + len(text)]] = number
        start += len(text)
    return ranks


def _check_merges(vocab: Mapping[str, int], pairs: Sequence[Sequence[str]]) -> None:
    """Raise NotConvertible unless merging `pairs` makes all of `vocab` but bytes, in id order."""
    letters = {chr(letter) for letter in _bytes_by_letter()}
    made = [text for text in sorted(vocab, key=vocab.__getitem__) if text not in letters]
    if len(made) != len(pairs) or not letters <= vocab.keys():
        raise NotConvertible("its tokens are not all made of bytes, each in one way")
    if len(set(vocab.values())) != len(vocab):
        raise NotConvertible("it has tokens that share an id")
    if made != [first + second for first, second in pairs]:
        raise NotConvertible("its merges are not in the order of ids")
    try:
        first_ids = np.array([vocab[first] for first, _ in pairs], dtype=np.int64)
        second_ids = np.array([vocab[second] for _, second in pairs], dtype=np.int64)
    except KeyError as error:
        raise NotConvertible(f"it merges the added token {error}") from error
    made_ids = np.array([vocab[text] for text in made], dtype=np.int64)
    if not _makes_each(first_ids, second_ids, made_ids):
        raise NotConvertible("it has tokens that it never makes")


def _makes_each(
    first: NDArray[np.int64], second: NDArray[np.int64], made: NDArray[np.int64]
) -> bool:
    """Return whether encoding each token of `made` (ids, ascending) ends with `first` + `second`.

    The last step of its text's encoding has to merge these two. It does if no earlier merge crosses
    the border between the two halves. So the halves are split again at that border, undoing the
    latest merge each time: two neighbours across the border must not be a pair that would have been
    merged before.
    """
    if not len(made):
        return True
    size = 1 + max(made.max(), first.max(), second.max())
    left_of = np.full(size, -1)  # -1: a byte, which no merge makes
    left_of[made] = first
    right_of = np.full(size, -1)
    right_of[made] = second
    when = np.full(size, -1)
    when[made] = made
    pairs = first * size + second
    order = np.argsort(pairs)
    pairs = pairs[order]
    joins = made[order]
    if np.any(np.maximum(when[first], when[second]) >= made):
        return False
    left = first
    right = second
    before = made  # merges from it on come too late to matter
    while len(left):
        pair = left * size + right
        place = np.minimum(np.searchsorted(pairs, pair), len(pairs) - 1)
        if np.any((pairs[place] == pair) & (joins[place] < before)):
            return False
        is_divisible = np.maximum(when[left], when[right]) >= 0
        left = left[is_divisible]
        right = right[is_divisible]
        is_left_later = when[left] > when[right]  # of equal merges the left one comes first
        before = np.where(is_left_later, left, right + 1)
        left = np.where(is_left_later, right_of[left], left)
        right = np.where(is_left_later, right, left_of[right])
    return True


@cache
def _bytes_by_letter() -> dict[int, int]:
    """Return the byte of each byte-level BPE letter: latin-1 as itself, others from U+0100 on.

    Only printable latin-1 letters stand for themselves.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: byte for byte in printable}
    letters |= dict(enumerate(others, start=256))
    if letters.keys() != set(map(ord, pre_tokenizers.ByteLevel.alphabet())):
        raise NotConvertible("tokenizers writes bytes in letters that are not known here")
    return letters


def _as_bytes(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()
