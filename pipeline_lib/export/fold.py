"""The merged model, tensor by tensor of the base's files.

Each is the base's value, the trained one, or the base's with its adapter folded in, in fp32 and
rounded once. The plan covers every tensor of the base before the first is read. Trained adapters
are in memory; of all other tensors a thread reads one at a time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline_lib.arch.config_json import read_object
from pipeline_lib.arch.families import family_in
from pipeline_lib.arch.weight_files import ADAPTER, Piece, refuse_unreadable_kinds
from pipeline_lib.config.train import Lora, Train
from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.run_folder import WEIGHTS
from pipeline_lib.export.write import Buffers, Entry
from pipeline_lib.model.build import DTYPES, build_trainable
from pipeline_lib.model.nf4 import rounded
from pipeline_lib.model.weights import Stored, find_tensors, match_tensors, quantized_linears
from pipeline_lib.train.optimizer import trainable
from pipeline_lib.train.saved_tensors import SavedTensor, fill_saved, find_saved

PEFT_PREFIX = "base_model.model."
_NAMED_AT_MOST = 5


@dataclass(frozen=True)
class TensorRecipe:
    """A merged tensor's source: the base's, a trained parameter's `piece`, or base and adapter.

    A tensor of another part of the model than the text model is copied as it is.
    """

    stored: Stored
    trained: str | None
    piece: Piece
    adapter: str | None  # the adapted module, by peft's name
    beside: str = ""  # how the names of its part begin, if it is none of the text model

    def entry(self, dtype: torch.dtype | None) -> Entry:
        """Return what is written of it, in `dtype`; if that is None, in that of the base."""
        if dtype is None or self.beside:
            dtype = self.stored.dtype
        return Entry(self.stored.name, self.stored.shape, dtype)


@dataclass(frozen=True)
class Trained:
    """The trained tensors by name: `adapters` in memory, in fp32; all others in files."""

    saved: Mapping[str, SavedTensor]
    adapters: Mapping[str, Tensor]

    def factors(self, module: str) -> tuple[Tensor, Tensor]:
        """Return A and B of the adapted `module`."""
        a = self.adapters[f"{module}.lora_A.{ADAPTER}.weight"]
        b = self.adapters[f"{module}.lora_B.{ADAPTER}.weight"]
        return a, b


@dataclass(frozen=True)
class Fold:
    """A merge's plan: a recipe for every merged tensor, by its name in the base's files.

    The base's tensors in `quantized` are those of the training: rounded to `computed_in`, quantized
    and dequantized.
    """

    recipes: dict[str, TensorRecipe]
    trained: Trained
    lora: Lora
    quantized: frozenset[str] = frozenset()
    computed_in: torch.dtype = torch.float32

    @property
    def beside(self) -> list[str]:
        """The parts beside the text model: how the names of their tensors begin."""
        return sorted({recipe.beside for recipe in self.recipes.values()} - {""})

    def size_bytes(self, dtype: torch.dtype | None) -> int:
        """Return the bytes of all merged tensors in `dtype`; None means the base's dtypes."""
        return sum(recipe.entry(dtype).size_bytes for recipe in self.recipes.values())

    def value(self, name: str, dtype: torch.dtype, buffers: Buffers) -> Tensor:
        """Return the merged tensor `name`, rounded to `dtype` once; it may lie in `buffers`."""
        recipe = self.recipes[name]
        if recipe.trained is not None:
            values = buffers.empty(recipe.stored.shape, torch.float32)
            piece = recipe.piece
            self.trained.saved[recipe.trained].fill(values.view(piece.sizes), piece.offsets)
            return buffers.rounded(values, dtype)
        if recipe.adapter is None:
            return self._base(recipe.stored, dtype, buffers)
        weight = self._base(recipe.stored, torch.float32, buffers)
        self._add_adapter(weight, recipe.adapter, recipe.piece)
        return buffers.rounded(weight, dtype)

    def _base(self, stored: Stored, dtype: torch.dtype, buffers: Buffers) -> Tensor:
        """Return the value that the base had in the training, in `dtype`."""
        if stored.name in self.quantized:
            return rounded(stored.read(), self.computed_in, stored.name).to(dtype)
        values = buffers.empty(stored.shape, dtype)
        stored.copy_to(values, stored.whole)
        return values

    def _add_adapter(self, weight: Tensor, module: str, piece: Piece) -> None:
        """Fold `module`'s adapter into `weight` [rows, columns] in fp32, its `piece`.

        The piece is the part of what the module adapts.
        """
        from pipeline_lib.model.lora import factors_of_experts, row_norms  # loads peft

        a, b = self.trained.factors(module)
        divisor = math.sqrt(self.lora.rank) if self.lora.rslora else self.lora.rank
        scale = self.lora.alpha / divisor
        # of all experts of a layer; `piece` says of which, and which of their rows
        if len(piece.sizes) == 3:
            experts, rows, _ = piece.slices
            a, b = factors_of_experts(a, b, self.lora.rank, experts, rows)
            weight.view(piece.sizes).baddbmm_(b, a, alpha=scale)
            return
        weight.addmm_(b, a, alpha=scale)
        if self.lora.dora:
            magnitude = self.trained.adapters[f"{module}.lora_magnitude_vector.{ADAPTER}.weight"]
            weight.mul_((magnitude / row_norms(weight)).unsqueeze(1))


