"""cuDNN's attention graphs, which need a GPU, in plain torch: operators around them are real.

And torch.compile without the kernels that it builds.
"""

import functools
from collections import Counter

import pytest
import torch
from torch import Tensor

from pipeline_lib.model import attention
from pipeline_lib.model.attention import Shape


def use_torch_for_graphs(patch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each graph has run since; as on a GPU, cuDNN's operator takes every document."""
    counts: Counter[str] = Counter()

    def run(graph: tuple[str, Shape], ends: Tensor, tensors: dict[str, Tensor]) -> None:
        kind, shape = graph
        counts[kind] += 1
        bounds = ends.tolist()
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            _compute(
                kind, shape.scaling, {name: tensor[begin:end] for name, tensor in tensors.items()}
            )

    patch.setattr(attention, "is_available", lambda value: True)
    patch.setattr(attention, "_forward_graph", lambda shape: ("forward", shape))
    patch.setattr(attention, "_backward_graph", lambda shape: ("backward", shape))
    patch.setattr(attention, "_run", run)
    return counts


def compile_without_kernels(patch: pytest.MonkeyPatch) -> None:
    """Have layers compiled, cut and decomposed as they would be; building kernels takes long.

    That is many times as long.
    """
    torch.compiler.reset()
    patch.setattr(
        torch, "compile", functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    )


def _weights_of(query: Tensor, key: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Causal weights [H, n, n] of a document's query and key [n, H, D], and log-sum-exp [n, H]."""
    scores = torch.einsum("nhd,mhd->hnm", query, key) * scaling
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
    return scores.softmax(-1), scores.logsumexp(-1).T


def _compute(kind: str, scaling: float, to: dict[str, Tensor]) -> None:
    """Compute one document's graph of that kind, in fp32, into the tensors that it writes."""
    of = {name: tensor.float() for name, tensor in to.items()}
    repeats = of["q"].shape[1] // of["k"].shape[1]
    key, value = (of[name].repeat_interleave(repeats, dim=1) for name in "kv")
    weights, sums = _weights_of(of["q"], key, scaling)
    if kind == "forward":
        to["o"].copy_(torch.einsum("hnm,mhd->nhd", weights, value))
        to["stats"].copy_(sums)
        return
    of_weights = torch.einsum("nhd,mhd->hnm", of["do"], value)
    of_scores = scaling * weights * (of_weights - (of["do"] * of["o"]).sum(-1).T[..., None])
    to["dq"].copy_(torch.einsum("hnm,mhd->nhd", of_scores, key))
    for name, found in (
        ("dk", torch.einsum("hnm,nhd->mhd", of_scores, of["q"])),
        ("dv", torch.einsum("hnm,nhd->mhd", weights, of["do"])),
    ):
        to[name].copy_(
            found.view(len(found), found.shape[1] // repeats, repeats, found.shape[2]).sum(2)
        )
