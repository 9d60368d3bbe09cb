"""What is wrong with a config by its schema, in words: pydantic's errors, with what to write."""

import json
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from pipeline_lib.config.other_tools import LAUNCHERS, hint_for
from pipeline_lib.config.schema import (
    NAME_PATTERN,
    AdapterSource,
    ConfigFile,
    DataSource,
    ModelSource,
)
from pipeline_lib.config.section import REPOSITORY_PATTERN, Section, fields_of
from pipeline_lib.config.strict_yaml import Keys, at_nearest, dotted
from pipeline_lib.core.text import cut, did_you_mean

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "keys with values",
    "model_type": "keys with values",
    "model_attributes_type": "keys with values",
}
# Members of `word | list` and the like, by the name that pydantic gives them.
_WORD = "a word"
_MEMBERS = {
    "literal": _WORD,
    "tuple": "a list",
    "int": "a whole number",
    "constrained-int": "a whole number",
    "bool": "true or false",
}
_MEANT = {
    NAME_PATTERN: "a name of up to 128 letters, digits, '.', '_', '-' and '=', the first a letter "
    "or a digit",
    REPOSITORY_PATTERN: "owner/name, as in Qwen/Qwen3-8B",
}


def schema_problems(error: ValidationError, places: Mapping[Keys, str]) -> list[str]:
    """Return the problems that pydantic found, each after the place of its key in `places`."""
    problems = []
    errors = error.errors()
    for detail in errors:
        # Pydantic also reports a list as too short if its items are wrong.
        if detail["type"] == "too_short" and detail["input"]:
            continue
        member = _member(detail)
        beside = {_member(other) for other in errors if other["loc"][:-1] == detail["loc"][:-1]}
        # It reports each member of `word | list` or `word | number`, also the one not meant.
        is_about_meant = isinstance(detail["input"], str) == (member == _WORD)
        if member and _WORD in beside and not is_about_meant:
            continue
        keys, names = key_in_file(detail["loc"])
        if detail["type"].startswith("union_tag"):
            keys = (*keys, "source")
        others = sorted(beside - {_WORD, ""}) if member == _WORD else []
        problems.append(with_place(keys, _in_words(detail, keys, names, others), places))
    return problems


def _member(detail: Any) -> str:
    """Return in words which member of a union an error is about; empty if about none."""
    if not detail["loc"]:
        return ""
    last = str(detail["loc"][-1])
    for name, words in _MEMBERS.items():
        if last == name or last.startswith(f"{name}["):
            return words
    return ""


def with_place(keys: Keys, text: str, places: Mapping[Keys, str]) -> str:
    """Return the problem with its key, and the line or flag of that key or the nearest above."""
    place = at_nearest(places, keys)
    if place:
        return f"{place}: {dotted(keys)}: {text}"
    return f"{dotted(keys) or 'the file'}: {text}"


def _in_words(detail: Any, keys: Keys, names: list[str], others: list[str]) -> str:
    """Return the problem in words; `others` are the kinds of value allowed besides a word."""
    kind = detail["type"]
    found = detail["input"]
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        where = f" where source is {detail['loc'][-2]}" if "source" in names else ""
        return f"unknown key{where}{_hint(str(keys[-1]), names)}"
    if kind == "union_tag_not_found":
        return f"missing; it is one of {', '.join(_sources(keys))}"
    if kind == "missing":
        return "missing; it has no default"
    if kind == "union_tag_invalid":
        return _not_one_of(found["source"], context["expected_tags"].split(", "))
    if kind == "literal_error":
        words = context["expected"].replace(" or ", ", ").split(", ")
        if keys[-1] == "launcher" and isinstance(found, str) and found in LAUNCHERS:
            return f"{_short(found)} is not one of {', '.join(words)}; {LAUNCHERS[found]}"
        return _not_one_of(found, [*words, *others])
    if kind in _WANTED:
        return f"{_short(found)} is not {_WANTED[kind]}{_form_of(kind, found, keys)}"
    if kind == "string_pattern_mismatch":
        return f"{_short(found)} is not {_MEANT[context['pattern']]}"
    if kind == "too_short":
        return f"needs at least {context['min_length']} item"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return message if isinstance(found, dict) else f"{_short(found)} {message}"


