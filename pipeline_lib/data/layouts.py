"""The known row layouts: detect a row's layout, and convert the row to turns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline_lib.config.schema import IGNORE, Rows
from pipeline_lib.data.conversations import (
    BadRow,
    Content,
    Conversation,
    Message,
    Reason,
    Text,
    TextParts,
    WrongFile,
    check,
    type_name,
)
from pipeline_lib.data.keys import (
    KeyCounts,
    check_examples,
    refuse,
    refuse_in_parts,
)
from pipeline_lib.data.refusals import IN_ROWS, IN_TURNS, KEPT_IN_TURNS, TRAINED_KEYS
from pipeline_lib.data.row_fields import Fields, is_turns, names_of
from pipeline_lib.data.tools import calls_in, calls_of, conversation_tools

# Conversion of a conversation row to turns, for each layout.
#
# alpaca: instruction, input, output, and optionally history ([[question, answer], ...]). sharegpt:
# conversations, a list of objects with from and value. messages: messages, a list of objects with
# role and content, in OpenAI's format. prompt_completion: prompt and completion, each a text or a
# list as in messages; only the completion is trained on. All layouts may have system and tools, and
# turns may be excluded from training; an answer that is a single text may have reasoning_content.

Format = Literal["alpaca", "sharegpt", "messages", "prompt_completion", "text"]
Turn = tuple[Message, bool]  # a message, and whether it may be trained on if it is the assistant's
Roles = Mapping[str, str]

# Alternatives: a row has a format if it has all keys of one of them.
KEYS: Mapping[Format, tuple[tuple[str, ...], ...]] = {
    "alpaca": (("instruction", "output"), ("input", "output")),
    "sharegpt": (("conversations",),),
    "messages": (("messages",),),
    "prompt_completion": (("prompt", "completion"),),
    "text": (("text",),),
}
OPENAI_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "function_call",
    "observation": "tool",
    "tool": "tool",
}
# known in turns of every role, so they never count as unread
_KNOWN_IN_TURNS = (*TRAINED_KEYS, "tool_call_id")


def _turns_of(row: Fields, row_format: Format, roles: Roles) -> list[Turn]:
    check_examples(row)
    refuse(row, IN_ROWS[row_format])
    turns: list[Turn] = []
    if row_format == "alpaca":
        for number, pair in enumerate(row.items("history")):
            if (
                not isinstance(pair, list)
                or len(pair) != 2
                or not all(isinstance(text, str) for text in pair)
            ):
                raise BadRow(
                    Reason.BAD_VALUE,
                    f"{row.shown('history')}[{number}]: expected [question, answer]",
                )
            turns += [(_message("user", pair[0]), True), (_message("assistant", pair[1]), True)]
        question = [text for key in ("instruction", "input") if (text := row.text(key)).strip()]
        turns += [
            (_message("user", "\n".join(question)), True),
            (_message("assistant", row.text("output"), row), True),
        ]
    elif row_format == "sharegpt":
        turns = _turns(row, "conversations", "from", "value", {**SHAREGPT_ROLES, **roles})
    elif row_format == "messages":
        turns = _turns(row, "messages", "role", "content", {**OPENAI_ROLES, **roles})
    else:
        prompt = _part(row, "prompt", "user", roles)
        turns = [(message, False) for message, _ in prompt] + _part(
            row, "completion", "assistant", roles
        )
    turns = _with_joined_calls(turns)
    # The row's own system message replaces a first system turn that is blank or equal to it.
    system = row.text("system")
    if (
        turns
        and turns[0][0]["role"] == "system"
        and turns[0][0]["content"].strip() in ("", system.strip())
    ):
        turns = turns[1:]
    return [(_message("system", system), True), *turns] if system.strip() else turns


def _with_joined_calls(turns: list[Turn]) -> list[Turn]:
    """Return the turns with consecutive turns of calls, and those behind a text, joined into one.

    Templates write a text and all its calls into one turn, as a model answers and a server returns
    them.
    """
    joined: list[Turn] = []
    for message, is_trained_on in turns:
        if joined and _belongs_to(message, joined[-1][0]) and is_trained_on == joined[-1][1]:
            before, _ = joined.pop()
            calls = [*before.get("tool_calls", ()), *message["tool_calls"]]
            message = {**before, "tool_calls": calls}
        joined.append((message, is_trained_on))
    return joined


def _belongs_to(message: Message, before: Message) -> bool:
    """Return whether `message` is only calls, and `before` the assistant's text or calls."""
    has_only_calls = (
        "tool_calls" in message and not message["content"] and "reasoning_content" not in message
    )
    return (
        has_only_calls
        and before["role"] == "assistant"
        and bool(before["content"] or before.get("tool_calls"))
    )


def _message(role: str, content: str, answer: Fields | None = None) -> Message:
    """Return a message with `answer`'s reasoning_content, from an assistant's row or turn."""
    message = {"role": role, "content": content}
    if answer is not None and (reasoning := answer.text("reasoning_content")):
        message["reasoning_content"] = reasoning
    return message


