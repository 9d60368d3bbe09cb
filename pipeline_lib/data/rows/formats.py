"""The known layouts of a conversation row, each read into turns.

alpaca: instruction, input, output, and where present history ([[question, answer], ...]).
sharegpt: conversations, a list of from and value.
messages: messages, a list of role and content as OpenAI has them.
prompt_completion: prompt and completion, each a text or a list as under messages; only the completion is trained on.
All of them may bring system and tools, and turns may say that they are not trained on; an answer that is one text may
come with reasoning_content. What is not read, unread.py counts or refuses.
"""

from collections.abc import Mapping
from typing import Literal

from pipeline_lib.data.rows.conversation import BadRow, Message, Reason
from pipeline_lib.data.rows.fields import Fields
from pipeline_lib.data.rows.tool_calls import calls_in, calls_of
from pipeline_lib.data.rows.unread import IN_ROWS, IN_TURNS, KEPT_IN_TURNS, TRAINED_KEYS, check_examples, refuse

Format = Literal["alpaca", "sharegpt", "messages", "prompt_completion", "text"]
Turn = tuple[Message, bool]  # and whether it may be trained on, if it is the assistant's
Roles = Mapping[str, str]

# Alternatives: a row has a format if it has all keys of one of them.
KEYS: Mapping[Format, tuple[tuple[str, ...], ...]] = {
    "alpaca": (("instruction", "output"), ("input", "output")),
    "sharegpt": (("conversations",),),
    "messages": (("messages",),),
    "prompt_completion": (("prompt", "completion"),),
    "text": (("text",),),
}
OPENAI_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
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
_KNOWN_IN_TURNS = (*TRAINED_KEYS, "tool_call_id")  # of every role, so none counts as unread


def turns_of(row: Fields, row_format: Format, roles: Roles) -> list[Turn]:
    """The turns of a conversation in `row_format`; `roles` adds to the names of roles.

    Raises BadRow, and PreferenceData if it is no example to follow.
    """
    check_examples(row)
    refuse(row, IN_ROWS[row_format])
    if row_format == "alpaca":
        turns = _alpaca(row)
    elif row_format == "sharegpt":
        turns = _turns(row, "conversations", "from", "value", {**SHAREGPT_ROLES, **roles})
    elif row_format == "messages":
        turns = _turns(row, "messages", "role", "content", {**OPENAI_ROLES, **roles})
    else:
        prompt = _part(row, "prompt", "user", roles)
        turns = [(message, False) for message, _ in prompt] + _part(row, "completion", "assistant", roles)
    return _with_system(row.text("system"), turns)


def _with_system(system: str, turns: list[Turn]) -> list[Turn]:
    """`turns` after the row's own system message, unless they begin with the same; a blank one says nothing."""
    if turns and turns[0][0]["role"] == "system" and turns[0][0]["content"].strip() in ("", system.strip()):
        turns = turns[1:]
    return [_said("system", system), *turns] if system.strip() else turns


def _alpaca(row: Fields) -> list[Turn]:
    turns = []
    for number, pair in enumerate(row.items("history")):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise BadRow(Reason.BAD_VALUE, f"{row.shown('history')}[{number}]: expected [question, answer]")
        turns += [_said("user", pair[0]), _said("assistant", pair[1])]
    asked = [text for key in ("instruction", "input") if (text := row.text(key)).strip()]
    return [*turns, _said("user", "\n".join(asked)), _answer(row, "output")]


def _answer(row: Fields, key: str) -> Turn:
    """The answer of a row that holds a single one as text."""
    message, is_trained_on = _said("assistant", row.text(key))
    if reasoning := row.text("reasoning_content"):
        message["reasoning_content"] = reasoning
    return message, is_trained_on


def _part(row: Fields, key: str, role: str, roles: Roles) -> list[Turn]:
    """A prompt or a completion: one turn of `role` if it is text, which is never parsed."""
    if isinstance(row.value(key), str):
        return [_answer(row, key) if role == "assistant" else _said(role, row.text(key))]
    if role == "assistant" and row.text("reasoning_content").strip():
        key = row.shown("reasoning_content")
        raise BadRow(Reason.BAD_VALUE, f"{key}: not read beside a list of turns: write it into its turn")
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
            remedy = "if it is called otherwise, see `columns`"
        raise BadRow(Reason.BAD_VALUE, f"{turn.shown(role_key)}: missing; the turn has {keys:.80}; {remedy}")
    if not isinstance(name, str) or name not in roles:
        known = ", ".join(roles)
        raise BadRow(Reason.BAD_VALUE, f"{turn.shown(role_key)}: {name!r:.40} is not one of {known}; see `roles`")
    role = roles[name]
    check_examples(turn)
    refuse(turn, IN_TURNS[role])
    turn.mark_read(_KNOWN_IN_TURNS)
    if role == "function_call":
        calls, content = calls_in(turn.value(text_key), turn.shown(text_key)), ""
    else:
        calls = calls_of(turn)
        content = _content(turn, text_key, may_be_null=bool(calls))
    if role not in ("assistant", "function_call"):
        if calls:
            raise BadRow(Reason.BAD_VALUE, f"{turn.shown('tool_calls')}: only the assistant calls tools")
        return _said(role, content)
    message, _ = _said("assistant", content)
    if reasoning := turn.text("reasoning_content"):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message, _is_trained_on(turn)


def _content(turn: Fields, key: str, *, may_be_null: bool) -> str:
    """The text of a turn. Several text parts are joined by newlines, as servers do for templates that take text."""
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
            detail = f'expected {{"type": "text", "text": ...}}, found a part of type {kind}; only text is supported'
            raise BadRow(Reason.BAD_VALUE, f"{turn.shown(key)}[{number}]: {detail}")
        texts.append(text)
    return "\n".join(texts)


def _is_trained_on(turn: Fields) -> bool:
    """What the turn itself says, by any of its names."""
    trained = True
    for key in TRAINED_KEYS:
        value = turn.value(key)
        if value is not None and value not in (0, 1):
            problem = f"{turn.where}{key}: {value!r:.40} is neither 0 nor 1, false nor true"
            remedy = "turns are not weighted: write one of these, or remove the key"
            raise BadRow(Reason.BAD_VALUE, f"{problem}: {remedy}")
        trained = trained and value in (None, 1)
    return trained


def _said(role: str, content: str) -> Turn:
    return {"role": role, "content": content}, True
