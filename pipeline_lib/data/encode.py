"""From a conversation to samples: exactly the tokens that inference sees, with only the assistant's supervised.

For each assistant turn, inference feeds the model the messages before it with a generation prompt, and the
model writes on from there. So the tokens of that prompt have to be a prefix of the tokens of the whole turn,
and what comes after them, up to the end-of-turn token, is what the model learns to write. What the prompt
already holds (Qwen3's empty thinking block) and what follows the end of the turn is not supervised.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Tokenizer

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.fsio import read_json
from pipeline_lib.data.blocks import Document
from pipeline_lib.data.chat import ChatTemplate
from pipeline_lib.data.rows import Message

TOKENIZER_NAME = "tokenizer.json"


class Drop(StrEnum):
    """Why a sample is not trained on. The names are stable: ledgers hold them."""

    PROMPT_NOT_PREFIX = "prompt_not_prefix"
    NO_END_OF_TURN = "no_end_of_turn"
    NOTHING_SUPERVISED = "nothing_supervised"
    OVER_LONG = "over_long"


@dataclass(frozen=True)
class Sample(Document):
    """What one sequence trains on."""

    truncated: bool = False


@dataclass(frozen=True)
class _Turn:
    """The tokens of a conversation up to the end of an assistant turn."""

    prompt_ids: list[int]  # what the model is given
    full_ids: list[int]  # that and what it writes
    spans: tuple[tuple[int, int], ...]  # what is supervised, of earlier turns as well where they are shared


def load_tokenizer(folder: Path) -> Tokenizer:
    """tokenizer.json of the model in `folder`, cutting and padding nothing. Raises DataError."""
    path = folder / TOKENIZER_NAME
    if not path.is_file():
        raise DataError(f"{folder}: has no {TOKENIZER_NAME}")
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot read ({error})") from error
    if not isinstance(content, dict) or "model" not in content:
        raise DataError(f"{path}: not a tokenizer (it describes no model)")
    tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Encoder:
    """Encodes conversations with the tokenizer and the chat template of one model."""

    def __init__(self, folder: Path, max_tokens: int, over_long: Literal["drop", "truncate"] = "drop") -> None:
        """Take both from the model in `folder`. Samples longer than `max_tokens` are dropped or cut."""
        self.template = ChatTemplate.load(folder)
        self.tokenizer = load_tokenizer(folder)
        self.max_tokens = max_tokens
        self.over_long = over_long
        added = self.tokenizer.get_added_tokens_decoder()
        self._control_ids = frozenset(number for number, token in added.items() if token.special)
        self._control_texts = tuple(sorted(token.content for token in added.values() if token.special))

    def control_token_in(self, messages: Iterable[Message]) -> str | None:
        """A control token (`<|im_end|>`, ...) that the text of `messages` holds, if any.

        The tokenizer would read it as the real one, so that text could end a turn or forge another.
        """
        for message in messages:
            for text in (message["content"], message.get("reasoning_content", "")):
                if found := next((token for token in self._control_texts if token in text), None):
                    return found
        return None

    def encode(self, conversations: Sequence[Sequence[Message]]) -> list[list[Sample | Drop]]:
        """The samples of each conversation, in order, or why one is dropped. Raises DataError."""
        return self.encode_rendered([self.render(messages) for messages in conversations])

    def render(self, messages: Sequence[Message]) -> list[str]:
        """For each assistant turn two texts: what the model is given, and that with what it writes.

        Raises DataError if the template fails.
        """
        texts = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                thinking = has_thinking(message)
                texts.append(self.template.render(messages[:number], True, enable_thinking=thinking))
                texts.append(self.template.render(messages[: number + 1], enable_thinking=thinking))
        return texts

    def encode_rendered(self, conversations: Sequence[Sequence[str]]) -> list[list[Sample | Drop]]:
        """The samples of each conversation that `render` made, in order, or why one is dropped.

        Turns share a sample where the template renders a turn in the history as it rendered it at the end;
        else each has its own.
        """
        texts = [text for turns in conversations for text in turns]
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        pairs = zip(ids[::2], ids[1::2], strict=True)
        return [self._samples(list(islice(pairs, len(turns) // 2))) for turns in conversations]

    def _samples(self, pairs: list[tuple[list[int], list[int]]]) -> list[Sample | Drop]:
        samples: list[Sample | Drop] = []
        current: _Turn | None = None
        for prompt_ids, full_ids in pairs:
            turn = self._turn(prompt_ids, full_ids)
            if isinstance(turn, Drop):
                samples.append(turn)
                continue
            if current is not None:
                if turn.prompt_ids[: len(current.full_ids)] == current.full_ids:
                    turn = _Turn(turn.prompt_ids, turn.full_ids, (*current.spans, *turn.spans))
                else:
                    samples.append(self._fit(current))
            current = turn
        return [*samples, self._fit(current)] if current is not None else samples

    def _turn(self, prompt_ids: list[int], full_ids: list[int]) -> _Turn | Drop:
        start = len(prompt_ids)
        if not prompt_ids or full_ids[:start] != prompt_ids:
            return Drop.PROMPT_NOT_PREFIX
        ends = [position for position in range(start, len(full_ids)) if full_ids[position] in self._control_ids]
        if not ends:
            return Drop.NO_END_OF_TURN
        end = ends[-1] + 1
        if end == start + 1:
            return Drop.NOTHING_SUPERVISED  # the turn ends where it begins
        return _Turn(prompt_ids, full_ids[:end], ((start, end),))

    def _fit(self, turn: _Turn) -> Sample | Drop:
        too_long = len(turn.full_ids) > self.max_tokens
        if too_long and self.over_long == "drop":
            return Drop.OVER_LONG
        supervised = np.zeros(len(turn.full_ids), dtype=np.bool_)
        for start, end in turn.spans:
            supervised[start:end] = True
        tokens = np.array(turn.full_ids, dtype=np.int32)[: self.max_tokens]
        supervised = supervised[: self.max_tokens]
        if not supervised.any():
            return Drop.OVER_LONG  # the cut left nothing but the prompt
        return Sample(tokens, supervised, truncated=too_long)


def has_thinking(message: Message) -> bool:
    """Whether the assistant's `message` thinks before it answers; an empty thinking block does not count."""
    if reasoning := message.get("reasoning_content"):
        return bool(reasoning.strip())
    before, closing, _ = message["content"].partition("</think>")
    return bool(closing and before.rpartition("<think>")[2].strip())
