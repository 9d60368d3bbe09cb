"""The known row layouts: detect a row's layout, convert the row to turns, and track the keys that are not read."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from pipeline_lib.config.schema import IGNORE, Rows
from pipeline_lib.core.text import redact
from pipeline_lib.data.conversations import (
    BadRow,
    Content,
    Conversation,
    Fields,
    Message,
    Reason,
    Text,
    TextParts,
    WrongFile,
    calls_in,
    calls_of,
    check,
    conversation_tools,
    names_of,
    type_name,
)
from pipeline_lib.data.read_files import printable

# Keys that are not read. A key that would change what the model learns is refused; any other is counted by name.
# `columns: {KEY: ignore}` allows a key to be left out, a key of KEPT_IN_TURNS only in rows. Rows of raw text have no
# refused keys.

# Keys of preference data: they compare answers, or label an answer as good or bad.
_COMPARED = (
    *("chosen", "chosen_response", "preferred_output"),
    *("rejected", "rejected_response", "rejected_responses", "rejected_messages", "non_preferred_output"),
)
_LABELS = ("label", "kto_tag")
# Names that OpenAI, ms-swift and Axolotl use for the flag that an assistant's turn is trained on.
TRAINED_KEYS = ("weight", "loss", "train", "training", "loss_scale", "loss_weight", "loss_mask")
# Keys with one meaning in a row and another in a turn: ignoring them in rows must not ignore them in turns.
KEPT_IN_TURNS = (*TRAINED_KEYS, "tools")
# Other names of reasoning_content. They are not read automatically, but their content must not be lost silently.
REASONING_ALIASES = (
    *("reasoning", "reasoning_text", "thinking", "thinking_content", "think", "thought", "thoughts"),
    *("cot", "Complex_CoT", "rationale"),
)
_REASONING_PARTS = "reasoning_details"  # a list, in OpenRouter's format
# Keys that some rows of a data set may have under our name, and others under the name in `columns`.
_MIXED = ("system", "tools", "tool_calls", "reasoning_content")

_ITS_NAME = "KEY"  # placeholder in a remedy for the key that it is about
MAX_KEYS = 100  # keys of a file that are counted by name
MAX_NAME_CHARS = 60


def _spellings(key: str) -> list[str]:
    """Return `key` and its spellings in table headings: System_prompt, SYSTEM_PROMPT, System Prompt, ..."""
    cases = (key, key.capitalize(), key.title(), key.upper())
    return list(dict.fromkeys([*cases, *(case.replace("_", " ") for case in cases)]))


def _spelled(remedies: Mapping[str, str]) -> dict[str, str]:
    return {spelling: remedy for key, remedy in remedies.items() for spelling in _spellings(key)}


def _other_names(ours: str, *keys: str) -> dict[str, str]:
    return dict.fromkeys(keys, f"not read; to read it set columns: {{{ours}: {_ITS_NAME}}}")


def _other_spellings(*ours: str) -> dict[str, str]:
    return {key: remedy for name in ours for key, remedy in _other_names(name, *_spellings(name)[1:]).items()}


_COMPARED_KEYS = frozenset(spelling for key in _COMPARED for spelling in _spellings(key))
_LABEL_KEYS = frozenset(spelling for key in _LABELS for spelling in _spellings(key))
# Keys that would change what the model learns, with a remedy for each.
_MEDIA = dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "only text is supported")
_ANY_ROW = {
    **_MEDIA,
    **_other_names("system", "system_prompt", "system_message"),
    **_other_names("tools", "functions"),
    **_other_spellings("system", "tools"),
    **dict.fromkeys(
        ("chat_template_kwargs", "enable_thinking"),
        "not read: a row does not set the template's variables (tokenize.chat_template_kwargs sets them for all), and "
        "thinking is on where an answer has reasoning_content",
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


@dataclass(eq=False)
class PreferenceData(WrongFile):
    """The error for a row that compares answers, or that labels its answer as bad, by its `keys`."""

    keys: tuple[str, ...]

    def __str__(self) -> str:
        ignored = ", ".join(f"{key}: {IGNORE}" for key in self.keys)
        return (
            f"is preference data by its {' and '.join(self.keys)}: only good examples can be trained on. Keep only "
            f"those, or take another data set. If the name means something else, set columns: {{{ignored}}}"
        )


def _check_examples(fields: Fields, *, labels: bool = True) -> None:
    """Raise PreferenceData if the row or turn compares answers, or, if `labels`, labels its answer as bad."""
    keys = [key for key in fields.among(_COMPARED_KEYS) if not _is_blank(fields.peek(key))]
    if labels:
        for key in fields.among(_LABEL_KEYS):
            label = fields.peek(key)
            if label == 0 or _is_text(label, ("0", "0.0", "false")):
                keys.append(key)
    if keys:
        raise PreferenceData(tuple(keys))


def _refuse(fields: Fields, refused: Mapping[str, str]) -> None:
    """Raise BadRow for the first of the `refused` keys that has a value in the row or turn.

    Raise it also for a key of ours that has a value, if `columns` reads that key from another one that is blank.
    """
    for key in fields.displaced(_MIXED):
        if _is_blank(fields.peek(key)) and not _is_blank(fields.values[key]):
            remedy = f"write it as {fields.shown(key)}, or give such files a source of their own"
            raise BadRow(
                Reason.BAD_VALUE, f"{fields.where}{key}: not read, because `columns` gives another name: {remedy}"
            )
    for key in fields.among(refused.keys()):
        value = fields.peek(key)
        if key.lower() in TRAINED_KEYS:
            is_harmless = value is None or value == 1 or _is_text(value, ("", "1", "1.0", "true"))
        else:
            is_repeated = key in _REASONING_KEYS and not _is_blank(fields.peek("reasoning_content"))
            is_harmless = _is_blank(value) or is_repeated
        if not is_harmless:
            is_kept = fields.where and key in KEPT_IN_TURNS
            remedy = "" if is_kept else f"; to leave it out set columns: {{{key}: {IGNORE}}}"
            reason = refused[key].replace(_ITS_NAME, key)
            raise BadRow(Reason.BAD_VALUE, f"{fields.shown(key)}: {reason}{remedy}")


def _is_blank(value: Any) -> bool:
    return not value or _is_text(value, ("", "[]", "{}", "null"))


def _is_text(value: Any, words: Collection[str]) -> bool:
    return isinstance(value, str) and len(value) < 80 and value.strip().lower() in words


@dataclass
class KeyCounts:
    """Counts of the keys in rows.

    `unread` counts the values of each key that was not read, `others` the values of keys beyond MAX_KEYS. A column is
    counted under its name, a key of turns as `messages[].name`. `named` holds the names in `columns` that any row has;
    `first` the keys of the first row that is an object, and is empty if there was no such row.
    """

    unread: Counter[str] = field(default_factory=Counter)
    others: int = 0
    named: set[str] = field(default_factory=set)
    first: tuple[str, ...] = ()

    def add(self, more: "KeyCounts") -> None:
        """Add the counts of later rows."""
        for name, number in more.unread.items():
            self._count(name, number)
        self.others += more.others
        self.named |= more.named
        self.first = self.first or more.first

    def count_unread(self, row: Fields) -> None:
        """Count the unread keys of a row and of its turns."""
        for name in row.unread():
            self._count(_shown(name), 1)
        for turns, turn in row.turns:
            for name in turn.unread():
                self._count(f"{turns}[].{_shown(name)}", 1)

    def note(self, row: Fields, names: Collection[str]) -> None:
        """Record which of the `names` the row or its turns have, and the keys of the first row."""
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


# Conversion of a conversation row to turns, for each layout.
#
# alpaca: instruction, input, output, and optionally history ([[question, answer], ...]).
# sharegpt: conversations, a list of objects with from and value.
# messages: messages, a list of objects with role and content, in OpenAI's format.
# prompt_completion: prompt and completion, each a text or a list as in messages; only the completion is trained on.
# All layouts may have system and tools, and turns may be excluded from training; an answer that is a single text may
# have reasoning_content.

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
_KNOWN_IN_TURNS = (*TRAINED_KEYS, "tool_call_id")  # known in turns of every role, so they never count as unread


def _turns_of(row: Fields, row_format: Format, roles: Roles) -> list[Turn]:
    _check_examples(row)
    _refuse(row, IN_ROWS[row_format])
    turns: list[Turn] = []
    if row_format == "alpaca":
        for number, pair in enumerate(row.items("history")):
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise BadRow(Reason.BAD_VALUE, f"{row.shown('history')}[{number}]: expected [question, answer]")
            turns += [(_message("user", pair[0]), True), (_message("assistant", pair[1]), True)]
        question = [text for key in ("instruction", "input") if (text := row.text(key)).strip()]
        turns += [(_message("user", "\n".join(question)), True), (_message("assistant", row.text("output"), row), True)]
    elif row_format == "sharegpt":
        turns = _turns(row, "conversations", "from", "value", {**SHAREGPT_ROLES, **roles})
    elif row_format == "messages":
        turns = _turns(row, "messages", "role", "content", {**OPENAI_ROLES, **roles})
    else:
        prompt = _part(row, "prompt", "user", roles)
        turns = [(message, False) for message, _ in prompt] + _part(row, "completion", "assistant", roles)
    # The row's own system message replaces a first system turn that is blank or equal to it.
    system = row.text("system")
    if turns and turns[0][0]["role"] == "system" and turns[0][0]["content"].strip() in ("", system.strip()):
        turns = turns[1:]
    return [(_message("system", system), True), *turns] if system.strip() else turns


def _message(role: str, content: str, answer: Fields | None = None) -> Message:
    """Return a message with the reasoning_content of `answer`, the row or turn of an assistant's text."""
    message = {"role": role, "content": content}
    if answer is not None and (reasoning := answer.text("reasoning_content")):
        message["reasoning_content"] = reasoning
    return message


