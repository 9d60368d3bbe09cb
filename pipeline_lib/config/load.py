"""Load a YAML file as checked `Config`s, or report all of its problems at once."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from pipeline_lib.config import strict_yaml
from pipeline_lib.config.checks import cross_check
from pipeline_lib.config.halving import Halving, halving_problems
from pipeline_lib.config.other_tools import LAUNCHERS, hint_for
from pipeline_lib.config.schema import (
    NAME_PATTERN,
    REPOSITORY_PATTERN,
    Config,
    ConfigFile,
    DataSource,
    ModelSource,
)
from pipeline_lib.config.section import Section, fields_of
from pipeline_lib.config.strict_yaml import Keys, as_written, dotted, undotted
from pipeline_lib.config.sweep import (
    HALVING,
    Variant,
    collapsed,
    line_of,
    name_by,
    put,
    read_sweep,
)
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.text import cut, did_you_mean

# Hints for unknown keys: the key belongs to another section, or is another tool's name for a key.


def _hint(word: str, names: list[str]) -> str:
    """Return what the unknown key `word` may be; `names` are valid in its place."""
    if hint := hint_for(word):
        return f"; {hint}"
    elsewhere = [key for key, _ in fields_of(ConfigFile) if key.rpartition(".")[2] == word]
    return f"; here it is {' or '.join(elsewhere)}" if elsewhere else _nearest(word, names)


# Loading: from a YAML file to checked `Config`s.

# finds further problems of a config; each begins with its key
Check = Callable[[Config], list[str]]
FLAG = "--what-if"


@dataclass(frozen=True)
class Overrides:
    """Values `KEY=VALUE` in place of a file's, in each of its experiments.

    A key is dotted, and a value YAML. `flag` stands before each on the command line. If
    `in_names`, the experiments are others than those of the file, and their names say the values.
    """

    settings: Sequence[str] = ()
    flag: str = FLAG
    in_names: bool = False


NONE_OVERRIDDEN = Overrides()

WANTED = {
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
    "float_type": "a number",
    "string_type": "text",
    "tuple_type": "a list",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "keys with values"),
}
# Members of `word | list` and the like, by the name that pydantic gives them.
WORD = "a word"
MEMBERS = {
    "literal": WORD,
    "tuple": "a list",
    **dict.fromkeys(("int", "constrained-int"), "a whole number"),
    "bool": "true or false",
}
MEANT = {
    NAME_PATTERN: "a name of up to 128 letters, digits, '.', '_', '-' and '=', the first a letter "
    "or a digit",
    REPOSITORY_PATTERN: "owner/name, as in Qwen/Qwen3-8B",
}


@dataclass(frozen=True)
class LoadedConfig:
    """The experiments of a config file.

    `name` is the file's; `halving_line` begins problems with `halving`.
    """

    name: str
    configs: tuple[Config, ...]
    halving: Halving | None
    halving_line: str


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Load and check the config file at `path`; of a sweep, return the first experiment.

    Raises as `load_configs`.
    """
    return load_configs(path, overrides)[0]


def load_configs(path: Path, overrides: Sequence[str] = ()) -> tuple[Config, ...]:
    """Load and check the experiments of the config file at `path`: one, or all of its sweep.

    `overrides` are settings of the flag FLAG, see Overrides. Raises ConfigError with every problem.
    """
    return load_sweep(path, Overrides(overrides)).configs


def load_sweep(
    path: Path, overrides: Overrides = NONE_OVERRIDDEN, checks: Sequence[Check] = ()
) -> LoadedConfig:
    """Load as `load_configs`, and also return the name and the halving settings of the file.

    Each of `checks` finds further problems of a config. A problem is left out if its key already
    has one.
    """
    document = strict_yaml.load(path)
    if document.value is None:
        raise ConfigError(str(path), ["holds no keys; config/config.yaml is an example"])
    problems = list(document.problems)
    sweep = read_sweep(document)
    problems += sweep.problems
    checked = [_checked(variant, sweep.halving, overrides, checks) for variant in sweep.variants]
    problems += collapsed(
        [(variant.tag, own) for variant, (_, own) in zip(sweep.variants, checked, strict=True)]
    )
    if problems:
        raise ConfigError(str(path), problems)
    configs = tuple(config for config, _ in checked if config is not None)
    tag = sweep.variants[0].tag
    name = configs[0].experiment.removesuffix(f"-{tag}" if tag else "")
    return LoadedConfig(name, configs, sweep.halving, line_of(document.lines, HALVING))


