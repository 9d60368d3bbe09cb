"""Attention forward and backward over packed documents of several lengths, by every kernel."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from benchmarks.kernels.clock import Call
from benchmarks.kernels.documents import Documents
from benchmarks.kernels.report import Report, gradients, random
from pipeline_lib.model.attention import packed_attention

# torch 2.11 accepts fewer key heads than query heads; 2.13 needs this argument for it.
_GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
DOCUMENTS = ("8192", "1024", "alpaca", "huanhuan")


def measure_attention(report: Report) -> None:
    """Lines for all documents and kernels; ways for the parts `attention 8192` and so on."""
    for name in DOCUMENTS:
        documents = Documents.drawn(name, report.tokens)
        kernels: dict[str, Callable[[Documents], Call]] = {
            "ours": functools.partial(_ours, report),
            "varlen_attn": functools.partial(_varlen, report),
            "flex_attention": functools.partial(_flex, report),
        }
        if documents.is_even:
            kernels["cuDNN, a row for each document"] = functools.partial(_even, report)
        geometry = report.geometry
        flops = 6.0 * geometry.heads * geometry.head_dim * documents.squared
        # Forward reads q, k, v and writes the output; backward reads these and its gradient, and
        # writes three.
        width = geometry.head_dim * (6 * geometry.heads + 6 * geometry.kv_heads)
        for kernel, make in kernels.items():
            seconds = report.measure(
                "attention",
                f"{name}: {kernel}",
                functools.partial(make, documents),
                flops,
                2.0 * report.tokens * width,
                geometry.layers,
            )
            report.way(f"attention {name}", kernel, geometry.layers * seconds)


def _inputs(report: Report, rows: int, tokens: int) -> list[Tensor]:
    """Query, key and value [rows, heads, tokens, width], laid out as projections leave them."""
    geometry = report.geometry
    return [
        random(rows, tokens, heads, geometry.head_dim, device=report.device)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (geometry.heads, geometry.kv_heads, geometry.kv_heads)
    ]


def _ours(report: Report, documents: Documents) -> Call:
    batch, nothing = documents.batch(), nn.Module()
    ends = batch.cu_seq_lens.to(report.device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return packed_attention(
            nothing, query, key, value, None, cu_seq_lens_q=ends, max_length_q=batch.max_length
        )[0]

    return gradients(attend, _inputs(report, 1, report.tokens))


def _varlen(report: Report, documents: Documents) -> Call:
    ends = torch.tensor([0, *np.cumsum(documents.lengths)], dtype=torch.int32, device=report.device)
    longest = max(documents.lengths)

    def attend(*inputs: Tensor) -> Tensor:
        query, key, value = (tensor[0].transpose(0, 1) for tensor in inputs)
        found: Any = varlen_attn(
            query, key, value, ends, ends, longest, longest, window_size=(-1, 0), **_GROUPED_HEADS
        )
        return found  # type: ignore[no-any-return]

    return gradients(attend, _inputs(report, 1, report.tokens))


def _even(report: Report, documents: Documents) -> Call:
    inputs = _inputs(report, len(documents.lengths), documents.lengths[0])
    group = report.geometry.heads // report.geometry.kv_heads

    def attend(query: Tensor, key: Tensor, value: Tensor, has_groups: bool = True) -> Tensor:
        if not has_groups:
            key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=has_groups
            )

    try:
        return gradients(attend, inputs)
    except RuntimeError:  # this torch's cuDNN wants as many key heads
        return gradients(functools.partial(attend, has_groups=False), inputs)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


def _flex(report: Report, documents: Documents) -> Call:
    """The mask is made once for a batch, not in each layer: it does not count."""
    owners, tokens = documents.batch().documents[0].to(report.device), report.tokens

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (owners[query] == owners[key]) & (query >= key)

    mask = create_block_mask(sees, None, None, tokens, tokens, device=report.device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _compiled_flex()(query, key, value, block_mask=mask, enable_gqa=True)

    return gradients(attend, _inputs(report, 1, tokens))
