"""What a row becomes: a Conversation or a Text, or a BadRow with a stable reason.

The checks hold for every format: who may speak after whom, that everybody says something, and that all text can be
encoded. Nothing is repaired: what does not fit is refused.
"""

import math
from collections.abc import Sequence
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

MAX_TURNS = 1000
CALL_IN_TEXT = "<tool_call>"  # how a template writes a call
OPENS_THINKING, ENDS_THINKING = "<think>", "</think>"
MAX_DEPTH = 64  # of tools and arguments; json.dumps, templates and the stack all have room for more


class Reason(StrEnum):
    """Why a row cannot be used. The names are stable: ledgers and quarantine files hold them."""

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
    TOO_MANY_TURNS = "too_many_turns"
    WRONG_FORMAT = "wrong_format"


class BadRow(Exception):
    """A row that cannot be used. Never leaves the data package: it becomes a quarantined row."""

    def __init__(self, reason: Reason, detail: str) -> None:
        """Keep the stable `reason` and the `detail` for the person who mends the row."""
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class WrongFile(Exception):
    """A row that shows that its file cannot be used as the config says, whatever its other rows are."""


@dataclass(frozen=True)
class Conversation:
    """Messages as a chat template takes them.

    Each has `role` (system, user, assistant or tool) and `content`; an assistant's may have `reasoning_content` and
    `tool_calls`, [{"type": "function", "function": {"name": str, "arguments": dict}}]. `tools` are JSON schemas.
    `supervised` holds the indexes of the assistant messages that may be trained on: ascending, never empty.
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
    _check_roles([message["role"] for message in content.messages], content.messages)
    for message in content.messages:
        _check_message(message)
    check_json(content.tools)
    if not content.supervised:
        raise BadRow(Reason.NO_ASSISTANT_TURN, "none of the assistant's turns may be trained on")


def _check_roles(roles: Sequence[str], messages: Sequence[Message]) -> None:
    if not roles:
        raise BadRow(Reason.EMPTY, "no messages")
    if len(roles) > MAX_TURNS:
        raise BadRow(Reason.TOO_MANY_TURNS, f"{len(roles)} messages; more than {MAX_TURNS} are not taken")
    if "assistant" not in roles:
        raise BadRow(Reason.NO_ASSISTANT_TURN, f"only {', '.join(dict.fromkeys(roles))}")
    first = 1 if roles[0] == "system" else 0
    for number in range(first, len(roles)):
        before = None if number == first else messages[number - 1]
        if not _may_follow(roles[number], before):
            after = "after system" if before is None and first else "at the start"
            if before is not None:
                after = f"after {before['role']}"
            if roles[number] == "tool" and before is not None and before["role"] == "assistant":
                after += ", which called no tool"
                if CALL_IN_TEXT in before["content"]:
                    after += f" but in its text ({CALL_IN_TEXT}): write the call as `tool_calls` of message {number}"
            order = "a system message, then user and assistant in turns, tool answers behind the calls"
            raise BadRow(
                Reason.BAD_ROLE_ORDER, f"message {number + 1} is {roles[number]} {after}; the order has to be {order}"
            )


def _may_follow(role: str, before: Message | None) -> bool:
    """Whether `role` may speak after `before`, the message before it other than a system message at the start."""
    if role == "user":
        return before is None or before["role"] == "assistant"
    if role == "assistant":
        return before is not None and before["role"] in ("user", "tool")
    called = before is not None and (before["role"] == "tool" or bool(before.get("tool_calls")))
    return role == "tool" and called


def _check_message(message: Message) -> None:
    role, content = message["role"], message["content"]
    if not content.strip() and role != "tool" and "tool_calls" not in message:
        raise BadRow(Reason.EMPTY, f"the {role} says nothing")
    check_text(content)
    check_text(message.get("reasoning_content", ""))
    check_json(message.get("tool_calls"))
    if role == "assistant":
        _check_thinking(content, message.get("reasoning_content", ""))
        if not content.rpartition(ENDS_THINKING)[2].strip() and "tool_calls" not in message:
            raise BadRow(Reason.EMPTY, "the assistant thinks and then says nothing")


def _check_thinking(content: str, reasoning: str) -> None:
    """Raise BadRow unless it is certain where the thinking ends and the answer begins."""
    opens, ends = content.count(OPENS_THINKING), content.count(ENDS_THINKING)
    if opens or ends:
        is_one_block = opens == ends == 1 and content.lstrip().startswith(OPENS_THINKING) and not reasoning
    else:
        is_one_block = OPENS_THINKING not in reasoning and ENDS_THINKING not in reasoning
    if not is_one_block:
        raise BadRow(
            Reason.BAD_VALUE,
            "the assistant's text has <think> tags that are not one block at its start: expected "
            "<think>...</think> and then the answer, or the thinking in reasoning_content and no tags",
        )


def check_json(value: Any, depth: int = 0) -> None:
    """Raise BadRow unless `value` is JSON through and through, not nested too deeply, and its text can be encoded."""
    if depth > MAX_DEPTH:
        raise BadRow(Reason.BAD_VALUE, f"tools or arguments are nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        check_text(value)
    elif isinstance(value, list):
        for item in value:
            check_json(item, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_json(key, depth + 1)
            check_json(item, depth + 1)
    elif not (value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
        raise BadRow(Reason.BAD_VALUE, f"tools or arguments hold {value!r:.40}, which is not JSON")


def check_text(text: str) -> None:
    """Raise BadRow if `text` holds what no tokenizer can take."""
    if "\0" in text:
        raise BadRow(Reason.BAD_TEXT, "holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(Reason.BAD_TEXT, f"holds half of a surrogate pair at character {error.start}") from error


def type_name(value: Any) -> str:
    """What JSON calls the type of `value`; of what JSON does not have, Python's name."""
    return _TYPE_NAMES.get(type(value), type(value).__name__)
