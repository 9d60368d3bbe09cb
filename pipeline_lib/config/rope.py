"""The keys of `model.rope`, and where specs have them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from pipeline_lib.config.section import Section, Tokens, read_settings, settings_of

ROPE = "rope"  # the key of the specs of plan, train and evaluate, beside the keys of their section
# In the spec of a plan: the `rope` of an experiment before, which is in the config.json of its model.
INHERITED_ROPE = "inherited_rope"


class Rope(Section):
    """Rotary position embeddings stretched beyond the trained positions, as in a model card."""

    type: Literal["yarn"] = Field(
        description="`yarn` (arXiv 2309.00071), `rope_type` in transformers"
    )
    factor: Annotated[FiniteFloat, Field(ge=1.0, le=1024.0)] = Field(
        description="the model takes this many times the original positions"
    )
    original_max_position_embeddings: Tokens | None = Field(
        None,
        description="positions of the pretraining; default: `max_position_embeddings` of the "
        "model's config.json, and 32,768 where that is 40,960, as Qwen3's model card says",
    )


def settings_with_rope(settings: Mapping[str, Any], rope: Rope | None) -> dict[str, Any]:
    """Return the `settings` of a spec with `rope`, if it is set; a factor of 1 changes nothing."""
    return (
        dict(settings)
        if rope is None or rope.factor == 1.0
        else {**settings, ROPE: settings_of(rope)}
    )


def rope_in(settings: Mapping[str, Any]) -> Rope | None:
    """Return `model.rope` of a spec's settings; None if it is not set. Raises IntegrityError."""
    return read_settings(Rope, settings[ROPE]) if ROPE in settings else None


def planned_rope(plan: Mapping[str, Any]) -> Rope | None:
    """Return the `model.rope` of the settings of a `plan`, or of an experiment before its own.

    It stretches the model at the beginning of the chain. Raises IntegrityError.
    """
    if INHERITED_ROPE in plan:
        return read_settings(Rope, plan[INHERITED_ROPE])
    return rope_in(plan)


def without_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec's settings without `model.rope`: those of its section alone."""
    return {key: value for key, value in settings.items() if key != ROPE}
