"""The keys of rows, turns and calls that are not read, and those refused as harmful.

Refused are those that would change what is learned. A key is refused by its name in the tables, or
by the sense of its words: a system prompt, tools, thinking or calls under another name. The value
decides too: a number, a name or an identifier is no prompt and no thinking. Any other key is
counted by name. `columns: {KEY: ignore}` allows a key to be left out, a key of KEPT_IN_TURNS only
in rows. Rows of raw text have no refused keys.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import product
from typing import Any

from pipeline_lib.config.schema import IGNORE
from pipeline_lib.core.text import redact
from pipeline_lib.data.conversations import BadRow, Reason, WrongFile
from pipeline_lib.data.read_files import printable
from pipeline_lib.data.row_fields import Fields

# Names: `systemPrompt`, `SYSTEM-PROMPT`, `System Prompt` and `system_prompts` are the words
# (system, prompt).

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+")
MAX_NAME_CHARS = 60


@lru_cache(maxsize=4096)
def words_of(key: str) -> tuple[str, ...]:
    """Return the words of a `key` in lower case and singular; `chain of thought` is `cot`."""
    found = _WORD.findall(key[: 4 * MAX_NAME_CHARS].replace("CoT", "Cot"))
    words = " ".join(_singular(word.lower()) for word in found)
    for long in ("chain of thought", "train of thought", "chainofthought"):
        words = words.replace(long, "cot")
    return tuple(words.split())


def _singular(word: str) -> str:
    if word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


@lru_cache(maxsize=4096)
def _folded(key: str) -> str:
    return "".join(_WORD.findall(key[: 4 * MAX_NAME_CHARS])).lower()


# What the last words of a name say that the value is; `system_id` is an identifier, and
# `reasoning_model` a model.


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_VALUE_WORDS = _set("text content str string raw value json list")
# Words before a name that make it a property of the row: `has_reasoning`, `num_tools`,
# `type_of_reasoning`.
_PROPERTY_WORDS = _set(
    "is has had no not use using with without need require enable disable num n count max min avg "
    "total type kind of level"
)
_SYSTEM_WORDS = _set("system sys meta developer custom")
_PROMPT_WORDS = _set("prompt message msg instruction")
_SYSTEM_NAMES = _set("system sys preamble preprompt 系统 系统提示 系统提示词 系统消息 系统指令") | {
    first + last for first, last in product(_SYSTEM_WORDS, _PROMPT_WORDS)
}
_TOOL_NAMES = _set("tool function toolset 工具")
_TOOL_VALUES = _VALUE_WORDS | _set(
    "schema definition def declaration spec specification desc description set"
)
_THINKING_NAMES = _set(
    "think thinking thought reasoning cot rationale scratchpad monologue 思考 思考过程 推理 推理过程 思维链"
)
_THINKING_VALUES = _VALUE_WORDS | _set(
    "trace step trajectory process block chain path detail output log part segment"
)
_CALL_WORDS = _set("call use invocation")


def _without_ending(words: tuple[str, ...], endings: Collection[str]) -> tuple[str, ...]:
    while len(words) > 1 and words[-1] in endings:
        words = words[:-1]
    return words


class Sense(StrEnum):
    """What the words of a name say that its value is."""

    SYSTEM = "system"
    THINKING = "thinking"
    CALLS = "calls"
    TOOLS = "tools"


@lru_cache(maxsize=4096)
def sense_of(key: str) -> Sense | None:
    """Return what the words of `key` say that its value is; None if it is none of those."""
    words = words_of(key)
    if not words:
        return None
    if _is_system(_without_ending(words, _VALUE_WORDS)):
        return Sense.SYSTEM
    if words[0] in _PROPERTY_WORDS:
        return None
    if _without_ending(words, _THINKING_VALUES)[-1] in _THINKING_NAMES:
        return Sense.THINKING
    if _without_ending(words, _TOOL_VALUES)[-1] in _TOOL_NAMES:
        return Sense.TOOLS
    pair = _without_ending(words, _VALUE_WORDS)[-2:]
    is_call = len(pair) == 2 and pair[0] in _TOOL_NAMES and pair[1] in _CALL_WORDS
    return Sense.CALLS if is_call else None


def _is_system(words: tuple[str, ...]) -> bool:
    if len(words) == 1:
        return words[0] in _SYSTEM_NAMES
    return words[-2] in _SYSTEM_WORDS and words[-1] in _PROMPT_WORDS


# Values.

_NO_WORDS = frozenset(
    {"", "[]", "{}", "null", "none", "true", "false", "yes", "no", "on", "off", "n/a", "na", "nan"}
)
_NUMBER = re.compile(r"\s*[-+]?[\d.,]+(?:[eE][-+]?\d+)?\s*%?\s*")


def is_blank(value: Any) -> bool:
    """Return whether `value` says nothing."""
    return not value or _is_text(value, ("", "[]", "{}", "null"))


def _is_text(value: Any, words: Collection[str]) -> bool:
    return isinstance(value, str) and len(value) < 80 and value.strip().lower() in words


def has_words(value: Any) -> bool:
    """Return whether `value` holds a text that is no number and no answer such as `yes`."""
    if isinstance(value, str):
        return not _is_text(value, _NO_WORDS) and not (len(value) < 80 and _NUMBER.fullmatch(value))
    if isinstance(value, dict):
        return any(map(has_words, value.values()))
    return isinstance(value, list) and any(map(has_words, value))


def has_schemas(value: Any) -> bool:
    """Return whether `value` holds named objects, as schemas and calls do, or such JSON text."""
    if isinstance(value, str):
        return value.lstrip()[:1] in ("[", "{") and '"name"' in value
    if isinstance(value, dict):
        return "name" in value or any(
            has_schemas(item) for item in value.values() if isinstance(item, (dict, list))
        )
    return isinstance(value, list) and any(map(has_schemas, value))


# The tables, for rows of each format and for turns of each role.

# Keys of preference data: they compare answers, or label an answer as good or bad.
_COMPARED = (
    *("chosen", "chosen_response", "preferred_output"),
    *(
        "rejected",
        "rejected_response",
        "rejected_responses",
        "rejected_messages",
        "non_preferred_output",
    ),
)
_COMPARED_NAMES = frozenset(map(_folded, _COMPARED))
_LABELS = _set("label ktotag")
# Keys of a row for what its answer or trajectory came to. A turn may have them too, and a step
# without a reward is no failure.
_OUTCOMES = _set("reward success resolved solved")
# a number may be that of the right choice, or of tests
_VERDICTS = _set("correct iscorrect passed successful")
# Names that OpenAI, ms-swift and Axolotl use for the flag that an assistant's turn is trained on.
TRAINED_KEYS = ("weight", "loss", "train", "training", "loss_scale", "loss_weight", "loss_mask")
_TRAINED_NAMES = frozenset(map(_folded, TRAINED_KEYS))
# Keys with one meaning in a row and another in a turn: ignoring them in rows must not ignore them
# in turns.
KEPT_IN_TURNS = (*TRAINED_KEYS, "tools")
# Keys that some rows of a data set may have under our name, and others under the name in `columns`.
_MIXED = ("system", "tools", "tool_calls", "reasoning_content")

_ITS_NAME = "KEY"  # placeholder in a remedy for the key that it is about
MAX_KEYS = 100  # keys of a file that are counted by name


# Remedies for lists and objects, such as the blocks of an API.
_AS_TEXT = {
    Sense.SYSTEM: "not read: write its text as the system message",
    Sense.THINKING: "not read: write its text as reasoning_content",
}


@dataclass(frozen=True)
class Refusals:
    """The remedies for keys at one place: by their folded names, and by the sense of their words.

    The keys in `read` are read there, spelled like that.
    """

    read: frozenset[str]
    names: Mapping[str, str]
    senses: Mapping[Sense, str]

    def remedy(self, key: str, value: Any) -> str:
        """Return the remedy if `key` may not have this `value` there; "" if it may."""
        if key in self.read:
            return ""
        folded = _folded(key)
        if folded in self.names:
            is_harmless = _is_weight_of_one(value) if folded in _TRAINED_NAMES else is_blank(value)
            return "" if is_harmless else self.names[folded]
        sense = sense_of(key)
        if sense is None or sense not in self.senses:
            return ""
        if sense not in _AS_TEXT:
            return self.senses[sense] if has_schemas(value) else ""
        if not has_words(value):
            return ""
        return self.senses[sense] if isinstance(value, str) else _AS_TEXT[sense]


def _is_weight_of_one(value: Any) -> bool:
    return value is None or value == 1 or _is_text(value, ("", "1", "1.0", "true"))


def _to_read(ours: str) -> str:
    return f"not read; to read it set columns: {{{ours}: {_ITS_NAME}}}"


def _refusals(read: str, *tables: Mapping[str, str], **senses: str) -> Refusals:
    names = {_folded(key): remedy for table in tables for key, remedy in table.items()}
    return Refusals(_set(read), names, {Sense(sense): remedy for sense, remedy in senses.items()})


_MEDIA = dict.fromkeys(
    ("image", "images", "video", "videos", "audio", "audios"), "only text is supported"
)
_ANY_ROW = {
    **_MEDIA,
    **dict.fromkeys(
        ("chat_template_kwargs", "enable_thinking"),
        "not read: a row does not set the template's variables (tokenize.chat_template_kwargs "
        "sets them for all), and thinking is on where an answer has reasoning_content",
    ),
    "functions": _to_read("tools"),
    "documents": "not read: write their text into the question or the system message",
    **dict.fromkeys(
        TRAINED_KEYS, "rows are not weighted: remove the row, or weight the turns or the source"
    ),
}
# a list, in OpenRouter's format
_DETAILS = {"reasoning_details": "not read: write its text as reasoning_content"}
_DETAIL_NAMES = frozenset(map(_folded, _DETAILS))
_TO_CALL = "not read: write the row as messages, whose turns may call tools"
_ONE_ANSWER = {**_ANY_ROW, **_DETAILS, **dict.fromkeys(("tool_calls", "function_call"), _TO_CALL)}
_BESIDE_TURNS = {"history": "not read beside turns: write it as the first turns"}
_IN_ITS_TURN = "not read beside turns: write it into its turn as reasoning_content"
_IN_PROMPT = dict.fromkeys(("instruction", "input", "context"), "not read: put it into the prompt")
_WITH_HISTORY = (
    "not read; set format: alpaca and columns: {instruction: prompt, output: completion}"
)

_ROW_SENSES = {"system": _to_read("system"), "tools": _to_read("tools")}
_LISTED = _refusals("system tools", _ANY_ROW, _BESIDE_TURNS, thinking=_IN_ITS_TURN, **_ROW_SENSES)
_SENSES = {**_ROW_SENSES, "thinking": _to_read("reasoning_content"), "calls": _TO_CALL}
IN_ROWS: Mapping[str, Refusals] = {
    "alpaca": _refusals(
        "system tools reasoning_content input history",
        _ONE_ANSWER,
        {"context": _to_read("input"), "input": _to_read("input"), "history": _to_read("history")},
        **_SENSES,
    ),
    "sharegpt": _LISTED,
    "messages": _LISTED,
    "prompt_completion": _refusals(
        "system tools reasoning_content",
        _ONE_ANSWER,
        _IN_PROMPT,
        {"history": _WITH_HISTORY},
        **_SENSES,
    ),
}

_READ_IN_TURNS = " ".join((*TRAINED_KEYS, "tool_calls"))
_TOOLS_OF_ROW = "not read here: write it as `tools` of the row or of its system turn"
_ANY_TURN = {
    **_MEDIA,
    **dict.fromkeys(("tools", "functions"), _TOOLS_OF_ROW),
    "function_call": "not read; write it as tool_calls",
    **dict.fromkeys(
        ("train_detail", "training_detail"), "not read: a turn is trained on as a whole"
    ),
    **dict.fromkeys(TRAINED_KEYS, "not read in this spelling: write it as `loss`"),
}
_MASKS = dict.fromkeys(
    ("mask", "masked"), "not read: write `loss: false` into a turn that is not trained on"
)
_FIRST_TURN = "not read here: write it as a first turn of the role system"
_USER_TURN = _refusals(_READ_IN_TURNS, _ANY_TURN, system=_FIRST_TURN, calls=_to_read("tool_calls"))
_ASSISTANT_TURN = _refusals(
    f"{_READ_IN_TURNS} reasoning_content",
    _ANY_TURN,
    _DETAILS,
    _MASKS,
    system=_FIRST_TURN,
    tools=f"{_TOOLS_OF_ROW}, or as tool_calls if it is a call",
    thinking=_to_read("reasoning_content"),
    calls=_to_read("tool_calls"),
)
IN_TURNS: Mapping[str, Refusals] = {
    "system": _refusals("tools", _MEDIA, {"functions": _to_read("tools")}, tools=_to_read("tools")),
    "user": _USER_TURN,
    "assistant": _ASSISTANT_TURN,
    "function_call": _ASSISTANT_TURN,
    "tool": _USER_TURN,
}
_IN_PARTS = _refusals("", thinking="not read here: write it as reasoning_content of the turn")


# The checks.


@dataclass(eq=False)
class PreferenceData(WrongFile):
    """The error for a row that compares answers, or labels its answer as bad, by its `keys`."""

    keys: tuple[str, ...]

    def __str__(self) -> str:
        ignored = ", ".join(f"{key}: {IGNORE}" for key in self.keys)
        return (
            f"is preference data by its {' and '.join(self.keys)}: only good examples can be "
            "trained on. Keep only those, or take another data set. If the name means something "
            f"else, set columns: {{{ignored}}}"
        )


def check_examples(fields: Fields, *, labels: bool = True) -> None:
    """Raise PreferenceData if the row or turn compares answers or, if `labels`, calls one bad."""
    keys = [key for key in _keys_of(fields) if _is_of_bad_example(fields, key, labels)]
    if keys:
        raise PreferenceData(tuple(sorted(keys)))


def _is_of_bad_example(fields: Fields, key: str, labels: bool) -> bool:
    folded = _folded(key)
    if folded in _COMPARED_NAMES:
        return not is_blank(fields.peek(key))
    if not labels:
        return False
    value = fields.peek(key)
    if folded in _LABELS:
        return _is_zero(value)
    if fields.where:
        return False
    if folded == "reward" and value == -1:  # what some environments give for a failure
        return True
    if folded in _OUTCOMES:
        return _is_zero(value)
    return folded in _VERDICTS and (value is False or _is_text(value, ("false",)))


def _is_zero(value: Any) -> bool:
    return value == 0 or _is_text(value, ("0", "0.0", "false"))


def _keys_of(fields: Fields) -> Collection[str]:
    """Return the keys of a row or turn, and our names that `columns` gives to others."""
    return {*fields.values, *fields.names} if fields.names else fields.values.keys()


def refuse(fields: Fields, refusals: Refusals) -> None:
    """Raise BadRow for the first key of the row or turn that `refusals` forbid with its value.

    Raise it also for a key of ours that has a value, if `columns` reads that key from another one
    that is blank.
    """
    for key in fields.displaced(_MIXED):
        if is_blank(fields.peek(key)) and not is_blank(fields.values[key]):
            remedy = f"write it as {fields.shown(key)}, or give such files a source of their own"
            raise BadRow(
                Reason.BAD_VALUE,
                f"{fields.where}{key}: not read, because `columns` gives another name: {remedy}",
            )
    found = {}
    for key in _keys_of(fields):
        value = fields.peek(key)
        if value is not None and (remedy := refusals.remedy(key, value)):
            found[key] = remedy
    if found and not is_blank(fields.peek("reasoning_content")):  # the thinking, and it is repeated
        found = {key: remedy for key, remedy in found.items() if not _is_thinking(key)}
    for key in sorted(found):
        is_kept = fields.where and key in KEPT_IN_TURNS
        ignoring = "" if is_kept else f"; to leave it out set columns: {{{key}: {IGNORE}}}"
        raise BadRow(
            Reason.BAD_VALUE, f"{fields.shown(key)}: {found[key].replace(_ITS_NAME, key)}{ignoring}"
        )


def _is_thinking(key: str) -> bool:
    return key != "reasoning_content" and (
        sense_of(key) is Sense.THINKING or _folded(key) in _DETAIL_NAMES
    )


def refuse_in_parts(turn: Fields) -> None:
    """Raise BadRow for thinking in the calls and the parts of the content of a turn."""
    for part in turn.parts:
        refuse(part, _IN_PARTS)


@dataclass
class KeyCounts:
    """Counts of the keys in rows.

    `unread` counts the values of each key that was not read, `others` the values of keys beyond
    MAX_KEYS. A column is counted under its name, a key of turns as `messages[].name`, one of their
    calls as `messages[].tool_calls[].name`. `named` holds the names in `columns` that any row has,
    and `roles` those in `roles` that any turn has; `first` the keys of the first row that is an
    object, and is empty if there was no such row.
    """

    unread: Counter[str] = field(default_factory=Counter)
    others: int = 0
    named: set[str] = field(default_factory=set)
    roles: set[str] = field(default_factory=set)
    first: tuple[str, ...] = ()

    def add(self, more: "KeyCounts") -> None:
        """Add the counts of later rows."""
        for name, number in more.unread.items():
            self._count(name, number)
        self.others += more.others
        self.named |= more.named
        self.roles |= more.roles
        self.first = self.first or more.first

    def count_unread(self, row: Fields) -> None:
        """Count the unread keys of a row, of its turns, and of their calls and parts."""
        for name in row.unread():
            self._count(_shown(name), 1)
        for turns, turn in row.turns:
            for name in turn.unread():
                self._count(f"{turns}[].{_shown(name)}", 1)
            for part in turn.parts:
                for name in part.unread():
                    self._count(f"{turns}[].{part.place}.{_shown(name)}", 1)

    def note(self, row: Fields, names: Collection[str], roles: Collection[str] = ()) -> None:
        """Record which `names` the row or its turns have, the turns' `roles`, and first keys.

        The keys are those of the first row.
        """
        if self.first and not names and not roles:
            return
        objects = [row.values]
        for _, turn in row.turns:
            objects += [turn.values, *(part.values for part in turn.parts)]
        if not self.first:
            self.first = tuple(
                sorted({_shown(key) for values in objects for key in values})[:MAX_KEYS]
            )
        missing = [name for name in names if name not in self.named]
        self.named.update(name for name in missing if any(name in values for values in objects))
        if len(self.roles) < len(roles):
            of_turns = [turn.peek(key) for _, turn in row.turns for key in ("role", "from")]
            self.roles.update(role for role in roles if role in of_turns)

    def _count(self, name: str, number: int) -> None:
        if name in self.unread or len(self.unread) < MAX_KEYS:
            self.unread[name] += number
        else:
            self.others += number


@lru_cache(maxsize=4 * MAX_KEYS)
def _shown(key: str) -> str:
    return printable(redact(key[: 4 * MAX_NAME_CHARS])[:MAX_NAME_CHARS])
