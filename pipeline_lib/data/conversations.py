"""The content types, and their checks for every format.

They check the order of roles, that no turn is empty, and that UTF-8 and tokenizers can encode the
text.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Message = dict[str, Any]

_TYPE_NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}


class TextParts(str):
    """The text of a message in `parts`, joined by line ends; a template may join otherwise."""

    parts: tuple[str, ...]

    @classmethod
    def of(cls, parts: Sequence[str]) -> "TextParts":
        """Return the joined text, which keeps its `parts`."""
        text = cls("\n".join(parts))
        text.parts = tuple(parts)
        return text


MAX_TURNS = 1000
CALL_IN_TEXT = "<tool_call>"  # the tag with which templates write a call
OPENS_THINKING, ENDS_THINKING = "<think>", "</think>"
# nesting of tools and arguments; json.dumps, templates and the stack can all handle more
MAX_DEPTH = 64


class Reason(StrEnum):
    """The reasons why a row cannot be used.

    The names are stable: ledgers and quarantine files contain them.
    """

    BAD_CSV = "bad_csv"
    BAD_JSON = "bad_json"
    BAD_UTF8 = "bad_utf8"
    BAD_TEXT = "bad_text"
    BAD_VALUE = "bad_value"
    BAD_ROLE_ORDER = "bad_role_order"
    CONTROL_TOKEN = "control_token"  # noqa: S105 - a reason, not a password
    EMPTY = "empty"
    LINE_TOO_LONG = "line_too_long"
    NO_ASSISTANT_TURN = "no_assistant_turn"
    NOT_AN_OBJECT = "not_an_object"
    OVER_LIMITS = "over_limits"
    TOO_MANY_TURNS = "too_many_turns"
    WRONG_FORMAT = "wrong_format"


@dataclass(eq=False)
class BadRow(Exception):
    """The error for a row that cannot be used.

    It never leaves the data package: the row is quarantined.
    """

    reason: Reason
    detail: str  # for the person who mends the row

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class WrongFile(Exception):
    """The error for a row that shows that its whole file cannot be used as configured."""


@dataclass(frozen=True)
class Conversation:
    """Messages in the form that a chat template expects.

    Each has `role` (system, user, assistant or tool) and `content`; an assistant's may have
    `reasoning_content` and `tool_calls`, [{"type": "function", "function": {"name": str,
    "arguments": dict}}]. `tools` are JSON schemas. `supervised` holds the indexes of the assistant
    messages that may be trained on, ascending and never empty after `check`.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    supervised: tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """Raw text, for continued pre-training."""

    text: str


Content = Conversation | Text


def check(content: Content) -> None:
    """Raise BadRow unless `content` can be trained on."""
    if isinstance(content, Text):
        if not content.text.strip():
            raise BadRow(Reason.EMPTY, "the text is empty")
        check_text(content.text)
        return
    _check_roles(content.messages, content.supervised)
    for message in content.messages:
        role = message["role"]
        text = message["content"]
        reasoning = message.get("reasoning_content", "")
        if not text.strip() and role != "tool" and "tool_calls" not in message:
            raise BadRow(Reason.EMPTY, f"the {role}'s message has no text")
        check_text(text)
        check_text(reasoning)
        check_json(message.get("tool_calls"))
        if role == "assistant":
            _check_thinking(text, reasoning)
            if not text.rpartition(ENDS_THINKING)[2].strip() and "tool_calls" not in message:
                raise BadRow(Reason.EMPTY, "the assistant's message has thinking and no answer")
    check_json(content.tools)
    if not content.supervised:
        raise BadRow(Reason.NO_ASSISTANT_TURN, "none of the assistant's turns may be trained on")


