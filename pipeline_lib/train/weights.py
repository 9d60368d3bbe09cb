"""Memory and values for a model that has neither: each rank gets the parts that it keeps, and reads no others.

A model is built on the meta device, spread by its strategy, and filled here. Promise: the values are bitwise those
that transformers and peft would give; on the host a rank holds what it keeps, and its part of one tensor more. What
the files lack, or hold besides, is refused before anything is read.

Torch's strategies keep a box of each parameter (a DTensor); DeepSpeed's keep a range of its elements (`flat.py`).
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline_lib.base.errors import DataError
from pipeline_lib.model.weights import Piece, copies_of, refuse_misfit
from pipeline_lib.train.adapters import draw_adapters
from pipeline_lib.train.flat import boxes, flat_part, gather, whole_shape
from pipeline_lib.train.model_files import Stored, find_tensors


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
