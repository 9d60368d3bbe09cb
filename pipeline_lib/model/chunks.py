"""The second half of a decoder layer, its MLP, in chunks: only one chunk's intermediates exist.

It stands inside full checkpointing, which keeps the layer's input. The forward pass keeps nothing
of the chunks. The backward pass needs the first half of the layer again, which checkpointing
computes once the tensor between the halves is asked for; that tensor is the last one kept, so the
repetition ends there. Then each chunk is computed again, and its own backward pass follows. So each
half is computed twice, as without chunks.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from pipeline_lib.arch import layers
from pipeline_lib.arch.layers import tokens_at_once
from pipeline_lib.model.dropout import rows_from


def attended(layer: Any, hidden: Tensor, use_cache: bool = False, **kwargs: Any) -> Tensor:
    """Return the first half of a dense decoder layer: `hidden` [B, T, H] plus its attention.

    In a layer with Gated DeltaNet, that takes the place of attention.
    """
    normed = layer.input_layernorm(hidden)
    if hasattr(layer, "linear_attn"):
        result: Tensor = layer.linear_attn(normed, **kwargs)
    else:
        result = layer.self_attn(hidden_states=normed, **kwargs)[0]
    return hidden + result


def fed_forward(layer: Any, hidden: Tensor) -> Tensor:
    """Return the second half: `hidden` [..., H] plus its MLP."""
    result: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return result


def in_chunks(
    whole: Callable[..., Any],
    attend: Callable[..., Tensor],
    feed: Callable[..., Tensor],
    has_random: bool,
) -> Callable[..., Any]:
    """Return `whole`, a layer's forward, in chunks of tokens with gradients.

    More than FED_AT_ONCE tokens run in chunks. `attend` and `feed` are `attended` and
    `fed_forward`, as they are or compiled. `has_random` makes the backward pass repeat random
    numbers.
    """

    @functools.wraps(whole)
    def forward(layer: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden.shape[:-1].numel() <= layers.FED_AT_ONCE or not torch.is_grad_enabled():
            return whole(layer, hidden, *args, **kwargs)
        between = attend(layer, hidden, *args, **kwargs)
        # The empty tensor makes a node of the graph in any case, which keeps `between` before the
        # chunks are computed.
        kept = _Kept.apply(torch.empty(0, requires_grad=True), between)  # type: ignore[no-untyped-call]
        return _FedForward.apply(feed, layer, [kept], has_random, between, *_trained(layer))  # type: ignore[no-untyped-call]

    return forward


def _trained(layer: Any) -> list[nn.Parameter]:
    """Return the parameters of the second half that get gradients."""
    modules = (layer.post_attention_layernorm, layer.mlp)
    trained = []
    for module in modules:
        trained += [one for one in module.parameters() if one.requires_grad]
    return trained


class _Kept(torch.autograd.Function):
    """A node that keeps a tensor, as its neighbours keep tensors; it has no part in the result."""

    @staticmethod
    def forward(ctx: Any, node: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return node.new_empty(0)


class _FedForward(torch.autograd.Function):
    """The second half of a layer, chunk by chunk. Gradients of parameters are added up in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        feed: Callable[..., Tensor],
        layer: Any,
        kept: list[Tensor],
        has_random: bool,
        between: Tensor,
        *_: Tensor,
    ) -> Tensor:
        # The tensor, not its node alone: up to torch 2.11 a node frees what it keeps when its last
        # tensor is gone.
        ctx.feed, ctx.layer, ctx.kept = feed, layer, kept
        ctx.again = _Again(between.device, has_random)
        rows = between.flatten(0, -2)
        output = torch.empty_like(rows)
        # The backward pass has to repeat this, so it is the same code: with a graph, which is
        # dropped.
        with torch.enable_grad(), _keeping_for_itself():
            for part in _parts(len(rows)):
                chunk = rows[part].detach().requires_grad_(between.requires_grad)
                with rows_from(layer, part.start):
                    output[part] = feed(layer, chunk).detach()
        return output.view_as(between)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.kept:
            raise RuntimeError("the layer's chunks have been used; run the forward pass again")
        kept = ctx.kept.pop()  # has to live while its node is asked
        [between] = kept.grad_fn.saved_tensors  # computes the first half again
        del kept  # with which the layer's input is freed
        rows = between.flatten(0, -2)
        of_output = gradient.flatten(0, -2)
        wants_rows = ctx.needs_input_grad[4]
        parameters = _trained(ctx.layer)
        of_rows = torch.empty_like(rows) if wants_rows else None
        sums: list[Tensor | None] = [None] * len(parameters)
        with ctx.again.repeated(), torch.enable_grad(), _keeping_for_itself():
            for part in _parts(len(rows)):
                chunk = rows[part].detach().requires_grad_(wants_rows)
                sources = [chunk, *parameters] if wants_rows else parameters
                with rows_from(ctx.layer, part.start):
                    result = ctx.feed(ctx.layer, chunk)
                found = [*torch.autograd.grad(result, sources, of_output[part], allow_unused=True)]
                if of_rows is not None:
                    of_rows[part] = found.pop(0)
                sums = [_added(*pair) for pair in zip(sums, found, strict=True)]
                del result, found  # before the next chunk's are computed
        of_parameters = [
            None if one is None else one.to(parameter.dtype)
            for one, parameter in zip(sums, parameters, strict=True)
        ]
        return (
            None,
            None,
            None,
            None,
            None if of_rows is None else of_rows.view_as(between),
            *of_parameters,
        )


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if gradient is None or total is None:
        return total if gradient is None else gradient.float()
    return total.add_(gradient)


def _parts(rows: int) -> Iterator[slice]:
    size = tokens_at_once(rows)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _keeping_for_itself() -> AbstractContextManager[Any]:
    """Let autograd keep tensors as usual: the checkpoint around it shall not see a chunk's.

    They are kept as aliases: an operator's own result would keep its graph alive.
    """
    return saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)


class _Again:
    """The state of autocast, and of any random numbers, of a forward pass that is repeated."""

    def __init__(self, device: torch.device, has_random: bool) -> None:
        """Take what holds now."""
        self._device = device
        self._autocast = (
            torch.get_autocast_dtype(device.type),
            torch.is_autocast_enabled(device.type),
        )
        self._random: tuple[Tensor, Tensor | None] | None = None
        if has_random:
            self._random = (
                torch.get_rng_state(),
                torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            )

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Let it hold again; afterwards what held before."""
        dtype, enabled = self._autocast
        with torch.autocast(self._device.type, dtype, enabled=enabled), self._drawing():
            yield

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        if self._random is None:
            yield
            return
        of_host, of_device = self._random
        with torch.random.fork_rng(devices=[] if of_device is None else [self._device]):
            torch.set_rng_state(of_host)
            if of_device is not None:
                torch.cuda.set_rng_state(of_device, self._device)
            yield