def _check_roles(messages: Sequence[Message], supervised: Collection[int]) -> None:
    roles = [message["role"] for message in messages]
    if not roles:
        raise BadRow(Reason.EMPTY, "no messages")
    if len(roles) > MAX_TURNS:
        raise BadRow(
            Reason.TOO_MANY_TURNS, f"{len(roles)} messages; at most {MAX_TURNS} are allowed"
        )
    if "assistant" not in roles:
        raise BadRow(Reason.NO_ASSISTANT_TURN, f"only {', '.join(dict.fromkeys(roles))}")
    first = 1 if roles[0] == "system" else 0
    for number in range(first, len(roles)):
        before = None if number == first else messages[number - 1]
        is_greeting = roles[number] == "assistant" and before is None and number not in supervised
        if is_greeting or _may_follow(roles[number], before):
            continue
        after = "after system" if first else "at the start"
        if before is not None:
            after = f"after {before['role']}"
        order = "a system message, then user and assistant in turns, tool answers behind the calls"
        raise BadRow(
            Reason.BAD_ROLE_ORDER,
            f"message {number + 1} is {roles[number]} "
            f"{after}{_remedy(roles[number], before, number)}; the order has to be {order}",
        )


def _may_follow(role: str, before: Message | None) -> bool:
    if role == "user":
        return before is None or before["role"] == "assistant"
    if role == "assistant":
        return before is not None and before["role"] in ("user", "tool")
    called = before is not None and (before["role"] == "tool" or bool(before.get("tool_calls")))
    return role == "tool" and called


def _remedy(role: str, before: Message | None, number: int) -> str:
    """Return what to do with a `role` message misplaced after `before`; "" if nothing is known."""
    if role == "system":
        return ": write it into the first system message, or into the message of the user"
    if role == "assistant" and before is None:
        return (
            ", and nothing asks for it: to keep it as context write `loss: false` into its turn, "
            "or write a message of the user before it"
        )
    if before is None:
        return ""
    if role == "tool" and before["role"] == "assistant":
        if CALL_IN_TEXT in before["content"]:
            said = (
                f"but in its text ({CALL_IN_TEXT}): write the call as `tool_calls` of message "
                f"{number}"
            )
            return f", which called no tool {said}"
        return ", which called no tool"
    if role == before["role"]:
        return ": make them one message" + (
            ", its text before its calls" if role == "assistant" else ""
        )
    if role == "user" and before["role"] == "tool":
        return ": write the answer of the assistant between them"
    return ""


def _check_thinking(content: str, reasoning: str) -> None:
    opens = content.count(OPENS_THINKING)
    ends = content.count(ENDS_THINKING)
    if opens or ends:
        is_one_block = (
            opens == ends == 1 and content.lstrip().startswith(OPENS_THINKING) and not reasoning
        )
    else:
        is_one_block = OPENS_THINKING not in reasoning and ENDS_THINKING not in reasoning
    if not is_one_block:
        raise BadRow(
            Reason.BAD_VALUE,
            "the assistant's text has <think> tags that are not one block at its start: expected "
            "<think>...</think> and then the answer, or the thinking in reasoning_content and no "
            "tags",
        )


def check_json(value: Any, depth: int = 0) -> None:
    """Raise BadRow unless `value` is JSON data with valid text, nested no deeper than MAX_DEPTH."""
    if depth > MAX_DEPTH:
        raise BadRow(
            Reason.BAD_VALUE, f"tools or arguments are nested deeper than {MAX_DEPTH} levels"
        )
    if isinstance(value, str):
        check_text(value)
    elif isinstance(value, list):
        for item in value:
            check_json(item, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_json(key, depth + 1)
            check_json(item, depth + 1)
    elif not (
        value is None
        or isinstance(value, int)
        or (isinstance(value, float) and math.isfinite(value))
    ):
        raise BadRow(Reason.BAD_VALUE, f"tools or arguments hold {value!r:.40}, which is not JSON")


def check_text(text: str) -> None:
    """Raise BadRow if `text` has a NUL or a lone surrogate, which no tokenizer accepts."""
    if "\0" in text:
        raise BadRow(Reason.BAD_TEXT, "holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            Reason.BAD_TEXT, f"holds half of a surrogate pair at character {error.start}"
        ) from error


def type_name(value: Any) -> str:
    """Return JSON's name of the type of `value`; Python's name if JSON has no such type."""
    return _TYPE_NAMES.get(type(value), type(value).__name__)
