"""Activation checkpointing of decoder layers: what a layer keeps, and how the rest is repeated."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pipeline_lib.arch.layers import KEPT_FROM
from pipeline_lib.model.offload import HostMemory, LayerCall

Results = tuple[Tensor, ...]

# Results of attention under full checkpointing: kept where documents are long, and not computed
# again. `train.kept_attention_layers` may be fewer layers than all.
#
# The attention operators of model/attention.py call `once`. It stands inside the operator, so that
# compiled layers, which call operators while they run, have it too, and the graphs of both passes
# are the same. Kept are aliases of the results: a result belongs to the graph that is built at the
# call, and would keep that graph alive.


class KeptResults:
    """The attention results of one call of a layer, in order; on the host with a `call` there."""

    def __init__(self, call: LayerCall | None = None) -> None:
        """Keep nothing yet."""
        self._call = call
        self._results: list[tuple[Any, ...]] = []
        # the number of the next result to return; None while results are recorded
        self._next: int | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of the forward pass and its repetition, as `checkpoint` takes."""
        return self._during(None), self._during(0)

    @contextmanager
    def _during(self, start: int | None) -> Iterator[None]:
        self._next = start
        token = _KEPT_RESULTS.set(self)
        try:
            yield
        finally:
            _KEPT_RESULTS.reset(token)

    def once(self, compute: Callable[[], Results]) -> Results:
        """Compute and keep the results of an operator, or return them in the repetition."""
        if self._next is None:
            found = compute()
            self._results.append(tuple(self._keep(tensor.detach()) for tensor in found))
            return found
        results = self._results[self._next]
        self._next += 1
        return tuple(self._get(kept).detach() for kept in results)

    def _keep(self, tensor: Tensor) -> Any:
        return tensor if self._call is None else self._call.keep(tensor)

    def _get(self, kept: Any) -> Tensor:
        return kept if self._call is None else self._call.get(kept)


_KEPT_RESULTS: ContextVar[KeptResults | None] = ContextVar("kept results", default=None)


def once(compute: Callable[[], Results]) -> Results:
    """Return `compute()`, or in a layer's repetition the results that its forward pass kept."""
    kept = _KEPT_RESULTS.get()
    return compute() if kept is None else kept.once(compute)


def keep_attention_of_last(layers: Iterable[nn.Module], count: int) -> None:
    """Let only the last `count` of those of `layers` that have attention keep its results."""
    attending: list[Any] = [layer for layer in layers if hasattr(layer, "self_attn")]
    for number, layer in enumerate(reversed(attending)):
        layer.keeps_attention = number < count


def fully_recomputed(
    forward: Callable[..., Any], has_random: bool, host: HostMemory | None = None
) -> Callable[..., Any]:
    """Return `forward`, of a layer, so that it keeps its input and long documents' attention.

    These only if `keep_attention_of_last` does not leave the layer out. `has_random` makes the
    repetition repeat random numbers. With `host`, what is kept is kept there.
    """

    @functools.wraps(forward)
    def recomputed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(layer, *args, **kwargs)
        call = None if host is None else host.call()
        longest = kwargs.get("max_length_q")
        is_long = isinstance(longest, int) and longest >= KEPT_FROM
        if is_long and _keeps_attention(layer, args):
            kwargs["context_fn"] = KeptResults(call).contexts
        to_host: AbstractContextManager[Any] = nullcontext()
        if call is not None:
            to_host = saved_tensors_hooks(call.keep, call.get)
        # `checkpoint` saves the tensors among `args` for the repetition, which is the layer's
        # input.
        with to_host:
            return checkpoint(
                forward,
                layer,
                *args,
                use_reentrant=False,
                preserve_rng_state=has_random,
                **kwargs,
            )

    return recomputed


def _keeps_attention(layer: nn.Module, args: tuple[Any, ...]) -> bool:
    """Return whether `layer` keeps its attention's results, and they are saved for backward.

    Compiled code reuses the memory of what is not saved. The delta rule's result is never kept: its
    time does not grow with the square of a document, and the result is as large as the layer's
    input.
    """
    if not hasattr(layer, "self_attn") or not getattr(layer, "keeps_attention", True):
        return False
    if any(isinstance(value, Tensor) and value.requires_grad for value in args):
        return True
    for name in ("q_proj", "k_proj", "v_proj"):
        projection: Any = getattr(layer.self_attn, name)
        if any(parameter.requires_grad for parameter in projection.parameters()):
            return True
    return False


# Selective checkpointing. The choice of experts is recomputed, since transformers normalizes its
# weights in place; from the same router logits it comes out the same.

# Operators whose results it keeps: matmuls, attention, the delta rule and collectives.
_KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::linear",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "qwen3_pipeline::flash_attention",
        "qwen3_pipeline::cudnn_attention",
        "qwen3_pipeline::delta_rule",
        "qwen3_pipeline::adapted",
        "qwen3_pipeline::adapted_nf4",
        "qwen3_pipeline::frozen_nf4",
        "transformers::grouped_mm_fallback",
        "_c10d_functional::reduce_scatter_tensor",
    }
)


def selectively_recomputed(forward: Callable[..., Any], has_random: bool) -> Callable[..., Any]:
    """Return `forward`, of a layer, so that it keeps its input and the results of _KEPT.

    `has_random` makes the repetition repeat random numbers.
    """

    @functools.wraps(forward)
    def recomputed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            forward,
            layer,
            *args,
            use_reentrant=False,
            preserve_rng_state=has_random,
            context_fn=_SELECTIVE,
            **kwargs,
        )

    return recomputed


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator.name().partition(".")[0] in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = functools.partial(create_selective_checkpoint_contexts, _policy)
