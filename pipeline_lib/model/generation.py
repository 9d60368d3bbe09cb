"""Reads generation_config.json, which says how a model is to answer: it is published, and decides no training."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.fsio import read_json
from pipeline_lib.base.redact import cut
from pipeline_lib.config.content import GENERATION_NAME, not_json

_IDS = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_eos_token_id")
_SEVERAL_IDS = ("eos_token_id", "forced_eos_token_id")
_NUMBERS = ("temperature", "top_p", "top_k", "repetition_penalty", "max_length", "max_new_tokens")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """What generation_config.json of the model in `folder` says; empty without one.

    Raises DataError with all that is wrong with it, as far as it shows without transformers.
    """
    path = folder / GENERATION_NAME
    if not path.exists():
        return {}
    config = read_object(path)
    if problems := list(_problems(config)):
        raise DataError(f"{path}: {'; '.join(problems)}")
    return config


def take_generation_config(folder: Path) -> dict[str, Any]:
    """The same. Raises DataError also for what transformers does not take."""
    config = read_generation_config(folder)
    if not config:
        return {}
    from transformers import GenerationConfig  # loads torch

    try:
        GenerationConfig.from_dict(config)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise DataError(
            f"{folder / GENERATION_NAME}: transformers does not take it ({cut(str(error), 200)})"
        ) from error
    return config


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`. Raises DataError, also for values that no JSON file can hold."""
    try:
        content = read_json(path)
        wrong = next(not_json(content), None)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: does not read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds no JSON object")
    if wrong is not None:
        raise DataError(f"{path}: {wrong}")
    return content


def wrong_ids(config: dict[str, Any], vocab: int) -> Iterator[str]:
    """What is wrong with the token ids that a config.json names."""
    for key in _IDS:
        value = config.get(key)
        if value is None:
            continue
        values = value if isinstance(value, list) and value and key in _SEVERAL_IDS else [value]
        # -1 means none to some tools, and no token has it.
        if not all(_is_whole(each) and -1 <= each < vocab for each in values):
            which = "a token id, or a list of them," if key in _SEVERAL_IDS else "a token id"
            yield f"{key}: {_short(value)} is not {which} of a vocabulary of {vocab:,}"


def _problems(config: dict[str, Any]) -> Iterator[str]:
    for key in _IDS:
        value = config.get(key)
        values = value if isinstance(value, list) and value else [value]
        if value is not None and not all(map(_is_whole, values)):
            yield f"{key}: {_short(value)} is not a token id, or a list of them"
    for key in _NUMBERS:
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            yield f"{key}: {_short(value)} is not a number"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    return cut(repr(value), 40)
