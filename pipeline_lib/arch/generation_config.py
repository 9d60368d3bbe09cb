"""generation_config.json, the published generation settings; training does not need it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline_lib.arch.config_json import is_whole, read_object, short
from pipeline_lib.config.content import GENERATION_NAME
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.stage import Sealed
from pipeline_lib.core.text import cut

IDS = (
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "decoder_start_token_id",
    "forced_eos_token_id",
)
SEVERAL_IDS = ("eos_token_id", "forced_eos_token_id")
_NUMBERS = ("temperature", "top_p", "top_k", "repetition_penalty", "max_length", "max_new_tokens")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the content of generation_config.json in `folder`; empty if there is none.

    Raises DataError with all problems that can be found without transformers.
    """
    path = folder / GENERATION_NAME
    if not path.exists():
        return {}
    config = read_object(path)
    problems = []
    for key in IDS:
        value = config.get(key)
        values = value if isinstance(value, list) and value else [value]
        if value is not None and not all(map(is_whole, values)):
            problems.append(f"{key}: {short(value)} is not a token id, or a list of them")
    for key in _NUMBERS:
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            problems.append(f"{key}: {short(value)} is not a number")
    if problems:
        raise DataError(f"{path}: {'; '.join(problems)}")
    return config


def take_generation_config(folder: Path) -> dict[str, Any]:
    """Return `read_generation_config(folder)`. Raises DataError also if transformers rejects it."""
    config = read_generation_config(folder)
    if not config:
        return {}
    from transformers import GenerationConfig  # takes a second

    try:
        GenerationConfig.from_dict(config)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise DataError(
            f"{folder / GENERATION_NAME}: transformers does not take it ({cut(str(error), 200)})"
        ) from error
    return config


def generation_config_of(inputs: Mapping[str, Sealed]) -> dict[str, Any]:
    """Return the content of the base model's generation_config.json; empty if there is none.

    A local model's file is sealed as an input of its own, any other together with the model. Raises
    DataError if the file is invalid.
    """
    folder = inputs.get("generation", inputs["model"]).folder(GENERATION_NAME)
    try:
        return take_generation_config(folder)
    except DataError as error:
        mend = "mend it in the model's folder" if "generation" in inputs else f"delete {folder}"
        raise DataError(f"{error}; {mend} and run snakemake again") from error