def _validated(value: Any) -> Config:
    """Return the config `value` of a file, whose keys go by their names in files alone."""
    return Config.model_validate_json(json.dumps(value), by_alias=True, by_name=False)


def problems_of(value: Mapping[str, Any], places: Mapping[Keys, str]) -> list[str]:
    """Return the problems of the config `value`, each after the place of its key in `places`."""
    try:
        config = _validated(value)
    except ValidationError as error:
        return _problems(error, places)
    return [_with_place(keys, text, places) for keys, text in cross_check(config)]


def _checked(
    variant: Variant, halving: Halving | None, overrides: Overrides, checks: Sequence[Check]
) -> tuple[Config | None, list[str]]:
    """Return one experiment's config and its problems; no config if it breaks the schema."""
    problems: list[str] = []
    places = {keys: f"line {line}" for keys, line in variant.lines.items()}
    for setting in overrides.settings:
        problems += _override(variant.value, places, overrides.flag, setting)
    problems += _repeated(overrides)
    if overrides.in_names and not problems:
        name_by(variant.value, variant.tag, overrides.settings)
    try:
        config = _config_of(variant.value)
    except ValidationError as error:
        return None, [*problems, *_problems(error, places)]
    wrong = [*cross_check(config), *(halving_problems(halving, config) if halving else ())]
    problems += [_with_place(keys, text, places) for keys, text in wrong]
    wrong_keys = {dotted(keys) for keys, _ in wrong}
    for check in checks:
        own = [text.partition(": ") for text in check(config)]
        own = [parts for parts in own if parts[0] not in wrong_keys]
        wrong_keys |= {key for key, _, _ in own}
        for key, colon, text in own:
            keys = undotted(key)
            is_key = keys and keys[0] in Config.model_fields
            problems.append(_with_place(keys, text, places) if is_key else key + colon + text)
    return config, problems


def _config_of(value: Any) -> Config:
    """Return the config.

    Where text is wanted, a bare number is taken as it was written: `experiment: 007`. Raises
    ValidationError.
    """
    try:
        return _validated(value)
    except ValidationError as error:
        is_changed = False
        for detail in error.errors():
            if detail["type"] != "string_type":
                continue
            *above, last = _in_file(detail["loc"])[0]
            section = value
            for part in above:
                section = section[part]
            number = section[last]
            section[last] = as_written(number)
            is_changed |= section[last] is not number
        if not is_changed:
            raise
    return _validated(value)


def _repeated(overrides: Overrides) -> list[str]:
    """Return a problem for each key that is given more than once, of which the last would count."""
    values: dict[str, list[str]] = {}
    for setting in overrides.settings:
        key, _, value = setting.partition("=")
        values.setdefault(key, []).append(value)
    return [
        f"{overrides.flag} {key}: given {len(given)} times ({' and '.join(given)}); give it once, "
        "and ask again for the other"
        for key, given in values.items()
        if len(given) > 1
    ]


def _override(root: Any, places: dict[Keys, str], flag: str, setting: str) -> list[str]:
    """Put the value of `setting` into `root` and its origin into `places`; return the problems."""
    key, equals, text = setting.partition("=")
    given_as = f"{flag} {setting}".strip()
    keys = undotted(key)
    if not equals or not keys:
        example = f"{flag} cluster.nodes=2".strip()
        return [f"{given_as}: not of the form KEY=VALUE, as in {example}"]
    try:
        given = strict_yaml.parse(text, given_as)
    except ConfigError as error:
        return [f"{given_as}: {problem}" for problem in error.problems]
    if problem := put(root, keys, given.value):
        return [f"{given_as}: {problem}"]
    for below in [known for known in places if known[: len(keys)] == keys]:
        del places[below]
    places.update({keys[:end]: given_as for end in range(1, len(keys)) if keys[:end] not in places})
    places[keys] = given_as
    return [f"{given_as}: {problem}" for problem in given.problems]


