"""From a conversation to samples: exactly the tokens that inference sees, with only the assistant's supervised.

For each assistant turn, inference feeds the model the messages before it with a generation prompt, and the
model writes on from there. So the tokens of that prompt have to be a prefix of the tokens of the whole turn,
and what comes after them, up to the end-of-turn token, is what the model learns to write. What the prompt
already holds (Qwen3's empty thinking block) and what follows the end of the turn is not supervised.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import Tokenize
from pipeline_lib.data.chat.bpe import BatchTokenizer
from pipeline_lib.data.chat.template import ChatTemplate, read_tokenizer_config, special_tokens
from pipeline_lib.data.chat.thinking import end_of_thinking, thinking_modes, thinking_of, without_thinking
from pipeline_lib.data.document import Document
from pipeline_lib.data.rows.conversation import BadRow, check_json
from pipeline_lib.data.rows.fields import Fields
from pipeline_lib.data.rows.layout import Content, Conversation, Message, Text
from pipeline_lib.data.rows.tool_calls import tools_of

TOKENIZER_NAME = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
_ID_BYTES = 4
_CHANCE_CHARS = 24  # a shorter thought may stand in what the template writes around an answer


class Drop(StrEnum):
    """Why a sample is not trained on. The names are stable: ledgers hold them."""

    PROMPT_NOT_PREFIX = "prompt_not_prefix"
    NO_END_OF_TURN = "no_end_of_turn"
    NOTHING_SUPERVISED = "nothing_supervised"
    LAST_TURN_EXCLUDED = "last_turn_excluded"
    OVER_LONG = "over_long"
    THINKING_NOT_SEPARABLE = "thinking_not_separable"
    THINKING_NOT_RENDERED = "thinking_not_rendered"


@dataclass(frozen=True)
class Sample(Document):
    """What one sequence trains on. `truncated`: its end is missing; `split`: it is a piece of a longer text."""

    truncated: bool = False
    split: bool = False
    asked_to_think: tuple[bool, ...] = ()  # [turns trained on], whether each one's prompt has thinking on; not of texts


class Rendered(NamedTuple):
    """One assistant turn as text, or a text as it is (it has no prompt)."""

    prompt: str | None  # what the model is given
    full: str  # that and what it writes
    asked_to_think: bool | None = None  # the switch that the prompt was rendered with
    thinking: int = 0  # characters of `full` up to the end of thinking that is not to be learned
    drop: Drop | None = None  # why it is not to be learned, if its prompt fits at all


class _Span(NamedTuple):
    """What is supervised of one turn, from `start` to `end`."""

    start: int
    end: int
    asked_to_think: bool | None  # None of a text


@dataclass(frozen=True)
class _Turn:
    """The tokens of a conversation up to the end of an assistant turn."""

    prompt: bytes  # what the model is given, as int32
    full: bytes  # that and what it writes
    spans: tuple[_Span, ...]  # those of earlier turns as well where they are shared


def default_tools(texts: Sequence[str]) -> list[dict[str, Any]] | None:
    """The tools of `tokenize.tools`, as a row's own are read. Raises DataError."""
    try:
        tools = tools_of(Fields({"tools": list(texts)}, {}))
        check_json(tools)
    except BadRow as bad:
        raise DataError(f"tokenize.{bad.detail}; each is a function's JSON schema") from bad
    return tools


