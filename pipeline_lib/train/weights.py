"""Memory and values for a model that has neither: each rank gets the parts that it keeps, and reads no others.

A model is built on the meta device, spread by its strategy, and filled here. Promise: the values are bitwise those
that transformers and peft would give; on the host a rank holds what it keeps, and its part of one tensor more. What
the files lack, or hold besides, is refused before anything is read.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline_lib.base.errors import DataError
from pipeline_lib.train.model_files import Stored, find_tensors

_NAMED_AT_MOST = 5
_FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Piece:
    """The values of `sizes` elements of a parameter from `offsets` on: the stored tensor `name`."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor of `shape` is meant; an expert's has no dimension for the experts."""
        extra = len(self.sizes) - len(shape)
        return self.sizes == (1,) * extra + shape


def load_weights(model: nn.Module, folder: Path, device: torch.device, adapter_seed: int) -> None:
    """Give a model on the meta device memory on `device`, and this rank's part of the weights in `folder`.

    Parameters keep their dtype. Adapters are new, drawn from `adapter_seed`. Raises DataError that names the tensors
    that are not as config.json says.
    """
    stored = find_tensors(folder)
    copies = [_copies(parameter, names, stored) for parameter, names in _base_parameters(model)]
    _refuse_misfit(folder, copies, stored)
    _materialise(model, device)
    for (parameter, _), (first, *others) in zip(_base_parameters(model), copies, strict=True):
        for piece in first:
            _fill(parameter, piece, stored[piece.name].copy_to)
        for piece in chain.from_iterable(others):
            _refuse_other_values(parameter, piece, stored[piece.name])
    _draw_adapters(model, adapter_seed)


def _base_parameters(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """The parameters that come from the files, in a fixed order, with the names they have there: two for a tied one."""
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".lora_" not in name:
            plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            found.setdefault(id(parameter), (parameter, []))[1].append(plain)
    return list(found.values())


def _copies(parameter: Tensor, names: list[str], stored: Mapping[str, Stored]) -> list[list[Piece]]:
    """The pieces of a parameter under each name by which it is stored; under the first if by none."""
    held = [name for name in names if name in stored] or names[:1]
    return [_pieces(name, tuple(parameter.shape), stored) for name in held]


def _pieces(name: str, shape: tuple[int, ...], stored: Mapping[str, Stored]) -> list[Piece]:
    """What fills a parameter: one tensor of its name, or, for all experts' [E, rows, columns], a few for each."""
    stem, _, last = name.rpartition(".")
    if name in stored or not stem.endswith(".experts") or last not in _FUSED_EXPERTS:
        return [Piece(name, (0,) * len(shape), shape)]
    parts = _FUSED_EXPERTS[last]
    rows = shape[1] // len(parts)
    return [
        Piece(f"{stem}.{expert}.{part}.weight", (expert, number * rows, 0), (1, rows, shape[2]))
        for expert in range(shape[0])
        for number, part in enumerate(parts)
    ]


def _refuse_misfit(folder: Path, copies: list[list[list[Piece]]], stored: Mapping[str, Stored]) -> None:
    """Raise DataError unless the files hold the model, all of it, and nothing else. The same on every rank."""
    wanted = {piece.name: piece for of_one in copies for pieces in of_one for piece in pieces}
    held = [piece for name, piece in wanted.items() if name in stored]
    misfits = {piece.name: stored[piece.name].shape for piece in held if not piece.fits(stored[piece.name].shape)}
    shapes = [f"{name} {list(shape)} instead of {list(wanted[name].sizes)}" for name, shape in misfits.items()]
    problems = [
        *_list("lacks", [name for name in wanted if name not in stored]),
        *_list("holds besides", [name for name in stored if name not in wanted]),
        *_list("holds in another shape", shapes),
    ]
    if problems:
        raise DataError(
            f"{folder}: the weights are not those of its config.json: it {'; it '.join(problems)}. "
            "Get the whole model again, with the config.json that belongs to it"
        )


def _list(what: str, names: list[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
        yield f"{what} {', '.join(names[:_NAMED_AT_MOST])}{more}"


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Move `model` to `device`; what was on the meta device has memory there, and no values yet."""
    model._apply(  # type: ignore[no-untyped-call]
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    )
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    base.tie_weights()  # one plain tensor that two modules had has become two


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of `parameter`, sharing its memory, and where in the whole it begins."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), (0,) * parameter.ndim
    (chunk,) = parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return parameter.to_local(), tuple(chunk.offsets)


@torch.no_grad()
def _fill(parameter: Tensor, piece: Piece, copy_to: Callable[[Tensor, tuple[slice, ...]], None]) -> None:
    """Let `copy_to` copy the slices of `piece` that this rank keeps to their place in `parameter`."""
    local, begins = local_part(parameter)
    here, there = [], []
    for begin, length, offset, size in zip(begins, local.shape, piece.offsets, piece.sizes, strict=True):
        first, last = max(begin, offset), min(begin + length, offset + size)
        if first >= last:
            return
        here.append(slice(first - begin, last - begin))
        there.append(slice(first - offset, last - offset))
    copy_to(local[tuple(here)], tuple(there))


def _refuse_other_values(parameter: Tensor, piece: Piece, stored: Stored) -> None:
    """Raise DataError if a second copy of a tied parameter differs from the first: they would be two."""
    again = torch.empty_like(parameter)
    _fill(again, piece, stored.copy_to)
    if not torch.equal(local_part(again)[0], local_part(parameter)[0]):
        raise DataError(
            f"{stored.path}: {stored.name} is not equal to the tensor that config.json ties it to; "
            "set tie_word_embeddings to false there if they are two"
        )


@torch.no_grad()
def _draw_adapters(model: nn.Module, seed: int) -> None:
    """Fill new adapters as peft does on one device: A random, B zero. Drawn whole, one at a time, on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                _draw_adapter(layer)


def _draw_adapter(layer: Any) -> None:
    dtype = layer.get_base_layer().weight.dtype
    for name in layer.lora_A:
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        drawn = nn.Linear(a.shape[1], a.shape[0], bias=False).weight
        nn.Linear(b.shape[1], b.shape[0], bias=False)  # peft draws B too, before it makes it zero,
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))  # and then A once more
        rounded = drawn.to(dtype)  # by peft, though adapters are kept in fp32
        _fill(a, Piece(name, (0, 0), tuple(a.shape)), partial(_copy_rows, rounded))
        local_part(b)[0].zero_()


def _copy_rows(whole: Tensor, target: Tensor, slices: tuple[slice, ...]) -> None:
    target.copy_(whole[slices])
