"""Every key of the config, walked out of the schema, for tests that have to cover all of them."""

import copy
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from pipeline_lib.config.schema import Config

# Valid configs that between them can hold every key.
TINY = {
    "experiment": "demo",
    "model": {"source": "tiny"},
    "data": {"train": [{"source": "pydoc"}]},
    "train": {"method": "lora"},
}
LOCAL = {
    "experiment": "demo",
    "model": {"source": "local", "path": "models/base"},
    "data": {"train": [{"source": "file", "path": "rows.jsonl"}]},
    "train": {"method": "lora"},
}
COMMIT = "a" * 40
HUB = {
    "experiment": "demo",
    "model": {"source": "huggingface", "name": "Qwen/Qwen3-0.6B", "revision": COMMIT},
    "data": {"train": [{"source": "modelscope", "name": "owner/rows", "revision": COMMIT}]},
    "train": {"method": "lora"},
}
CHILD = {
    "experiment": "demo",
    "model": {"source": "experiment", "name": "text"},
    "data": {"train": [{"source": "pydoc"}]},
    "train": {"method": "lora"},
}
BASES = {
    "(tiny)": TINY,
    "(pydoc)": TINY,
    "(local)": LOCAL,
    "(file)": LOCAL,
    "(huggingface)": HUB,
    "(experiment)": CHILD,
}


def all_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Paths such as `train.lora.rank`; where a source decides on keys, `model(tiny).layers`.

    A section that may be left out is one key, and so is a list of sections.
    """
    for name, field in section.model_fields.items():
        if name == "parent":
            continue  # no key of files: what the experiment of `model` is found to be
        members = [] if field.default in (None, ()) else sections_in(field.annotation)
        if not members:
            yield prefix + str(field.validation_alias or name)
        for member in members:
            source = ""
            if len(members) > 1:
                kinds: Any = member.model_fields["source"].annotation
                source = f"({kinds.__args__[0]})"
            yield from all_keys(member, f"{prefix}{name}{source}.")


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that an annotation names, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def with_value(key: str, value: Any) -> dict[str, Any]:
    """A config in which `key` has `value`, and all else is as in the base that has the key."""
    config: dict[str, Any] = copy.deepcopy(base_of(key))
    *above, last = plain(key).split(".")
    section: Any = config
    for name in above:
        section = section.setdefault(name, {})
        section = section[0] if isinstance(section, list) else section
    section[last] = value
    return config


def base_of(key: str) -> dict[str, Any]:
    """The config of this module that has `key`."""
    return next((base for source, base in BASES.items() if source in key), TINY)


def plain(key: str) -> str:
    """The key without the sources: `model.layers`."""
    for source in BASES:
        key = key.replace(source, "")
    return key
