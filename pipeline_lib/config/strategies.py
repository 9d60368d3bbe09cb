"""The strategies, each described by a row that needs no torch.

Schema, checks and plan read the row; train/strategies.py has the class of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

StrategyName = Literal["ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class StrategyRow:
    """What is known of a strategy without torch.

    `keys` are those of `train` that work with it and not with every strategy; of a key that has
    other values too, the one that is meant stands behind it. `offloads` are the values of
    `train.offload`.
    """

    keys: frozenset[str]
    offloads: tuple[str, ...]
    uses_deepspeed: bool = False


_OF_TORCH = frozenset({"context_ranks", "offload_activations", "lora.base: nf4"})
_OF_LAYERS = frozenset({"compile", "lora.dora", "lora.targets: experts"})
_OF_FSDP = _OF_TORCH | _OF_LAYERS | {"unit_layers", "reshard"}
_OF_ZERO = frozenset({"deepspeed_json"})

STRATEGIES: Mapping[str, StrategyRow] = {
    "ddp": StrategyRow(
        keys=_OF_TORCH | _OF_LAYERS | {"local_sgd_steps", "gradient_compression: powersgd"},
        offloads=("none",),
    ),
    "fsdp": StrategyRow(keys=_OF_FSDP, offloads=("none", "optimizer+params")),
    "hsdp": StrategyRow(keys=_OF_FSDP | {"shard_ranks"}, offloads=("none", "optimizer+params")),
    "zero1": StrategyRow(
        keys=_OF_ZERO | _OF_LAYERS, offloads=("none", "optimizer"), uses_deepspeed=True
    ),
    "zero2": StrategyRow(
        keys=_OF_ZERO | _OF_LAYERS, offloads=("none", "optimizer"), uses_deepspeed=True
    ),
    "zero3": StrategyRow(
        keys=_OF_ZERO,
        offloads=("none", "optimizer", "optimizer+params"),
        uses_deepspeed=True,
    ),
}


def with_key(key: str) -> tuple[str, ...]:
    """Return the strategies that `key` works with, one of those that not all have."""
    return tuple(name for name, row in STRATEGIES.items() if key in row.keys)
