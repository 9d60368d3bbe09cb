"""Context parallelism (Ulysses): each rank of a group holds a part of the tokens of every block.

Only attention, and what takes its place in Gated DeltaNet layers, needs the other tokens of a
document. One all-to-all before it trades tokens for heads, so that each rank attends with some of
the heads over all tokens, and one after it trades back (DeepSpeed-Ulysses, arXiv 2309.14509).
Blocks are cut at any token, and all ranks of a group do the same work whatever the documents are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


@dataclass(frozen=True)
class Part:
    """Part `number`, of `count` equal ones, of each block's tokens; `group` names its ranks."""

    number: int
    count: int
    group: str

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of `tensor` [B, T]: [B, T / count].

        `count` divides T, as the config's checks ensure.
        """
        return tensor.chunk(self.count, dim=1)[self.number].contiguous()

    def summed(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over the ranks of the group, without gradients."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=_named(self.group))
        return total


def _named(group: str) -> dist.ProcessGroup:
    """Return the process group of that name: operators take no groups as arguments."""
    return distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]


# custom, so that compiled layers contain it as one opaque step
@torch.library.custom_op("qwen3_pipeline::exchange", mutates_args=())
def exchange(parts: Tensor, group: str) -> Tensor:
    """Send `parts[i]` to rank i of the group; return what its ranks sent here, in order."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=_named(group))
    return received


@exchange.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


def _save_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _exchange_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return exchange(gradient, ctx.group), None


exchange.register_autograd(_exchange_back, setup_context=_save_group)


def tokens_to_heads(
    query: Tensor, key: Tensor, value: Tensor, part: Part
) -> tuple[Tensor, Tensor, Tensor]:
    """Trade this rank's tokens of all heads for all tokens of its heads, in one exchange.

    For P parts, `query` is [B, H, T / P, D], and `key` and `value` are [B, G, T / P, D]. Returns
    the query [B, H / P, T, D], and key and value with G / P heads, or one if G < P: then each is
    sent to P / G ranks. P divides H, and divides G or is a multiple of it.
    """
    ranks, (batch, _, length, width) = part.count, query.shape
    if key.shape[1] < ranks:
        key = key.repeat_interleave(ranks // key.shape[1], dim=1)
        value = value.repeat_interleave(ranks // value.shape[1], dim=1)
    # [P, B, T / P, heads of a rank, D]: then a rank receives the tokens of a block in order.
    parts = [
        tensor.transpose(1, 2).reshape(batch, length, ranks, -1, width).permute(2, 0, 1, 3, 4)
        for tensor in (query, key, value)
    ]
    received = exchange(torch.cat(parts, dim=3), part.group).transpose(0, 1).flatten(1, 2)
    of_query, of_key, of_value = received.transpose(1, 2).split(
        [each.shape[3] for each in parts], dim=1
    )
    return of_query, of_key, of_value


def tokens_to_channels(tensors: Sequence[Tensor], part: Part) -> list[Tensor]:
    """Trade this rank's tokens of all channels for all tokens of its channels, in one exchange.

    For P parts, each of `tensors` is [B, T / P, C], of one dtype and with its own C, which P
    divides; the results are [B, T, C / P]. The channels of a rank are adjacent.
    """
    batch, length = tensors[0].shape[:2]
    parts = [tensor.reshape(batch, length, part.count, -1) for tensor in tensors]
    received = (
        exchange(torch.cat(parts, dim=3).permute(2, 0, 1, 3), part.group)
        .transpose(0, 1)
        .flatten(1, 2)
    )
    return [*received.split([each.shape[3] for each in parts], dim=2)]


def heads_to_tokens(output: Tensor, part: Part) -> Tensor:
    """Trade all tokens of this rank's heads for its tokens of all heads.

    This turns [B, T, H / P, D] into [B, T / P, H, D].
    """
    batch, _, heads, width = output.shape
    # [P, B, T / P, H / P, D]
    parts = output.reshape(batch, part.count, -1, heads, width).transpose(0, 1)
    received: Tensor = exchange(parts, part.group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)
