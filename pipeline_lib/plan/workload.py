"""The training data in numbers, and how layers are run."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline_lib.config.checks import LEAST_KEPT_TOKENS
from pipeline_lib.config.schema import Config
from pipeline_lib.config.train import AUTO, CHOSEN_KEYS, Train
from pipeline_lib.core.units import count
from pipeline_lib.model.geometry import Geometry
from pipeline_lib.plan.document import TO_A_BLOCK
from pipeline_lib.plan.machine import End, Machine, Ranks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipeline_lib.data.blocks import BlockIndex


# Workload: the properties of the data that time and memory depend on, from the shards or assumed before they exist.


_SHORT_DOCUMENT = 200.0  # tokens, as the questions and answers of instruction data have


@dataclass(frozen=True)
class Workload:
    """Blocks of `block_tokens` positions; fractions are relative to positions.

    `document_tokens` is the mean length of a document weighted by tokens, sum(n^2) / sum(n), which the cost of
    attention is proportional to. `blocks` and `epoch_blocks` are None while there is no data. `samples_per_block` is a
    mean over the blocks that an epoch uses. With `is_assumed`, all but `block_tokens` is assumed; with `is_estimated`,
    lengths and supervised tokens are by the first rows of the files. `document_band` has the least and the most that
    `document_tokens` may be, where that is assumed.
    """

    block_tokens: int
    real_fraction: float
    supervised_fraction: float
    document_tokens: float
    blocks: int | None
    epoch_blocks: int | None
    validation_blocks: int = 0
    is_assumed: bool = False
    is_estimated: bool = False
    samples_per_block: float = 1.0
    document_band: tuple[float, float] | None = None

    @staticmethod
    def assumed(config: Config) -> "Workload":
        """Return the assumption before data is read: 98 % full, half supervised, documents a quarter of the limit.

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

    def documents_at(self, end: End) -> float:
        """Return `document_tokens` at one end of its band; longer documents take longer."""
        if self.document_band is None or end == End.EXPECTED:
            return self.document_tokens
        return self.document_band[0 if end == End.GOOD else 1]

    def with_documents(self, tokens: float) -> "Workload":
        """Return the workload with documents of another mean length, for what-if questions."""
        samples = self.samples_per_block
        if self.is_assumed:
            samples = max(1.0, self.real_fraction * self.block_tokens / tokens)
        return replace(self, document_tokens=tokens, samples_per_block=samples, document_band=None)


# How layers are run, as far as memory and time depend on it, and which of those keys the plan chooses.
#
# The plan resolves every `auto` before anything runs. An unresolved `auto` counts as off, as in model/build.py.


def recompute_of(train: Train) -> str:
    """Return `none`, `selective` or `full`."""
    return "none" if train.recompute == AUTO else train.recompute


# Length of documents, in tokens, from which on full checkpointing keeps the attention's results. There, attention
# is 26 % of the FLOPs of a layer of Qwen3-8B, and computing it again 8 % of those of a step. The results take as much
# memory as the layer's input. In shorter documents the time shrinks with the length, and the memory does not.
KEPT_FROM = LEAST_KEPT_TOKENS


def can_keep_attention(train: Train, tokens: float) -> bool:
    """Return whether layers can keep the attention's results of documents of so many tokens: full checkpointing does.

    In fp32 there is no operator that keeps them.
    """
    return recompute_of(train) == "full" and train.precision != "fp32" and tokens >= KEPT_FROM


def kept_attention(geometry: Geometry, train: Train, tokens: float) -> int:
    """Return how many layers keep the attention's results of documents of so many tokens."""
    kept = train.kept_attention_layers if can_keep_attention(train, tokens) else 0
    return kept if isinstance(kept, int) else geometry.attention_layers


def keeps_on_host(train: Train) -> bool:
    """Return whether what full checkpointing keeps of the layers is in host memory."""
    return train.offload_activations is True and recompute_of(train) == "full"


def can_keep_on_host(train: Train) -> bool:
    """Return whether `offload_activations: auto` may become true on GPUs."""
    return recompute_of(train) == "full" and not train.uses_deepspeed


def micro_batch_tokens(train: Train, block_tokens: int) -> int:
    """Return the tokens of a micro-batch on a rank, which has a part of each block if ranks share blocks."""
    return train.micro_batch_blocks * block_tokens // train.ranks_per_block


# The tokens of the block whose logits prove the export, at most: the merge passes them through the model on CPUs.
PROBE_TOKENS = 16_384


# Tokens of a micro-batch from which on full checkpointing feeds them forward in chunks of at most so many
# (model/chunks.py). Qwen3-8B's intermediate tensors and their gradients then take 1.9 GiB, however long the block is.
FED_AT_ONCE = 16_384


