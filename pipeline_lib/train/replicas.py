"""Whether ranks that hold the same weights hold the same bits: a GPU that computes wrongly is found out."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline_lib.base.errors import TrainingError
from pipeline_lib.train.dist import World
from pipeline_lib.train.parallel.fsdp import let_go

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def refuse_differing_replicas(wrapped: nn.Module, world: World, group: dist.ProcessGroup) -> None:
    """Compare the parameters that several ranks hold. Raises TrainingError naming the tensor and the ranks.

    Sums of their bits as integers are compared: exact in any order, and changed by any one bit.
    """
    held, alike = _held_alike(wrapped, world)
    if not held:
        return
    mine = torch.stack([_sum_of_bits(tensor) for tensor in held.values()]).cpu()
    of_ranks = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(of_ranks, mine, group=group)
    table = torch.stack(of_ranks)  # [ranks, tensors]
    for ranks in alike:
        for column in (table[ranks] != table[ranks[0]]).any(dim=0).nonzero().flatten().tolist()[:1]:
            common, holders = Counter(table[ranks, column].tolist()).most_common(1)[0]
            odd = [rank for rank in ranks if table[rank, column] != common]
            who = f": it differs on {_ranks(odd)}" if holders > len(odd) else ""  # of two, either may be wrong
            raise TrainingError(
                f"{list(held)[column].removeprefix('module.')} is not the same on {_ranks(ranks)}{who}. Nothing was "
                "saved; a GPU or its memory may be faulty. Run again, elsewhere, from the last checkpoint"
            )


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _held_alike(wrapped: nn.Module, world: World) -> tuple[dict[str, Tensor], list[list[int]]]:
    """What this rank holds, and which ranks hold the same: all hold what is whole, and replicas the same shards."""
    let_go(wrapped)  # what a validation left gathered is a copy of the shards, in bf16
    parameters = {name: parameter.detach() for name, parameter in wrapped.named_parameters()}
    meshes = [parameter.device_mesh for parameter in parameters.values() if isinstance(parameter, DTensor)]
    if not meshes:
        return parameters, [list(range(world.size))]
    if meshes[0].ndim == 1:  # each rank has a part of its own
        return {}, []
    shards = {name: each.to_local() for name, each in parameters.items() if isinstance(each, DTensor)}
    return shards, meshes[0].mesh.T.tolist()


def _sum_of_bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)
