"""The optimizers, each described by a row that needs no torch.

Checks, importer, plan and checkpoints read the row; train/optimizer.py makes the optimizer itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ADAM_BYTES = 28  # read and written by AdamW for each parameter
_FP32_BYTES = 4

# What an optimizer may refuse: the words of the sentence that says so.
DEEPSPEED = "DeepSpeed"
OFFLOAD = "train.offload"
ADAPTERS = "train.method: lora"
LOCAL_SGD = "train.local_sgd_steps"
EXPERTS = "models with experts"


@dataclass(frozen=True, eq=False)
class Rule:
    """How a tensor is updated. A rule equals itself only.

    `moments` are the tensors that it keeps beside the weight, of the same shape, by their names in
    checkpoints, which have them in fp32. On the device an element of one takes `moment_bytes`. For
    each element, an update reads and writes `moved_bytes`. The host needs as long for a tensor as
    for `launches` kernels beside those of iterations, by strategy, where hsdp is as fsdp.

    With `newton_schulz_steps`, the update of a matrix is made orthogonal by that many iterations.
    They need the whole matrix, in bf16, so one of the ranks makes them for all.
    """

    moments: tuple[str, ...]
    moment_bytes: float
    moved_bytes: int
    launches: Mapping[str, float]
    newton_schulz_steps: int = 0

    def matrix_flops(self, shape: tuple[int, ...]) -> float:
        """Return the FLOPs of the matrix products in the update of a tensor of that shape.

        With s rows and l columns, s <= l, an iteration has X @ X.T, the square of that, and its
        product with X.
        """
        if not self.newton_schulz_steps:
            return 0.0
        short, long = sorted(shape)
        return self.newton_schulz_steps * (4.0 * short * short * long + 2.0 * short**3)


@dataclass(frozen=True)
class Extra:
    """A library that is not always installed, and the extra of this project that installs it."""

    library: str
    name: str


@dataclass(frozen=True)
class Optimizer:
    """What is known of an optimizer without torch.

    `of_matrices` is for the matrices of decoder layers, `of_others` for embedding, head, norms,
    biases and all else. `refuses` has what it does not work with, and why. `is_stand_in` says
    whether it is offered in place of another where memory is short. `known_as` are the names that
    other tools give it, `switches` their keys that turn it on.
    """

    summary: str
    of_matrices: Rule
    of_others: Rule
    refuses: Mapping[str, str]
    is_stand_in: bool
    known_as: tuple[str, ...]
    switches: tuple[str, ...] = ()
    extra: Extra | None = None

    def rule_of(self, name: str, shape: tuple[int, ...]) -> Rule:
        """Return the rule for the parameter `name`, as transformers calls it."""
        is_matrix_of_layer = ".layers." in name and len(shape) == 2
        return self.of_matrices if is_matrix_of_layer else self.of_others

    @property
    def moments(self) -> tuple[str, ...]:
        """The names of all moments, of which a parameter has those of its rule."""
        return tuple(dict.fromkeys(self.of_matrices.moments + self.of_others.moments))

    @property
    def has_fp32_moments(self) -> bool:
        """Whether moments are on the device as in a checkpoint."""
        return self.of_matrices.moment_bytes == self.of_others.moment_bytes == _FP32_BYTES


_ADAM = Rule(
    moments=("exp_avg", "exp_avg_sq"),
    moment_bytes=_FP32_BYTES,
    moved_bytes=ADAM_BYTES,
    launches={"ddp": 0.5, "fsdp": 1.7, "zero1": 2.5, "zero2": 8.0, "zero3": 7.0},
)
# It calls a compiled function for each tensor: a step of 4B, with 399 of them, took 0.12 s (ddp)
# and 0.17 s (fsdp) longer than with adamw on one H200 (benchmarks/RESULTS.md).
_ADAM_8BIT = Rule(
    moments=_ADAM.moments,
    moment_bytes=1 + _FP32_BYTES / 256,  # blocks of 256 numbers with one fp32 scale each
    moved_bytes=ADAM_BYTES,
    launches={"ddp": 20.0, "fsdp": 27.0},
)
# Bytes of momentum, cast, exchange and weight, and the kernels for them; counted, not measured.
_MUON = Rule(
    moments=("momentum_buffer",),
    moment_bytes=_FP32_BYTES,
    moved_bytes=48,
    launches={"ddp": 8.0, "fsdp": 14.0},
    newton_schulz_steps=5,
)

OptimizerName = Literal["adamw", "adamw_8bit", "muon"]
DEFAULT: OptimizerName = "adamw"
OPTIMIZERS: Mapping[OptimizerName, Optimizer] = {
    "adamw": Optimizer(
        summary="keeps its moments in fp32",
        of_matrices=_ADAM,
        of_others=_ADAM,
        refuses={},
        is_stand_in=True,  # it can be offloaded, adamw_8bit cannot
        known_as=(
            "adamw",
            "adam",
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_hf",
            "adamw_apex_fused",
            "paged_adamw_32bit",
        ),
    ),
    "adamw_8bit": Optimizer(
        summary="keeps them in 8 bits and needs the extra `optim8bit`",
        of_matrices=_ADAM_8BIT,
        of_others=_ADAM_8BIT,
        refuses={
            DEEPSPEED: "DeepSpeed keeps moments in fp32",
            OFFLOAD: "its update is compiled for GPUs",
        },
        is_stand_in=True,
        known_as=("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"),
        extra=Extra("torchao", "optim8bit"),
    ),
    "muon": Optimizer(
        summary="makes the updates of the layers' matrices orthogonal, with one moment, and is "
        "`adamw` for all else, at the same `lr`; for `method: full` of models without experts",
        of_matrices=_MUON,
        of_others=_ADAM,
        refuses={
            DEEPSPEED: "its ranks have pieces of a few parameters each, and no rows of matrices",
            OFFLOAD: "the products of its update are for GPUs",
            ADAPTERS: "an update of an adapter is that of two factors, not of the matrix",
            LOCAL_SGD: "ranks that update alone cannot share the work of an update",
            EXPERTS: "their matrices are stacked in tensors of three dimensions",
        },
        is_stand_in=False,
        known_as=("muon",),
        switches=("use_muon",),
    ),
}
