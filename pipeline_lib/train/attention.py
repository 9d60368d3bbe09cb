"""Attention inside the documents of packed blocks, with no mask of T x T.

The model is given the ends of all documents (`cu_seq_lens`), and each document attends to itself alone. On CUDA that is
one kernel for the whole batch: cuDNN's where there is one (attention_cudnn.py), else torch's flash kernel; elsewhere,
and for fp32, one exact product for each document. Promise: a document has the same output whatever lies around it.
Non-goals: sliding windows, and rows that are padded for generation.
"""

import functools
import inspect
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pipeline_lib.train.attention_cudnn import cudnn_attention
from pipeline_lib.train.attention_cudnn import is_available as has_cudnn

PACKED = "packed"
PACKED_FLASH = "packed_by_torch"  # without cuDNN
# torch 2.11 takes fewer key heads than query heads as they come; 2.13 wants to be told.
_GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
_CAUSAL = (-1, 0)


def register() -> None:
    """Let transformers load models with `attn_implementation=PACKED`, or PACKED_FLASH."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionInterface.register(PACKED_FLASH, functools.partial(packed_attention, takes_cudnn=False))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    takes_cudnn: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention as transformers calls it: query [B, H, T, D], key and value [B, G, T, D]; returns [B, T, H, D].

    `cu_seq_lens_q`, int32, says where the documents begin in the B * T tokens, and ends with B * T, any number of
    times. `max_length_q` is at least the longest one's length, or `sized` by it. Without them, as in generation, a row
    is one sequence.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout
        )
        return found
    longest = max_length_q.shape[0] if isinstance(max_length_q, Tensor) else max_length_q
    batch, _, length, width = query.shape
    # Under autocast the norms' fp32 weights raise queries and keys; values come as a product left them.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if takes_cudnn and dropout == 0.0 and has_cudnn(value):
        scale = width**-0.5 if scaling is None else scaling
        return cudnn_attention(query, key, value, cu_seq_lens_q, longest, scale)[0], None
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if dropout == 0.0 and has_kernel(value):
        output = _in_one_kernel(query, key, value, cu_seq_lens_q, longest, scaling)
    else:
        output = _one_by_one(query, key, value, cu_seq_lens_q, scaling, dropout)
    return output.view(batch, length, *output.shape[1:]), None


@functools.cache
def sized(length: int, device: torch.device) -> Tensor:
    """A number as the size of an empty tensor: compiled code takes sizes that vary, and is made anew for numbers."""
    return torch.empty(max(2, length), 0, device=device)  # a size of 1 is a constant to the compiler


def has_kernel(value: Tensor) -> bool:
    """Whether the flash kernel takes tensors like this one: half precision, on a GPU from Ampere on."""
    return (
        value.is_cuda
        and value.dtype in (torch.bfloat16, torch.float16)
        and value.shape[-1] % 8 == 0
        and torch.cuda.get_device_properties(value.device).major >= 8
    )


def _in_one_kernel(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, max_length: int, scaling: float | None
) -> Tensor:
    """[N, H, D] from query [N, H, D], key and value [N, G, D], in half precision on CUDA."""
    output: Any = varlen_attn(
        query,
        key,
        value,
        cu_seq_lens,
        cu_seq_lens,
        max_length,
        max_length,
        scale=scaling,
        window_size=_CAUSAL,
        **_GROUPED_HEADS,
    )
    return cast(Tensor, output)


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, scaling: float | None, dropout: float
) -> Tensor:
    """The same by one product for each document. On a GPU it waits for the lengths, in every layer."""
    if query.is_cuda:  # the kernels that are left there want as many key heads, or would make a matrix of scores
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    lengths = [length for length in cu_seq_lens.diff().tolist() if length]
    queries, keys, values = (torch.split(tensor.transpose(0, 1), lengths, dim=1) for tensor in (query, key, value))
    outputs = [
        F.scaled_dot_product_attention(
            one[None],
            keys[number][None],
            values[number][None],
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        for number, one in enumerate(queries)
    ]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)
