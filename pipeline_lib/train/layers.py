"""The decoder layers of a model: what they compute again instead of keeping it, and whether they are compiled.

Both are done to each layer's `forward`, in place, before a strategy wraps anything: a strategy's hooks stay outside,
and parameters keep their names.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pipeline_lib.config.schema import Train

# What `selective` keeps, as torch's operators are called: products, attention, what was exchanged, chosen experts.
_KEPT = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::_grouped_mm", "aten::topk"),
        *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
        *("aten::_scaled_dot_product_fused_attention_overrideable", "torch_attn::_varlen_attn"),
        *("transformers::grouped_mm_fallback", "_c10d_functional::reduce_scatter_tensor"),
    }
)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformers decoder, also beneath adapters."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.endswith("layers"):
            return list(module)
    return []


def prepare_layers(model: nn.Module, train: Train) -> None:
    """Let the decoder layers of `model` compute again what `train.recompute` says, and compile them if it says so.

    It may be called while the model is on the meta device: what is compiled is compiled when it first runs.
    """
    for layer in decoder_layers(model):
        forward: Any = layer.forward
        if train.recompute != "none":
            forward = _recomputing(forward, train.recompute, has_dropout(layer))
        if train.compile:
            forward = torch.compile(forward)
        if forward is not layer.forward:
            layer.forward = forward


def has_dropout(layer: nn.Module) -> bool:
    """Whether `layer` draws random numbers in training."""
    in_attention = any(getattr(module, "attention_dropout", 0.0) > 0.0 for module in layer.modules())
    return in_attention or any(isinstance(module, nn.Dropout) and module.p > 0.0 for module in layer.modules())


def _recomputing(
    forward: Callable[..., Any], recompute: Literal["selective", "full"], has_random: bool
) -> Callable[..., Any]:
    """`forward` with its activations computed again in the backward pass, with the same random numbers."""
    selective = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)}
    options: dict[str, Any] = selective if recompute == "selective" else {}

    @functools.wraps(forward)  # transformers reads the signature
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=has_random, **options, **kwargs)

    return recomputed


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator.name().partition(".")[0] in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
