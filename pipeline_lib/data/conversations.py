"""The content of a row: a Conversation or a Text, or a BadRow with a stable reason.

The checks hold for every format. Nothing is repaired: a row that does not fit is refused.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn

from pipeline_lib.config.schema import IGNORE

# Strict JSON parsing: no NaN, and no duplicate keys in an object.
# The json module keeps the last of duplicate keys, so a row would silently lose a value. One decoder serves the whole
# process, because json.loads with options builds a new one at every call.


def parse(text: str) -> Any:
    """Return the value of the JSON `text`. Raises ValueError with a one-line reason, also for deep nesting."""
    try:
        return _STRICT.decode(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{error.msg.removesuffix(' at')} at {place}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ValueError("a number of thousands of digits" if "digits" in reason else reason) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r:.60} stands twice in one object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)


# The content types, and their checks for every format: the order of roles, no empty turns, and text that UTF-8 and
# tokenizers can encode.

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
    """The text of a message that a row gives in `parts`, joined by line ends; a template may join them otherwise."""

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
MAX_DEPTH = 64  # nesting of tools and arguments; json.dumps, templates and the stack can all handle more


class Reason(StrEnum):
    """The reasons why a row cannot be used. The names are stable: ledgers and quarantine files contain them."""

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
    """The error for a row that cannot be used. It never leaves the data package: the row is quarantined."""

    reason: Reason
    detail: str  # for the person who mends the row

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class WrongFile(Exception):
    """The error for a row that shows that its whole file cannot be used as configured."""


@dataclass(frozen=True)
class Conversation:
    """Messages in the form that a chat template expects.

    Each has `role` (system, user, assistant or tool) and `content`; an assistant's may have `reasoning_content` and
    `tool_calls`, [{"type": "function", "function": {"name": str, "arguments": dict}}]. `tools` are JSON schemas.
    `supervised` holds the indexes of the assistant messages that may be trained on, ascending and never empty
    after `check`.
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
        role, text, reasoning = message["role"], message["content"], message.get("reasoning_content", "")
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
        raise BadRow(Reason.TOO_MANY_TURNS, f"{len(roles)} messages; at most {MAX_TURNS} are allowed")
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
            f"message {number + 1} is {roles[number]} {after}{_remedy(roles[number], before, number)}; the order has "
            f"to be {order}",
        )


def _may_follow(role: str, before: Message | None) -> bool:
    if role == "user":
        return before is None or before["role"] == "assistant"
    if role == "assistant":
        return before is not None and before["role"] in ("user", "tool")
    called = before is not None and (before["role"] == "tool" or bool(before.get("tool_calls")))
    return role == "tool" and called


def _remedy(role: str, before: Message | None, number: int) -> str:
    """Return what to do with a message of `role` after `before`, where it may not stand; "" if nothing is known."""
    if role == "system":
        return ": write it into the first system message, or into the message of the user"
    if role == "assistant" and before is None:
        return (
            ", and nothing asks for it: to keep it as context write `loss: false` into its turn, or write a message of "
            "the user before it"
        )
    if before is None:
        return ""
    if role == "tool" and before["role"] == "assistant":
        if CALL_IN_TEXT in before["content"]:
            said = f"but in its text ({CALL_IN_TEXT}): write the call as `tool_calls` of message {number}"
            return f", which called no tool {said}"
        return ", which called no tool"
    if role == before["role"]:
        return ": make them one message" + (", its text before its calls" if role == "assistant" else "")
    if role == "user" and before["role"] == "tool":
        return ": write the answer of the assistant between them"
    return ""


