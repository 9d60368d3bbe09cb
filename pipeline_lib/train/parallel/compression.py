"""What DDP exchanges instead of whole gradients, for slow networks. Both ways are approximations.

bf16 halves the bytes and rounds the sum. PowerSGD (Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2) exchanges
two thin factors of each matrix; what they miss stays with the rank and is added to its next gradient, so that it is
late rather than lost. torch has hooks for both, which go on in callbacks: in gloo's threads these can wait
for each other, and for ever when the process ends. Here PowerSGD's exchanges follow one another in the thread that
computes, and so do those of bf16 on CPUs.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

PLAIN_STEPS = 2  # exchanged whole before PowerSGD begins, as gradients change fast at first
_STEPS = "powersgd.steps"
_RESIDUAL, _FACTOR = "powersgd.residual", "powersgd.factor"


def round_to_bf16(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """The average of a bucket, exchanged in bf16."""
    flat = bucket.buffer()
    if flat.is_cuda:  # meanwhile the backward pass goes on
        return bf16_compress_hook(None, bucket)  # type: ignore[arg-type]
    rounded = (flat / dist.get_world_size()).to(torch.bfloat16)
    dist.all_reduce(rounded)
    return _done(flat.copy_(rounded))


def exchange_factors(power: "PowerSgd", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """About the average of a bucket, by what `power` remembers of it."""
    flat = bucket.buffer()
    if power.steps < PLAIN_STEPS:
        _average([flat])
    else:
        power.approximate(bucket.index(), flat, bucket.gradients())
    if bucket.is_last():
        power.steps += 1
    return _done(flat)


def _done(flat: Tensor) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
    done.set_result(flat)
    return done


def _average(tensors: list[Tensor]) -> None:
    """Over all ranks, in place, in one exchange."""
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(whole)
    whole /= dist.get_world_size()
    for tensor, part in zip(tensors, torch.split(whole, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


class PowerSgd:
    """What PowerSGD remembers of one step for the next: this rank's residuals, and a factor of each matrix."""

    def __init__(self, rank: int) -> None:
        """Approximate each matrix by one of `rank`."""
        self.rank = rank
        self.reset()

    def reset(self) -> None:
        """Forget everything; the next PLAIN_STEPS steps are exchanged whole."""
        self.steps = 0
        self.residuals: dict[str, Tensor] = {}  # by bucket, as large as the gradients
        self.factors: dict[str, Tensor] = {}  # [columns, rank], by bucket and place in it

    @torch.no_grad()
    def approximate(self, bucket: int, flat: Tensor, gradients: list[Tensor]) -> None:
        """Replace `gradients`, the parts of `flat`, by about their average over ranks."""
        if (residual := self.residuals.get(str(bucket))) is not None:
            flat += residual
        wanted = flat.clone()
        matrices = {
            f"{bucket}.{place}": gradient.view(gradient.shape[0], -1)
            for place, gradient in enumerate(gradients)
            if self._is_worth_it(gradient)
        }
        whole = [gradient for gradient in gradients if not self._is_worth_it(gradient)]
        lefts = [matrix @ self._factor(name, matrix) for name, matrix in matrices.items()]
        if lefts or whole:
            _average([*lefts, *whole])
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.t() @ left for matrix, left in zip(matrices.values(), lefts, strict=True)]
        for matrix, left, right in zip(matrices.values(), lefts, rights, strict=True):
            torch.mm(left, right.t(), out=matrix)  # of this rank's own: what it has given, and will not give again
        self.residuals[str(bucket)] = wanted.sub_(flat)
        for gradient in whole:  # given whole
            offset = (gradient.data_ptr() - flat.data_ptr()) // flat.element_size()
            wanted[offset : offset + gradient.numel()] = 0
        if rights:
            _average(rights)
        for (name, matrix), left, right in zip(matrices.items(), lefts, rights, strict=True):
            torch.mm(left, right.t(), out=matrix)
            self.factors[name] = right

    def _is_worth_it(self, gradient: Tensor) -> bool:
        """Whether two factors are smaller than the matrix."""
        rows = gradient.shape[0] if gradient.ndim else 1
        columns = gradient.numel() // max(1, rows)
        return gradient.ndim >= 2 and (rows + columns) * self.rank < rows * columns

    def _factor(self, name: str, matrix: Tensor) -> Tensor:
        """Orthogonal [columns, rank]: where the last step's matrix pointed, or random, the same on all ranks."""
        found = self.factors.get(name)
        if found is None:
            generator = torch.Generator().manual_seed(0)
            found = torch.randn(matrix.shape[1], self.rank, generator=generator).to(matrix)
        orthogonal: Tensor = torch.linalg.qr(found).Q
        return orthogonal

    def state(self) -> dict[str, Tensor]:
        """Copies in host memory."""
        kinds = {_RESIDUAL: self.residuals, _FACTOR: self.factors}
        found = {
            f"{kind}.{key}": tensor.to("cpu", copy=True) for kind, held in kinds.items() for key, tensor in held.items()
        }
        return {_STEPS: torch.tensor(self.steps), **found}

    def load(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Continue from what `state` gave, on the same rank of as many."""
        self.reset()
        self.steps = int(state[_STEPS])
        for name, tensor in state.items():
            for kind, held in ((_RESIDUAL, self.residuals), (_FACTOR, self.factors)):
                if name.startswith(f"{kind}."):
                    held[name.removeprefix(f"{kind}.")] = tensor.to(device, copy=True)
