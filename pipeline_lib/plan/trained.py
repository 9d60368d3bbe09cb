"""What a run trains: its tensors, and how the optimizer updates them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from pipeline_lib.arch.geometry import FP32_BYTES, HALF_BYTES, Geometry, frozen_parameters
from pipeline_lib.config.optimizers import OPTIMIZERS, OptimizerName, Rule
from pipeline_lib.config.train import Lora, Train


def trained_shapes(geometry: Geometry, train: Train) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of all tensors with gradients; for adapters, both factors of a linear.

    The factors of all experts of a layer are one tensor each, as in peft.
    """
    if train.method == "full":
        if not train.freeze:
            return geometry.shapes()
        frozen = frozen_parameters(geometry, train)
        return {name: shape for name, shape in geometry.shapes().items() if name not in frozen}
    return _adapter_shapes(geometry, train.lora)


@lru_cache(maxsize=16)  # a search asks for those of a few models thousands of times
def _adapter_shapes(geometry: Geometry, lora: Lora) -> Mapping[str, tuple[int, ...]]:
    linears = geometry.adapted_linears(lora)
    experts = geometry.adapted_experts(lora)
    adapted = [
        *(
            (layer, name, 1, widths)
            for layer in range(geometry.layers)
            for name, widths in geometry.linears_of(geometry.kind_of(layer)).items()
            if name in linears
        ),
        *(
            (layer, name, geometry.experts, widths)
            for layer in geometry.expert_layers
            for name, widths in experts.items()
        ),
    ]
    return {
        f"{layer}.{name}.{factor}": shape
        for layer, name, count, (inputs, outputs) in adapted
        for factor, shape in (
            ("A", (count * lora.rank, inputs)),
            ("B", (outputs, count * lora.rank)),
        )
    }


@dataclass(frozen=True)
class Portion:
    """The trained tensors that one rule updates: their number, and that of their elements.

    `flops` are those of orthogonal updates of all its matrices, `matrix_bytes` the largest of these
    matrices in bf16, and `iteration_bytes` what an iteration needs for it.
    """

    rule: Rule
    tensors: int
    elements: int
    flops: float = 0.0
    matrix_bytes: int = 0
    iteration_bytes: int = 0

    @property
    def moment_elements(self) -> int:
        """The number of elements of all moments."""
        return self.elements * len(self.rule.moments)

    @property
    def moment_bytes(self) -> float:
        """The bytes of all moments on devices."""
        return self.moment_elements * self.rule.moment_bytes


def portions(geometry: Geometry, train: Train) -> tuple[Portion, ...]:
    """Return what each rule of the optimizer updates."""
    row = OPTIMIZERS[train.optimizer]
    shapes = trained_shapes(geometry, train)
    if row.of_matrices is row.of_others:
        return (Portion(row.of_others, len(shapes), geometry.trained_parameters(train)),)
    return _by_rule(train.optimizer, tuple(shapes.items()))


@lru_cache(maxsize=16)  # a search asks for those of a few models thousands of times
def _by_rule(
    optimizer: OptimizerName, named: tuple[tuple[str, tuple[int, ...]], ...]
) -> tuple[Portion, ...]:
    """Return the portions of parameters with those names and shapes."""
    row = OPTIMIZERS[optimizer]
    found = []
    for rule in (row.of_matrices, row.of_others):
        of_rule = [shape for name, shape in named if row.rule_of(name, shape) is rule]
        matrices = of_rule if rule.newton_schulz_steps else []
        found.append(
            Portion(
                rule,
                tensors=len(of_rule),
                elements=sum(math.prod(shape) for shape in of_rule),
                flops=sum(rule.matrix_flops(shape) for shape in matrices),
                matrix_bytes=max((HALF_BYTES * math.prod(shape) for shape in matrices), default=0),
                iteration_bytes=max(map(_iteration_bytes, matrices), default=0),
            )
        )
    return tuple(found)


def _iteration_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of a Newton-Schulz iteration: the matrix before and after, and two squares.

    The squares are as wide as its shorter side.
    """
    short, long = sorted(shape)
    return HALF_BYTES * (2 * short * long + 2 * short * short)


def checkpoint_bytes(geometry: Geometry, train: Train) -> int:
    """Return the bytes of a checkpoint: fp32 weights and moments of all trained parameters."""
    of_moments = sum(portion.moment_elements for portion in portions(geometry, train))
    return FP32_BYTES * (geometry.trained_parameters(train) + of_moments)