def _problems(error: ValidationError, places: Mapping[Keys, str]) -> list[str]:
    problems = []
    errors = error.errors()
    for detail in errors:
        # Pydantic also reports the member of `word | list` or `word | number` that was not meant,
        # and a list as too short if its items are wrong: another error describes the same problem
        # better.
        beside = {_member(other) for other in errors if other["loc"][:-1] == detail["loc"][:-1]}
        is_other_member = (
            isinstance(detail["input"], str) != (_member(detail) == WORD) and WORD in beside
        )
        if (is_other_member and _member(detail)) or (
            detail["type"] == "too_short" and detail["input"]
        ):
            continue
        keys, names = _in_file(detail["loc"])
        if detail["type"].startswith("union_tag"):
            keys = (*keys, "source")
        others = sorted(beside - {WORD, ""}) if _member(detail) == WORD else []
        problems.append(_with_place(keys, _describe(detail, keys, names, others), places))
    return problems


def _member(detail: Any) -> str:
    """Return in words which member of a union an error is about; empty if about none."""
    last = str(next(iter(detail["loc"][-1:]), ""))
    return next(
        (words for name, words in MEMBERS.items() if last == name or last.startswith(f"{name}[")),
        "",
    )


def _with_place(keys: Keys, text: str, places: Mapping[Keys, str]) -> str:
    """Return the problem with its key, and the line or flag of that key or the nearest above."""
    place = next(
        (places[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in places), None
    )
    return f"{place}: {dotted(keys)}: {text}" if place else f"{dotted(keys) or 'the file'}: {text}"


def _describe(detail: Any, keys: Keys, names: list[str], others: list[str]) -> str:
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
    if kind in WANTED:
        return f"{_short(found)} is not {WANTED[kind]}{_form_of(kind, found, keys)}"
    if kind == "string_pattern_mismatch":
        return f"{_short(found)} is not {MEANT[context['pattern']]}"
    if kind == "too_short":
        return f"needs at least {context['min_length']} item"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return message if isinstance(found, dict) else f"{_short(found)} {message}"


def _sources(keys: Keys) -> list[str]:
    """Return the values that `source` may have at `keys`: `model.source`, `data.train[0].source`."""
    kinds = get_args(get_args(ModelSource if keys[0] == "model" else DataSource)[0])
    return [source for kind in kinds for source in _sources_of(kind)]


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
    return f"; it needs {', '.join(inside)}" if found is None and inside else ""


# What people write for a value that has another name here, or two.
_WRITTEN = {
    **dict.fromkeys(("on", "yes"), "true"),
    **dict.fromkeys(("off", "no"), "false"),
    "qlora": "lora, and train.lora.base: nf4",
}


def _not_one_of(found: Any, quoted: list[str]) -> str:
    words = [word.strip("'") for word in quoted]
    if isinstance(found, str) and found.lower() in _WRITTEN:
        return f"{_short(found)} is not one of {', '.join(words)}; write {_WRITTEN[found.lower()]}"
    return f"{_short(found)} is not one of {', '.join(words)}{_nearest(str(found), words)}"


def _nearest(word: str, valid: list[str]) -> str:
    if "." in word and not any("." in one for one in valid):
        return f"; nest it, {word.replace('.', ': {')}: ...{'}' * word.count('.')}"
    return did_you_mean(word.lower().replace("-", "_"), valid, cutoff=0.5)


def _short(value: Any) -> str:
    return "an empty value" if value is None else cut(json.dumps(value, ensure_ascii=False), 60)


def _in_file(loc: tuple[str | int, ...]) -> tuple[Keys, list[str]]:
    """Return the place of `loc` in the file, and the names that are valid beside its last key.

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
            continue
        elif here or isinstance(part, int):
            keys = (*keys, part)
            beside = here
            if not isinstance(part, int):
                fields = [
                    section.model_fields[part] for section in here if part in section.model_fields
                ]
                here = [section for field in fields for section in _sections_in(field.annotation)]
    names = {
        field.validation_alias or name
        for section in beside
        for name, field in section.model_fields.items()
    }
    return keys, sorted(map(str, names))


def _sections_in(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections_in(argument)]
