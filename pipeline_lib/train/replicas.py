"""Comparison of replicas: ranks that hold the same weights must hold the same bits.

It detects a GPU that computes wrongly.
"""

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline_lib.core.errors import TrainingError
from pipeline_lib.train.dist import World
from pipeline_lib.train.fsdp import let_go

_SUM_BYTES = 8  # of each integer that is summed


def refuse_differing_replicas(
    wrapped: nn.Module, world: World, group: dist.ProcessGroup, *, with_frozen: bool = True
) -> None:
    """Raise TrainingError, naming tensor and ranks, if ranks differ in what they should share.

    The sums of the bits as integers are compared: exact in any order, and changed by any one bit.
    Without `with_frozen`, only what is trained is compared.
    """
    let_go(wrapped)  # what a validation left gathered is a bf16 copy of the shards
    if world.size == 1:
        return
    parameters = {}
    for name, parameter in wrapped.named_parameters():
        if with_frozen or parameter.requires_grad:
            parameters[name] = parameter.detach()
    sharded = {name: each for name, each in parameters.items() if isinstance(each, DTensor)}
    replicas = [list(range(world.size))]  # groups of ranks that hold the same
    if sharded:
        mesh = next(iter(sharded.values())).device_mesh
        if mesh.ndim == 1:  # each rank has a part of its own
            return
        parameters = {name: each.to_local() for name, each in sharded.items()}
        replicas = mesh.mesh.T.tolist()
    mine = torch.stack([sum_of_bits(each) for each in parameters.values()]).cpu()
    of_ranks = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(of_ranks, mine, group=group)
    table = torch.stack(of_ranks)  # [ranks, tensors]
    for ranks in replicas:
        is_different = (table[ranks] != table[ranks[0]]).any(dim=0)  # [tensors]
        if not is_different.any():
            continue
        column = int(is_different.nonzero()[0])
        name = list(parameters)[column].removeprefix("module.")
        who = _named(ranks) + _who_differs(table[:, column], ranks)
        raise TrainingError(
            f"{name} is not the same on {who}. Nothing was saved; a GPU or its memory may be "
            "faulty. Run again, elsewhere, from the last checkpoint"
        )


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum, modulo 2**64, of `tensor`'s bytes as 64-bit integers, and of its end's."""
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % _SUM_BYTES:
        octets = octets.clone()
    whole = octets.numel() // _SUM_BYTES * _SUM_BYTES
    return octets[:whole].view(torch.int64).sum() + octets[whole:].sum(dtype=torch.int64)


def _who_differs(sums: Tensor, ranks: Sequence[int]) -> str:
    """Return which of `ranks` have a sum unlike most; nothing if half do: either may be wrong."""
    common, holders = Counter(sums[list(ranks)].tolist()).most_common(1)[0]
    odd = [rank for rank in ranks if sums[rank] != common]
    if holders <= len(odd):
        return ""
    return f": it differs on {_named(odd)}"


def _named(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
