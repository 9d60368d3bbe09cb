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


def all_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Paths such as `train.lora.rank`; where a source decides what keys there are, `model(tiny).layers`."""
    for name, field in section.model_fields.items():
        members = sections_in(field.annotation)
        if not members:
            yield prefix + name
        for member in members:
            source = f"({member.model_fields['source'].annotation.__args__[0]})" if len(members) > 1 else ""  # type: ignore[union-attr]
            yield from all_keys(member, f"{prefix}{name}{source}.")


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that an annotation names, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


def with_value(key: str, value: Any) -> dict[str, Any]:
    """A config in which `key` has `value`, and all else is as in TINY or LOCAL, whichever has the key."""
    config: dict[str, Any] = copy.deepcopy(LOCAL if "(local)" in key or "(file)" in key else TINY)
    *above, last = plain(key).split(".")
    section: Any = config
    for name in above:
        section = section.setdefault(name, {})
        section = section[0] if isinstance(section, list) else section
    section[last] = value
    return config


def plain(key: str) -> str:
    """The key without the sources: `model.layers`."""
    return key.replace("(tiny)", "").replace("(local)", "").replace("(pydoc)", "").replace("(file)", "")
