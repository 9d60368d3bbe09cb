"""From a YAML file to a checked `Config`, or to all of its problems at once."""

import difflib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from pipeline_lib.base.errors import ConfigError
from pipeline_lib.config import strict_yaml
from pipeline_lib.config.schema import Config

WANTED = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "tuple": "a list",
    "model_type": "keys with values",
    "model_attributes_type": "keys with values",
    "finite_number": "a finite number",
}


def load_config(path: Path) -> Config:
    """Read and check the config file at `path`. Raises ConfigError with every problem it has."""
    document, lines = strict_yaml.load(path)
    try:
        text = json.dumps(_no_strange_values(document))
        config = Config.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(str(path), _problems(error, lines)) from error
    if problems := cross_check(config):
        raise ConfigError(str(path), problems)
    return config


def cross_check(config: Config) -> list[str]:
    """Problems between keys that are each right."""
    problems = []
    block, batch = config.shard.block_tokens, config.train.global_batch_tokens
    if config.tokenize.max_tokens > block:
        problems.append(
            f"tokenize.max_tokens: a sample of {config.tokenize.max_tokens} tokens does not fit a block of {block}; "
            "lower it or raise shard.block_tokens"
        )
    if batch % block:
        problems.append(
            f"train.global_batch_tokens: {batch} is not a multiple of shard.block_tokens ({block}); "
            f"try {max(1, round(batch / block)) * block}"
        )
    elif (batch // block) % (config.cluster.ranks * config.train.micro_batch_blocks):
        ranks, micro = config.cluster.ranks, config.train.micro_batch_blocks
        problems.append(
            f"train.global_batch_tokens: {batch // block} blocks a step cannot be shared by {ranks} ranks "
            f"x {micro} blocks; try {math.ceil(batch / block / ranks / micro) * ranks * micro * block}"
        )
    if config.train.method == "full" and config.train.lora != type(config.train.lora)():
        problems.append("train.lora: has values, and train.method is 'full'; set train.method: lora or remove them")
    return problems


def _no_strange_values(value: Any) -> Any:
    """Dates and the like become their text, NaN and infinities a word, so that the schema can refuse them."""
    if isinstance(value, dict):
        return {str(key): _no_strange_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_no_strange_values(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _problems(error: ValidationError, lines: dict[tuple[str | int, ...], int]) -> list[str]:
    problems = {}
    for detail in error.errors():
        if detail["type"] == "too_short" and detail["input"]:
            continue  # its items have problems of their own
        keys = _without_tags(detail["loc"], lines)
        line = next((lines[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in lines), None)
        text = _describe(detail, keys)
        problems.setdefault(text, f"line {line}: {text}" if line else text)
    return list(problems.values())


def _without_tags(loc: tuple[str | int, ...], lines: dict[tuple[str | int, ...], int]) -> tuple[str | int, ...]:
    """Pydantic puts the name of the union member into the location; the file has no such key."""
    keys: tuple[str | int, ...] = ()
    for position, part in enumerate(loc):
        is_last = position == len(loc) - 1
        if (*keys, part) in lines or (is_last and not _is_tag(part)) or not _is_tag(part):
            keys = (*keys, part)
    return keys


def _is_tag(part: str | int) -> bool:
    return part in {"tiny", "local", "pydoc", "file"} or str(part).startswith(("tuple[", "literal["))


def _describe(detail: Any, keys: tuple[str | int, ...]) -> str:
    name = _dotted(keys)
    kind, found, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{name}: unknown key{_nearest(str(keys[-1]), _names_beside(keys))}"
    if kind == "missing":
        return f"{name}: missing; it has no default"
    if kind == "union_tag_not_found":
        return f"{name}.source: missing; it has no default"
    if kind == "union_tag_invalid":
        valid = [tag.strip(" '") for tag in context["expected_tags"].split(",")]
        return f"{name}.source: {context['tag']!r} is not one of {', '.join(valid)}{_nearest(context['tag'], valid)}"
    if kind == "literal_error":
        valid = [word.strip(" '") for word in context["expected"].replace(" or ", ", ").split(",")]
        return f"{name}: {found!r} is not one of {', '.join(valid)}{_nearest(str(found), valid)}"
    wanted = next((text for prefix, text in WANTED.items() if kind.startswith(prefix) and "than" not in kind), None)
    if wanted and kind.endswith(("_type", "_parsing", "_number", "_from_float")):
        return f"{name}: {_short(found)} is not {wanted}"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{name}: {_short(found)} {message}" if not isinstance(found, dict) else f"{name}: {message}"


def _dotted(keys: Iterable[str | int]) -> str:
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}"
    return text.lstrip(".") or "the file"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest(word: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _names_beside(keys: tuple[str | int, ...]) -> list[str]:
    """Valid names where the unknown key `keys[-1]` stands, those of every member where it is a union."""
    models: list[type[BaseModel]] = [Config]
    for key in keys[:-1]:
        if isinstance(key, int):
            continue
        found = [model.model_fields[key].annotation for model in models if key in model.model_fields]
        models = [model for annotation in found for model in _models_in(annotation)]
    return sorted({name for model in models for name in model.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
