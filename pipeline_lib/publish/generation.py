"""Reads the generation_config.json of a base model from among the inputs of a stage."""

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.stage import Sealed
from pipeline_lib.config.content import GENERATION_NAME
from pipeline_lib.model.generation import read_generation_config
from pipeline_lib.plan.geometry import Geometry


def generation_config_of(inputs: Mapping[str, Sealed]) -> dict[str, Any]:
    """That of the base: of a local model it is sealed by itself, else with the model. Raises DataError."""
    folder = inputs.get("generation", inputs["model"]).folder(GENERATION_NAME)
    config = read_generation_config(folder, Geometry.from_folder(inputs["model"].folder("config.json")).vocab)
    try:
        GenerationConfig.from_dict(config)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise DataError(f"{folder / GENERATION_NAME}: transformers does not take it ({error})") from error
    return config
