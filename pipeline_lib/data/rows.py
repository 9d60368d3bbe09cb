"""Recognises the three common layouts of a conversation row and turns a row into messages.

alpaca: instruction, input, output, and where present history ([[question, answer], ...]) and system.
sharegpt: conversations, a list of from and value (human, user, gpt, assistant, system), and where present system.
messages: messages, a list of role and content as OpenAI has them (reasoning_content of an assistant is kept).
Other keys of a row are ignored. Nothing is repaired: a row that does not fit is refused with a reason.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Literal

Message = dict[str, str]
Format = Literal["alpaca", "sharegpt", "messages"]

SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
OPENAI_ROLES = {"user": "user", "assistant": "assistant", "system": "system"}


class Reason(StrEnum):
    """Why a row cannot be used. The names are stable: ledgers and quarantine files hold them."""

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
    WRONG_FORMAT = "wrong_format"


class BadRow(Exception):
    """A row that cannot be used. Never leaves the data package: it becomes a quarantined row."""

    def __init__(self, reason: Reason, detail: str) -> None:
        """Keep the stable `reason` and the `detail` for the person who mends the row."""
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def detect(row: Any) -> Format:
    """The format whose keys `row` has. Raises BadRow if it has those of none."""
    if not isinstance(row, dict):
        raise BadRow(Reason.NOT_AN_OBJECT, f"expected an object, found {type_name(row)}")
    if "messages" in row:
        return "messages"
    if "conversations" in row:
        return "sharegpt"
    if "output" in row and ("instruction" in row or "input" in row):
        return "alpaca"
    keys = ", ".join(sorted(map(repr, row))[:8]) or "no keys"
    raise BadRow(Reason.WRONG_FORMAT, f"neither alpaca, sharegpt nor messages; it has {keys}")


def to_messages(row: Any, row_format: Format) -> list[Message]:
    """The conversation in `row`, which has to be in `row_format`. Raises BadRow."""
    found = detect(row)
    if found != row_format:
        raise BadRow(Reason.WRONG_FORMAT, f"expected {row_format}, found {found}")
    messages = CONVERTERS[row_format](row)
    if messages and messages[0]["role"] == "system" and not messages[0]["content"].strip():
        messages = messages[1:]  # an empty system message says nothing
    _check(messages)
    return messages


def _from_alpaca(row: Mapping[str, Any]) -> list[Message]:
    messages = [_message("system", _text(row, "system"))]
    history = row.get("history") or []
    if not isinstance(history, list):
        raise BadRow(Reason.BAD_VALUE, f"history: expected a list, found {type_name(history)}")
    for number, turn in enumerate(history):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise BadRow(Reason.BAD_VALUE, f"history[{number}]: expected [question, answer]")
        messages += [_message("user", turn[0]), _message("assistant", turn[1])]
    asked = [text for key in ("instruction", "input") if (text := _text(row, key)).strip()]
    return [*messages, _message("user", "\n".join(asked)), _message("assistant", _text(row, "output"))]


def _from_sharegpt(row: Mapping[str, Any]) -> list[Message]:
    messages = _turns(row, "conversations", "from", "value", SHAREGPT_ROLES)
    system = _text(row, "system")
    return [_message("system", system), *messages] if system.strip() else messages


def _from_openai(row: Mapping[str, Any]) -> list[Message]:
    return _turns(row, "messages", "role", "content", OPENAI_ROLES)


CONVERTERS: Mapping[Format, Callable[[Mapping[str, Any]], list[Message]]] = {
    "alpaca": _from_alpaca,
    "sharegpt": _from_sharegpt,
    "messages": _from_openai,
}


def _turns(row: Mapping[str, Any], key: str, role_key: str, text_key: str, roles: Mapping[str, str]) -> list[Message]:
    turns = row[key]
    if not isinstance(turns, list):
        raise BadRow(Reason.BAD_VALUE, f"{key}: expected a list, found {type_name(turns)}")
    messages = []
    for number, turn in enumerate(turns):
        where = f"{key}[{number}]"
        if not isinstance(turn, dict):
            raise BadRow(Reason.BAD_VALUE, f"{where}: expected an object, found {type_name(turn)}")
        role = turn.get(role_key)
        if not isinstance(role, str) or role not in roles:
            raise BadRow(Reason.BAD_VALUE, f"{where}.{role_key}: {role!r:.40} is not one of {', '.join(roles)}")
        if turn.get("tool_calls"):
            raise BadRow(Reason.BAD_VALUE, f"{where}: tool calls are not supported")
        message = _message(roles[role], _text(turn, text_key, where, required=True))
        if roles[role] == "assistant" and (reasoning := _text(turn, "reasoning_content", where)):
            message["reasoning_content"] = reasoning
        messages.append(message)
    return messages


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _text(holder: Mapping[str, Any], key: str, where: str = "", *, required: bool = False) -> str:
    """The text under `key`; "" if it is missing or null, unless it is required."""
    value = holder.get(key)
    if value is None and not required:
        return ""
    if not isinstance(value, str):
        raise BadRow(Reason.BAD_VALUE, f"{f'{where}.{key}'.lstrip('.')}: expected text, found {type_name(value)}")
    return value


def _check(messages: list[Message]) -> None:
    """Users and assistants take turns after at most one system message, each says something, in text that encodes."""
    roles = [message["role"] for message in messages]
    if not roles:
        raise BadRow(Reason.EMPTY, "no messages")
    if "assistant" not in roles:
        raise BadRow(Reason.NO_ASSISTANT_TURN, f"only {', '.join(dict.fromkeys(roles))}")
    turns = roles[1:] if roles[0] == "system" else roles
    for number, role in enumerate(turns):
        if role != ("user", "assistant")[number % 2]:
            raise BadRow(Reason.BAD_ROLE_ORDER, f"turn {number + 1} is {role}; user and assistant take turns")
    for message in messages:
        if not message["content"].strip():
            raise BadRow(Reason.EMPTY, f"the {message['role']} says nothing")
        for text in (message["content"], message.get("reasoning_content", "")):
            _check_text(text)


def _check_text(text: str) -> None:
    if "\0" in text:
        raise BadRow(Reason.BAD_TEXT, "holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(Reason.BAD_TEXT, f"holds half of a surrogate pair at character {error.start}") from error


def type_name(value: Any) -> str:
    """What JSON calls the type of `value`."""
    names: dict[type, str] = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
