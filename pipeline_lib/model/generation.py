"""Reads generation_config.json, which says how a model is to answer: it is published, and decides no training."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.fsio import read_json
from pipeline_lib.base.redact import cut
from pipeline_lib.config.content import GENERATION_NAME, not_json

_IDS = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_eos_token_id")
_SEVERAL_IDS = ("eos_token_id", "forced_eos_token_id")
_FROM_ZERO = ("max_length", "min_length", "min_new_tokens", "top_k", "no_repeat_ngram_size")
_FROM_ONE = ("max_new_tokens", "num_beams", "num_return_sequences")
_FRACTIONS = ("top_p", "min_p", "typical_p")
_NUMBERS = ("temperature", "repetition_penalty", "length_penalty", "diversity_penalty")
_FLAGS = ("do_sample", "use_cache")


def read_generation_config(folder: Path, vocab: int) -> dict[str, Any]:
    """What generation_config.json of the model in `folder` says, of a vocabulary of `vocab`; empty without one.

    Raises DataError with all that is wrong with it.
    """
    path = folder / GENERATION_NAME
    if not path.exists():
        return {}
    config = read_object(path)
    if problems := list(_problems(config, vocab)):
        raise DataError(f"{path}: {'; '.join(problems)}; mend that, or delete the file")
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
    """What is wrong with the token ids that a config.json or generation_config.json names."""
    for key in _IDS:
        value = config.get(key)
        if value is None:
            continue
        values = value if isinstance(value, list) and value and key in _SEVERAL_IDS else [value]
        # -1 means none to some tools, and no token has it.
        if not all(_is_whole(each) and -1 <= each < vocab for each in values):
            which = "a token id, or a list of them," if key in _SEVERAL_IDS else "a token id"
            yield f"{key}: {_short(value)} is not {which} of a vocabulary of {vocab:,}"


def _problems(config: dict[str, Any], vocab: int) -> Iterator[str]:
    yield from wrong_ids(config, vocab)
    for keys, is_right, wanted in _WANTED:
        for key in keys:
            if config.get(key) is not None and not is_right(config[key]):
                yield f"{key}: {_short(config[key])} is not {wanted}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_WANTED: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_FROM_ZERO, lambda value: _is_whole(value) and value >= 0, "a whole number from 0"),
    (_FROM_ONE, lambda value: _is_whole(value) and value >= 1, "a whole number from 1"),
    (_FRACTIONS, lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    (_NUMBERS, _is_number, "a number"),
    (_FLAGS, lambda value: isinstance(value, bool), "true or false"),
    (("early_stopping",), lambda value: isinstance(value, bool) or value == "never", 'true, false or "never"'),
)


def _short(value: Any) -> str:
    return cut(repr(value), 40)
