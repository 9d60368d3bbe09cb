"""Documents and samples: tokens with a supervision mask, and platform-independent randomness."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

# Random bits as a pure function of integers (splitmix64), equal on any machine and with any numpy
# version. numpy's own generators guarantee no stable streams between versions, and these bits
# decide the sample order, the packing and the weights of the tiny model.

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def key_of(*parts: int) -> int:
    """Return a 64-bit key for the integers `parts`; their order matters."""
    key = 0
    for part in parts:
        key = int(mix(np.array([(key + _GAMMA + part) & _MASK], dtype=np.uint64))[0])
    return key


def bits(key: int, count: int, start: int = 0) -> NDArray[np.uint64]:
    """Return elements `start` to `start + count` (exclusive) of stream `key`: uint64[count].

    The stream is uniformly random.
    """
    counters = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    return mix(counters * np.uint64(_GAMMA) + np.uint64(key & _MASK))


def permutation(key: int, count: int) -> NDArray[np.int64]:
    """Return the numbers 0 to `count` - 1 in a random order determined by `key`: int64[count]."""
    return np.argsort(bits(key, count), kind="stable").astype(np.int64, copy=False)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply splitmix64's finalizer to each element: a bijection that spreads every bit.

    An input bit flips half the output bits.
    """
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    return mixed ^ (mixed >> np.uint64(31))


# The tokens around the thinking block of Qwen3 and similar models.
_THINKING = ("<think>", "</think>")


@dataclass(frozen=True)
class Document:
    """One sample: tokens, int32[n], and a mask of the tokens to be predicted, bool[n]."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]


def prompt_length(document: Document) -> int:
    """Return the number of tokens before the first supervised one: the length of the prompt."""
    return int(document.supervised.argmax())


def question(document: Document, tokenizer: Tokenizer) -> list[int]:
    """Return the prompt as users write it: without thinking, which `thinking: mask` leaves in."""
    prompt: list[int] = document.tokens[: prompt_length(document)].tolist()
    opening, closing = map(tokenizer.token_to_id, _THINKING)
    if opening not in prompt:
        return prompt
    start = len(prompt) - 1 - prompt[::-1].index(opening)
    thought = prompt[start + 1 :]
    if closing not in thought:
        return prompt
    end = thought.index(closing)
    is_last = not tokenizer.decode(thought[end + 1 :]).strip()
    return prompt[:start] if is_last and tokenizer.decode(thought[:end]).strip() else prompt


def first_answer(document: Document) -> list[int]:
    """Return the first run of supervised tokens, up to the next speaker's turn."""
    start = prompt_length(document)
    spoken = document.supervised[start:]
    length = len(spoken) if spoken.all() else int(spoken.argmin())
    return list(document.tokens[start : start + length].tolist())


# The output arrays of the tokenize stage: all samples concatenated, written as a stream and read
# memory-mapped.
#
# tokens.npy: int32[total]. supervised.npy: bool[total]. offsets.npy: int64[samples + 1], where each
# sample begins. conversations.npy: int32[samples], the conversation that each sample came from.
# content.npy: uint64[conversations], a hash that is equal for conversations with equal samples.
# prompts.npy: uint64[conversations], a hash of the first user message with the row's own system
# message, or of the
#     text; conversations with equal hashes belong to the same side of a split.
# source_offsets.npy: int64[sources + 1], the first sample of each source.

ARRAYS = {
    "tokens": np.int32,
    "supervised": np.bool_,
    "offsets": np.int64,
    "conversations": np.int32,
    "content": np.uint64,
    "prompts": np.uint64,
    "source_offsets": np.int64,
}


class Samples:
    """The samples in a folder, indexed by number."""

    def __init__(self, folder: Path) -> None:
        """Open the arrays of `folder`; tokens and supervision are memory-mapped."""
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self.supervised = np.load(folder / "supervised.npy", mmap_mode="r")
        self.offsets = np.load(folder / "offsets.npy")
        self.conversations = np.load(folder / "conversations.npy")
        self.content = np.load(folder / "content.npy")
        self.prompts = np.load(folder / "prompts.npy")
        self.source_offsets = np.load(folder / "source_offsets.npy")

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, number: int) -> Document:
        start, end = self.offsets[number : number + 2]
        return Document(self.tokens[start:end], self.supervised[start:end])