def _sources(keys: Keys) -> list[str]:
    """Return the values that `source` may have at `keys`: `model.source`, `data.train[0].source`."""
    union = ModelSource if keys[0] == "model" else DataSource
    if keys[:2] == ("model", "adapter"):
        union = AdapterSource
    sources: list[str] = []
    for section in get_args(get_args(union)[0]):
        sources += _sources_of(section)
    return sources


def _sources_of(section: type[Section]) -> tuple[str, ...]:
    """Return the values of `source` by which `section` is chosen."""
    return get_args(section.model_fields["source"].annotation)


def _form_of(kind: str, found: Any, keys: Keys) -> str:
    """Return how to write a value that is of another kind than `kind` wants; empty if it is plain."""
    if kind == "string_type" and isinstance(found, int | float):
        return "; put it in quotes"
    if kind == "tuple_type" and keys in (("data", "train"), ("data", "validation")):
        path = found if isinstance(found, str) else "FILE"
        return f"; write {keys[-1]}: [{{source: file, path: {path}}}]"
    if kind == "tuple_type" and isinstance(found, str | int | float):
        return f"; write [{found}]"
    wanted = [key for key, field in fields_of(ConfigFile) if field.is_required()]
    inside = [key for key in wanted if key.startswith(f"{dotted(keys)}.")]
    if found is None and inside:
        return f"; it needs {', '.join(inside)}"
    return ""


def _hint(word: str, names: list[str]) -> str:
    """Return what the unknown key `word` may be; `names` are valid in its place."""
    if hint := hint_for(word):
        return f"; {hint}"
    elsewhere = [key for key, _ in fields_of(ConfigFile) if key.rpartition(".")[2] == word]
    if elsewhere:
        return f"; here it is {' or '.join(elsewhere)}"
    return _nearest(word, names)


# What people write for a value that has another name here, or two.
_WRITTEN = {
    "on": "true",
    "yes": "true",
    "off": "false",
    "no": "false",
    "qlora": "lora, and train.lora.base: nf4",
}


def _not_one_of(found: Any, quoted: list[str]) -> str:
    words = [word.strip("'") for word in quoted]
    problem = f"{_short(found)} is not one of {', '.join(words)}"
    if isinstance(found, str) and found.lower() in _WRITTEN:
        return f"{problem}; write {_WRITTEN[found.lower()]}"
    return f"{problem}{_nearest(str(found), words)}"


def _nearest(word: str, valid: list[str]) -> str:
    if "." in word and not any("." in one for one in valid):
        return f"; nest it, {word.replace('.', ': {')}: ...{'}' * word.count('.')}"
    return did_you_mean(word.lower().replace("-", "_"), valid, cutoff=0.5)


def _short(value: Any) -> str:
    if value is None:
        return "an empty value"
    return cut(json.dumps(value, ensure_ascii=False), 60)


def key_in_file(loc: tuple[str | int, ...]) -> tuple[Keys, list[str]]:
    """Return the key of `loc` in the file, and the names that are valid beside its last part.

    After the key of a union, pydantic adds the name of the member that it tried; the file has no
    such key.
    """
    keys: Keys = ()
    beside: list[type[Section]] = []
    here: list[type[Section]] = [ConfigFile]
    for part in loc:
        chosen = [section for section in here if len(here) > 1 and part in _sources_of(section)]
        if chosen:
            here = chosen
        elif part in ("str", *(section.__name__ for section in here)):
            continue  # a member of `text | section`, by the name that pydantic gives it
        elif here or isinstance(part, int):
            keys = (*keys, part)
            beside = here
            if not isinstance(part, int):
                here = _below(here, part)
    names = set()
    for section in beside:
        for name, field in section.model_fields.items():
            names.add(str(field.validation_alias or name))
    return keys, sorted(names)


def _below(sections: list[type[Section]], key: str) -> list[type[Section]]:
    """Return the sections that the value of `key` in one of `sections` may be."""
    below = []
    for section in sections:
        if key in section.model_fields:
            below += _sections_in(section.model_fields[key].annotation)
    return below


def _sections_in(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections_in(argument)]
