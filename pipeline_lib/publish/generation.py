"""Reads the generation_config.json of a base model from among the inputs of a stage."""

from collections.abc import Mapping
from typing import Any

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.stage import Sealed
from pipeline_lib.config.content import GENERATION_NAME
from pipeline_lib.model.generation import take_generation_config


def generation_config_of(inputs: Mapping[str, Sealed]) -> dict[str, Any]:
    """That of the base: of a local model it is sealed by itself, else with the model. Raises DataError."""
    folder = inputs.get("generation", inputs["model"]).folder(GENERATION_NAME)
    try:
        return take_generation_config(folder)
    except DataError as error:
        mend = "mend it in the model's folder" if "generation" in inputs else f"delete {folder}"
        raise DataError(f"{error}; {mend} and run snakemake again") from error