@dataclass(frozen=True)
class MeanFold(Fold):
    """The plan of the mean, in fp32, of this merge and of `others` of the same base."""

    others: Sequence[Fold] = ()

    def value(self, name: str, dtype: torch.dtype, buffers: Buffers) -> Tensor:
        """Return the mean of the merged tensors `name`, rounded to `dtype` once."""
        recipe = self.recipes[name]
        if recipe.trained is None and recipe.adapter is None:
            return super().value(name, dtype, buffers)
        total = super().value(name, torch.float32, buffers).clone()
        for other in self.others:
            total.add_(other.value(name, torch.float32, buffers))
        return buffers.rounded(total.div_(1 + len(self.others)), dtype)


def mean_of(first: Fold, others: Sequence[Fold]) -> Fold:
    """Return the plan of the mean of `first` and `others`: `first` if there are no others."""
    return MeanFold(**vars(first), others=others) if others else first


def plan_fold(base: Path, trained: Path, train: Train) -> Fold:
    """Plan the merge of the folders `base` and `trained`.

    Raises DataError if the base's files do not match its config, and IntegrityError if the trained
    tensors are not exactly those that `train` trains.
    """
    model = build_trainable(base, train)
    wanted = {name: tuple(parameter.shape) for name, parameter in trainable(model).items()}
    saved = find_saved(trained / WEIGHTS)
    shapes = {name: tensor.shape for name, tensor in saved.items()}
    _refuse_other_tensors(trained / WEIGHTS, shapes, wanted)
    stored, sources = match_tensors(model, base)
    everything = find_tensors(base)
    refuse_unreadable_kinds(everything.values())
    recipes: dict[str, TensorRecipe] = {}
    adapters: dict[str, Tensor] = {}
    of_experts: dict[int, str] = {}
    if train.method == "lora":
        from pipeline_lib.model.lora import adapted_matrices  # loads peft

        adapters = {name: torch.empty(shape) for name, shape in wanted.items()}
        of_experts = adapted_matrices(model)
    for parameter, names, copies in sources:
        trained_name = names[0] if parameter.requires_grad else None
        for piece in copies[0]:  # if a tied weight is stored twice, only the first copy is written
            module = of_experts.get(id(parameter), PEFT_PREFIX + piece.name.removesuffix(".weight"))
            is_adapted = f"{module}.lora_A.{ADAPTER}.weight" in wanted
            adapter = module if is_adapted and not piece.name.endswith(".bias") else None
            tensor = stored[piece.name]
            recipes[tensor.name] = TensorRecipe(tensor, trained_name, piece, adapter)
    _refuse_unused(trained / WEIGHTS, wanted, recipes)
    for part in family_in(read_object(base / "config.json")).beside:
        for name, tensor in everything.items():
            if name.startswith(part):
                whole = Piece(name, (0,) * len(tensor.shape), tensor.shape)
                recipes[name] = TensorRecipe(tensor, None, whole, None, part)
    quantized = frozenset(stored[name].name for _, name in quantized_linears(model))
    fill_saved(trained / WEIGHTS, saved, adapters)
    return Fold(recipes, Trained(saved, adapters), train.lora, quantized, DTYPES[train.precision])


def _refuse_unused(
    folder: Path, wanted: Iterable[str], recipes: Mapping[str, TensorRecipe]
) -> None:
    """Raise IntegrityError if a tensor of `wanted`, in `folder`, is in none of the `recipes`.

    The comparison of logits might miss a small one.
    """
    used = set[str | None]()
    for recipe in recipes.values():
        used.update((recipe.trained, recipe.adapter))
    unused = [name for name in wanted if not used & {name, name.partition(".lora_")[0]}]
    if unused:
        text = f"{folder}: {unused[0]} belongs to no tensor of the base model"
        raise IntegrityError(f"{text}; this is a bug, report it")


def _refuse_other_tensors(
    folder: Path, stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise IntegrityError unless `stored` in `folder` are exactly the `wanted` tensors.

    The shapes have to be the same too.
    """
    problems = [f"lacks {name}" for name in wanted.keys() - stored.keys()]
    problems += [f"holds {name}, which is not trained" for name in stored.keys() - wanted.keys()]
    for name, shape in wanted.items():
        found = stored.get(name, shape)
        if found != shape:
            problems.append(f"holds {name} as {list(found)} instead of {list(shape)}")
    if problems:
        named = "; it ".join(sorted(problems)[:_NAMED_AT_MOST])
        if len(problems) > _NAMED_AT_MOST:
            named += f" and {len(problems) - _NAMED_AT_MOST} more"
        raise IntegrityError(
            f"{folder}: not what this run trained: it {named}. Delete the result of the training "
            "stage, and run snakemake again"
        )
