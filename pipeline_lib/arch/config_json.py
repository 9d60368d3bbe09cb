"""Checks of a model's config.json, which may come from anywhere: numbers and weight storage."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline_lib.config.content import not_json
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json
from pipeline_lib.core.text import cut

# Upper bounds far above any real model, to catch typing errors. That of layers and experts is
# lower, since the code loops over them.
MOST_OF_MANY = 10_000
MOST = 2**31
_MANY = ("num_hidden_layers", "num_experts", "num_local_experts")


def is_whole(value: Any) -> bool:
    """Return whether `value` is a whole number; a JSON boolean is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def short(value: Any) -> str:
    """Return `value` as messages quote it: at most 40 characters."""
    return cut(repr(value), 40)


def wrong_numbers(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each of `values` that is not positive and whole, or is too large.

    Too large means larger than any model has.
    """
    for key, value in values.items():
        most = MOST_OF_MANY if key in _MANY else MOST
        if not is_whole(value) or not 1 <= value <= most:
            yield f"{key}: {short(value)} is not a whole number from 1 to {most:,}"


def wrong_heads(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message if the heads of queries cannot share those of keys and values equally."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads")
    if kv_heads is not None and heads % kv_heads:
        yield f"num_key_value_heads: {kv_heads} does not divide num_attention_heads, {heads}"


# Keys that say how the base's own weights are stored: transformers', mlx's, and compressed-tensors'
# former one. Where the weights are plain, a key that was left over makes loaders take the model for
# a quantized one.
QUANTIZATION_KEYS = ("quantization_config", "quantization", "compression_config")


def refuse_quantized(config: Mapping[str, Any], origin: str) -> None:
    """Raise DataError if `config`, a config.json that messages call `origin`, is quantized."""
    found = sorted(_quantizations(config))
    if found:
        raise DataError(
            f"{origin}: its weights are quantized ({', '.join(found)}), and training starts from "
            "F32, BF16 or F16: name the model that it was made from, or, if this is a copy whose "
            "weights are plain again, delete that key in a local folder"
        )


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` without the keys that describe quantized weights, in its parts too."""
    kept = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    return {
        key: without_quantization(value) if isinstance(value, dict) else value
        for key, value in kept.items()
    }


def _quantizations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of `config` that describe quantized weights, with the name of their part."""
    for key, value in config.items():
        if key in QUANTIZATION_KEYS and value:
            yield key
        elif isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in _quantizations(value))


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file at `path`.

    Raises DataError if the file is no JSON object, or if it holds values that JSON does not allow.
    """
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
