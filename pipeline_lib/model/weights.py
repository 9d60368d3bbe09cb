"""A model's weights: read from safetensors in slices, each rank only the parts that it keeps."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline_lib.core.errors import DataError
from pipeline_lib.model.files import Header, Piece, copies_of, find_headers, refuse_misfit
from pipeline_lib.model.lora import draw_adapters

# Parameters that are spread element by element: a rank keeps a range of the elements, in the order of their rows.
#
# So DeepSpeed spreads weights and moments. Here are the boxes that such a range consists of, which is how files are
# read, and its way to a whole tensor and back, bit by bit.

_MARK = "pipeline_flat_part"


@dataclass(frozen=True)
class FlatPart:
    """What this rank keeps of a tensor of `shape`: `values` [n], the elements from `start` on. n may be 0."""

    values: Tensor
    start: int
    shape: tuple[int, ...]


@contextmanager
def held_flat(parts: Mapping[nn.Parameter, FlatPart]) -> Iterator[None]:
    """Within, those parameters are read and filled in their parts, whatever else they hold."""
    try:
        for parameter, part in parts.items():
            setattr(parameter, _MARK, part)
        yield
    finally:
        for parameter in parts:
            parameter.__dict__.pop(_MARK, None)


def flat_part(parameter: Tensor) -> FlatPart | None:
    """The part that `held_flat` gave `parameter`."""
    return getattr(parameter, _MARK, None)


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of `parameter` over all ranks."""
    part = flat_part(parameter)
    return tuple(parameter.shape) if part is None else part.shape


def boxes(part: FlatPart) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The boxes that `part` consists of, in order: where in the whole each begins, its sizes, and its first value."""
    first = 0
    for begins, sizes in _boxes(part.start, part.start + len(part.values), part.shape):
        yield begins, sizes, first
        first += math.prod(sizes)


def _boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Begins and sizes of the boxes of the elements `start` to `stop`: a row in part, whole rows, a row in part."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _within_row(last, start, stop, shape)
        return
    yield from _within_row(first - 1, start, first * row, shape)
    if first < last:
        yield (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
    yield from _within_row(last, last * row, stop, shape)


def _within_row(
    number: int, start: int, stop: int, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    row = math.prod(shape[1:])
    for begins, sizes in _boxes(start - number * row, stop - number * row, shape[1:]):
        yield (number, *begins), (1, *sizes)


def gather(part: FlatPart, device: torch.device, owner: int | None = None) -> Tensor:
    """The whole tensor, of the parts of all ranks, on `device`; they call it together.

    It is right on the rank `owner`, or on all. Every bit is kept, the sign of a zero too.
    """
    whole = torch.zeros(math.prod(part.shape), dtype=part.values.dtype, device=device)
    whole[part.start : part.start + len(part.values)] = part.values.to(device)
    bits = whole.view(torch.uint8) if whole.element_size() < 4 else whole.view(torch.int32)
    if owner is None:
        dist.all_reduce(bits)
    else:
        dist.reduce(bits, owner)
    return whole.view(part.shape)


def scatter(part: FlatPart, whole: Tensor | None, device: torch.device, owner: int) -> None:
    """Fill `part` of every rank from the `whole` tensor that `owner` has; they call it together."""
    received = torch.empty(math.prod(part.shape), dtype=part.values.dtype, device=device)
    if whole is not None:
        received.copy_(whole.flatten())
    dist.broadcast(received, owner)
    part.values.copy_(received[part.start : part.start + len(part.values)])


# The tensors in a model folder's safetensors files: slices of them.
#
# Promise: no more of a tensor is read than is asked for, and nothing of it stays in memory.


@dataclass(frozen=True)
class Stored(Header):
    """A tensor in a file."""

    def read(self) -> Tensor:
        """All of it, in memory of its own."""
        with safe_open(str(self.path), framework="pt") as file:
            return file.get_tensor(self.name).clone()  # type: ignore[no-any-return]

    def copy_to(self, target: Tensor, slices: tuple[slice, ...]) -> None:
        """Copy the `slices` of the tensor to `target`, in its dtype and on its device.

        `slices` may begin with some for dimensions that `target` has and the tensor has not.
        """
        # Opened for each tensor, since pages of an open file count as memory of this process.
        with safe_open(str(self.path), framework="pt") as file:
            values = file.get_slice(self.name)[slices[len(slices) - len(self.shape) :]]
            target.copy_(values.view(target.shape))


def find_tensors(folder: Path) -> dict[str, Stored]:
    """What the weight files of `folder` hold, by name. Raises DataError for absent or damaged files."""
    return {name: Stored(**vars(header)) for name, header in find_headers(folder).items()}


# Memory and values for a model that has neither: each rank gets the parts that it keeps, and reads no others.
#
# A model is built on the meta device, spread by its strategy, and filled here. Promise: the values are bitwise those
# that transformers and peft would give; on the host a rank holds what it keeps, and its part of one tensor more. What
# the files lack, or hold besides, is refused before anything is read.
#
# Torch's strategies keep a box of each parameter (a DTensor); DeepSpeed's keep a range of its elements (`flat.py`).


def load_weights(model: nn.Module, folder: Path, device: torch.device, adapter_seed: int) -> None:
    """Give a model on the meta device memory on `device`, and this rank's part of the weights in `folder`.

    What has memory already is filled where it is. Parameters keep their dtype. Adapters are new, drawn from
    `adapter_seed`. Raises DataError that names the tensors that are not as config.json says.
    """
    stored = find_tensors(folder)
    copies = [copies_of(whole_shape(parameter), names, stored) for parameter, names in base_parameters(model)]
    refuse_misfit(folder, copies, stored)
    materialise(model, device)
    for (parameter, _), (first, *others) in zip(base_parameters(model), copies, strict=True):
        for piece in first:
            _fill(parameter, piece, stored[piece.name].copy_to)
        for piece in chain.from_iterable(others):
            _refuse_other_values(parameter, piece, stored[piece.name])
    draw_adapters(model, adapter_seed, put, whole)


def base_parameters(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """The parameters that come from the files, in a fixed order, with the names they have there: two for a tied one."""
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".lora_" not in name:
            plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            found.setdefault(id(parameter), (parameter, []))[1].append(plain)
    return list(found.values())


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give what is on the meta device memory on `device`, without values, and move the buffers there.

    Parameters that a strategy has given memory stay where that is.
    """

    def place(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=device)
        return tensor if isinstance(tensor, nn.Parameter) else tensor.to(device)

    was_meta = any(parameter.is_meta for parameter in model.parameters())
    model._apply(place)  # type: ignore[no-untyped-call]
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if was_meta:
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
    for local, begins in _local_boxes(parameter):
        _fill_box(local, begins, piece, copy_to)


