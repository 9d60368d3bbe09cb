"""Gated DeltaNet layers over packed documents: each document is computed as if it were alone.

Two parts of such a layer carry something from token to token, and both stop at the beginning of a
document here: a causal convolution over a few tokens, and the gated delta rule, whose state is a
matrix for each head. The convolution is plain torch, which compiled layers fuse. The delta rule is
a custom operator, so that compiled layers contain it as one opaque step. On GPUs it runs the Triton
kernels of fla-core in half precision; anything else takes transformers' function, document by
document.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import MethodType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from pipeline_lib.arch.geometry import DELTA_CHUNK
from pipeline_lib.core.errors import ConfigError, TrainingError
from pipeline_lib.core.text import how_to_install
from pipeline_lib.model.attention import has_kernel
from pipeline_lib.model.context import Part, heads_to_tokens, tokens_to_channels

_LAYERS = frozenset({"Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})


def install(model: nn.Module) -> None:
    """Let transformers' Gated DeltaNet layers heed `cu_seq_lens_q`; names and weights stay."""
    for module in model.modules():
        if type(module).__name__ in _LAYERS:
            module.forward = MethodType(packed_forward, module)


def packed_forward(
    module: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    part: Part | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute a Gated DeltaNet layer within documents: [B, T, H] from `hidden_states`, the same.

    `cu_seq_lens_q` is as in `packed_attention`. Without it or with a cache, as in generation,
    transformers' own forward runs. With `part`, the tokens are this rank's part: each rank
    convolves all tokens for some of the heads. Raises TrainingError if the ranks cannot share the
    heads equally.
    """
    if cu_seq_lens_q is None or cache_params is not None:
        if cu_seq_lens_q is not None:
            kwargs["cu_seq_lens_q"] = cu_seq_lens_q
        own: Callable[..., Tensor] = type(module).forward
        return own(
            module,
            hidden_states,
            cache_params=cache_params,
            attention_mask=attention_mask,
            **kwargs,
        )
    sizes = [module.key_dim, module.key_dim, module.value_dim]
    inputs = list(module.in_proj_qkv(hidden_states).split(sizes, -1))
    inputs.append(module.in_proj_a(hidden_states))
    inputs.append(module.in_proj_b(hidden_states))
    weights = list(module.conv1d.weight[:, 0].split(sizes))
    weights.append(module.A_log)
    weights.append(module.dt_bias)
    if part is not None:
        key_heads = module.key_dim // module.head_k_dim
        if key_heads % part.count:
            shared = f"{key_heads} key heads of Gated DeltaNet"
            text = f"{part.count} ranks cannot share {shared} equally"
            raise TrainingError(f"train.context_ranks: {text}")
        inputs = tokens_to_channels(inputs, part)
        weights = [weight.chunk(part.count)[part.number] for weight in weights]
    batch, length = inputs[0].shape[:2]
    query, key, value, step, strength = (tensor.flatten(0, 1) for tensor in inputs)
    of_query, of_key, of_value, decay_log, bias = weights
    positions = positions_of(cu_seq_lens_q, batch * length)
    # Queries, keys and values are convolved by themselves: so they are contiguous, as the kernels
    # want, without copies.
    query = convolved(query, of_query, positions, module.activation)
    key = convolved(key, of_key, positions, module.activation)
    value = convolved(value, of_value, positions, module.activation)
    output, _ = delta_rule(
        query.view(batch * length, -1, module.head_k_dim),
        key.view(batch * length, -1, module.head_k_dim),
        value.view(batch * length, -1, module.head_v_dim),
        # In fp32: it would be -inf in fp16, and decays multiply over thousands of tokens.
        -decay_log.float().exp() * F.softplus(step.float() + bias.float()),
        strength.float().sigmoid(),
        cu_seq_lens_q,
    )
    if part is not None:
        output = heads_to_tokens(output.view(batch, length, -1, module.head_v_dim), part)
    gate = module.in_proj_z(hidden_states)
    output = module.norm(output.reshape(-1, module.head_v_dim), gate.reshape(-1, module.head_v_dim))
    return module.out_proj(output.view(*hidden_states.shape[:2], -1))  # type: ignore[no-any-return]


def positions_of(ends: Tensor, tokens: int) -> Tensor:
    """Return each token's position [tokens] in its document; `ends` are cu_seq_lens, may repeat."""
    index = torch.arange(tokens, dtype=ends.dtype, device=ends.device)
    return index - ends[torch.searchsorted(ends, index, right=True) - 1]


def convolved(mixed: Tensor, weight: Tensor, positions: Tensor, activation: str) -> Tensor:
    """Return the activation of each channel's causal convolution within documents.

    It is [N, C], from `mixed` [N, C]. `weight` is [C, K]: the last of a channel's weights is that
    of the token itself. `positions` [N] are those in the documents. It is computed in fp32 and
    returned in the dtype of `mixed`.
    """
    tokens = len(mixed)
    before = weight.shape[1] - 1
    # All products are of parts of one tensor: it is what autograd keeps, in the dtype of `mixed`.
    padded = F.pad(mixed, (0, 0, before, 0))
    weights = weight.float()
    total = padded[before:] * weights[:, before]
    for back in range(1, before + 1):
        earlier = padded[before - back : before - back + tokens] * weights[:, before - back]
        total = total + torch.where(positions[:, None] >= back, earlier, 0.0)
    activated: Tensor = ACT2FN[activation](total)
    return activated.to(mixed.dtype)


# The delta rule. With the state S of a head, [D, E], a token's key k and query q, both of norm 1,
# and its value v: S <- decay S; S <- S + k (beta (v - S' k))'; its output is S' q / sqrt(D).


@torch.library.custom_op("qwen3_pipeline::delta_rule", mutates_args=())
def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule within documents.

    Query and key are [N, G, D], value [N, H, E], and G divides H. Queries and keys are normalized
    here. `log_decay` and `beta` are [N, H] in fp32; `ends` are cu_seq_lens. Returns the output [N,
    H, E] and the inverses [N, H, DELTA_CHUNK] that the kernels' backward pass needs, [N, H, 0]
    without kernels. Raises ConfigError if there should be kernels and fla-core is not installed.
    """
    if has_kernel(value):
        return _kernels().forward(query, key, value, log_decay, beta, ends)  # type: ignore[no-any-return]
    documents = _documents(ends, query, key, value, log_decay, beta)
    outputs = [_alone(*document) for document in documents]
    return torch.cat(outputs), _inverses(value)


@delta_rule.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    return value.new_empty(value.shape), _inverses(value)


def _inverses(value: Tensor) -> Tensor:
    tokens, heads = value.shape[:2]
    return value.new_empty(tokens, heads, DELTA_CHUNK if has_kernel(value) else 0)


@torch.library.custom_op("qwen3_pipeline::delta_rule_backward", mutates_args=())
def delta_rule_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    inverses: Tensor,
    ends: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, log_decay and beta; recompute the reference."""
    if has_kernel(value):
        return _kernels().backward(gradient, query, key, value, log_decay, beta, inverses, ends)  # type: ignore[no-any-return]
    found = []
    with _recording(value.device):
        for of_output, *inputs in _documents(ends, gradient, query, key, value, log_decay, beta):
            leaves = [tensor.detach().requires_grad_() for tensor in inputs]
            found.append(torch.autograd.grad(_alone(*leaves), leaves, of_output))
    of_query, of_key, of_value, of_decay, of_beta = map(torch.cat, zip(*found, strict=True))
    return of_query, of_key, of_value, of_decay, of_beta


@delta_rule_backward.register_fake
def _(gradient: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, key, value, log_decay, beta = (tensor.new_empty(tensor.shape) for tensor in inputs[:5])
    return query, key, value, log_decay, beta


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ends = inputs
    ctx.save_for_backward(*tensors, output[1], ends)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*delta_rule_backward(gradient, *ctx.saved_tensors), None)


delta_rule.register_autograd(_backward, setup_context=_save)


@contextmanager
def _recording(device: torch.device) -> Iterator[None]:
    """Let autograd record inside an operator, where it is off, in whatever modes it was called."""
    nothing = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    keys = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), nothing)
    with keys, torch.enable_grad(), torch.autocast(device.type, enabled=False):
        yield


