"""What the name of a key, and its value, say that the value is.

Names are compared by their words: `systemPrompt`, `SYSTEM-PROMPT`, `System Prompt` and
`system_prompts` are the words (system, prompt). The last words decide: `system_id` is an
identifier, and `reasoning_model` a model.
"""

import re
from collections.abc import Collection
from enum import StrEnum
from functools import lru_cache
from itertools import product
from typing import Any

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
def folded(key: str) -> str:
    """Return the letters and digits of `key` in lower case: names that differ in form are alike."""
    return "".join(_WORD.findall(key[: 4 * MAX_NAME_CHARS])).lower()


def word_set(words: str) -> frozenset[str]:
    """Return the words in `words`."""
    return frozenset(words.split())


_VALUE_WORDS = word_set("text content str string raw value json list")
# Words before a name that make it a property of the row: `has_reasoning`, `num_tools`,
# `type_of_reasoning`.
_PROPERTY_WORDS = word_set(
    "is has had no not use using with without need require enable disable num n count max min avg "
    "total type kind of level"
)
_SYSTEM_WORDS = word_set("system sys meta developer custom")
_PROMPT_WORDS = word_set("prompt message msg instruction")
_SYSTEM_NAMES = word_set(
    "system sys preamble preprompt 系统 系统提示 系统提示词 系统消息 系统指令"
) | {first + last for first, last in product(_SYSTEM_WORDS, _PROMPT_WORDS)}
_TOOL_NAMES = word_set("tool function toolset 工具")
_TOOL_VALUES = _VALUE_WORDS | word_set(
    "schema definition def declaration spec specification desc description set"
)
_THINKING_NAMES = word_set(
    "think thinking thought reasoning cot rationale scratchpad monologue 思考 思考过程 推理 推理过程 思维链"
)
_THINKING_VALUES = _VALUE_WORDS | word_set(
    "trace step trajectory process block chain path detail output log part segment"
)
_CALL_WORDS = word_set("call use invocation")


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


_NO_WORDS = frozenset(
    {"", "[]", "{}", "null", "none", "true", "false", "yes", "no", "on", "off", "n/a", "na", "nan"}
)
_NUMBER = re.compile(r"\s*[-+]?[\d.,]+(?:[eE][-+]?\d+)?\s*%?\s*")


def is_blank(value: Any) -> bool:
    """Return whether `value` says nothing."""
    return not value or is_text(value, ("", "[]", "{}", "null"))


def is_text(value: Any, words: Collection[str]) -> bool:
    """Return whether `value` is a text that is one of `words`, in any case."""
    return isinstance(value, str) and len(value) < 80 and value.strip().lower() in words


def has_words(value: Any) -> bool:
    """Return whether `value` holds a text that is no number and no answer such as `yes`."""
    if isinstance(value, str):
        return not is_text(value, _NO_WORDS) and not (len(value) < 80 and _NUMBER.fullmatch(value))
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
