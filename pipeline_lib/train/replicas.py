"""Whether ranks that hold the same weights hold the same bits: a GPU that computes wrongly is found out."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pipeline_lib.base.errors import TrainingError
from pipeline_lib.train.dist import World

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def refuse_differing_replicas(wrapped: nn.Module, world: World, group: dist.ProcessGroup) -> None:
    """Compare the parameters that are whole on every rank. Raises TrainingError naming the tensor and the ranks.

    Sums of their bits as integers are compared: exact in any order, and changed by any one bit.
    Under FSDP none is whole by design; what a validation left gathered of it is a copy of the shards, in bf16.
    """
    if isinstance(wrapped, FSDPModule):
        return
    whole = {name: p.detach() for name, p in wrapped.named_parameters() if not isinstance(p, DTensor)}
    if not whole:
        return
    mine = torch.stack([_sum_of_bits(tensor) for tensor in whole.values()]).cpu()
    of_ranks = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(of_ranks, mine, group=group)
    table = torch.stack(of_ranks)  # [ranks, tensors]
    for column in (table != table[0]).any(dim=0).nonzero().flatten().tolist()[:1]:
        sums = table[:, column].tolist()
        common = Counter(sums).most_common(1)[0][0]
        odd = ", ".join(str(rank) for rank, value in enumerate(sums) if value != common)
        raise TrainingError(
            f"{list(whole)[column].removeprefix('module.')} is not the same on all ranks: it differs on rank {odd}. "
            "Nothing was saved; a GPU or its memory may be faulty. Run again, elsewhere, from the last checkpoint"
        )


def _sum_of_bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)