@functools.cache
def _kernels() -> ModuleType:
    try:
        from pipeline_lib.model import delta_kernels
    except ImportError as error:
        text = f"Gated DeltaNet layers on a GPU need fla-core: {how_to_install('delta')}"
        raise ConfigError("model", [text]) from error
    delta_kernels.pin()
    return delta_kernels


def _documents(ends: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the rows of `tensors` that are a document's, for each document.

    On a GPU this waits for the lengths.
    """
    for begin, end in pairwise(ends.tolist()):
        if begin < end:
            yield tuple(tensor[begin:end] for tensor in tensors)


def _alone(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Return the output [n, H, E] of one document, in transformers' arithmetic, which is fp32."""
    repeats = value.shape[1] // key.shape[1]
    query = query.repeat_interleave(repeats, dim=1)
    key = key.repeat_interleave(repeats, dim=1)
    tensors = [tensor[None] for tensor in (query, key, value, log_decay, beta)]
    outputs, _ = _reference()(*tensors, chunk_size=DELTA_CHUNK, use_qk_l2norm_in_kernel=True)
    output: Tensor = outputs[0]
    return output


@functools.cache
def _reference() -> Callable[..., Any]:
    """Return transformers' own function: with fla-core installed, its name means fla's kernels."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    plain: Callable[..., Any] = inspect.unwrap(torch_chunk_gated_delta_rule)
    return plain