def _part(row: Fields, key: str, role: str, roles: Roles) -> list[Turn]:
    """Return the turns of a prompt or a completion. Text is one turn of `role` and is never parsed as JSON."""
    if isinstance(row.value(key), str):
        return [(_message(role, row.text(key), row if role == "assistant" else None), True)]
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
            remedy = "if it has another name, set `columns`"
        raise BadRow(Reason.BAD_VALUE, f"{turn.shown(role_key)}: missing; the turn has {keys:.80}; {remedy}")
    if not isinstance(name, str) or name not in roles:
        known = ", ".join(roles)
        raise BadRow(Reason.BAD_VALUE, f"{turn.shown(role_key)}: {name!r:.40} is not one of {known}; see `roles`")
    role = roles[name]
    _check_examples(turn)
    _refuse(turn, IN_TURNS[role])
    turn.mark_read(_KNOWN_IN_TURNS)
    if role == "function_call":
        calls, content = calls_in(turn.value(text_key), turn.shown(text_key)), ""
    else:
        calls = calls_of(turn)
        content = _turn_content(turn, text_key, may_be_null=bool(calls))
    if role not in ("assistant", "function_call"):
        if calls:
            raise BadRow(Reason.BAD_VALUE, f"{turn.shown('tool_calls')}: only the assistant calls tools")
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
            detail = f'expected {{"type": "text", "text": ...}}, found a part of type {kind}; only text is supported'
            raise BadRow(Reason.BAD_VALUE, f"{turn.shown(key)}[{number}]: {detail}")
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


