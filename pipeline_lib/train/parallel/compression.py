"""What DDP exchanges instead of whole gradients, for slow networks. Both ways are approximations, by torch's hooks.

bf16 halves the bytes and rounds the sum. PowerSGD exchanges two thin factors of each matrix; what they miss stays with
the rank and is added to its next gradient, so that it is late rather than lost.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

PLAIN_STEPS = 2  # exchanged whole before PowerSGD begins: the least that torch takes
_STEPS = "powersgd.steps"
_MEMORIES = {"powersgd.error": "error_dict", "powersgd.p": "p_memory_dict", "powersgd.q": "q_memory_dict"}


def round_to_bf16(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """The average of a bucket, exchanged in bf16. torch refuses its hook by name where there is no NCCL."""
    return bf16_compress_hook(None, bucket)  # type: ignore[arg-type]


def exchange_factors(power: "PowerSgd", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """About the average of a bucket, by what `power` remembers of it."""
    average = powerSGD_hook(power.memory, bucket)
    if not bucket.buffer().is_cuda:
        average.wait()  # its parts follow one another in gloo's few threads: two buckets could wait for each other
    return average


class PowerSgd:
    """What PowerSGD remembers of one step for the next: for each bucket the factors, and this rank's residual."""

    def __init__(self, rank: int) -> None:
        """Approximate each matrix by one of `rank`."""
        self.rank = rank
        self.reset()

    def reset(self) -> None:
        """Forget everything; the next PLAIN_STEPS steps are exchanged whole."""
        self.memory = PowerSGDState(None, matrix_approximation_rank=self.rank, start_powerSGD_iter=PLAIN_STEPS)

    def state(self) -> dict[str, Tensor]:
        """Copies in host memory; the residuals are as large as the gradients."""
        found = {
            f"{kind}.{bucket}": tensor.to("cpu", copy=True)
            for kind, memory in _MEMORIES.items()
            for bucket, tensor in getattr(self.memory, memory).items()
        }
        return {_STEPS: torch.tensor(self.memory.iter), **found}

    def load(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Continue from what `state` gave, on the same rank of as many."""
        self.reset()
        self.memory.iter = int(state[_STEPS])
        for name, tensor in state.items():
            kind, _, bucket = name.rpartition(".")
            if kind in _MEMORIES:
                getattr(self.memory, _MEMORIES[kind])[int(bucket)] = tensor.to(device, copy=True)
