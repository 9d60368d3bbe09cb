"""The training data in numbers, and which keys it leaves to the plan."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from pipeline_lib.arch.layers import (
    can_compile,
    is_compiled,
    keeps_on_host,
    stays_gathered,
)
from pipeline_lib.config.schema import Config
from pipeline_lib.config.train import AUTO, CHOSEN_KEYS, Train
from pipeline_lib.core.units import count
from pipeline_lib.plan.machine import End
from pipeline_lib.records.data import BlockIndex
from pipeline_lib.records.plan import TO_A_BLOCK, Workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# Workload: the properties of the data that time and memory depend on, from the shards or assumed
# before they exist.


_SHORT_DOCUMENT = 200.0  # tokens, as the questions and answers of instruction data have


def assumed_workload(config: Config) -> Workload:
    """Return the assumption without data: 98 % full, half supervised, documents of a quarter.

    They may be as short as short chats, or as long as the limit.
    """
    block = config.shard.block_tokens
    longest = min(config.tokenize.max_tokens, block)
    document = max(1.0, longest / 4)
    return Workload(
        block_tokens=block,
        real_fraction=0.98,
        supervised_fraction=0.5,
        document_tokens=document,
        blocks=None,
        epoch_blocks=None,
        is_assumed=True,
        samples_per_block=max(1.0, 0.98 * block / document),
        document_band=(min(document, _SHORT_DOCUMENT), float(longest)),
    )


def documents_at(workload: Workload, end: End) -> float:
    """Return `document_tokens` at one end of its band; longer documents take longer."""
    if workload.document_band is None or end == End.EXPECTED:
        return workload.document_tokens
    return workload.document_band[0 if end == End.GOOD else 1]


def free_keys(train: Train, fixed: Collection[str]) -> frozenset[str]:
    """Return the keys that the plan chooses: each `auto`; with `strategy: auto` all but `fixed`.

    `fixed` are some of the CHOSEN_KEYS.
    """
    is_open = train.strategy == AUTO
    return frozenset(
        key for key in CHOSEN_KEYS if getattr(train, key) == AUTO or (is_open and key not in fixed)
    )


def settled(train: Train, has_triton: bool) -> Train:
    """Return `train` with defaults for `auto`, for use where no machine is known to choose by.

    The strategy must be a concrete one.
    """
    usual = {
        **{"recompute": "none", "reshard": True, "compile": can_compile(train, has_triton)},
        "save_async": train.offload == "none",
        "offload_activations": False,
        "context_ranks": 1,
    }
    return train.model_copy(
        update={key: value for key, value in usual.items() if getattr(train, key) == AUTO}
    )


def in_words(train: Train, accumulation: int) -> list[str]:
    """Return how `train` trains: `fsdp`, `micro-batch 2 x accumulation 4`, `compiled`."""
    words = [train.strategy + (f" over {train.shard_ranks} ranks" if train.shard_ranks else "")]
    words.append(f"micro-batch {train.micro_batch_blocks} x accumulation {accumulation}")
    if train.ranks_per_block > 1:
        words.append(f"{train.ranks_per_block} {TO_A_BLOCK}")
    if train.lora.base != "unquantized":
        words.append(f"base in {train.lora.base}")
    if train.recompute != "none":
        words.append(f"{train.recompute} activation checkpointing")
        layers = train.kept_attention_layers
        if train.recompute == "full" and isinstance(layers, int):
            words.append(
                f"attention kept in {count(layers, 'layers')}"
                if layers
                else "attention computed again"
            )
    if keeps_on_host(train):
        words.append("activations on the host")
    if stays_gathered(train):
        words.append("no reshard after forward")
    if train.offload != "none":
        words.append(f"{train.offload} offloaded")
    if is_compiled(train):
        words.append("compiled")
    return words


def workload_from(
    index: BlockIndex,
    costs: "NDArray[np.int64]",
    samples_per_block: float,
    validation_blocks: int = 0,
) -> Workload:
    """Return the workload of the training blocks of `index`.

    `costs` are the sums of squared document lengths of each block, int64[blocks].
    """
    positions = index.blocks * index.block_tokens
    return Workload(
        block_tokens=index.block_tokens,
        real_fraction=index.packing_efficiency,
        supervised_fraction=index.supervised_tokens / positions,
        document_tokens=float(costs.sum()) / max(1, index.tokens),
        blocks=index.blocks,
        epoch_blocks=index.epoch_blocks,
        validation_blocks=validation_blocks,
        samples_per_block=samples_per_block,
    )