def read_tokenizer(folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of the model in `folder`, cutting and padding nothing, and its tokenizer.json. Raises DataError."""
    content = _read(folder)
    return _tokenizer(folder, content), json.loads(content)


def load_tokenizer(folder: Path) -> Tokenizer:
    """tokenizer.json of the model in `folder`, cutting and padding nothing. Raises DataError."""
    return _tokenizer(folder, _read(folder))


def _read(folder: Path) -> bytes:
    path = folder / TOKENIZER_NAME
    if not path.is_file():
        raise DataError(f"{folder}: has no {TOKENIZER_NAME}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot read ({error})") from error


def _tokenizer(folder: Path, content: bytes) -> Tokenizer:
    """The tokenizer that `content`, of the tokenizer.json in `folder`, describes. Raises DataError."""
    path = folder / TOKENIZER_NAME
    try:
        tokenizer: Tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises nothing more special
        raise DataError(f"{path}: not a tokenizer ({error}); take that of the model's publisher") from error
    if not tokenizer.get_vocab_size(with_added_tokens=False):
        raise DataError(f"{path}: the tokenizer has an empty vocabulary; take that of the model's publisher")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Encoder:
    """Encodes conversations and texts with the tokenizer and the chat template of one model."""

    def __init__(self, folder: Path, settings: Tokenize, fast: bool = True) -> None:
        """Take both from the model in `folder`; the template when the first conversation comes. Raises DataError.

        Unless `fast`, ids come from `tokenizers` alone.
        """
        self.settings = settings
        self._folder = folder
        self.tokenizer, description = read_tokenizer(folder)
        self._batches = BatchTokenizer(self.tokenizer, description, fast)
        special = {n: token for n, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        self._is_control = np.zeros(2 + max(special, default=0), dtype=np.bool_)  # the last is of all ids from there on
        self._is_control[list(special)] = True
        contents = sorted(token.content for token in special.values())
        self._control_text = re.compile("|".join(map(re.escape, contents)) or "(?!)")
        self._system: list[Message] = [{"role": "system", "content": settings.system}] if settings.system else []
        self._tools = default_tools(settings.tools)
        for text in _texts([settings.system, self._tools]):
            if found := self._control_text.search(text):
                raise DataError(f"tokenize.system or tokenize.tools holds the control token {found[0]}: take it out")
        names = (END_OF_TEXT, special_tokens(read_tokenizer_config(folder)).get("eos_token"))
        ends = [number for name in names if name and (number := self.tokenizer.token_to_id(name)) is not None]
        self._end_of_text = np.array(ends[:1], dtype=np.int32)

    @cached_property
    def template(self) -> ChatTemplate:
        """Texts need none; and as code of others it is compiled where it is run. Raises DataError."""
        return ChatTemplate.load(self._folder)

    @property
    def how(self) -> str:
        """What tokenizes: `tiktoken`, or `tokenizers` and why."""
        return self._batches.how

    def control_token_in(self, content: Content) -> str | None:
        """A control token (`<|im_end|>`, ...) in any text of `content`, tools and tool calls included, if any.

        The tokenizer would read it as the real one, so that text could end a turn or forge another.
        """
        values: list[Any] = [content.text] if isinstance(content, Text) else [content.messages, content.tools]
        found = map(self._control_text.search, chain.from_iterable(map(_texts, values)))
        return next((match[0] for match in found if match), None)

    def encode(self, contents: Sequence[Content]) -> list[list[Sample | Drop]]:
        """The samples of each content, in order, or why one is dropped. Raises DataError."""
        return self.encode_rendered([self.render(content) for content in contents])

    def render(self, content: Content) -> list[Rendered]:
        """The text, or each assistant turn to be trained on. Raises DataError if the template fails."""
        if isinstance(content, Text):
            return [Rendered(None, content.text)]
        strip = self.settings.thinking == "strip"
        messages = [without_thinking(message) for message in content.messages] if strip else content.messages
        system = [] if messages[0]["role"] == "system" else self._system
        tools = content.tools or self._tools
        thinking = thinking_modes(messages)
        return [
            self._render_turn([*system, *messages[: turn + 1]], tools, thinking[turn])
            for turn in self._turns_to_train_on(content)
        ]

    def _turns_to_train_on(self, content: Conversation) -> Sequence[int]:
        if self.settings.train_on == "all_assistant":
            return content.supervised
        last = max(number for number, message in enumerate(content.messages) if message["role"] == "assistant")
        return [last] if last in content.supervised else []

    def _render_turn(self, messages: list[Message], tools: list[dict[str, Any]] | None, thinking: bool) -> Rendered:
        asked = thinking or self.settings.prompt_thinking == "on"
        prompt = self.template.render(messages[:-1], tools, True, enable_thinking=asked)
        full = self.template.render(messages, tools, enable_thinking=asked)
        if self._is_thinking_left_out(messages, tools, full, len(prompt)):
            return Rendered(prompt, full, asked, drop=Drop.THINKING_NOT_RENDERED)
        if not thinking or self.settings.thinking != "mask":
            return Rendered(prompt, full, asked)
        end = end_of_thinking(messages[-1], full, len(prompt))
        return Rendered(prompt, full, asked, end or 0, Drop.THINKING_NOT_SEPARABLE if end is None else None)

    def _is_thinking_left_out(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, full: str, start: int
    ) -> bool:
        """Whether what the last of `messages` thinks is missing in what `full` holds of it, from `start` on."""
        thought = thinking_of(messages[-1])
        if not thought or full.find(thought, start) < 0:
            return bool(thought)
        bare = without_thinking(messages[-1])
        if len(thought) >= _CHANCE_CHARS and not any(thought in text for text in _texts(bare)):
            return False
        # The same words may be the answer's: then the turn reads as it does without the thinking.
        return full == self.template.render([*messages[:-1], bare], tools, enable_thinking=True)

    def encode_rendered(self, batch: Sequence[Sequence[Rendered]]) -> list[list[Sample | Drop]]:
        """The samples of each content that `render` made, in order, or why one is dropped.

        Turns share a sample where the template renders a turn in the history as it rendered it at the end;
        else each has its own.
        """
        texts = []
        for turn in chain.from_iterable(batch):
            texts += [turn.prompt or "", turn.full, turn.full[: turn.thinking]]
        ids = iter(self._batches.encode(texts))
        return [list(self._samples(turns, ids)) if turns else [Drop.LAST_TURN_EXCLUDED] for turns in batch]

    def _samples(self, turns: Sequence[Rendered], ids: Iterator[bytes]) -> Iterator[Sample | Drop]:
        current: _Turn | None = None
        for rendered in turns:
            turn = self._turn(rendered, next(ids), next(ids), next(ids))
            if isinstance(turn, Drop):
                yield turn
                continue
            if current is not None:
                if turn.prompt.startswith(current.full):
                    turn = _Turn(turn.prompt, turn.full, (*current.spans, *turn.spans))
                else:
                    yield from self._fit(current)
            current = turn
        if current is not None:
            yield from self._fit(current)

    def _turn(self, rendered: Rendered, prompt: bytes, full: bytes, thinking: bytes) -> _Turn | Drop:
        if rendered.prompt is None:
            return self._text(full)
        if not prompt or not full.startswith(prompt):
            return Drop.PROMPT_NOT_PREFIX
        if rendered.drop is not None:
            return rendered.drop
        if not full.startswith(thinking):
            return Drop.THINKING_NOT_SEPARABLE
        written = len(prompt) // _ID_BYTES
        ends = self._is_control.take(np.frombuffer(full, dtype=np.int32)[written:], mode="clip").nonzero()[0]
        if not len(ends):
            return Drop.NO_END_OF_TURN
        start, end = max(written, len(thinking) // _ID_BYTES), written + int(ends[-1]) + 1
        if end <= start + 1:
            return Drop.NOTHING_SUPERVISED  # the turn ends where it begins
        return _Turn(prompt, full[: end * _ID_BYTES], (_Span(start, end, rendered.asked_to_think),))

    def _text(self, ids: bytes) -> _Turn | Drop:
        if not len(self._end_of_text):
            return Drop.NO_END_OF_TURN
        full = ids + self._end_of_text.tobytes()
        length = len(full) // _ID_BYTES
        return _Turn(b"", full, (_Span(1, length, None),)) if length > 1 else Drop.NOTHING_SUPERVISED

    def _fit(self, turn: _Turn) -> Iterator[Sample | Drop]:
        tokens = np.frombuffer(turn.full, dtype=np.int32)
        supervised = np.zeros(len(tokens), dtype=np.bool_)
        for span in turn.spans:
            supervised[span.start : span.end] = True
        limit, over_long = self.settings.max_tokens, self.settings.over_long
        if len(tokens) <= limit:
            yield Sample(tokens, supervised, asked_to_think=_asked_to_think(turn.spans))
        elif over_long == "split" and not turn.prompt:
            yield from _pieces(tokens, supervised, limit)
        elif over_long == "split":
            # Up to the end of a turn, a conversation is what inference sees; a piece from its middle is not.
            fitting = [span for span in turn.spans if span.end <= limit]
            if fitting:
                end = fitting[-1].end
                yield Sample(tokens[:end], supervised[:end], asked_to_think=_asked_to_think(fitting))
            yield from [Drop.OVER_LONG] * (len(turn.spans) - len(fitting))
        elif over_long == "truncate" and supervised[:limit].any():
            begun = _asked_to_think([span for span in turn.spans if span.start < limit])
            yield Sample(tokens[:limit], supervised[:limit], truncated=True, asked_to_think=begun)
        else:
            yield Drop.OVER_LONG  # also if the cut left nothing but the prompt

    def thinking_default(self) -> str | None:
        """Which prompt the template renders where `enable_thinking` is not given: `on`, `off`, or `other` than both.

        None if it is the same for both, or cannot be told.
        """
        question: list[Message] = [{"role": "user", "content": "?"}]
        try:
            default = self.template.render(question, None, True)
            on, off = (self.template.render(question, None, True, enable_thinking=value) for value in (True, False))
        except DataError:  # the template takes no such question
            return None
        if on == off:
            return None
        return {on: "on", off: "off"}.get(default, "other")

    def hint(self, drop: Drop) -> str:
        """What to do about samples that are dropped for that reason."""
        if drop == Drop.PROMPT_NOT_PREFIX:
            question: Message = {"role": "user", "content": "?"}
            prompt = self.template.render([question], add_generation_prompt=True, enable_thinking=False)
            if prompt.rstrip().endswith("<think>"):
                return (
                    "the model's generation prompt opens a thinking block, and these turns do not think: give them "
                    "reasoning_content, set tokenize.thinking to keep or mask, or take a model that answers at once"
                )
        return _HINTS[drop]


def _asked_to_think(spans: Sequence[_Span]) -> tuple[bool, ...]:
    return tuple(span.asked_to_think for span in spans if span.asked_to_think is not None)


def _pieces(tokens: NDArray[np.int32], supervised: NDArray[np.bool_], limit: int) -> Iterator[Sample | Drop]:
    """Consecutive pieces of at most `limit` tokens."""
    for start in range(0, len(tokens), limit):
        piece = supervised[start : start + limit]
        piece[0] = False  # nothing comes before it from which it could be predicted
        yield Sample(tokens[start : start + limit], piece, split=True) if piece.any() else Drop.NOTHING_SUPERVISED


_HINTS = {
    Drop.PROMPT_NOT_PREFIX: "the chat template renders a turn otherwise than its generation prompt begins it, so the "
    "model would learn what it never has to write: look at the template of this model",
    Drop.NO_END_OF_TURN: "no control token follows the answer (the template writes none, or tokenizer.json does not "
    "call it special), so the model would not learn to stop: take a chat model's tokenizer files",
    Drop.NOTHING_SUPERVISED: "these turns or pieces hold nothing for the model to write: look for empty answers, or "
    "for texts whose last piece is a single token with tokenize.over_long: split",
    Drop.LAST_TURN_EXCLUDED: "tokenize.train_on is last_assistant, and the rows exclude the assistant's last turn from "
    "training (by its weight, or because it is in the prompt): include it, or set train_on to all_assistant",
    Drop.OVER_LONG: "raise tokenize.max_tokens, or set tokenize.over_long to truncate (a sample loses its end) or to "
    "split (of a conversation the turns that fit are kept, a text becomes pieces)",
    Drop.THINKING_NOT_SEPARABLE: "the template ends the thinking without </think>, or a token reaches from it into the "
    "answer, so one cannot be masked without the other: set tokenize.thinking to keep or strip",
    Drop.THINKING_NOT_RENDERED: "the chat template leaves out what these answers think, so it would not be learned: "
    "take a model whose template renders it, write it as <think>...</think> at the start of the answer if the template "
    "keeps that, or set tokenize.thinking to strip to train on the answers alone",
}


def _texts(value: Any) -> list[str]:
    """All texts in a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [*value, *chain.from_iterable(map(_texts, value.values()))]
    return list(chain.from_iterable(map(_texts, value))) if isinstance(value, list) else []