def _local_boxes(parameter: Tensor) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """The boxes of `parameter` that this rank keeps, sharing its memory, and where in the whole each begins."""
    part = flat_part(parameter)
    if part is None:
        yield local_part(parameter)
        return
    for begins, sizes, first in boxes(part):
        yield part.values[first : first + math.prod(sizes)].view(sizes), begins


def _fill_box(
    local: Tensor, begins: tuple[int, ...], piece: Piece, copy_to: Callable[[Tensor, tuple[slice, ...]], None]
) -> None:
    """Let `copy_to` copy what `piece` and `local`, which begins at `begins` of the whole, have in common."""
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
    for local, begins in _local_boxes(parameter):
        again = torch.empty_like(local)
        _fill_box(again, begins, piece, stored.copy_to)
        if not torch.equal(again, local):
            raise DataError(
                f"{stored.path}: {stored.name} is not equal to the tensor that config.json ties it to; "
                "set tie_word_embeddings to false there if they are two"
            )


def put(parameter: Tensor, values: Tensor) -> None:
    """Let this rank's part of `parameter` be that of the whole `values`, which every rank has."""
    _fill(parameter, Piece("", (0,) * values.ndim, tuple(values.shape)), partial(_copy_slices, values))


def _copy_slices(values: Tensor, target: Tensor, slices: tuple[slice, ...]) -> None:
    target.copy_(values[slices])


def whole(parameter: Tensor) -> Tensor:
    """The values that all ranks have of `parameter`; they call it together."""
    part = flat_part(parameter)
    if part is not None:
        return gather(part, parameter.device)
    values: Any = parameter.detach()
    gathered: Tensor = values.full_tensor() if isinstance(parameter, DTensor) else values
    return gathered
