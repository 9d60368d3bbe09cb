"""Strategies built on torch alone: DDP with optional gradient compression, FSDP2, and hybrid sharding."""

import inspect
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pipeline_lib.config.checks import TORCH_CASTS_INTEGERS, shards_integers
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import TrainingError
from pipeline_lib.core.run_folder import WEIGHTS
from pipeline_lib.model.build import DTYPES, decoder_layers, prepare_layers
from pipeline_lib.model.weights import without_adapters
from pipeline_lib.train.dist import LET_GO_S, World, mean_over_ranks
from pipeline_lib.train.mesh import state_mesh
from pipeline_lib.train.optimizer import (
    is_8bit,
    make_optimizer,
    set_learning_rate,
    take_values,
    trainable,
    update,
    values_of,
    zero_moments,
)
from pipeline_lib.train.staging import Copy, new_copies
from pipeline_lib.train.state import LOSS_SCALE, STATE_KINDS, own_part
from pipeline_lib.train.strategy import LossScale, Strategy, grouped, holders_of, share_of

# Gradient compression for DDP on slow networks. Both methods are approximations.
#
# bf16 halves the bytes and rounds the sum. PowerSGD (Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2)
# exchanges two thin factors of each matrix; the error of the approximation stays on the rank and is added to its next
# gradient, so that it is delayed rather than lost. torch has hooks for both, which continue in callbacks: in gloo's
# threads these can wait for each other, and deadlock when the process ends. Here PowerSGD's exchanges follow one
# another in the thread that computes, and so do those of bf16 on CPUs.

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
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[flat.device] if flat.is_cuda else None)
    done.set_result(flat)
    return done


def _average(tensors: list[Tensor]) -> None:
    """Average `tensors` over all ranks in place, in one exchange."""
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(whole)
    whole /= dist.get_world_size()
    for tensor, part in zip(tensors, torch.split(whole, [tensor.numel() for tensor in tensors]), strict=True):
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
            if gradient.ndim >= 2 and (rows + columns) * self.rank < rows * columns:  # two factors are smaller
                matrices[f"{bucket}.{place}"] = gradient.view(rows, -1)
            else:
                whole.append(gradient)
        lefts = [matrix @ self._factor(name, matrix) for name, matrix in matrices.items()]
        if lefts or whole:
            _average([*lefts, *whole])
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.t() @ left for matrix, left in zip(matrices.values(), lefts, strict=True)]
        for matrix, left, right in zip(matrices.values(), lefts, rights, strict=True):
            torch.mm(left, right.t(), out=matrix)  # this rank's contribution: the residual is the rest
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
        """Return an orthogonal [columns, rank] factor: from the last step, else random, the same on all ranks."""
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


# What these strategies share: AdamW over the parameters as they are distributed, and its state by name.

VALUES_AT_ONCE_BYTES = 2 * 10**9  # fp32 values of a state with 8-bit moments, on each rank's device


