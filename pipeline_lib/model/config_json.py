"""Checks of the numbers in a model's config.json, which came from anywhere."""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline_lib.core.text import cut

# Upper bounds far above any real model, to catch typing errors. That of layers and experts is lower, since the code
# loops over them.
MOST_OF_MANY, MOST = 10_000, 2**31
_MANY = ("num_hidden_layers", "num_experts", "num_local_experts")


def is_whole(value: Any) -> bool:
    """Return whether `value` is a whole number; a JSON boolean is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def short(value: Any) -> str:
    """Return `value` as messages quote it: at most 40 characters."""
    return cut(repr(value), 40)


def wrong_numbers(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each of `values` that is no positive whole number, or too large for any model."""
    for key, value in values.items():
        most = MOST_OF_MANY if key in _MANY else MOST
        if not is_whole(value) or not 1 <= value <= most:
            yield f"{key}: {short(value)} is not a whole number from 1 to {most:,}"


def wrong_heads(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message if the heads of queries cannot share those of keys and values equally."""
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads is not None and heads % kv_heads:
        yield f"num_key_value_heads: {kv_heads} does not divide num_attention_heads, {heads}"
