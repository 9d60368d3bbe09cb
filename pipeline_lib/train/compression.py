"""Gradient compression for DDP on slow networks. Both methods are approximations.

bf16 halves the bytes and rounds the sum. PowerSGD (Vogels et al. 2019, arXiv 1905.13727, algorithms
1 and 2) exchanges two thin factors of each matrix; the error of the approximation stays on the rank
and is added to its next gradient, so that it is delayed rather than lost. torch has hooks for both,
which continue in callbacks: in gloo's threads these can wait for each other, and deadlock when the
process ends. Here PowerSGD's exchanges follow one another in the thread that computes, and so do
those of bf16 on CPUs.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from pipeline_lib.train.staging import new_copies

PLAIN_STEPS = 2  # with whole gradients before PowerSGD begins, as gradients change fast at first
_STEPS = "powersgd.steps"
_RESIDUAL, _FACTOR = "powersgd.residual", "powersgd.factor"


def round_to_bf16(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Return the average of a bucket over ranks, exchanged in bf16."""
    flat = bucket.buffer()
    if flat.is_cuda:  # asynchronous: the backward pass goes on
        return bf16_compress_hook(None, bucket)  # type: ignore[arg-type]
    rounded = (flat / dist.get_world_size()).to(torch.bfloat16)
    dist.all_reduce(rounded)
    return _done(flat.copy_(rounded))


def _done(flat: Tensor) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[flat.device] if flat.is_cuda else None
    )
    done.set_result(flat)
    return done


def _average(tensors: list[Tensor]) -> None:
    """Average `tensors` over all ranks in place, in one exchange."""
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(whole)
    whole /= dist.get_world_size()
    for tensor, part in zip(
        tensors, torch.split(whole, [tensor.numel() for tensor in tensors]), strict=True
    ):
        tensor.copy_(part.view_as(tensor))


class PowerSgd:
    """PowerSGD's state between steps: this rank's residuals, and a factor of each matrix."""

    def __init__(self, rank: int) -> None:
        """Start empty; matrices are approximated with rank `rank`."""
        self.rank = rank
        self.reset()

    def reset(self) -> None:
        """Drop the state; the gradients of the next PLAIN_STEPS steps are exchanged whole."""
        self.steps = 0
        self.residuals: dict[str, Tensor] = {}  # by bucket, as large as the gradients
        self.factors: dict[str, Tensor] = {}  # [columns, rank], by bucket and place in it

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Return the approximate average of a bucket over ranks."""
        flat = bucket.buffer()
        if self.steps < PLAIN_STEPS:
            _average([flat])
        else:
            self._approximate(bucket.index(), flat, bucket.gradients())
        if bucket.is_last():
            self.steps += 1
        return _done(flat)

    @torch.no_grad()
    def _approximate(self, bucket: int, flat: Tensor, gradients: list[Tensor]) -> None:
        """Replace `gradients`, the parts of `flat`, by their approximate average over ranks."""
        if (residual := self.residuals.get(str(bucket))) is not None:
            flat += residual
        wanted = flat.clone()
        matrices: dict[str, Tensor] = {}
        whole = []
        for place, gradient in enumerate(gradients):
            rows = gradient.shape[0] if gradient.ndim else 1
            columns = gradient.numel() // max(1, rows)
            # two factors are smaller
            if gradient.ndim >= 2 and (rows + columns) * self.rank < rows * columns:
                matrices[f"{bucket}.{place}"] = gradient.view(rows, -1)
            else:
                whole.append(gradient)
        lefts = [matrix @ self._factor(name, matrix) for name, matrix in matrices.items()]
        if lefts or whole:
            _average([*lefts, *whole])
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.t() @ left for matrix, left in zip(matrices.values(), lefts, strict=True)]
        for matrix, left, right in zip(matrices.values(), lefts, rights, strict=True):
            # this rank's contribution: the residual is the rest
            torch.mm(left, right.t(), out=matrix)
        self.residuals[str(bucket)] = wanted.sub_(flat)
        for gradient in whole:  # exchanged whole: no residual
            offset = (gradient.data_ptr() - flat.data_ptr()) // flat.element_size()
            wanted[offset : offset + gradient.numel()] = 0
        if rights:
            _average(rights)
        for (name, matrix), left, right in zip(matrices.items(), lefts, rights, strict=True):
            torch.mm(left, right.t(), out=matrix)
            self.factors[name] = right

    def _factor(self, name: str, matrix: Tensor) -> Tensor:
        """Return an orthogonal [columns, rank] factor: the last, or random, equal on all ranks."""
        factor = self.factors.get(name)
        if factor is None:
            generator = torch.Generator().manual_seed(0)
            factor = torch.randn(matrix.shape[1], self.rank, generator=generator).to(matrix)
        orthogonal: Tensor = torch.linalg.qr(factor).Q
        return orthogonal

    def state(self) -> dict[str, Tensor]:
        """Return copies of the state in host memory."""
        tensors = {f"{_RESIDUAL}.{key}": tensor for key, tensor in self.residuals.items()}
        tensors |= {f"{_FACTOR}.{key}": tensor for key, tensor in self.factors.items()}
        return {_STEPS: torch.tensor(self.steps), **new_copies(tensors.items())}

    def load(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore what `state` returned, on the same rank of a world of the same size."""
        self.reset()
        self.steps = int(state[_STEPS])
        for name, tensor in state.items():
            for kind, tensors in ((_RESIDUAL, self.residuals), (_FACTOR, self.factors)):
                if name.startswith(f"{kind}."):
                    tensors[name.removeprefix(f"{kind}.")] = tensor.to(device, copy=True)