class Native(Strategy):
    """The part of a strategy that does not depend on how parameters are distributed."""

    def __init__(self, world: World, train: Train, accumulation: int) -> None:
        """Set up for `world`; `own` makes the optimizer."""
        self.world = world
        self.train = train
        self.parameters: dict[str, nn.Parameter] = {}
        self.updates = 0
        self.optimizer: torch.optim.Optimizer
        self.loss_scale = LossScale() if train.precision == "fp16" else None

    def spread(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Load the whole `model` and make its optimizer."""
        prepare_layers(model, self.train)
        self._load = partial(load, model)
        self._load()
        self.own(model)
        return model

    def own(self, model: nn.Module) -> None:
        """Make the optimizer of `model`, which is already distributed and loaded; moments are zero."""
        self.parameters = trainable(model)
        self.optimizer = make_optimizer(self.parameters, self.train)
        zero_moments(self.optimizer)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the loss, multiplied by the fp16 loss scale if there is one."""
        (loss if self.loss_scale is None else loss * self.loss_scale.value).backward()  # type: ignore[no-untyped-call]

    def grad_norm(self) -> Tensor:
        """Return the L2 norm over all trained parameters; it is not finite if fp16 overflowed."""
        norm = nn.utils.get_total_norm(self.gradients())
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return whole.to(self.world.device, torch.float64) / self._scale  # a power of two

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the parameters that have one."""
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def update(self, lr: float, grad_norm: float) -> None:
        """Clip the gradients, make one update, and drop them."""
        # One factor for clipping and the loss scale, so that gradients are rounded once; as in torch's clip_grad_norm_.
        factor = min(1.0, self.train.max_grad_norm / (grad_norm + 1e-6)) / self._scale
        set_learning_rate(self.optimizer, lr)
        update(self.optimizer, factor)
        self.updates += 1
        self._end_step(grad_norm)

    def discard(self, grad_norm: float | None = None) -> None:
        """Drop the gradients, and halve the loss scale if they overflowed."""
        self._end_step(grad_norm)

    def _end_step(self, grad_norm: float | None) -> None:
        if self.loss_scale is not None and grad_norm is not None:
            self.loss_scale.follow(grad_norm)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Free the memory of the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def rewrite(self, change: Callable[[dict[str, Tensor]], None]) -> None:
        """Let `change` modify the fp32 state, by checkpoint name: all at once, or a few at a time with 8-bit moments.

        All dequantized values together would take as much memory as moments in fp32. Every rank makes the same calls of
        `change`.
        """
        stored = self._stored(STATE_KINDS)
        if self.train.optimizer != "adamw_8bit":
            change(stored)
            return
        # Groups are the same on all ranks, though parts of a tensor may differ in size and only some have 8 bits:
        # reading is collective. A group's values are freed before the next group's are made.
        of_rank = {
            name: 4 * tensor.numel() * holders_of(tensor, self.world)[0] // self.world.size
            for name, tensor in stored.items()
        }
        for names in grouped(of_rank, VALUES_AT_ONCE_BYTES):
            _rewrite({name: stored[name] for name in names}, change)

    def _stored(self, kinds: tuple[str, ...]) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            by_kind = {WEIGHTS: parameter.detach(), **self.optimizer.state[parameter]}
            stored |= {f"{kind}.{name}": by_kind[kind] for kind in kinds}
        return stored

    def state_sizes(self, kinds: tuple[str, ...] = STATE_KINDS) -> dict[str, int]:
        """Return the elements of each whole tensor of a checkpoint."""
        return {name: tensor.numel() for name, tensor in self._stored(kinds).items()}

    def snapshot(self, names: Collection[str] | None = None, copied: Copy = new_copies) -> dict[str, Tensor]:
        """Copy this rank's share to host memory; 8-bit moments are dequantized one at a time."""
        stored = self._stored(STATE_KINDS)
        mine = share_of(stored if names is None else {name: stored[name] for name in names}, self.world)
        return copied((name, values_of(tensor) if is_8bit(tensor) else tensor) for name, tensor in mine.items())

    def restore(self, read: Callable[[Mapping[str, Tensor]], None], updates: int) -> None:
        """Let `read` fill the state; set the step count of Adam's bias correction to `updates`."""
        self.rewrite(read)
        self.updates = updates
        for parameter in self.parameters.values():
            self.optimizer.state[parameter]["step"].fill_(float(updates))

    def begin_anew(self) -> None:
        """Load the model again, and set moments to zero."""

        def clear(tensors: Mapping[str, Tensor]) -> None:
            for name, tensor in tensors.items():
                if not name.startswith(WEIGHTS):
                    tensor.zero_()

        self.restore(clear, updates=0)
        self._load()

    def own_state(self) -> dict[str, Tensor]:
        """Return the fp16 loss scale, if there is one."""
        return {} if self.loss_scale is None else {LOSS_SCALE: self.loss_scale.state()}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the fp16 loss scale from `state`, if it holds one."""
        if self.loss_scale is not None and LOSS_SCALE in state:
            self.loss_scale.load(state[LOSS_SCALE])


def _rewrite(stored: Mapping[str, Tensor], change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = {name: values_of(tensor) if is_8bit(tensor) else tensor for name, tensor in stored.items()}
    change(tensors)
    for name, tensor in stored.items():
        if is_8bit(tensor):
            take_values(tensor, tensors.pop(name))


# Data parallel (DDP): every rank holds the whole model, and gradients are averaged in buckets during backward.
#
# `gradient_compression` exchanges fewer bytes, and `local_sgd_steps` exchanges less often; both change the result.

# Buffers are constants and need no sync. torch 2.11 has only `broadcast_buffers`, and 2.13 warns about it.
_KNOWN = inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS: dict[str, Any] = {
    ("forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers"): False
}


class Ddp(Native):
    """Data parallel, with weights, gradients and moments whole on every rank: fastest where they fit."""

    def __init__(self, world: World, train: Train, accumulation: int) -> None:
        """Set up for `world`, with local SGD or gradient compression if `train` asks for it."""
        super().__init__(world, train, accumulation)
        self.is_local = train.local_sgd_steps > 1
        self.power = PowerSgd(train.powersgd_rank) if train.gradient_compression == "powersgd" else None
        self._is_laid = False  # whether DDP's buckets have their final order
        self._own_norm: Tensor  # this rank's gradient norm, with local SGD
        self._averaged_at = 0  # number of updates at the last averaging

    def spread(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Load the whole model to the device and wrap it in DDP; with local SGD, return it unwrapped."""
        super().spread(model, load)
        if self.is_local:
            return model
        device = self.world.device
        # All ranks have read the same weights and drawn the same adapters, so nothing needs to be broadcast at first.
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            init_sync=False,
            **_NO_BUFFERS,
        )
        if self.power is not None:
            wrapped.register_comm_hook(self.power, PowerSgd.exchange)
        elif self.train.gradient_compression == "bf16":
            wrapped.register_comm_hook(None, round_to_bf16)
        self._wrapped = wrapped
        return wrapped

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """Suppress the exchange of gradients before the last micro-batch."""
        return nullcontext() if is_last or self.is_local else self._wrapped.no_sync()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return autocast for mixed precision: fp32 weights are rounded for each product."""
        precision = self.train.precision
        return torch.autocast(self.world.device.type, DTYPES[precision], enabled=precision != "fp32")

    def grad_norm(self) -> Tensor:
        """Return the gradient norm; with local SGD the mean over ranks, while each rank clips by its own."""
        norm = super().grad_norm()
        if not self.is_local:
            return norm
        self._own_norm = norm
        return mean_over_ranks(norm.clone())

    def update(self, lr: float, grad_norm: float) -> None:
        """Clip, update, and average the models of the ranks when local SGD is due to."""
        super().update(lr, float(self._own_norm) if self.is_local else grad_norm)
        if self.updates % self.train.local_sgd_steps == 0:
            self._average()

    def discard(self, grad_norm: float | None = None) -> None:
        """Drop the gradients and PowerSGD's state, whose residuals may contain a bad gradient."""
        super().discard(float(self._own_norm) if self.is_local and grad_norm is not None else grad_norm)
        if self.power is not None:
            self.power.reset()

    def drop_gradients(self) -> None:
        """Zero the gradients in place, in DDP's buckets: otherwise micro-batches would allocate memory beside them.

        The first time, free the gradients and rebuild the buckets in the order in which gradients arrived. DDP would
        rebuild them itself in the next forward pass, when the old buckets are still there while activations fill the
        memory.
        """
        self.optimizer.zero_grad(set_to_none=self.is_local or not self._is_laid)
        if not self.is_local and not self._is_laid:
            if self.world.device.type == "cuda":
                time.sleep(LET_GO_S)  # until NCCL's watchdog releases the exchanged tensors
            self._wrapped.reducer._rebuild_buckets()
            self._is_laid = True

    def snapshot(self, names: Collection[str] | None = None, copied: Copy = new_copies) -> dict[str, Tensor]:
        """Average the models if they differ, then copy this rank's share to host memory."""
        self._average()
        return super().snapshot(names, copied)

    def restore(self, read: Callable[[Mapping[str, Tensor]], None], updates: int) -> None:
        """Restore the same state on every rank, so that no averaging is due."""
        super().restore(read, updates)
        self._averaged_at = updates

    def _average(self) -> None:
        def average(tensors: dict[str, Tensor]) -> None:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors.values()]:
                work.wait()
            torch._foreach_div_(list(tensors.values()), self.world.size)

        if self.is_local and self._averaged_at != self.updates:
            self.rewrite(average)
            self._averaged_at = self.updates

    def own_state(self) -> dict[str, Tensor]:
        """Return PowerSGD's residuals and factors, and the loss scale."""
        return super().own_state() | (self.power.state() if self.power is not None else {})

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `own_state` returned."""
        super().load_own_state(state)
        if self.power is not None and state:
            self.power.load(state, self.world.device)


# Fully sharded data parallel (FSDP2): each rank keeps 1/N of weights, gradients and moments.


class Fsdp(Native):
    """FSDP2: layers are gathered just before they are used; gradients are reduced after every micro-batch, in fp32.

    With `gradient_compression: bf16` they are reduced in bf16, and still added up over micro-batches in fp32.

    Gradients kept until the last micro-batch would be whole on every rank.
    """

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass; offloaded gradients of earlier micro-batches are added after it.

        FSDP2 copies a gradient to page-locked memory during the backward pass, if the parameter has none yet.
        Otherwise it waits for each copy, which goes to new pageable memory: 40 times as slow (benchmarks/RESULTS.md).
        CPUs would not need that; they do the same, so that tests without GPUs take this way too.
        """
        if self.train.offload == "none":
            super().backward(loss)
            return
        earlier = {parameter: parameter.grad for parameter in self.parameters.values() if parameter.grad is not None}
        self.drop_gradients()
        super().backward(loss)
        for parameter, gradient in earlier.items():
            if parameter.grad is None:  # this micro-batch did not use it
                parameter.grad = gradient
            else:
                own_part(parameter.grad).add_(own_part(gradient))

    def grad_norm(self) -> Tensor:
        """Return the gradient norm; that of offloaded gradients is computed on the device, one tensor at a time.

        On the host torch computes it at 10 GB/s, with 4 threads and with 16 (benchmarks/RESULTS.md).
        """
        if self.train.offload == "none" or self.world.device.type == "cpu":
            return super().grad_norm()
        return self.norm_on_device()

    def norm_on_device(self) -> Tensor:
        """Return the gradient norm, computed on the device: of each tensor in fp32, their sum in float64."""
        device = self.world.device
        squared = torch.zeros((), dtype=torch.float64, device=device)
        for gradient in self.gradients():
            norm = torch.linalg.vector_norm(own_part(gradient).to(device, non_blocking=True))
            squared += norm.double().square()
        dist.all_reduce(squared, group=self._mesh.get_group("shard"))
        return squared.sqrt() / self._scale

    def spread(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Shard `unit_layers` decoder layers at a time, embedding and head separately, and the rest as the root.

        The model has no memory until it is sharded, so neither host nor device ever holds the whole of it. If embedding
        and head share their weight, both stay in the root's group. Otherwise the head is gathered and reduced while
        layers compute. Raises TrainingError if this torch cannot shard a base in 4 bits.
        """
        if self.train.lora.base == "nf4" and not shards_integers():
            raise TrainingError(
                f"train.lora.base: nf4 with train.strategy: {self.train.strategy} {TORCH_CASTS_INTEGERS}"
            )
        prepare_layers(model, self.train)
        reduced = torch.bfloat16 if self.train.gradient_compression == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[self.train.precision], reduce_dtype=reduced)
        offload = OffloadPolicy()
        if self.train.offload != "none":  # without GPUs, shards are in host memory in any case
            offload = CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda")
        self._mesh = state_mesh(self.world, self.train)
        shard = partial(fully_shard, mesh=self._mesh, mp_policy=policy, offload_policy=offload)
        layers, at_once = decoder_layers(model), self.train.unit_layers
        for start in range(0, len(layers), at_once):
            shard(layers[start : start + at_once], reshard_after_forward=self.train.reshard is not False)
        plain = without_adapters(model)
        ends = [plain.get_input_embeddings(), plain.get_output_embeddings()]
        if ends[0].weight is not ends[1].weight:
            for end in ends:
                shard(end, reshard_after_forward=False)
        shard(model)
        if self.train.offload != "none":  # the others get their memory from `load`
            model._apply(  # type: ignore[no-untyped-call]
                lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
            )
        self._load = partial(load, model)
        self._load()
        self.own(model)
        self._wrapped = cast(FSDPModule, model)
        return model

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """With `reshard: false`, keep layers gathered until the last micro-batch."""
        if self.train.reshard is False:
            self._wrapped.set_reshard_after_backward(is_last)
        return nullcontext()

    def restore(self, read: Callable[[Mapping[str, Tensor]], None], updates: int) -> None:
        """Restore into the shards, after freeing what a validation left gathered: the root would go on using it."""
        let_go(cast(nn.Module, self._wrapped))
        super().restore(read, updates)


def let_go(model: nn.Module) -> None:
    """Free everything that FSDP has gathered of `model`; do nothing if it is distributed in another way."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# Hybrid sharding (HSDP): FSDP2 within groups of ranks, such as nodes, each of which holds one replica.


class Hsdp(Fsdp):
    """Hybrid sharding: layers are gathered within a replica; replicas exchange only their shards of the gradients.

    Consecutive ranks share a replica. Gradients are reduced in fp32: within a replica after every micro-batch, across
    replicas after the last.
    """

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """Reduce gradients across replicas after the last micro-batch only."""
        self._wrapped.set_requires_all_reduce(is_last)
        return super().accumulating(is_last)

    def grad_norm(self) -> Tensor:
        """Return the norm, made equal on all ranks: replicas may add it up in different orders.

        Otherwise replicas would clip by factors that differ in the last bit, and would stay different. Norms are in
        fp32 and their mean in float64, so the mean of equal norms is exactly that norm, for any number of ranks.
        """
        return mean_over_ranks(super().grad_norm())
