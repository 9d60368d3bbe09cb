"""The merged model, one tensor of the base's files at a time: the base's own, the trained one, or both folded.

Adapters are folded in fp32 and rounded once. Promise: no more than one whole tensor of the trained model and one of the
base are in memory, and every tensor of the base is accounted for before the first is read.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.config.schema import Lora, Train
from pipeline_lib.model.weights import Piece, copies_of, refuse_misfit, refuse_unreadable_kinds
from pipeline_lib.train.adapted import ADAPTER
from pipeline_lib.train.adapters import row_norms
from pipeline_lib.train.checkpoint.tensors import load_tensors, tensor_shapes
from pipeline_lib.train.flat import whole_shape
from pipeline_lib.train.model import build_trainable
from pipeline_lib.train.model_files import Stored, find_tensors
from pipeline_lib.train.optimizer import trainable
from pipeline_lib.train.state import WEIGHTS
from pipeline_lib.train.weights import base_parameters

PEFT_PREFIX = "base_model.model."
_NAMED_AT_MOST = 5


@dataclass(frozen=True)
class Recipe:
    """A tensor of the merged model: the base's, or the `piece` of a trained parameter, or the base's and an adapter."""

    stored: Stored
    trained: str | None
    piece: Piece
    adapter: str | None  # the module that it belongs to, as peft calls it


@dataclass
class Trained:
    """The whole tensors in fp32 that training left behind, read one by one; the last one that had parts is kept."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]
    _name: str = ""
    _value: Tensor | None = None

    def read(self, name: str) -> Tensor:
        """The tensor of that name. Raises IntegrityError if it cannot be read."""
        value = torch.empty(self.shapes[name], dtype=torch.float32)
        load_tensors(self.folder, {name: value})
        return value

    def part(self, piece: Piece, name: str) -> Tensor:
        """What `piece` says of the tensor `name`; the whole is kept until another is asked for."""
        if self.shapes[name] == piece.sizes:
            self._name, self._value = "", None
            return self.read(name)
        if name != self._name or self._value is None:
            self._name, self._value = "", None  # before the next is read
            self._name, self._value = name, self.read(name)
        ranges = zip(piece.offsets, piece.sizes, strict=True)
        return self._value[tuple(slice(begin, begin + size) for begin, size in ranges)]


@dataclass(frozen=True)
class Fold:
    """How to make every tensor of the merged model, by its name in the base's files."""

    recipes: dict[str, Recipe]
    trained: Trained
    lora: Lora

    def value(self, name: str, dtype: torch.dtype) -> Tensor:
        """The merged tensor, rounded to `dtype` once."""
        recipe = self.recipes[name]
        if recipe.trained is not None:
            return self.trained.part(recipe.piece, recipe.trained).reshape(recipe.stored.shape).to(dtype)
        value = recipe.stored.read()
        return (value if recipe.adapter is None else self._adapted(value.float(), recipe.adapter)).to(dtype)

    def _adapted(self, weight: Tensor, module: str) -> Tensor:
        """`weight` [rows, columns] in fp32, changed in place, with the adapter of `module` folded in."""
        a, b = (self.trained.read(f"{module}.lora_{part}.{ADAPTER}.weight") for part in "AB")
        scale = self.lora.alpha / (math.sqrt(self.lora.rank) if self.lora.rslora else self.lora.rank)
        weight.addmm_(b, a, alpha=scale)
        if self.lora.dora:
            magnitude = self.trained.read(f"{module}.lora_magnitude_vector.{ADAPTER}.weight")
            weight.mul_((magnitude / row_norms(weight)).unsqueeze(1))
        return weight


def plan_fold(base: Path, trained: Path, train: Train) -> Fold:
    """What the merged model is made of.

    Raises DataError if the base does not hold its model, IntegrityError if training did not leave what it trained.
    """
    model = build_trainable(base, train)
    wanted = {name: tuple(parameter.shape) for name, parameter in trainable(model).items()}
    _refuse_other_tensors(trained / WEIGHTS, wanted)
    stored = find_tensors(base)
    parameters = base_parameters(model)
    copies = [copies_of(whole_shape(parameter), names, stored) for parameter, names in parameters]
    refuse_misfit(base, copies, stored)
    refuse_unreadable_kinds(stored.values())
    recipes: dict[str, Recipe] = {}
    for (parameter, names), (first, *_) in zip(parameters, copies, strict=True):
        for piece in first:  # of a tied weight that is stored twice, the first copy is written
            recipes[piece.name] = _recipe(stored[piece.name], parameter, names, piece, wanted)
    _refuse_unused(trained / WEIGHTS, recipes.values(), wanted)
    return Fold(recipes, Trained(trained / WEIGHTS, wanted), train.lora)


def _refuse_unused(folder: Path, recipes: Iterable[Recipe], wanted: Mapping[str, object]) -> None:
    """Raise IntegrityError if a trained tensor would be left out: the proof might not notice a small one."""
    used = {name for recipe in recipes for name in (recipe.trained, recipe.adapter) if name is not None}
    unused = [name for name in wanted if name not in used and name.partition(".lora_")[0] not in used]
    if unused:
        raise IntegrityError(f"{folder}: {unused[0]} belongs to no tensor of the base model; this is a bug, report it")


def _recipe(
    stored: Stored, parameter: nn.Parameter, names: list[str], piece: Piece, wanted: Mapping[str, object]
) -> Recipe:
    module = PEFT_PREFIX + stored.name.removesuffix(".weight")
    has_adapter = stored.name.endswith(".weight") and f"{module}.lora_A.{ADAPTER}.weight" in wanted
    return Recipe(stored, names[0] if parameter.requires_grad else None, piece, adapter=module if has_adapter else None)


def _refuse_other_tensors(folder: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise IntegrityError unless `folder` holds exactly what is trained."""
    held = tensor_shapes(folder)
    problems = [
        *(f"lacks {name}" for name in wanted.keys() - held.keys()),
        *(f"holds {name}, which is not trained" for name in held.keys() - wanted.keys()),
        *(
            f"holds {name} as {list(held[name])} instead of {list(shape)}"
            for name, shape in wanted.items()
            if held.get(name, shape) != shape
        ),
    ]
    if problems:
        more = f" and {len(problems) - _NAMED_AT_MOST} more" if len(problems) > _NAMED_AT_MOST else ""
        raise IntegrityError(
            f"{folder}: not what this run trained: it {'; it '.join(sorted(problems)[:_NAMED_AT_MOST])}{more}. "
            "Delete the result of the training stage, and run snakemake again"
        )