# Detection of a row's format, and conversion of the row to a Conversation or a Text.

_KEYS = [(row_format, frozenset(keys)) for row_format, alternatives in KEYS.items() for keys in alternatives]
_ALL_KEYS = frozenset().union(*(keys for _, keys in _KEYS))


@dataclass(eq=False)
class AmbiguousRow(WrongFile):
    """The error for a row that has the keys of several formats, so that the config has to set `format`."""

    formats: tuple[Format, ...]

    def __str__(self) -> str:
        return f"fits {' and '.join(self.formats)}: set `format` of the source to the one that is meant"


@dataclass(frozen=True)
class Layout:
    """The settings for reading the rows of one file.

    `columns` maps our name of a key, in rows and in turns, to the file's name, or a file's key to `ignore`. `roles`
    maps the file's name of a role to ours (system, user, assistant, tool, function_call), in addition to the role
    names of the format.
    """

    format: Format
    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)


def detect(row: Any, columns: Mapping[str, str]) -> Format:
    """Return the format whose keys `row` has; a null value counts as missing.

    Raises BadRow if no format matches, AmbiguousRow if several do, PreferenceData if none does and the row compares
    answers.
    """
    fields = _fields(row, columns)
    present = {key for key in _ALL_KEYS if fields.peek(key) is not None}
    fitting = tuple(dict.fromkeys(row_format for row_format, keys in _KEYS if keys <= present))
    if len(fitting) > 1:
        raise AmbiguousRow(fitting)
    if not fitting:
        _check_examples(fields, labels=False)
        raise BadRow(Reason.WRONG_FORMAT, f"none of {', '.join(KEYS)}; {_keys_text(row, columns)}")
    return fitting[0]


def layout_of(row: Any, reading: Rows) -> Layout:
    """Return the layout of the file whose first usable row is `row`: detected, unless `reading` names it.

    Raises what `detect` raises.
    """
    row_format = detect(row, reading.columns) if reading.format == "auto" else reading.format
    return Layout(row_format, reading.columns, reading.roles)


def to_content(row: Any, layout: Layout, counts: KeyCounts | None = None) -> Content:
    """Return the content of `row` in `layout`, and add its keys to `counts`. Raises BadRow, PreferenceData."""
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
            _check_examples(fields, labels=False)
        wanted = " or ".join(" and ".join(map(fields.shown, keys)) for keys in alternatives)
        raise BadRow(
            Reason.WRONG_FORMAT, f"{layout.format} needs {wanted}; {_keys_text(fields.values, layout.columns)}"
        )
    content: Content
    if layout.format == "text":
        content = Text(fields.text("text"))
    else:
        turns = _turns_of(fields, layout.format, layout.roles)
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


def _keys_text(row: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    keys = [f"{key!r:.40}{' (null)' if row[key] is None else ''}" for key in sorted(row)[:8]]
    missing = [f"{theirs!r:.40}" for theirs in columns.values() if theirs not in (IGNORE, *row)]
    hint = f"`columns` names {', '.join(missing)}" if missing else "set `columns` if it has other names for them"
    return f"it has {', '.join(keys) or 'no keys'}; {hint}"
