"""The known layouts of rows: which one a row has, its turns, and what of it is not read."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from pipeline_lib.config.schema import IGNORE
from pipeline_lib.core.text import redact
from pipeline_lib.data.conversations import (
    BadRow,
    Content,
    Conversation,
    Fields,
    Message,
    Reason,
    Text,
    WrongFile,
    calls_in,
    calls_of,
    check,
    conversation_tools,
    names_of,
    type_name,
)
from pipeline_lib.data.read_files import printable

# What rows say that is not read: refused where it would change what is learnt, else counted by its key.
#
# `columns: {KEY: ignore}` is how the owner of the data says that a key may be left out, those of KEPT_IN_TURNS only
# in rows. Raw text stands for itself, so nothing beside it is refused.

# Rows of preference data: which answer is the better one, or whether the answer is a good one.
_COMPARED = (
    *("chosen", "chosen_response", "preferred_output"),
    *("rejected", "rejected_response", "rejected_responses", "rejected_messages", "non_preferred_output"),
)
_LABELS = ("label", "kto_tag")
# What OpenAI, ms-swift and Axolotl call it whether an assistant's turn is trained on.
TRAINED_KEYS = ("weight", "loss", "train", "training", "loss_scale", "loss_weight", "loss_mask")
# Means one thing in a row and another in a turn: to ignore it in rows must not lose what a turn says.
KEPT_IN_TURNS = (*TRAINED_KEYS, "tools")
# Other names of reasoning_content: not guessed at, but what stands there must not be lost unseen.
REASONING_ALIASES = (
    *("reasoning", "reasoning_text", "thinking", "thinking_content", "think", "thought", "thoughts"),
    *("cot", "Complex_CoT", "rationale"),
)
_REASONING_PARTS = "reasoning_details"  # a list, as OpenRouter has it
# What some rows of a set call as we do, and others as `columns` says.
_MIXED = ("system", "tools", "tool_calls", "reasoning_content")

_ITS_NAME = "KEY"  # in a remedy: the key that it is for
MAX_KEYS = 100  # of a file, that are counted by name
MAX_NAME_CHARS = 60


def _spellings(key: str) -> list[str]:
    """`key` and how headings of tables write it: System_prompt, SYSTEM_PROMPT, System Prompt, ..."""
    cases = (key, key.capitalize(), key.title(), key.upper())
    return list(dict.fromkeys([*cases, *(case.replace("_", " ") for case in cases)]))


def _spelled(remedies: Mapping[str, str]) -> dict[str, str]:
    """`remedies`, by all spellings of their keys."""
    return {spelling: remedy for key, remedy in remedies.items() for spelling in _spellings(key)}


def _other_names(ours: str, *keys: str) -> dict[str, str]:
    return dict.fromkeys(keys, f"not read; to read it set columns: {{{ours}: {_ITS_NAME}}}")


def _other_spellings(*ours: str) -> dict[str, str]:
    return {key: remedy for name in ours for key, remedy in _other_names(name, *_spellings(name)[1:]).items()}


_COMPARED_KEYS = frozenset(spelling for key in _COMPARED for spelling in _spellings(key))
_LABEL_KEYS = frozenset(spelling for key in _LABELS for spelling in _spellings(key))
# Keys that would change what is learnt, and what to do about each.
_MEDIA = dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "only text is supported")
_ANY_ROW = {
    **_MEDIA,
    **_other_names("system", "system_prompt", "system_message"),
    **_other_names("tools", "functions"),
    **_other_spellings("system", "tools"),
    **dict.fromkeys(
        ("chat_template_kwargs", "enable_thinking"),
        "not read: a row does not set the template's variables, and thinking is on where an answer has "
        "reasoning_content",
    ),
    "documents": "not read: write their text into the question or the system message",
    **dict.fromkeys(TRAINED_KEYS, "rows are not weighted: remove the row, or weight the turns or the source"),
}
_REASONING = {
    **_other_names("reasoning_content", *REASONING_ALIASES),
    _REASONING_PARTS: "not read: write its text as reasoning_content",
}
_REASONING_KEYS = frozenset(_spelled(_REASONING))
_ONE_ANSWER = {
    **_ANY_ROW,
    **_REASONING,
    **_other_spellings("reasoning_content"),
    **dict.fromkeys(("tool_calls", "function_call"), "not read: write the row as messages, whose turns may call tools"),
}
_LISTED_TURNS = {
    **_ANY_ROW,
    **dict.fromkeys(
        ("reasoning_content", _REASONING_PARTS, *REASONING_ALIASES),
        "not read beside turns: write it into its turn as reasoning_content",
    ),
    "history": "not read beside turns: write it as the first turns",
}
_ROWS = {
    "alpaca": {**_ONE_ANSWER, **_other_names("input", "context"), **_other_spellings("input", "history")},
    "sharegpt": _LISTED_TURNS,
    "messages": _LISTED_TURNS,
    "prompt_completion": {
        **_ONE_ANSWER,
        **dict.fromkeys(("instruction", "input", "context"), "not read: put it into the prompt"),
        "history": "not read; set format: alpaca and columns: {instruction: prompt, output: completion}",
    },
}
IN_ROWS: Mapping[str, Mapping[str, str]] = {name: _spelled(remedies) for name, remedies in _ROWS.items()}
_ANY_TURN = {
    **_MEDIA,
    **dict.fromkeys(("tools", "functions"), "not read here: write it as `tools` of the row or of its system turn"),
    "function_call": "not read; write it as tool_calls",
    **_other_names("tool_calls", "tool_call", "function_calls"),
    **dict.fromkeys(("train_detail", "training_detail"), "not read: a turn is trained on as a whole"),
}
_SYSTEM_TURN = {**_MEDIA, **_other_names("tools", "functions")}
_ASSISTANT_TURN = {
    **_ANY_TURN,
    **_REASONING,
    **dict.fromkeys(("mask", "masked"), "not read: write `loss: false` into a turn that is not trained on"),
}
IN_TURNS: Mapping[str, Mapping[str, str]] = {
    "system": _SYSTEM_TURN,
    "user": _ANY_TURN,
    "assistant": _ASSISTANT_TURN,
    "function_call": _ASSISTANT_TURN,
    "tool": _ANY_TURN,
}


class PreferenceData(WrongFile):
    """A row that says which of two answers is better, or that its answer is a bad one."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        """Keep the `keys` that say so."""
        super().__init__(keys)
        self.keys = keys

    def __str__(self) -> str:
        ignored = ", ".join(f"{key}: {IGNORE}" for key in self.keys)
        return (
            f"is preference data by its {' and '.join(self.keys)}: this trains on examples to follow. Take a data set "
            f"of examples, or leave out what is none; where it means something else, set columns: {{{ignored}}}"
        )


def check_examples(fields: Fields, *, labels: bool = True) -> None:
    """Raise PreferenceData unless the row or turn is, for all it says, an example to follow.

    Without `labels`, only what compares answers is looked for: a label may be of anything.
    """
    keys = [key for key in fields.among(_COMPARED_KEYS) if not _is_blank(fields.peek(key))]
    if labels:
        keys += [key for key in fields.among(_LABEL_KEYS) if _is_no(fields.peek(key))]
    if keys:
        raise PreferenceData(tuple(keys))


def refuse(fields: Fields, refused: Mapping[str, str]) -> None:
    """Raise BadRow for the first of the `refused` keys under which the row or turn says something.

    Also for one of our own keys, if `columns` reads it from another key, which the row or turn does not have.
    """
    for key in fields.displaced(_MIXED):
        if _is_blank(fields.peek(key)) and not _is_blank(fields.values[key]):
            remedy = f"write it as {fields.shown(key)}, or give such files a source of their own"
            raise BadRow(Reason.BAD_VALUE, f"{fields.where}{key}: not read, because of `columns`: {remedy}")
    for key in fields.among(refused.keys()):
        value = fields.peek(key)
        if key.lower() in TRAINED_KEYS:
            is_harmless = value is None or value == 1 or _is_text(value, ("", "1", "1.0", "true"))
        else:
            is_told_twice = key in _REASONING_KEYS and not _is_blank(fields.peek("reasoning_content"))
            is_harmless = _is_blank(value) or is_told_twice
        if not is_harmless:
            is_kept = fields.where and key in KEPT_IN_TURNS
            remedy = "" if is_kept else f"; to leave it out set columns: {{{key}: {IGNORE}}}"
            reason = refused[key].replace(_ITS_NAME, key)
            raise BadRow(Reason.BAD_VALUE, f"{fields.shown(key)}: {reason}{remedy}")


def _is_blank(value: Any) -> bool:
    return not value or _is_text(value, ("", "[]", "{}", "null"))


def _is_no(value: Any) -> bool:
    return value == 0 or _is_text(value, ("0", "0.0", "false"))


def _is_text(value: Any, words: Collection[str]) -> bool:
    return isinstance(value, str) and len(value) < 80 and value.strip().lower() in words


@dataclass
class KeyCounts:
    """The keys of rows: `unread` counts the values of those that were not read, `others` those of further keys.

    A column goes by its name, a key of turns as `messages[].name`. `named` are those of the names in `columns` that
    any row has, `first` are the keys of the first row that is an object; none: there was no such row.
    """

    unread: Counter[str] = field(default_factory=Counter)
    others: int = 0
    named: set[str] = field(default_factory=set)
    first: tuple[str, ...] = ()

    def add(self, more: "KeyCounts") -> None:
        """Count those of later rows as well."""
        for name, number in more.unread.items():
            self._count(name, number)
        self.others += more.others
        self.named |= more.named
        self.first = self.first or more.first

    def count_unread(self, row: Fields) -> None:
        """Count what was not read of a row and of its turns."""
        for name in row.unread():
            self._count(_shown(name), 1)
        for turns, turn in row.turns:
            for name in turn.unread():
                self._count(f"{turns}[].{_shown(name)}", 1)

    def note(self, row: Fields, names: Collection[str]) -> None:
        """Note which of the `names` the row or its turns have."""
        if self.first and not names:
            return
        objects = [row.values, *(turn.values for _, turn in row.turns)]
        if not self.first:
            self.first = tuple(sorted({_shown(key) for values in objects for key in values})[:MAX_KEYS])
        missing = [name for name in names if name not in self.named]
        self.named.update(name for name in missing if any(name in values for values in objects))

    def _count(self, name: str, number: int) -> None:
        if name in self.unread or len(self.unread) < MAX_KEYS:
            self.unread[name] += number
        else:
            self.others += number


@lru_cache(maxsize=4 * MAX_KEYS)
def _shown(key: str) -> str:
    return printable(redact(key[: 4 * MAX_NAME_CHARS])[:MAX_NAME_CHARS])


# The known layouts of a conversation row, each read into turns.
#
# alpaca: instruction, input, output, and where present history ([[question, answer], ...]).
# sharegpt: conversations, a list of from and value.
# messages: messages, a list of role and content as OpenAI has them.
# prompt_completion: prompt and completion, each a text or a list as under messages; only the completion is trained on.
# All of them may bring system and tools, and turns may say that they are not trained on; an answer that is one text may
# come with reasoning_content. What is not read, unread.py counts or refuses.

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
        content = _turn_content(turn, text_key, may_be_null=bool(calls))
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


def _turn_content(turn: Fields, key: str, *, may_be_null: bool) -> str:
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


# Recognises the format of a row and turns the row into a Conversation or a Text.
#
# What the formats are is in formats.py, what a conversation has to be in conversation.py; users of rows import
# the names of both from here.

__all__ = [
    "AmbiguousRow",
    "BadRow",
    "Content",
    "Conversation",
    "Format",
    "KeyCounts",
    "Layout",
    "Message",
    "PreferenceData",
    "Reason",
    "Text",
    "WrongFile",
    "detect",
    "to_content",
]

_KEYS = [(row_format, frozenset(keys)) for row_format, alternatives in KEYS.items() for keys in alternatives]
_ALL_KEYS = frozenset().union(*(keys for _, keys in _KEYS))


class AmbiguousRow(WrongFile):
    """A row that has the keys of several formats: which one is meant has to be said."""

    def __init__(self, formats: tuple[Format, ...]) -> None:
        """Keep the `formats` that fit."""
        super().__init__(formats)
        self.formats = formats

    def __str__(self) -> str:
        return f"fits {' and '.join(self.formats)}: set `format` of the source to the one that is meant"


@dataclass(frozen=True)
class Layout:
    """How the rows of one file are read.

    `columns`: our name of a key -> the file's, in rows and in turns, or `ignore`. `roles`: the file's name of a role ->
    ours (system, user, assistant, tool, function_call), beside those that the format has.
    """

    format: Format
    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)


def detect(row: Any, columns: Mapping[str, str]) -> Format:
    """The format whose keys `row` has, null counting as missing.

    Raises BadRow if it has those of none, AmbiguousRow if it has those of several, PreferenceData if it has no answer
    to follow but answers that are compared.
    """
    fields = _fields(row, columns)
    present = {key for key in _ALL_KEYS if fields.peek(key) is not None}
    fitting = tuple(dict.fromkeys(row_format for row_format, keys in _KEYS if keys <= present))
    if len(fitting) > 1:
        raise AmbiguousRow(fitting)
    if not fitting:
        check_examples(fields, labels=False)
        raise BadRow(Reason.WRONG_FORMAT, f"none of {', '.join(KEYS)}; {_keys(row, columns)}")
    return fitting[0]


def to_content(row: Any, layout: Layout, counts: KeyCounts | None = None) -> Content:
    """What `row`, read as `layout` says, holds; `counts` is told of its keys. Raises BadRow, PreferenceData."""
    counts = KeyCounts() if counts is None else counts
    fields = _fields(row, layout.columns)
    try:
        content = _content(fields, layout)
    finally:
        counts.note(fields, layout.columns.values())
    counts.count_unread(fields)
    return content


def _content(fields: Fields, layout: Layout) -> Content:
    alternatives = KEYS[layout.format]
    if not any(all(fields.peek(key) is not None for key in keys) for keys in alternatives):
        if layout.format != "text":
            check_examples(fields, labels=False)
        wanted = " or ".join(" and ".join(map(fields.shown, keys)) for keys in alternatives)
        raise BadRow(Reason.WRONG_FORMAT, f"{layout.format} needs {wanted}; {_keys(fields.values, layout.columns)}")
    content: Content
    if layout.format == "text":
        content = Text(fields.text("text"))
    else:
        turns = turns_of(fields, layout.format, layout.roles)
        supervised = tuple(
            number for number, (message, trained) in enumerate(turns) if trained and message["role"] == "assistant"
        )
        content = Conversation([message for message, _ in turns], conversation_tools(fields), supervised)
    check(content)
    return content


def _fields(row: Any, columns: Mapping[str, str]) -> Fields:
    if not isinstance(row, dict):
        raise BadRow(Reason.NOT_AN_OBJECT, f"expected an object, found {type_name(row)}")
    return Fields(row, names_of(columns))


def _keys(row: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """What a row has instead of the keys of its format."""
    keys = [f"{key!r:.40}{' (null)' if row[key] is None else ''}" for key in sorted(row)[:8]]
    missing = [f"{theirs!r:.40}" for theirs in columns.values() if theirs not in (IGNORE, *row)]
    hint = f"`columns` names {', '.join(missing)}" if missing else "other names are told by `columns`"
    return f"it has {', '.join(keys) or 'no keys'}; {hint}"
