"""The parts of a conversation and whether each changes what a chat template renders.

A template may leave out calls, tools, roles or texts in silence, and then the model would learn
something else than the row says. What it renders depends on the shape of a conversation more than
on its words, so a conversation of each shape is rendered once with a mark in the place of each
text, and the marks are looked for.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pipeline_lib.core.errors import DataError
from pipeline_lib.data.conversations import Message
from pipeline_lib.data.thinking import without_thinking

Tools = Sequence[Mapping[str, Any]] | None
Render = Callable[[Sequence[Message], Tools], str]


class TemplatePart(StrEnum):
    """The kinds of parts that a template may leave out."""

    MESSAGE = "message"
    CALLS = "calls"
    TOOLS = "tools"


# keys of a schema whose values decide how a template writes it
_KEPT = frozenset({"type", "required"})
_NAMED = frozenset({"properties"})  # keys of a schema below which names are the author's own


@dataclass
class Marker:
    """Replaces each text by its own mark, and remembers which part of the conversation has it."""

    part: TemplatePart = TemplatePart.MESSAGE
    marks: dict[str, TemplatePart] = field(default_factory=dict)

    def text(self) -> str:
        """Return a new mark."""
        mark = f"mark{len(self.marks)}end"
        self.marks[mark] = self.part
        return mark

    def values(self, value: Any) -> Any:
        """Return `value` with marks for all texts and numbers at any depth, and authors' keys."""
        if isinstance(value, dict):
            return {self.text(): self.values(item) for item in value.values()}
        if isinstance(value, list):
            return [self.values(item) for item in value]
        if value is None or isinstance(value, bool):
            return value
        return self.text()

    def schema(self, value: Any) -> Any:
        """Return a tool with a mark for each text at any depth; keys stay: templates read them."""
        if isinstance(value, dict):
            return {key: item if key in _KEPT else self.schema(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.schema(item) for item in value]
        return self.text() if isinstance(value, str) else value

    def message(self, message: Message) -> Message:
        """Return `message` without thinking, with marks in its text and calls."""
        bare = without_thinking(message)
        self.part = TemplatePart.MESSAGE
        content = self.text() if bare["content"].strip() else ""
        marked = {"role": bare["role"], "content": content}
        if calls := bare.get("tool_calls"):
            self.part = TemplatePart.CALLS
            marked["tool_calls"] = [self._call(call) for call in calls]
        return marked

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        made = {"name": self.text(), "arguments": self.values(function["arguments"])}
        return {"type": "function", "function": made}


def shape_of(value: Any) -> Any:
    """Return the shape of a tool or of arguments: equal shapes render alike, whatever the words."""
    if isinstance(value, dict):
        return frozenset((key, _shape_below(key, item)) for key, item in value.items())
    if isinstance(value, list):
        return frozenset(map(shape_of, value))
    return type(value)


def _shape_below(key: str, value: Any) -> Any:
    if key in _NAMED:
        return _shapes(value)
    return shape_of(value)


def _shapes(value: Any) -> frozenset[Any]:
    """Return the shapes of the values in `value`, or of `value` itself if it is no mapping."""
    values = value.values() if isinstance(value, dict) else [value]
    return frozenset(map(shape_of, values))


def kind_of(message: Message) -> tuple[Any, ...]:
    """Return what a template may distinguish in `message` beside its words."""
    calls = message.get("tool_calls") or ()
    arguments = frozenset(_shapes(call["function"]["arguments"]) for call in calls)
    return message["role"], bool(message["content"].strip()), min(2, len(calls)), arguments


class RenderedParts:
    """What one chat template leaves out of conversations, by their shape."""

    def __init__(self, render: Render) -> None:
        """Keep `render`, which returns the text of messages and tools."""
        self._render = render
        self._left_out: dict[Any, TemplatePart | None] = {}

    def left_out(
        self, messages: Sequence[Message], tools: Tools, tools_shape: Any, full: str, begin: int
    ) -> TemplatePart | None:
        """Return the first part of `messages` and `tools` whose text is not in `full`, or None.

        `tools_shape` is the shape of `tools`. The texts of messages before number `begin` are known
        to be rendered.
        """
        kinds = [kind_of(message) for message in messages]
        before = [None, *kinds[:-1]]
        shape = frozenset(zip(before, kinds, strict=True)), kinds[-1], tools_shape
        if shape not in self._left_out:
            self._left_out[shape] = self._of_shape(messages, tools)
        if part := self._left_out[shape]:
            return part
        for message in messages[begin:]:
            if not _is_in(without_thinking(message)["content"].strip(), full):
                return TemplatePart.MESSAGE
        return None

    def _of_shape(self, messages: Sequence[Message], tools: Tools) -> TemplatePart | None:
        marker = Marker()
        marked = [marker.message(message) for message in messages]
        marker.part = TemplatePart.TOOLS
        marked_tools = None if tools is None else [marker.schema(tool) for tool in tools]
        try:
            text = self._render(marked, marked_tools)
        except DataError:  # the template looks into the texts, which are judged one by one
            return None
        for mark, part in marker.marks.items():
            if mark not in text:
                return part
        return None


def _is_in(text: str, full: str) -> bool:
    """Return whether `full` has all of `text`, also as JSON or with other white space."""
    if text in full or json.dumps(text, ensure_ascii=False)[1:-1] in full:
        return True
    return all(word in full for word in text.split())


def unrendered_default(
    render: Callable[..., str], system: Sequence[Message], tools: Tools
) -> str | None:
    """Return which config key the template of `render` leaves out: `tools`, `system`, or None."""
    question: list[Message] = [*system, {"role": "user", "content": "A question."}]
    try:
        full = render(question, tools)
    except DataError:  # the template fails on this question
        return None
    left_out = RenderedParts(render).left_out(question, tools, shape_of(tools), full, 0)
    if left_out == TemplatePart.TOOLS:
        return "tools"
    if left_out == TemplatePart.MESSAGE and system:
        return "system"
    return None


_BARRED = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)  # how control tokens are written


def control_tokens_of(render: Callable[..., str], added: Collection[str]) -> set[str]:
    """Return those of the `added` tokens that the template of `render` writes for turns.

    R1's tokenizer does not call <｜User｜> special. Tags such as <think> are not among them: rows may
    hold them.
    """
    call = {"type": "function", "function": {"name": "a_name", "arguments": {}}}
    messages: list[Message] = [
        {"role": "system", "content": "A system message."},
        {"role": "user", "content": "A question."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "A result."},
        {"role": "assistant", "content": "An answer."},
    ]
    written = ""
    for end in range(2, len(messages) + 1):
        with suppress(DataError):  # the template has no calls, or no results
            written += render(messages[:end], None, messages[end - 1]["role"] != "assistant")
    with suppress(DataError):
        written += render([messages[1], messages[-1]])
    return {text for text in added if _BARRED.fullmatch(text) and text in written}
