"""Encode conversations to samples: inference's exact tokens, with the assistant's supervised."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pipeline_lib.config.schema import Tokenize
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.bpe import BatchTokenizer
from pipeline_lib.data.chat_template import ChatTemplate, read_tokenizer_config, special_tokens
from pipeline_lib.data.conversations import BadRow, Content, Message, Text, TextParts, check_json
from pipeline_lib.data.documents import Document
from pipeline_lib.data.parts import (
    RenderedParts,
    TemplatePart,
    control_tokens_of,
    shape_of,
    unrendered_default,
)
from pipeline_lib.data.row_fields import Fields
from pipeline_lib.data.thinking import (
    end_of_thinking,
    opens_thinking,
    thinking_modes,
    thinking_of,
    without_thinking,
)
from pipeline_lib.data.tools import tools_of

# For each assistant turn, inference gives the model the messages before it with a generation
# prompt, and the model continues from there. So the tokens of that prompt have to be a prefix of
# the tokens of the whole turn, and the tokens after them, up to the end-of-turn token, are
# supervised. Tokens that the prompt already contains (Qwen3's empty thinking block) and tokens
# after the end of the turn are not supervised.

TOKENIZER_NAME = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
_ID_BYTES = 4
# a shorter thought may occur by chance in the text that the template writes around an answer
_CHANCE_CHARS = 24


_SIMPLE_ANSWER = "An answer."


class Drop(StrEnum):
    """The reasons why a sample is not trained on. The names are stable: ledgers contain them."""

    PROMPT_NOT_PREFIX = "prompt_not_prefix"
    NO_END_OF_TURN = "no_end_of_turn"
    NOTHING_SUPERVISED = "nothing_supervised"
    LAST_TURN_EXCLUDED = "last_turn_excluded"
    OVER_LONG = "over_long"
    THINKING_NOT_SEPARABLE = "thinking_not_separable"
    THINKING_NOT_RENDERED = "thinking_not_rendered"
    CALLS_NOT_RENDERED = "calls_not_rendered"
    TOOLS_NOT_RENDERED = "tools_not_rendered"
    MESSAGE_NOT_RENDERED = "message_not_rendered"


_LEFT_OUT = {
    TemplatePart.CALLS: Drop.CALLS_NOT_RENDERED,
    TemplatePart.TOOLS: Drop.TOOLS_NOT_RENDERED,
    TemplatePart.MESSAGE: Drop.MESSAGE_NOT_RENDERED,
}


@dataclass(frozen=True)
class Sample(Document):
    """A document to train on.

    `truncated`: its end is missing; `split`: it is a piece of a longer text.
    """

    truncated: bool = False
    split: bool = False
    asked_to_think: tuple[
        bool, ...
    ] = ()  # [turns trained on], whether the prompt has thinking on; empty for texts


class Rendered(NamedTuple):
    """The rendered text of one assistant turn, or a raw text, which has no prompt."""

    prompt: str | None  # the model's input
    full: str  # the prompt and the model's output
    asked_to_think: bool | None = None  # the thinking switch that the prompt was rendered with
    thinking: int = 0  # characters of `full` up to the end of thinking that is masked
    drop: Drop | None = None  # why the turn is dropped, if not because its prompt is no prefix
    # whether the answer begins with a line end, which must not join that of the prompt
    is_continued: bool = False


class _Span(NamedTuple):
    """The supervised tokens of one turn, from `start` to `end` (exclusive)."""

    start: int
    end: int
    asked_to_think: bool | None  # None for a text


@dataclass(frozen=True)
class _Turn:
    """The tokens of a conversation up to the end of an assistant turn."""

    prompt: bytes  # the model's input, as int32
    full: bytes  # the prompt and the model's output
    spans: tuple[_Span, ...]  # includes the spans of earlier turns that share this sample


def default_tools(texts: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return the tools of `tokenize.tools`, read like the tools of a row. Raises DataError."""
    try:
        tools = tools_of(Fields({"tools": list(texts)}, {}))
        check_json(tools)
    except BadRow as bad:
        raise DataError(f"tokenize.{bad.detail}; each is a function's JSON schema") from bad
    return tools


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of the model in `folder`, without truncation and padding.

    Raises DataError.
    """
    path = folder / TOKENIZER_NAME
    if not path.is_file():
        raise DataError(f"{folder}: has no {TOKENIZER_NAME}")
    try:
        tokenizer: Tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot read ({error})") from error
    except Exception as error:  # tokenizers raises no more specific class
        raise DataError(
            f"{path}: not a tokenizer ({error}); take that of the model's publisher"
        ) from error
    if not tokenizer.get_vocab_size(with_added_tokens=False):
        raise DataError(
            f"{path}: the tokenizer has an empty vocabulary; take that of the model's publisher"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts))) or "(?!)")


class Encoder:
    """An encoder of conversations and texts, with one model's tokenizer and chat template."""

    def __init__(self, folder: Path, settings: Tokenize, fast: bool = True) -> None:
        """Load the tokenizer of the model in `folder`; the first conversation loads the template.

        Unless `fast`, ids come from `tokenizers` alone. Raises DataError.
        """
        self.settings = settings
        self._folder = folder
        self.tokenizer = load_tokenizer(folder)
        description = json.loads((folder / TOKENIZER_NAME).read_bytes())
        self._batches = BatchTokenizer(self.tokenizer, description, fast)
        self.how = self._batches.how  # `tiktoken`, or `tokenizers` with the reason
        added = self.tokenizer.get_added_tokens_decoder()
        special = {number: token for number, token in added.items() if token.special}
        # the last entry is for all higher ids
        self._is_control = np.zeros(2 + max(special, default=0), dtype=np.bool_)
        self._is_control[list(special)] = True
        self._special = {token.content for token in special.values()}
        self._control_text = _any_of(self._special)
        self._system: list[Message] = []
        if settings.system:
            self._system = [{"role": "system", "content": settings.system}]
        self._tools = default_tools(settings.tools)
        for text in _texts([settings.system, self._tools]):
            if found := self._control_text.search(text):
                raise DataError(
                    f"tokenize.system or tokenize.tools holds the control token {found[0]}: take "
                    "it out"
                )
        names = (END_OF_TEXT, special_tokens(read_tokenizer_config(folder)).get("eos_token"))
        numbers = [self.tokenizer.token_to_id(name) for name in names if name]
        ends = [number for number in numbers if number is not None]
        self._end_of_text = np.array(ends[:1], dtype=np.int32)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, loaded on first use: texts need none, and it is untrusted code.

        Raises DataError.
        """
        return ChatTemplate.load(self._folder, self.settings.chat_template_kwargs)

    @cached_property
    def _parts(self) -> RenderedParts:
        """What the template leaves out.

        Raises DataError if that is the config's own system message or tools.
        """
        self.refuse_unrendered_defaults()
        return RenderedParts(self.template.render)

    def refuse_unrendered_defaults(self) -> None:
        """Raise DataError if the template leaves out the config's system message or tools."""
        if key := unrendered_default(self.template.render, self._system, self._tools):
            raise DataError(
                f"tokenize.{key}: the chat template of {self._folder} does not render it, or not "
                "all of it: take the key out, or a model whose template renders it"
            )

    @cached_property
    def _control_in_turns(self) -> re.Pattern[str]:
        """A pattern for control tokens that forge a turn: special ones, and the template's own."""
        added = {token.content for token in self.tokenizer.get_added_tokens_decoder().values()}
        return _any_of(self._special | control_tokens_of(self.template.render, added))

    def control_token_in(self, content: Content) -> str | None:
        """Return a control token (`<|im_end|>`, ...) in `content`, tools and calls too, or None.

        The tokenizer would encode it as the real token, so the text could end a turn or forge
        another. Raises DataError if a conversation has no template.
        """
        if isinstance(content, Text):
            texts = [content.text]
            control = self._control_text
        else:
            texts = _texts([content.messages, content.tools])
            control = self._control_in_turns
        found = map(control.search, texts)
        return next((match[0] for match in found if match), None)

    def encode(self, contents: Sequence[Content]) -> list[list[Sample | Drop]]:
        """Return the samples of each content, in order, or the reason why one is dropped.

        Raises DataError.
        """
        return self.encode_rendered([self.render(content) for content in contents])

    def render(self, content: Content) -> list[Rendered]:
        """Return the text, or each rendered assistant turn to be trained on.

        Raises DataError if the template fails.
        """
        if isinstance(content, Text):
            return [Rendered(None, content.text)]
        strip = self.settings.thinking == "strip"
        messages = [self._joined(message) for message in content.messages]
        if strip:
            messages = [without_thinking(message) for message in messages]
        system = [] if messages[0]["role"] == "system" else self._system
        tools = content.tools or self._tools
        thinking = thinking_modes(messages)
        turns: Sequence[int] = content.supervised
        if self.settings.train_on == "last_assistant":
            roles = [message["role"] for message in messages]
            last = max(number for number, role in enumerate(roles) if role == "assistant")
            turns = [last] if last in turns else []
        tools_shape = shape_of(tools)
        rendered = []
        begin = 0
        for turn in turns:
            given = system + messages[: turn + 1]
            one = self._render_turn(given, tools, thinking[turn])
            if one.drop is None:
                part = self._parts.left_out(given, tools, tools_shape, one.full, begin)
                if part:
                    one = one._replace(drop=_LEFT_OUT[part])
            rendered.append(one)
            begin = len(given)
        return rendered

    def _joined(self, message: Message) -> Message:
        """Return `message` with its text parts joined as the template joins them."""
        content = message["content"]
        if not isinstance(content, TextParts):
            return message
        return {**message, "content": self.template.part_separator.join(content.parts)}

    def _render_turn(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, thinking: bool
    ) -> Rendered:
        may_refuse = self.settings.prompt_thinking == "on"
        asked = thinking or may_refuse
        prompt = self.template.render(messages[:-1], tools, True, enable_thinking=asked)
        if asked and not may_refuse and opens_thinking(prompt) and not thinking_of(messages[-1]):
            # A step without thinking cannot follow this prompt (Qwen3.5's), though others of its
            # question think.
            asked = False
            prompt = self.template.render(messages[:-1], tools, True, enable_thinking=asked)
        full = self.template.render(messages, tools, enable_thinking=asked)
        if self._is_thinking_left_out(messages, tools, full, len(prompt)):
            return Rendered(prompt, full, asked, drop=Drop.THINKING_NOT_RENDERED)
        is_continued = _begins_with_line_end(prompt, full)
        if opens_thinking(prompt) and not thinking_of(messages[-1]):
            # the line end is that of an empty block, in which a model would think
            is_continued = False
        if not thinking or self.settings.thinking != "mask":
            return Rendered(prompt, full, asked, is_continued=is_continued)
        end = end_of_thinking(messages[-1], full, len(prompt))
        return Rendered(
            prompt, full, asked, end or 0, Drop.THINKING_NOT_SEPARABLE if end is None else None
        )

    def _is_thinking_left_out(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, full: str, start: int
    ) -> bool:
        thought = thinking_of(messages[-1])
        if not thought or full.find(thought, start) < 0:
            return bool(thought)
        bare = without_thinking(messages[-1])
        if len(thought) >= _CHANCE_CHARS and not any(thought in text for text in _texts(bare)):
            return False
        # The same words may be part of the answer: then the turn renders the same without the
        # thinking.
        return full == self.template.render([*messages[:-1], bare], tools, enable_thinking=True)

    def encode_rendered(self, batch: Sequence[Sequence[Rendered]]) -> list[list[Sample | Drop]]:
        """Return each content's samples that `render` returned, in order, or why one is dropped.

        Turns share a sample if the template renders a turn in the history exactly as at the end;
        else each turn has its own. Where the thinking switch changes the beginning too (Qwen3.8),
        turns of the same switch may share one.
        """
        texts = []
        for turn in chain.from_iterable(batch):
            texts += [turn.prompt or "", turn.full, turn.full[: turn.thinking]]
        ids = iter(self._batches.encode(texts))
        samples: list[list[Sample | Drop]] = []
        for turns in batch:
            if turns:
                samples.append(list(self._samples(turns, ids)))
            else:
                samples.append([Drop.LAST_TURN_EXCLUDED])
        return samples

    def _samples(self, turns: Sequence[Rendered], ids: Iterator[bytes]) -> Iterator[Sample | Drop]:
        found: list[_Turn] = []
        # by thinking switch, the place in `found` of its last turn
        latest: dict[bool | None, int] = {}
        for rendered in turns:
            turn = self._turn(rendered, next(ids), next(ids), next(ids))
            if isinstance(turn, Drop):
                yield turn
                continue
            for place in latest.values():
                begun = found[place]
                if turn.prompt.startswith(begun.full):
                    found[place] = _Turn(turn.prompt, turn.full, begun.spans + turn.spans)
                    break
            else:
                place = len(found)
                found.append(turn)
            latest[rendered.asked_to_think] = place
        for turn in found:
            yield from self._fit(turn)

    def _turn(
        self, rendered: Rendered, prompt: bytes, full: bytes, thinking: bytes
    ) -> _Turn | Drop:
        if rendered.prompt is None:
            text = full + self._end_of_text.tobytes()
            length = len(text) // _ID_BYTES
            if not len(self._end_of_text):
                return Drop.NO_END_OF_TURN
            if length == 1:
                return Drop.NOTHING_SUPERVISED
            return _Turn(b"", text, (_Span(1, length, None),))
        # MESSAGE_NOT_RENDERED follows from what is wrong below
        if rendered.drop not in (None, Drop.MESSAGE_NOT_RENDERED):
            return rendered.drop
        if prompt and not full.startswith(prompt) and rendered.is_continued:
            # The tokenizer joins line ends, and the model, which is given that of the prompt,
            # writes another.
            full = prompt + self._batches.encode([rendered.full[len(rendered.prompt) :]])[0]
        if not prompt or not full.startswith(prompt):
            return Drop.PROMPT_NOT_PREFIX
        if not full.startswith(thinking):
            return Drop.THINKING_NOT_SEPARABLE
        written = len(prompt) // _ID_BYTES
        ends = self._is_control.take(
            np.frombuffer(full, dtype=np.int32)[written:], mode="clip"
        ).nonzero()[0]
        if not len(ends):
            return Drop.NO_END_OF_TURN
        start = max(written, len(thinking) // _ID_BYTES)
        end = written + int(ends[-1]) + 1
        if end <= start + 1:
            return Drop.NOTHING_SUPERVISED  # the turn ends where it begins
        if rendered.drop is not None:
            return rendered.drop
        return _Turn(prompt, full[: end * _ID_BYTES], (_Span(start, end, rendered.asked_to_think),))

    def _fit(self, turn: _Turn) -> Iterator[Sample | Drop]:
        tokens = np.frombuffer(turn.full, dtype=np.int32)
        supervised = np.zeros(len(tokens), dtype=np.bool_)
        for span in turn.spans:
            supervised[span.start : span.end] = True
        limit = self.settings.max_tokens
        over_long = self.settings.over_long
        if len(tokens) <= limit:
            yield Sample(tokens, supervised, asked_to_think=_asked_to_think(turn.spans))
        elif over_long == "split" and not turn.prompt:
            yield from _pieces(tokens, supervised, limit)
        elif over_long == "split":
            # A conversation up to the end of a turn occurs in inference; a piece from its middle
            # does not.
            fitting = [span for span in turn.spans if span.end <= limit]
            if fitting:
                end = fitting[-1].end
                yield Sample(
                    tokens[:end], supervised[:end], asked_to_think=_asked_to_think(fitting)
                )
            yield from [Drop.OVER_LONG] * (len(turn.spans) - len(fitting))
        elif over_long == "truncate" and supervised[:limit].any():
            begun = _asked_to_think([span for span in turn.spans if span.start < limit])
            yield Sample(tokens[:limit], supervised[:limit], truncated=True, asked_to_think=begun)
        else:
            yield Drop.OVER_LONG  # also if truncation would leave only the prompt

    def end_of_turn(self) -> int | None:
        """Return the id of the last control token behind an answer, None if there is none."""
        question: Message = {"role": "user", "content": "A question."}
        answer: Message = {"role": "assistant", "content": _SIMPLE_ANSWER}
        system: Message = {"role": "system", "content": "A system message."}
        # Some templates refuse a conversation without a system message, or with the thinking switch
        # off.
        for messages, thinking in product(
            ([question, answer], [system, question, answer]), (False, True)
        ):
            with suppress(DataError):
                full = self.template.render(messages, enable_thinking=thinking)
                _, found, end = full.rpartition(_SIMPLE_ANSWER)
                ids = self._control_ids(self._batches.encode([end])[0])
                if found and len(ids):
                    return int(ids[-1])
        return None

    def lacks_generation_prompt(self) -> bool:
        """Return whether the template renders a question alike with a generation prompt or not."""
        question: list[Message] = [{"role": "user", "content": "?"}]
        try:
            with_prompt = self.template.render(question, None, True)
            without = self.template.render(question, None, False)
        except DataError:  # the template fails on this question
            return False
        return with_prompt == without

    def _control_ids(self, tokens: bytes) -> NDArray[np.int32]:
        """Return the control tokens among `tokens`, in order."""
        ids = np.frombuffer(tokens, dtype=np.int32)
        return ids[self._is_control.take(ids, mode="clip")]

    def thinking_default(self) -> str | None:
        """Return which prompt the template renders without `enable_thinking`: `on`, `off`, `other`.

        Return None if the switch changes nothing, or if the template fails on a simple question.
        """
        question: list[Message] = [{"role": "user", "content": "?"}]
        try:
            default = self.template.render(question, None, True)
            on = self.template.render(question, None, True, enable_thinking=True)
            off = self.template.render(question, None, True, enable_thinking=False)
        except DataError:  # the template fails on this question
            return None
        if on == off:
            return None
        return {on: "on", off: "off"}.get(default, "other")

    def hint(self, drop: Drop) -> str:
        """Return a remedy for samples that are dropped for the reason `drop`."""
        if drop == Drop.PROMPT_NOT_PREFIX:
            question: Message = {"role": "user", "content": "?"}
            may_refuse = self.settings.prompt_thinking == "on"
            prompt = self.template.render(
                [question], add_generation_prompt=True, enable_thinking=may_refuse
            )
            if opens_thinking(prompt) and may_refuse:
                return (
                    "with tokenize.prompt_thinking: on, the generation prompt of this template "
                    "opens a thinking block, and these turns do not think: set prompt_thinking to "
                    "off, which asks them with an empty block"
                )
            if opens_thinking(prompt):
                return (
                    "the model's generation prompt opens a thinking block, and these turns do not "
                    "think: give them reasoning_content, set tokenize.thinking to keep or mask, "
                    "or take a model that answers at once"
                )
        return _HINTS[drop]


def _begins_with_line_end(prompt: str, full: str) -> bool:
    """Return whether `full` continues a `prompt` that ends a line with white space."""
    is_prefix = full.startswith(prompt) and prompt.endswith("\n")
    return is_prefix and full[len(prompt) :][:1].isspace()


def _asked_to_think(spans: Sequence[_Span]) -> tuple[bool, ...]:
    return tuple(span.asked_to_think for span in spans if span.asked_to_think is not None)


def _pieces(
    tokens: NDArray[np.int32], supervised: NDArray[np.bool_], limit: int
) -> Iterator[Sample | Drop]:
    """Yield consecutive pieces of at most `limit` tokens."""
    for start in range(0, len(tokens), limit):
        piece = supervised[start : start + limit]
        piece[0] = False  # no token precedes it from which it could be predicted
        if piece.any():
            yield Sample(tokens[start : start + limit], piece, split=True)
        else:
            yield Drop.NOTHING_SUPERVISED


_HINTS = {
    Drop.PROMPT_NOT_PREFIX: "the chat template renders a turn otherwise than its generation prompt "
    "begins it, so the "
    "model would learn what it never has to write: look at the template of this model",
    Drop.NO_END_OF_TURN: "no control token follows the answer (the template writes none, or "
    "tokenizer.json does not "
    "call it special), so the model would not learn to stop: take a chat model's tokenizer files",
    Drop.NOTHING_SUPERVISED: "these turns or pieces hold nothing for the model to write: look for "
    "empty answers, or "
    "for texts whose last piece is a single token with tokenize.over_long: split",
    Drop.LAST_TURN_EXCLUDED: "tokenize.train_on is last_assistant, and the rows exclude the "
    "assistant's last turn from training (by its weight, or because it is in the prompt): "
    "include it, or set train_on to all_assistant",
    Drop.OVER_LONG: "raise tokenize.max_tokens, or set tokenize.over_long to truncate (a sample "
    "loses its end) or to "
    "split (of a conversation the turns that fit are kept, a text becomes pieces)",
    Drop.THINKING_NOT_SEPARABLE: "the template ends the thinking without </think>, or a token "
    "reaches from it into the "
    "answer, so one cannot be masked without the other: set tokenize.thinking to keep or strip",
    Drop.THINKING_NOT_RENDERED: "the chat template leaves out what these answers think, so it "
    "would not be learned: take a model whose template renders it, write it as "
    "<think>...</think> at the start of the answer if the template keeps that, or set "
    "tokenize.thinking to strip to train on the answers alone",
    Drop.CALLS_NOT_RENDERED: "the chat template leaves out calls of these conversations, or a part "
    "of their arguments, so the model would learn to stop instead of calling: take a model whose "
    "template renders calls, also beside text",
    Drop.TOOLS_NOT_RENDERED: "the chat template leaves out the tools of these rows, or a part of "
    "their schemas, so the "
    "model would learn to call what it was not told of: take a model whose template renders tools, "
    "or set columns: "
    "{tools: ignore} to train without them",
    Drop.MESSAGE_NOT_RENDERED: "the chat template leaves out the text of a message of these "
    "conversations, for its role or its place, so the model would learn answers without what was "
    "said: take a model whose template has it",
}


def _texts(value: Any) -> list[str]:
    """Return all texts in a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [*value, *chain.from_iterable(map(_texts, value.values()))]
    return list(chain.from_iterable(map(_texts, value))) if isinstance(value, list) else []
