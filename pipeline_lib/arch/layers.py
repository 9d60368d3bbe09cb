"""How layers are run, as far as memory and time depend on it, in plan and training alike.

The plan resolves every `auto` before anything runs. An unresolved `auto` counts as off.
"""

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.checks import LEAST_KEPT_TOKENS
from pipeline_lib.config.train import AUTO, Train

# Layers whose activations are on the device at a time with `offload_activations`.
LAYERS_ON_DEVICE = 2
# Logits that the loss computes at a time: 1,766 positions of Qwen3's vocabulary; up to 10 bytes per
# logit: 2.5 GiB.
LOGITS_AT_ONCE = 2**28


def recompute_of(train: Train) -> str:
    """Return `none`, `selective` or `full`."""
    return "none" if train.recompute == AUTO else train.recompute


# Length of documents, in tokens, from which on full checkpointing keeps the attention's results.
# There, attention is 26 % of the FLOPs of a layer of Qwen3-8B, and computing it again 8 % of those
# of a step. The results take as much memory as the layer's input. In shorter documents the time
# shrinks with the length, and the memory does not.
KEPT_FROM = LEAST_KEPT_TOKENS


def can_keep_attention(train: Train, tokens: float) -> bool:
    """Return whether layers can keep attention results of such documents: full checkpointing does.

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
    """Return a rank's tokens of a micro-batch: part of each block if ranks share blocks."""
    return train.micro_batch_blocks * block_tokens // train.ranks_per_block


# The tokens of the block whose logits prove the export, at most: the merge passes them through the
# model, on a GPU if one has room.
PROBE_TOKENS = 16_384


# Tokens of a micro-batch from which on full checkpointing feeds them forward in chunks of at most
# so many (model/chunks.py). Qwen3-8B's intermediate tensors and their gradients then take 1.9 GiB,
# however long the block is.
FED_AT_ONCE = 16_384


def can_feed_in_chunks(train: Train) -> bool:
    """Return whether dense layers feed long micro-batches forward in chunks; experts never do.

    DeepSpeed counts on gradients that its own hooks see, and fp8 scales the tokens of a product
    together.
    """
    return recompute_of(train) == "full" and not train.uses_deepspeed and train.precision != "fp8"


def feeds_in_chunks(train: Train, has_experts: bool, tokens: int) -> bool:
    """Return whether micro-batches of so many tokens are fed forward in chunks."""
    return can_feed_in_chunks(train) and not has_experts and tokens > FED_AT_ONCE


def tokens_at_once(tokens: int) -> int:
    """Return a chunk's tokens of `tokens`: equal chunks if below twice the fewest tokens."""
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
    """Return whether `compile: auto` may become true: if tested on GPUs, with one graph a layer.

    That excludes DeepSpeed, and adapters that are peft's own modules. It also excludes fp32, and
    GPUs without Triton: there, documents attend one by one, and layers would be recompiled for
    other lengths.
    """
    is_native = not train.uses_deepspeed
    is_whole = train.method == "full" or has_fused_adapters(train)
    return has_triton and is_native and is_whole and train.precision != "fp32"


def eager_under_deepspeed(train: Train) -> Train:
    """Return `train` with compilation off under DeepSpeed, which `auto` never compiles."""
    return train.model_copy(update={"compile": False}) if train.uses_deepspeed else train


def has_fused_adapters(train: Train) -> bool:
    """Return whether a linear with its adapter is one operator (model/lora.py), not peft's.

    `zero3` gathers a module's weights when the module itself is called, which the operator does not
    do.
    """
    return (
        train.method == "lora"
        and train.lora.dropout == 0
        and not train.lora.dora
        and train.strategy != "zero3"
    )