def _part(row: Fields, key: str, role: str, roles: Roles) -> list[Turn]:
    """Return the turns of a prompt or a completion.

    Text is one turn of `role` and is never parsed as JSON.
    """
    if isinstance(row.value(key), str):
        return [(_message(role, row.text(key), row if role == "assistant" else None), True)]
    if role == "assistant" and row.text("reasoning_content").strip():
        key = row.shown("reasoning_content")
        raise BadRow(
            Reason.BAD_VALUE, f"{key}: not read beside a list of turns: write it into its turn"
        )
    return _turns(row, key, "role", "content", {**OPENAI_ROLES, **roles})


def _turns(row: Fields, key: str, role_key: str, text_key: str, roles: Roles) -> list[Turn]:
    return [_turn(turn, role_key, text_key, roles) for turn in row.objects(key, kept=KEPT_IN_TURNS)]


def _turn(turn: Fields, role_key: str, text_key: str, roles: Roles) -> Turn:
    name = turn.value(role_key)
    if name is None:
        keys = ", ".join(turn.values) or "no keys"
        if role_key == "from" and turn.value("role") is not None:
            remedy = "set format: messages and columns: {messages: conversations}"
        elif role_key == "role" and turn.value("from") is not None:
            remedy = "set format: sharegpt and columns: {conversations: messages}"
        else:
            remedy = "if it has another name, set `columns`"
        raise BadRow(
            Reason.BAD_VALUE, f"{turn.shown(role_key)}: missing; the turn has {keys:.80}; {remedy}"
        )
    if not isinstance(name, str) or name not in roles:
        known = ", ".join(roles)
        raise BadRow(
            Reason.BAD_VALUE,
            f"{turn.shown(role_key)}: {name!r:.40} is not one of {known}; see `roles`",
        )
    role = roles[name]
    check_examples(turn)
    refuse(turn, IN_TURNS[role])
    turn.mark_read(_KNOWN_IN_TURNS)
    if role == "function_call":
        calls = calls_in(turn, text_key)
        content = ""
    else:
        calls = calls_of(turn)
        content = _turn_content(turn, text_key, may_be_null=bool(calls))
    refuse_in_parts(turn)
    if role not in ("assistant", "function_call"):
        if calls:
            raise BadRow(
                Reason.BAD_VALUE, f"{turn.shown('tool_calls')}: only the assistant calls tools"
            )
        return _message(role, content), True
    message = _message("assistant", content, turn)
    if calls:
        message["tool_calls"] = calls
    return message, _is_trained_on(turn)


def _turn_content(turn: Fields, key: str, *, may_be_null: bool) -> str:
    """Return the text of a turn, in which text parts are joined; the template says how."""
    value = turn.value(key)
    if value is None and may_be_null:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise turn.unlike(key, "text", value)
    texts = []
    for number, part in enumerate(value):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = f"{part.get('type')!r:.40}" if isinstance(part, dict) else "none"
            detail = (
                f'expected {{"type": "text", "text": ...}}, found a part of type {kind}; '
                "only text is supported"
            )
            raise BadRow(Reason.BAD_VALUE, f"{turn.shown(key)}[{number}]: {detail}")
        turn.add_part(
            part, f"{turn.shown(key)}[{number}]", f"{turn.name_of(key)}[]", ("type", "text")
        )
        texts.append(text)
    return TextParts.of(texts)


def _is_trained_on(turn: Fields) -> bool:
    trained = True
    for key in TRAINED_KEYS:
        value = turn.value(key)
        if value is not None and value not in (0, 1):
            problem = f"{turn.where}{key}: {value!r:.40} is neither 0 nor 1, false nor true"
            remedy = "turns have no other weights: write one of these, or remove the key"
            raise BadRow(Reason.BAD_VALUE, f"{problem}: {remedy}")
        trained = trained and value in (None, 1)
    return trained


_KEYS = []
for _format, _alternatives in KEYS.items():
    _KEYS += [(_format, frozenset(_keys)) for _keys in _alternatives]
_ALL_KEYS = frozenset().union(*(keys for _, keys in _KEYS))


@dataclass(eq=False)
class AmbiguousRow(WrongFile):
    """The error for a row with the keys of several formats: the config has to set `format`."""

    formats: tuple[Format, ...]

    def __str__(self) -> str:
        return (
            f"fits {' and '.join(self.formats)}: set `format` of the source to the one that is "
            "meant"
        )


@dataclass(frozen=True)
class Layout:
    """The settings for reading the rows of one file.

    `columns` maps our name of a key, in rows and in turns, to the file's name, or a file's key to
    `ignore`. `roles` maps the file's name of a role to ours (system, user, assistant, tool,
    function_call), in addition to the role names of the format.
    """

    format: Format
    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)


