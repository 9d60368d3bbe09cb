"""Documents and samples: token sequences that say which tokens are trained on, and random bits by arithmetic."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

# Random bits as a pure function of integers (splitmix64): the same on any machine and with any numpy.
#
# numpy's own generators promise no stable streams between versions, and sample order, packing and the
# weights of the tiny model are decided by these bits.

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def key_of(*parts: int) -> int:
    """One 64-bit key for the integers `parts`; their order counts."""
    key = 0
    for part in parts:
        key = int(mix(np.array([(key + _GAMMA + part) & _MASK], dtype=np.uint64))[0])
    return key


def bits(key: int, count: int, start: int = 0) -> NDArray[np.uint64]:
    """Numbers `start` to `start + count` of the stream `key`: uint64[count], uniform."""
    counters = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    return mix(counters * np.uint64(_GAMMA) + np.uint64(key & _MASK))


def permutation(key: int, count: int) -> NDArray[np.int64]:
    """The numbers 0 to `count` - 1 in the random order that `key` names: int64[count]."""
    return np.argsort(bits(key, count), kind="stable").astype(np.int64, copy=False)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64, element by element: a bijection in which each input bit moves half the output."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    return mixed ^ (mixed >> np.uint64(31))


# What the data stages hand to one another and to training: token sequences that say which tokens are trained on.

# The tokens around the thinking of Qwen3 and its like.
_THINKING = ("<think>", "</think>")


@dataclass(frozen=True)
class Document:
    """One sample: tokens int32[n] and whether each is to be predicted, bool[n]."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]


def prompt_length(document: Document) -> int:
    """Tokens before the first supervised one: what the model is given."""
    return int(document.supervised.argmax())


def question(document: Document, tokenizer: Tokenizer) -> list[int]:
    """The prompt as users give it: without the reference's own thinking, which `thinking: mask` leaves in it."""
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
    """The supervised tokens after the prompt, up to where somebody else speaks."""
    start = prompt_length(document)
    spoken = document.supervised[start:]
    length = len(spoken) if spoken.all() else int(spoken.argmin())
    return list(document.tokens[start : start + length].tolist())


# The arrays that the tokenize stage hands on: all samples end to end, and where each begins.
#
# tokens.npy int32[total], supervised.npy bool[total], offsets.npy int64[samples + 1], conversations.npy
# int32[samples] (the conversation that each sample came from), content.npy uint64[conversations] (a hash, equal for
# conversations of equal samples), prompts.npy uint64[conversations] (a hash of the first user message, with the
# row's own system message, or of the text: what is equal there belongs to one side of a split), source_offsets.npy
# int64[sources + 1] (the first sample of each entry of data.train). Written as a stream, read memory-mapped.

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
    """The samples in a folder, by number."""

    def __init__(self, folder: Path) -> None:
        """Map the arrays of `folder`."""
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