def _check_thinking(content: str, reasoning: str) -> None:
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
    """Raise BadRow unless `value` is JSON data with valid text, nested no deeper than MAX_DEPTH."""
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
    """Raise BadRow if `text` has a NUL character or a lone surrogate, which no tokenizer accepts."""
    if "\0" in text:
        raise BadRow(Reason.BAD_TEXT, "holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(Reason.BAD_TEXT, f"holds half of a surrogate pair at character {error.start}") from error


def type_name(value: Any) -> str:
    """Return JSON's name of the type of `value`; Python's name if JSON has no such type."""
    return _TYPE_NAMES.get(type(value), type(value).__name__)


# Access to the values of a row by our names of its keys; `columns` maps them to the file's names.
# Csv and parquet files may store lists and objects as JSON text, so a text is parsed where another type is expected.
# Messages use the file's names of keys.

Names = Mapping[str, str | None]
_NOTHING: tuple[Any, ...] = (None, "", [], {})


def names_of(columns: Mapping[str, str]) -> Names:
    """Return the file's name of each key where it differs from ours; None if the file's key is not read."""
    named = {ours: None if theirs == IGNORE else theirs for ours, theirs in columns.items()}
    return {**dict.fromkeys(columns.values()), **named}


@dataclass
class Fields:
    """The `values` of an object of a row; `names` maps our names of keys to the file's."""

    values: Mapping[str, Any]
    names: Names
    where: str = ""  # the path within the row: empty, or `messages[2].`
    turns: list[tuple[str, "Fields"]] = field(default_factory=list)  # returned by `objects`, with the name of the list
    parts: list["Fields"] = field(default_factory=list)  # objects of a turn: its calls, the parts of its content
    place: str = ""  # of a part within its turn: `tool_calls[].function`
    _read: set[str | None] = field(default_factory=set)

    def value(self, key: str) -> Any:
        """Return the value of our `key` and count it as read; None if it is missing or null."""
        self._read.add(self.names.get(key, key))
        return self.peek(key)

    def peek(self, key: str) -> Any:
        """Return the value of our `key` without counting it as read."""
        return self.values.get(self.names.get(key, key))  # type: ignore[arg-type]  # None is no key

    def among(self, keys: Set[str]) -> list[str]:
        """Return those of `keys` that occur in the object or in the names of `columns`, sorted."""
        if keys.isdisjoint(self.values) and keys.isdisjoint(self.names):
            return []
        return sorted(key for key in {*self.values, *self.names} if key in keys)

    def displaced(self, keys: Sequence[str]) -> list[str]:
        """Return those of our `keys` that the object has, but that `columns` reads from another key."""
        theirs = self.names.values()
        return [
            key
            for key in keys
            if key in self.values and self.names.get(key, key) not in (key, None) and key not in theirs
        ]

    def mark_read(self, keys: Collection[str]) -> None:
        """Count the file's `keys` as read."""
        self._read.update(keys)

    def add_part(self, values: Mapping[str, Any], where: str, place: str, read: Collection[str]) -> None:
        """Add a part of this turn, of whose keys `read` are read; `where` and `place` are its path."""
        part = Fields(values, self.names, f"{where}.", place=place)
        part.mark_read(read)
        self.parts.append(part)

    def unread(self) -> list[str]:
        """Return the file's names of the keys that have a value, were not read and are not ignored."""
        return [
            name
            for name, value in self.values.items()
            if name not in self._read and value not in _NOTHING and not self._is_ignored(name)
        ]

    def _is_ignored(self, name: str) -> bool:
        return name in self.names and self.names[name] is None and name not in self.names.values()

    def shown(self, key: str) -> str:
        """Return the path and the file's name of `key`, for messages."""
        return f"{self.where}{self.name_of(key)}"

    def name_of(self, key: str) -> str:
        """Return the file's name of `key`, for messages."""
        return self.names.get(key) or key

    def text(self, key: str) -> str:
        """Return the text under `key`; "" if it is missing or null. Raises BadRow for any other type."""
        value = self.value(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.unlike(key, "text", value)
        return value

    def items(self, key: str) -> list[Any]:
        """Return the list under `key`; empty if it is missing, null or blank text. Raises BadRow for any other type."""
        value = self.value(key)
        if value is None:
            return []
        value = parsed(value, self.shown(key))
        if not isinstance(value, list):
            raise self.unlike(key, "a list", value)
        return value

    def objects(self, key: str, kept: Collection[str] = ()) -> list["Fields"]:
        """Return the objects in the list under `key`. Raises BadRow if an item is not an object.

        They use the key names of this object, but do not ignore the keys in `kept` that this object ignores.
        """
        names = {ours: theirs for ours, theirs in self.names.items() if ours not in kept or not self._is_ignored(ours)}
        found = []
        for number, item in enumerate(self.items(key)):
            where = f"{self.shown(key)}[{number}]"
            found.append(Fields(as_object(item, where), names, f"{where}."))
        self.turns += [(self.shown(key), turn) for turn in found]
        return found

    def unlike(self, key: str, expected: str, value: Any) -> BadRow:
        """Return the error for a `value` of the wrong type."""
        return BadRow(Reason.BAD_VALUE, f"{self.shown(key)}: expected {expected}, found {type_name(value)}")


def is_turns(value: Any) -> bool:
    """Return whether `value` is a list of turns: objects with a role, or with ShareGPT's `from`."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value)


def as_object(value: Any, where: str) -> dict[str, Any]:
    """Return `value` as an object, parsed if it is JSON text. Raises BadRow if it is not an object."""
    value = parsed(value, where)
    if not isinstance(value, dict):
        raise BadRow(Reason.BAD_VALUE, f"{where}: expected an object, found {type_name(value)}")
    return value


def parsed(value: Any, where: str) -> Any:
    """Return `value`, parsed if it is text that begins like a list or an object; blank text is an empty list.

    Raises BadRow if such a text is not JSON.
    """
    if not isinstance(value, str):
        return value
    if not value.strip():
        return []
    if value.lstrip()[0] not in "[{":
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise BadRow(Reason.BAD_VALUE, f"{where}: text that is not JSON: {error}") from error


# Tools and tool calls, converted to the form in which an OpenAI-compatible server passes them to a chat template.
# Rows have arguments as an object or as JSON text, and calls and schemas with or without an enclosing
# {"type": "function", "function": ...}.

# Other names for the arguments of a call; `parameters` beside `arguments` are the schema of the function.
_CALL_KEYS = ("type", "id", "index")  # of a call, beside its function: they connect a call with its result
_OTHER_ARGUMENTS = ("parameters", "args", "kwargs", "params", "input")


# Other names for the schema of a tool's arguments: Anthropic's, MCP's, and others, without `_` and in lower case.
_OTHER_SCHEMAS = frozenset(
    {"inputschema", "argsschema", "parametersjsonschema", "schema", "arguments", "args", "params"}
)


def tools_of(row: Fields) -> list[dict[str, Any]] | None:
    """Return the JSON schemas of the tools of `row`; None if it has none. Raises BadRow."""
    tools = []
    for number, item in enumerate(row.items("tools")):
        where = f"{row.shown('tools')}[{number}]"
        tool = as_object(item, where)
        if "function" in tool:
            _check_type(tool, where)
            where = f"{where}.function"
            function = as_object(tool["function"], where)
        else:
            function, tool = tool, {}
            if function.get("type") == "function":  # OpenAI's Responses API has it beside the name
                function = {key: value for key, value in function.items() if key != "type"}
        _name_of(function, where)
        tools.append({**tool, "type": "function", "function": _with_parsed_schema(function, where)})
    return tools or None


def _with_parsed_schema(function: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `function` with `parameters` as an object, as clients send it. Raises BadRow if they are anything else."""
    parameters = function.get("parameters")
    if parameters is None:
        for key, value in function.items():
            if key.replace("_", "").lower() in _OTHER_SCHEMAS and isinstance(value, (dict, str)):
                raise BadRow(Reason.BAD_VALUE, f"{where}.{key}: not read; write the schema as `parameters`")
        return function
    where = f"{where}.parameters"
    parameters = as_object(parameters, where)
    if isinstance(parameters.get("properties"), str):
        parameters = {**parameters, "properties": as_object(parameters["properties"], f"{where}.properties")}
    return {**function, "parameters": parameters}


def conversation_tools(row: Fields) -> list[dict[str, Any]] | None:
    """Return the tools of a row or of its first turn. Raises BadRow if both have tools and they differ."""
    tools = tools_of(row)
    for _, turn in row.turns[:1]:
        of_turn = tools_of(turn)
        if tools and of_turn and of_turn != tools:
            raise BadRow(Reason.BAD_VALUE, f"{turn.shown('tools')}: differ from the `tools` of the row; remove one")
        tools = tools or of_turn
    return tools


def calls_of(turn: Fields) -> list[dict[str, Any]]:
    """Return the calls under `tool_calls` of a turn, in order; empty if there are none. Raises BadRow."""
    where, place = turn.shown("tool_calls"), turn.name_of("tool_calls")
    return [
        _call(turn, item, f"{where}[{number}]", f"{place}[]") for number, item in enumerate(turn.items("tool_calls"))
    ]


def calls_in(turn: Fields, key: str) -> list[dict[str, Any]]:
    """Return the calls of a `function_call` turn: one {"name", "arguments"} or a list of them. Raises BadRow."""
    value, where, place = turn.value(key), turn.shown(key), turn.name_of(key)
    if isinstance(value, str) and value.lstrip().startswith(OPENS_THINKING):
        remedy = f"write it as reasoning_content of the turn, and the calls alone as {where}"
        raise BadRow(Reason.BAD_VALUE, f"{where}: holds thinking ({OPENS_THINKING}) beside its calls: {remedy}")
    value = parsed(value, where)
    if not isinstance(value, list):
        return [_call(turn, value, where, place)]
    if not value:
        raise BadRow(Reason.EMPTY, f"{where}: calls no tool")
    return [_call(turn, item, f"{where}[{number}]", f"{place}[]") for number, item in enumerate(value)]


def _call(turn: Fields, item: Any, where: str, place: str) -> dict[str, Any]:
    call = as_object(item, where)
    if "function" in call:
        _check_type(call, where)
        outer, call = call, as_object(call["function"], f"{where}.function")
        _refuse_misplaced(call, outer, ("arguments", *_OTHER_ARGUMENTS), where)
        turn.add_part(outer, where, place, ("function", *_CALL_KEYS))
        turn.add_part(call, f"{where}.function", f"{place}.function", ("name", "arguments"))
    else:
        turn.add_part(call, where, place, ("name", "arguments", *_CALL_KEYS))
    _refuse_misplaced(call, call, _OTHER_ARGUMENTS, where)
    name = _name_of(call, where)
    # A call without arguments has null, an empty text, or no key.
    arguments = as_object(call.get("arguments") or {}, f"{where}.arguments")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _refuse_misplaced(call: Mapping[str, Any], holder: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    """Raise BadRow if `call` has no arguments but `holder` has a value under one of the `keys`."""
    found = None if call.get("arguments") else next((key for key in keys if holder.get(key)), None)
    if found is not None:
        raise BadRow(Reason.BAD_VALUE, f"{where}.{found}: not read; write it as `arguments` beside the function's name")


def _check_type(holder: dict[str, Any], where: str) -> None:
    if holder.get("type", "function") != "function":
        raise BadRow(Reason.BAD_VALUE, f"{where}.type: {holder['type']!r:.40}; only functions are supported")


def _name_of(function: dict[str, Any], where: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        found = "an empty text" if isinstance(name, str) else type_name(name)
        raise BadRow(Reason.BAD_VALUE, f"{where}: expected the name of a function, found {found}")
    return name