def can_feed_in_chunks(train: Train) -> bool:
    """Return whether dense layers feed long micro-batches forward in chunks; layers with experts never do.

    DeepSpeed counts on gradients that its own hooks see, and fp8 scales the tokens of a product together.
    """
    return recompute_of(train) == "full" and not train.uses_deepspeed and train.precision != "fp8"


def feeds_in_chunks(train: Train, has_experts: bool, tokens: int) -> bool:
    """Return whether micro-batches of so many tokens are fed forward in chunks."""
    return can_feed_in_chunks(train) and not has_experts and tokens > FED_AT_ONCE


def tokens_at_once(tokens: int) -> int:
    """Return the tokens of a chunk of `tokens`: equal chunks if that takes less than twice the fewest."""
    fewest = -(-tokens // FED_AT_ONCE)
    chunks = next((count for count in range(fewest, 2 * fewest) if tokens % count == 0), fewest)
    return -(-tokens // chunks)


def is_sharded(train: Train) -> bool:
    """Return whether the strategy is FSDP2, which gathers the weights."""
    return train.strategy in ("fsdp", "hsdp")


def stays_gathered(train: Train) -> bool:
    """Return whether layers stay gathered from the first to the last micro-batch of a step."""
    return is_sharded(train) and train.reshard is False


def is_compiled(train: Train) -> bool:
    """Return whether torch.compile compiles the layers."""
    return train.compile is True


def can_compile(train: Train, has_triton: bool) -> bool:
    """Return whether `compile: auto` may become true: where it was tested on GPUs, and a layer stays one graph.

    That excludes DeepSpeed, and adapters that are peft's own modules. It also excludes fp32, and GPUs without Triton:
    there, documents attend one by one, and layers would be recompiled for other lengths.
    """
    is_native = not train.uses_deepspeed
    is_whole = train.method == "full" or has_fused_adapters(train)
    return has_triton and is_native and is_whole and train.precision != "fp32"


def eager_under_deepspeed(train: Train) -> Train:
    """Return `train` with compilation off under DeepSpeed, which `auto` never compiles."""
    return train.model_copy(update={"compile": False}) if train.uses_deepspeed else train


def has_fused_adapters(train: Train) -> bool:
    """Return whether each linear with its adapter is one operator (model/lora.py), rather than peft's own module.

    `zero3` gathers a module's weights when the module itself is called, which the operator does not do.
    """
    return train.method == "lora" and train.lora.dropout == 0 and not train.lora.dora and train.strategy != "zero3"


def free_keys(train: Train, held: Collection[str]) -> frozenset[str]:
    """Return the keys that the plan chooses: each that is `auto`; with `strategy: auto` all CHOSEN_KEYS but `held`."""
    is_open = train.strategy == AUTO
    return frozenset(key for key in CHOSEN_KEYS if getattr(train, key) == AUTO or (is_open and key not in held))


def settled(train: Train, has_triton: bool) -> Train:
    """Return `train` with defaults in place of `auto`, for use where no machine is known to choose by.

    The strategy must be a concrete one.
    """
    usual = {
        **{"recompute": "none", "reshard": True, "compile": can_compile(train, has_triton)},
        "save_async": train.offload == "none",
        "offload_activations": False,
        "context_ranks": 1,
    }
    return train.model_copy(update={key: value for key, value in usual.items() if getattr(train, key) == AUTO})


def in_words(train: Train, accumulation: int) -> list[str]:
    """Return how `train` trains, the strategy first: `fsdp`, `micro-batch 2 x accumulation 4`, `compiled`."""
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
            words.append(f"attention kept in {count(layers, 'layers')}" if layers else "attention computed again")
    if keeps_on_host(train):
        words.append("activations on the host")
    if stays_gathered(train):
        words.append("no reshard after forward")
    if train.offload != "none":
        words.append(f"{train.offload} offloaded")
    if is_compiled(train):
        words.append("compiled")
    return words


# The case: what a prediction is of.


@dataclass(frozen=True)
class Case:
    """One way to train a model on a machine, with `batch_blocks` blocks a step.

    `steps` and `epoch_steps`, those of the run and of an epoch, are None while unknown.
    """

    geometry: Geometry
    train: Train
    machine: Machine
    workload: Workload
    batch_blocks: int
    steps: int | None = None
    epoch_steps: int | None = None

    @property
    def ranks(self) -> Ranks:
        """The ranks of the machine."""
        return Ranks.of(self.machine)

    @property
    def accumulation(self) -> int:
        """The micro-batches of a rank in a step."""
        return self.train.accumulation(self.batch_blocks, self.machine.ranks)

    @property
    def micro_batch_tokens(self) -> int:
        """The tokens of a micro-batch on a rank, padding included."""
        return micro_batch_tokens(self.train, self.workload.block_tokens)


def workload_from(
    index: "BlockIndex", costs: "NDArray[np.int64]", samples_per_block: float, validation_blocks: int = 0
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
