"""The keys that are refused, with what to do instead: in rows of each format, in turns of each role."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline_lib.data.key_senses import (
    Sense,
    folded,
    has_schemas,
    has_words,
    is_blank,
    is_text,
    sense_of,
    word_set,
)

# Keys of preference data: they compare answers, or label an answer as good or bad.
_COMPARED = (
    "chosen",
    "chosen_response",
    "preferred_output",
    "rejected",
    "rejected_response",
    "rejected_responses",
    "rejected_messages",
    "non_preferred_output",
)
COMPARED_NAMES = frozenset(map(folded, _COMPARED))
LABELS = word_set("label ktotag")
# Keys of a row for what its answer or trajectory came to. A turn may have them too, and a step
# without a reward is no failure.
OUTCOMES = word_set("reward success resolved solved")
# a number may be that of the right choice, or of tests
VERDICTS = word_set("correct iscorrect passed successful")
# Names that OpenAI, ms-swift and Axolotl use for the flag that an assistant's turn is trained on.
TRAINED_KEYS = ("weight", "loss", "train", "training", "loss_scale", "loss_weight", "loss_mask")
_TRAINED_NAMES = frozenset(map(folded, TRAINED_KEYS))
# Keys with one meaning in a row and another in a turn: ignoring them in rows must not ignore them
# in turns.
KEPT_IN_TURNS = (*TRAINED_KEYS, "tools")
# Keys that some rows of a data set may have under our name, and others under the name in `columns`.
MIXED = ("system", "tools", "tool_calls", "reasoning_content")

ITS_NAME = "KEY"  # placeholder in a remedy for the key that it is about


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
        name = folded(key)
        if name in self.names:
            is_harmless = is_blank(value)
            if name in _TRAINED_NAMES:
                is_harmless = _is_weight_of_one(value)
            return "" if is_harmless else self.names[name]
        sense = sense_of(key)
        if sense is None or sense not in self.senses:
            return ""
        if sense not in _AS_TEXT:
            return self.senses[sense] if has_schemas(value) else ""
        if not has_words(value):
            return ""
        return self.senses[sense] if isinstance(value, str) else _AS_TEXT[sense]


def _is_weight_of_one(value: Any) -> bool:
    return value is None or value == 1 or is_text(value, ("", "1", "1.0", "true"))


def _to_read(ours: str) -> str:
    return f"not read; to read it set columns: {{{ours}: {ITS_NAME}}}"


def _refusals(read: str, *tables: Mapping[str, str], **senses: str) -> Refusals:
    names = {}
    for table in tables:
        for key, remedy in table.items():
            names[folded(key)] = remedy
    of_senses = {Sense(sense): remedy for sense, remedy in senses.items()}
    return Refusals(word_set(read), names, of_senses)


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
DETAIL_NAMES = frozenset(map(folded, _DETAILS))
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
IN_PARTS = _refusals("", thinking="not read here: write it as reasoning_content of the turn")
