"""What rows say that is not read: refused where it would change what is learnt, else counted by its key.

`columns: {KEY: ignore}` is how the owner of the data says that a key may be left out, those of KEPT_IN_TURNS only
in rows. Raw text stands for itself, so nothing beside it is refused.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pipeline_lib.base.redact import redact
from pipeline_lib.config.sources import IGNORE
from pipeline_lib.data.rows.conversation import BadRow, Reason, WrongFile
from pipeline_lib.data.rows.corpus import printable
from pipeline_lib.data.rows.fields import Fields

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
