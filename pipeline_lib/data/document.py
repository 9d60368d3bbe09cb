"""What the data stages hand to one another and to training: token sequences that say which tokens are trained on."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

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