def detect(row: Any, columns: Mapping[str, str]) -> Format:
    """Return the format whose keys `row` has; a null value counts as missing.

    Raises BadRow if no format matches, AmbiguousRow if several do, PreferenceData if none does and
    the row compares answers.
    """
    fields = _fields(row, columns)
    present = {key for key in _ALL_KEYS if fields.peek(key) is not None}
    fitting = tuple(dict.fromkeys(row_format for row_format, keys in _KEYS if keys <= present))
    if len(fitting) > 1:
        raise AmbiguousRow(fitting)
    if not fitting:
        check_examples(fields, labels=False)
        raise BadRow(
            Reason.WRONG_FORMAT, f"none of {', '.join(KEYS)}; {_keys_text(fields.values, columns)}"
        )
    return fitting[0]


def layout_of(row: Any, reading: Rows) -> Layout:
    """Return the layout of the file with first usable row `row`: detected, or named by `reading`.

    Raises what `detect` raises.
    """
    row_format = detect(row, reading.columns) if reading.format == "auto" else reading.format
    return Layout(row_format, reading.columns, reading.roles)


def to_content(row: Any, layout: Layout, counts: KeyCounts | None = None) -> Content:
    """Return the content of `row` in `layout`, and add its keys to `counts`.

    Raises BadRow, PreferenceData.
    """
    counts = KeyCounts() if counts is None else counts
    fields = _fields(row, layout.columns)
    try:
        content = _content(fields, layout)
    finally:
        counts.note(fields, _names_in_files(layout.columns), layout.roles)
    counts.count_unread(fields)
    return content


def _names_in_files(columns: Mapping[str, str]) -> list[str]:
    """Return the names that `columns` gives: the file's name of our key, or an ignored key."""
    return [ours if theirs == IGNORE else theirs for ours, theirs in columns.items()]


def _content(fields: Fields, layout: Layout) -> Content:
    alternatives = KEYS[layout.format]
    if not any(all(fields.peek(key) is not None for key in keys) for keys in alternatives):
        if layout.format != "text":
            check_examples(fields, labels=False)
        wanted = " or ".join(" and ".join(map(fields.shown, keys)) for keys in alternatives)
        raise BadRow(
            Reason.WRONG_FORMAT,
            f"{layout.format} needs {wanted}; {_keys_text(fields.values, layout.columns)}",
        )
    _refuse_columns(fields, layout.format)
    content: Content
    if layout.format == "text":
        content = Text(fields.text("text"))
    else:
        turns = _turns_of(fields, layout.format, layout.roles)
        supervised = []
        for number, (message, may_be_trained) in enumerate(turns):
            if may_be_trained and message["role"] == "assistant":
                supervised.append(number)
        messages = [message for message, _ in turns]
        content = Conversation(messages, conversation_tools(fields), tuple(supervised))
    check(content)
    return content


def _fields(row: Any, columns: Mapping[str, str]) -> Fields:
    if is_turns(row):  # a conversation without a key
        key = "messages" if "role" in row[0] else "conversations"
        row = {columns.get(key, key): row}
    if not isinstance(row, dict):
        raise BadRow(Reason.NOT_AN_OBJECT, f"expected an object, found {type_name(row)}")
    return Fields(row, names_of(columns))


def _keys_text(row: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    keys = [f"{key!r:.40}{' (null)' if row[key] is None else ''}" for key in sorted(row)[:8]]
    return f"it has {', '.join(keys) or 'no keys'}; {_hint(row, columns)}"


def _hint(row: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    missing = [f"{theirs!r:.40}" for theirs in columns.values() if theirs not in (IGNORE, *row)]
    if missing:
        return f"`columns` names {', '.join(missing)}"
    if is_turns([row]):
        return (
            "it is a turn, not a row: write the turns of a conversation into one row, "
            '{"messages": [...]}'
        )
    for key, value in row.items():
        if is_turns(value):
            ours = "messages" if "role" in value[0] else "conversations"
            return f"its turns are under {key!r:.40}: set columns: {{{ours}: {key:.40}}}"
        if _is_rows(value):
            return f"if its rows are under {key!r:.40}, write that list alone into the file"
    return "set `columns` if it has other names for them"


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _refuse_columns(fields: Fields, row_format: Format) -> None:
    """Raise BadRow if each key of the format holds a column: a list, or values by number.

    Only keys that the format needs count.
    """
    kinds: tuple[type, ...] = (list,) if row_format in ("messages", "sharegpt") else (list, str)
    for keys in KEYS[row_format]:
        if all(_is_column(fields.peek(key), kinds) for key in keys):
            shown = " and ".join(map(fields.shown, keys))
            raise BadRow(
                Reason.WRONG_FORMAT,
                f"holds columns, not rows: all of {shown} stand in one object; write one object a "
                "row, with pandas to_json(path, orient='records', lines=True, force_ascii=False)",
            )


def _is_column(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, dict) and all(key.isdigit() for key in value):
        value = list(value.values())
    return (
        isinstance(value, list) and bool(value) and all(isinstance(item, kinds) for item in value)
    )
