"""All families of models; which one a config.json belongs to, and the sizes that it says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline_lib.arch.config_json import short
from pipeline_lib.arch.family import Family
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.arch.qwen3 import LIKE_QWEN2, QWEN3
from pipeline_lib.arch.qwen3_5 import QWEN3_5
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json

_FAMILIES = (QWEN3, QWEN3_5, LIKE_QWEN2)
_BY_TYPE = {kind: family for family in _FAMILIES for kind in family.types}
SUPPORTED = tuple(kind for kind, family in _BY_TYPE.items() if family.is_trained)
PLANNED = tuple(kind for kind, family in _BY_TYPE.items() if not family.is_trained)
# Configs by model name in lower case, without the owner.
PUBLISHED = {name: config for family in _FAMILIES for name, config in family.published.items()}
# keys of models that take more than text
_OF_MEDIA = ("vision_config", "audio_config", "thinker_config")


def published(name: str) -> dict[str, Any] | None:
    """Return a config for `geometry_in` of the published model `name`; None if the name is unknown.

    `name` is the model's name on the hub, in upper or lower case, with or without its owner:
    `Qwen/Qwen3-8B`.
    """
    found = PUBLISHED.get(name.lower().removeprefix("qwen/"))
    return None if found is None else dict(found)


def family_in(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json; one of an unknown model_type counts as Qwen3's."""
    return _BY_TYPE.get(str(config.get("model_type")), QWEN3)


def geometry_in(config: Mapping[str, Any]) -> Geometry:
    """Return the sizes that `config`, a well-formed config.json of a known family, says."""
    return family_in(config).geometry(config)


def read_geometry(folder: Path, may_be_planned: bool = False) -> Geometry:
    """Read `folder/config.json`.

    Raises DataError if it is unreadable, malformed, or of an unsupported model. With
    `may_be_planned`, models of PLANNED are supported too.
    """
    path = folder / "config.json"
    try:
        config = dict(read_json(path))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: not the config.json of a model ({error})") from error
    return checked_geometry(config, str(path), may_be_planned)


def checked_geometry(
    config: Mapping[str, Any], origin: str, may_be_planned: bool = False
) -> Geometry:
    """Read the config.json `config`, which came from anywhere and is called `origin` in messages.

    Raises DataError if it is malformed or of an unsupported model.
    """
    kind = config.get("model_type")
    known = SUPPORTED + PLANNED if may_be_planned else SUPPORTED
    if kind not in known:
        text = f"{origin}: model_type {short(kind)} is not one of {', '.join(SUPPORTED)}"
        if any(key in config for key in _OF_MEDIA):
            text += ": it takes pictures, video or sound beside text, and only text is trained on"
        text += "; name a text model of the Qwen2, Qwen2.5, Qwen3 or Qwen3.5 series"
        raise DataError(text)
    window = "sliding_window" if kind == "mistral" else "use_sliding_window"
    if config.get(window):
        value = str(config[window]).lower()
        text = f"{origin}: {window} is {value}, and packed blocks support whole documents only"
        raise DataError(text)
    family = family_in(config)
    try:
        problem = next(family.problems(config), None)
        if problem:
            raise DataError(f"{origin}: {problem}")
        return family.geometry(config)
    except KeyError as error:
        raise DataError(f"{origin}: lacks {error}") from error
