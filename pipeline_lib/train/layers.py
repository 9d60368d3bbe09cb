"""The decoder layers of a model: how they multiply, what they compute again, and whether they are compiled.

All is done to each layer's `forward`, in place, before a strategy wraps anything: a strategy's hooks stay outside,
and parameters keep their names.
"""

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pipeline_lib.config.schema import Train
from pipeline_lib.train.attention import sized
from pipeline_lib.train.experts import has_router, keeping_router_logits, tell_router_logits, with_router_logits
from pipeline_lib.train.fp8 import use_fp8

# What `selective` keeps, as torch's operators are called: products, attention, what was exchanged. Not the
# choice of experts, whose weights transformers divides in place: of the same products it is the same again.
_KEPT = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::_grouped_mm"),
        *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
        *("aten::_scaled_dot_product_fused_attention_overrideable", "torch_attn::_varlen_attn"),
        *("qwen3_pipeline::cudnn_attention", "qwen3_pipeline::adapted"),
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
    """Let the decoder layers of `model` compute as `train` says.

    It may be called while the model is on the meta device: what is compiled is compiled when it first runs, and layers
    that are alike share it. Only passes with gradients are: answers and validations come in other shapes.
    """
    prepared: dict[tuple[type, bool, bool], Callable[..., Any]] = {}
    for layer in decoder_layers(model):
        if train.precision == "fp8":
            use_fp8(layer)
        kind = type(layer), has_dropout(layer), has_router(layer) and train.router_aux_loss > 0
        if kind[2]:
            tell_router_logits(layer)
        if kind not in prepared:
            prepared[kind] = _prepared(kind[0].forward, train, has_random=kind[1], keeps_router_logits=kind[2])
        if prepared[kind] is not kind[0].forward:
            layer.forward = MethodType(prepared[kind], layer)


def _prepared(
    plain: Callable[..., Any], train: Train, has_random: bool, keeps_router_logits: bool
) -> Callable[..., Any]:
    """A `forward` for all layers of a class; they come as its first argument."""
    if keeps_router_logits:  # outside of what is computed again
        return keeping_router_logits(_prepared(with_router_logits(plain), train, has_random, False))
    forward = plain
    if train.recompute == "selective":
        forward = _recomputing(forward, {"context_fn": _SELECTIVE}, has_random)
    if train.compile is True:
        torch._dynamo.config.optimize_ddp = False  # its hooks are outside of layers, which need not be cut for them
        forward = _compiled(forward, plain)
    # Outside of what is compiled, so that a layer keeps nothing but its input.
    return _recomputing(forward, {}, has_random) if train.recompute == "full" else forward


def _compiled(forward: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` compiled for any number of documents, which differs from batch to batch; without gradients `plain`."""
    compiled = torch.compile(forward)

    @functools.wraps(plain)  # transformers reads the signature
    def run(layer: nn.Module, *args: Any, max_length_q: Any = None, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(layer, *args, max_length_q=max_length_q, **kwargs)
        ends = kwargs.get("cu_seq_lens_q")
        if ends is not None and max_length_q is not None:
            max_length_q = sized(max_length_q, ends.device)
            for tensor in (ends, max_length_q):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(layer, *args, max_length_q=max_length_q, **kwargs)

    return run


def has_dropout(layer: nn.Module) -> bool:
    """Whether `layer` draws random numbers in training."""
    in_attention = any(getattr(module, "attention_dropout", 0.0) > 0.0 for module in layer.modules())
    return in_attention or any(isinstance(module, nn.Dropout) and module.p > 0.0 for module in layer.modules())


def _recomputing(forward: Callable[..., Any], options: dict[str, Any], has_random: bool) -> Callable[..., Any]:
    """`forward` with its activations computed again in the backward pass, with the same random numbers."""

    @functools.wraps(forward)
    def recomputed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            forward, layer, *args, use_reentrant=False, preserve_rng_state=has_random, **options, **kwargs
        )

    return recomputed


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator.name().partition(".")[0] in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = functools.partial(create_selective_checkpoint_contexts, _policy)
