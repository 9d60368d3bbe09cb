"""What there is to train on, in which batches and steps, and how layers are run."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline_lib.config.schema import CHOSEN_KEYS, Config, Train
from pipeline_lib.core.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipeline_lib.data.blocks import BlockIndex
    from pipeline_lib.data.order import Group


# What there is to train on, as far as time and memory depend on it: from the shards, or assumed before they exist.


@dataclass(frozen=True)
class Workload:
    """Blocks of `block_tokens` positions; fractions are of those.

    `document_tokens` is the mean length of a document weighted by tokens, sum(n^2) / sum(n): what attention costs
    go by. `blocks` and `epoch_blocks` are None while there is no data. `is_assumed` says that all but the block is.
    """

    block_tokens: int
    real_fraction: float
    supervised_fraction: float
    document_tokens: float
    blocks: int | None
    epoch_blocks: int | None
    validation_blocks: int = 0
    is_assumed: bool = False

    @staticmethod
    def assumed(config: Config) -> "Workload":
        """Before any data is read: nearly full blocks, half of them supervised, documents of a quarter of the most."""
        block = config.shard.block_tokens
        longest = min(config.tokenize.max_tokens, block)
        return Workload(block, 0.98, 0.5, max(1.0, longest / 4), None, None, is_assumed=True)


# How layers are run, as far as memory and time go by it, and which keys of that the plan chooses.
#
# It settles every `auto` before anything runs; one that is not settled is off, as it is to model/build.py.

AUTO = "auto"


def recompute_of(train: Train) -> str:
    """`none`, `selective` or `full`."""
    return "none" if train.recompute == AUTO else train.recompute


def is_sharded(train: Train) -> bool:
    """Whether FSDP2 gathers the weights."""
    return train.strategy in ("fsdp", "hsdp")


def stays_gathered(train: Train) -> bool:
    """Whether layers that were gathered for the first micro-batch of a step stay so until the last one is done."""
    return is_sharded(train) and train.reshard is False


def is_compiled(train: Train) -> bool:
    """Whether torch.compile has the layers."""
    return train.compile is True


def can_compile(train: Train, has_triton: bool) -> bool:
    """Whether `compile: auto` may be true: where it was tried on GPUs, and layers stay one graph.

    That leaves out DeepSpeed, and adapters that are peft's own modules; and fp32 and GPUs without Triton (machine.py),
    where documents attend one by one and layers would be compiled anew for other lengths.
    """
    is_native = not train.uses_deepspeed
    is_whole = train.method == "full" or has_fused_adapters(train)
    return has_triton and is_native and is_whole and train.precision != "fp32"


def eager_under_deepspeed(train: Train) -> Train:
    """`train` as `auto` would have it after a change of the strategy: DeepSpeed's never compile."""
    return train.model_copy(update={"compile": False}) if train.uses_deepspeed else train


def has_fused_adapters(train: Train) -> bool:
    """Whether each linear with its adapter is one operator (model/lora.py), or peft's own module.

    `zero3` gathers the weights of a module when that itself is called, which the operator does not.
    """
    return train.method == "lora" and train.lora.dropout == 0 and not train.lora.dora and train.strategy != "zero3"


def free_keys(train: Train, held: Collection[str]) -> frozenset[str]:
    """Keys that the plan chooses: those that are `auto`, and with `strategy: auto` all of CHOSEN_KEYS but `held`."""
    is_open = train.strategy == AUTO
    return frozenset(key for key in CHOSEN_KEYS if getattr(train, key) == AUTO or (is_open and key not in held))


def settled(train: Train, has_triton: bool) -> Train:
    """`train` without `auto` where there is nothing to choose by: what needs no foresight.

    The strategy is one that exists.
    """
    usual = {"recompute": "none", "reshard": True, "compile": can_compile(train, has_triton)}
    return train.model_copy(update={key: value for key, value in usual.items() if getattr(train, key) == AUTO})


# Batches and steps, and what the blocks are like.
#
# Loads no numpy before there are blocks: a plan can be asked for without any.


@dataclass(frozen=True)
class BatchPlan:
    """How the blocks become optimizer steps.

    `epoch_blocks` and `steps_per_epoch` are those of the first epoch, and `last_step_blocks` the blocks of its last
    step; where weights are no whole numbers, later epochs may have a few more. `steps` are those of the whole run.
    What goes by the blocks is None while there are none.
    """

    block_tokens: int
    global_batch_blocks: int
    micro_batch_blocks: int
    accumulation: int
    epochs: int
    tokens_per_step: int
    blocks: int | None = None
    epoch_blocks: int | None = None
    validation_blocks: int | None = None
    steps_per_epoch: int | None = None
    steps: int | None = None
    last_step_blocks: int | None = None
    padding_fraction: float | None = None


def batch_without_data(train: Train, ranks: int, block_tokens: int) -> BatchPlan:
    """What is known of the batches before there are blocks."""
    batch_blocks = train.global_batch_tokens // block_tokens
    return BatchPlan(
        block_tokens=block_tokens,
        global_batch_blocks=batch_blocks,
        micro_batch_blocks=train.micro_batch_blocks,
        accumulation=batch_blocks // (ranks * train.micro_batch_blocks),
        epochs=train.epochs,
        tokens_per_step=batch_blocks * block_tokens,
    )


def plan_batches(train: Train, ranks: int, training: "BlockIndex", validation_blocks: int) -> BatchPlan:
    """The batch arithmetic over `ranks` ranks. Raises DataError if no step comes of the training blocks."""
    from pipeline_lib.data.order import epoch_steps, total_steps

    batch = batch_without_data(train, ranks, training.block_tokens)
    batch_blocks = batch.global_batch_blocks
    all_steps = total_steps(training.groups, batch_blocks, train.epochs)
    if not all_steps:
        raise _nothing_to_train_on(training.groups, train.epochs)
    return replace(
        batch,
        blocks=training.blocks,
        epoch_blocks=training.epoch_blocks,
        validation_blocks=validation_blocks,
        steps_per_epoch=epoch_steps(training.groups, batch_blocks),
        steps=min(train.until_step or all_steps, all_steps),
        last_step_blocks=_last_step_blocks(training.epoch_blocks, batch_blocks),
        padding_fraction=round(1 - training.packing_efficiency, 6),
    )


def workload_from(index: "BlockIndex", costs: "NDArray[np.int64]", validation_blocks: int = 0) -> Workload:
    """The blocks of `index`; `costs` are the sums of the squared lengths of their documents, int64[blocks]."""
    positions = index.blocks * index.block_tokens
    return Workload(
        block_tokens=index.block_tokens,
        real_fraction=index.packing_efficiency,
        supervised_fraction=index.supervised_tokens / positions,
        document_tokens=float(costs.sum()) / max(1, index.tokens),
        blocks=index.blocks,
        epoch_blocks=index.epoch_blocks,
        validation_blocks=validation_blocks,
    )


def _last_step_blocks(epoch_blocks: int, batch_blocks: int) -> int:
    """Of the steps that take `epoch_blocks`; 0 if there are none."""
    return (epoch_blocks - 1) % batch_blocks + 1 if epoch_blocks else 0


def _nothing_to_train_on(groups: "list[Group]", epochs: int) -> DataError:
    held = ", ".join(f"{group.blocks} of weight {group.weight:g}" for group in groups)
    needed = min(math.ceil(1 / group.per_epoch) for group in groups)
    return DataError(
        f"no step to train: of the training blocks ({held}), {epochs} epochs use none, because blocks times weight "
        f"times epochs is less than 1; set train.epochs to {needed} or more, or raise the weights in data.train"
    )
