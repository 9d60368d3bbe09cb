"""`model.rope` in a config.json: the keys that others read, and the positions they give.

The others are transformers and servers.
"""

from collections.abc import Mapping
from typing import Any

from pipeline_lib.config.rope import Rope
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.text import cut

# Qwen3 was pretrained on 32,768 positions; the 40,960 of its config.json count 8,192 more for a
# prompt (model card).
_PRETRAINED_POSITIONS = {40960: 32768}
_DEFAULT_POSITIONS = 32768  # of transformers' Qwen2Config, Qwen3Config and Qwen3MoeConfig
# before transformers 5, and since; the first goes first, as there
_PLACES = ("rope_scaling", "rope_parameters")


def scaling_type(config: Mapping[str, Any]) -> str:
    """Return the type of scaled rotary embeddings that the config.json `config` asks for, or ""."""
    scaling = scaling_in(config)
    return str(_type_of(scaling)) if scaling else ""


def scaling_in(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section of the config.json `config` that scales its rotary embeddings, or {}."""
    for place in _PLACES:
        found = config.get(place)
        if isinstance(found, dict) and found and _type_of(found) != "default":
            return found
    return {}


def _type_of(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


def positions_in(config: Mapping[str, Any]) -> int:
    """Return the positions that the model of `config` takes.

    With YaRN these are factor x original positions, as vLLM counts.
    """
    positions: int = config.get("max_position_embeddings", _DEFAULT_POSITIONS)
    scaling = scaling_in(config)
    original = scaling.get("original_max_position_embeddings")
    factor = scaling.get("factor")
    if (
        scaling
        and _type_of(scaling) == "yarn"
        and isinstance(original, int)
        and isinstance(factor, int | float)
    ):
        return int(original * factor)
    return positions


def original_positions(positions: int) -> int:
    """Return the positions of the pretraining of a model whose config.json says `positions`."""
    return _PRETRAINED_POSITIONS.get(positions, positions)


def stretched_positions(positions: int, rope: Rope) -> int:
    """Return the positions with `rope` of a model whose config.json says `positions`."""
    return int(
        (rope.original_max_position_embeddings or original_positions(positions)) * rope.factor
    )


def stretched(config: Mapping[str, Any], rope: Rope | None) -> dict[str, Any]:
    """Return the config.json `config` with `rope`, where its format has it; or as it is.

    `max_position_embeddings` becomes factor x original positions: transformers compares the
    quotient with the factor, vLLM multiplies by itself, and other servers read it as the length of
    the context. Raises DataError if `config` scales its rotary embeddings already.
    """
    if rope is None:
        return dict(config)
    refuse_scaled(scaling_type(config))
    positions: int = config.get("max_position_embeddings", _DEFAULT_POSITIONS)
    place = "rope_parameters" if isinstance(config.get("rope_parameters"), dict) else "rope_scaling"
    plain = {key: value for key, value in (config.get(place) or {}).items() if key != "type"}
    scaling = {
        "rope_type": rope.type,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings
        or original_positions(positions),
    }
    others = {key: value for key, value in config.items() if key not in _PLACES}
    return {
        **others,
        "max_position_embeddings": stretched_positions(positions, rope),
        place: {**plain, **scaling},
    }


def refuse_scaled(scaling: str) -> None:
    """Raise DataError if a config.json has a `scaling`, which `model.rope` would replace."""
    if scaling:
        raise DataError(
            "its config.json scales the rotary embeddings already (rope_type "
            f"{cut(scaling, 40)!r}), and model.rope is for models that do not; remove model.rope"
        )
