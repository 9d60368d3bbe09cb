"""What is known of a model family beside its sizes: names in its config.json and of tensors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline_lib.arch.geometry import Geometry

Config = Mapping[str, Any]


def _itself(config: Config) -> Config:
    return config


@dataclass(frozen=True)
class Family:
    """The models whose config.json has one of the `types` as model_type.

    `problems` yields what is malformed in the text model's config, and raises KeyError for what is
    missing; then `geometry` reads its sizes. `text` returns the text model's part of a config.json.
    `published` has configs by the model's name in lower case, without its owner.

    In files, names of the text model's tensors begin with `prefix` in place of `model.`, if that is
    not empty; tensors whose names begin with one of `beside` belong to other parts of the model,
    which stay as they are.
    """

    types: tuple[str, ...]
    geometry: Callable[[Config], Geometry]
    problems: Callable[[Config], Iterator[str]]
    published: Mapping[str, dict[str, Any]]
    is_trained: bool = True
    text: Callable[[Config], Config] = _itself
    prefix: str = ""
    beside: tuple[str, ...] = ()

    def text_name(self, stored: str) -> str | None:
        """Return transformers' name of the text parameter `stored` in files; None for others."""
        if stored.startswith(self.beside):
            return None
        if self.prefix and stored.startswith(self.prefix):
            return f"model.{stored.removeprefix(self.prefix)}"
        return stored
