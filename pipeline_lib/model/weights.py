"""Loading a model's weights from safetensors: each rank reads only the slices of its own shards."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline_lib.arch.weight_files import (
    Header,
    Piece,
    copies_of,
    find_headers,
    of_text,
    peft_name,
    read_headers,
    refuse_misfit,
)
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import unreadable_named
from pipeline_lib.core.threads import call_all
from pipeline_lib.model.nf4 import Nf4Linear, quantize_absmax, quantize_rows

# Flat shards: a rank keeps a range of a tensor's elements in row-major order, as DeepSpeed shards
# weights and moments. This section splits such a range into boxes, for reading files, and gathers
# and scatters it bit by bit.

_MARK = "pipeline_flat_part"


@dataclass(frozen=True)
class FlatPart:
    """This rank's flat shard of a tensor of `shape`: `values` [n], from `start` on.

    n may be 0.
    """

    values: Tensor
    start: int
    shape: tuple[int, ...]


@contextmanager
def held_flat(parts: Mapping[nn.Parameter, FlatPart]) -> Iterator[None]:
    """Mark parameters with their flat shards in the context; the functions below use these."""
    try:
        for parameter, part in parts.items():
            setattr(parameter, _MARK, part)
        yield
    finally:
        for parameter in parts:
            parameter.__dict__.pop(_MARK, None)


def flat_part(parameter: Tensor) -> FlatPart | None:
    """Return the flat shard that `held_flat` set on `parameter`; None if there is none."""
    return getattr(parameter, _MARK, None)


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole `parameter` over all ranks."""
    part = flat_part(parameter)
    return tuple(parameter.shape) if part is None else part.shape


def boxes(part: FlatPart) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield the boxes that make up `part`, in order.

    Each is (offsets in the whole tensor, sizes, index of its first element in `part.values`).
    """
    first = 0
    for begins, sizes in _boxes(part.start, part.start + len(part.values), part.shape):
        yield begins, sizes, first
        first += math.prod(sizes)


def _boxes(
    start: int, stop: int, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of the boxes of elements `start` to `stop`.

    The boxes are a partial row, whole rows, and a partial row.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = math.prod(shape[1:])
    first = -(-start // row)
    last = stop // row
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
    """Return the whole tensor on `device`, gathered from the shards of all ranks.

    This is a collective. The result is valid on the rank `owner` only, or on all ranks if `owner`
    is None. All bits are preserved, including the sign of zeros.
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
    """Fill `part` on every rank from the `whole` tensor of the rank `owner`.

    This is a collective.
    """
    received = torch.empty(math.prod(part.shape), dtype=part.values.dtype, device=device)
    if whole is not None:
        received.copy_(whole.flatten())
    dist.broadcast(received, owner)
    part.values.copy_(received[part.start : part.start + len(part.values)])


# Reading slices of tensors from a model folder's safetensors files, by the places that their
# headers give. No more of a tensor is read than is requested, and no pages of a file are mapped:
# those count as memory of this process, and a fault for each costs more than the copy.

KINDS = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    },
}
_CONVERTED_AT_ONCE = 1 << 22  # elements


@dataclass(frozen=True)
class Stored(Header):
    """A tensor in a safetensors file, whose values can be read."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values in the file."""
        return KINDS[self.kind]

    @property
    def whole(self) -> tuple[slice, ...]:
        """The slices that are the whole tensor."""
        return tuple(slice(0, size) for size in self.shape)

    def read(self) -> Tensor:
        """Return the whole tensor, in memory of its own. Raises DataError, Unreadable."""
        values = torch.empty(self.shape, dtype=self.dtype)
        self.copy_to(values, self.whole)
        return values

    def copy_to(self, target: Tensor, slices: tuple[slice, ...]) -> None:
        """Copy the `slices` of the tensor to `target`, converted to its dtype and device.

        `slices` may begin with extra ones for leading dimensions that `target` has and the stored
        tensor lacks. Raises DataError if the file has become shorter, Unreadable if it cannot be
        read.
        """
        if not target.is_contiguous():
            values = torch.empty(target.shape, dtype=self.dtype)
            self.copy_to(values, slices)
            target.copy_(values)
            return
        flat = target.detach().view(-1)
        done = 0
        is_in_place = target.dtype == self.dtype and target.device.type == "cpu"
        with unreadable_named(self.path), self.path.open("rb", buffering=0) as file:
            for first, count in runs(self.shape, slices[len(slices) - len(self.shape) :]):
                begin = self.begin + first * self.dtype.itemsize
                values = flat[done : done + count]
                if is_in_place:
                    self._read(file, begin, values)
                else:
                    self._convert(file, begin, values)
                done += count

    def _convert(self, file: FileIO, begin: int, target: Tensor) -> None:
        """Fill the flat `target` with values from `begin` on, through memory that stays cached.

        It is page-locked for a GPU, which then copies without a copy of its driver in between.
        """
        values = torch.empty(
            min(len(target), _CONVERTED_AT_ONCE), dtype=self.dtype, pin_memory=target.is_cuda
        )
        for part in torch.split(target, _CONVERTED_AT_ONCE):
            self._read(file, begin, values[: len(part)])
            # converted there: on the host it would be half as fast
            part.copy_(values[: len(part)].to(part.device))
            begin += part.numel() * self.dtype.itemsize

    def _read(self, file: FileIO, begin: int, values: Tensor) -> None:
        """Fill the flat `values`, in host memory, from `begin` on."""
        rest = values.view(torch.uint8).numpy().data
        while rest:
            count = os.preadv(file.fileno(), [rest], begin)
            if not count:
                raise DataError(f"{self.path}: ends within {self.name}; get the model again")
            rest = rest[count:]
            begin = begin + count


def runs(shape: Sequence[int], box: Sequence[slice]) -> Iterator[tuple[int, int]]:
    """Yield the elements of `box` in a tensor of `shape`, row-major, as (first, how many)."""
    if not shape:
        yield 0, 1
        return
    row, (rows, *rest) = math.prod(shape[1:]), box
    wholes = [slice(0, size) for size in shape[1:]]
    if list(rest) == wholes:
        yield rows.start * row, (rows.stop - rows.start) * row
        return
    for number in range(rows.start, rows.stop):
        for first, count in runs(shape[1:], rest):
            yield number * row + first, count


def find_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors in the weight files of `folder`, by name.

    Raises DataError for missing or damaged files.
    """
    return {name: Stored(**vars(header)) for name, header in find_headers(folder).items()}


# Filling a model that was built on the meta device and sharded by its strategy. The values are
# bitwise those that transformers and peft would give. Host memory holds this rank's shards and its
# slices of a few more tensors. Missing or unexpected tensors raise an error before anything is
# read. Torch's strategies shard a parameter into boxes (DTensor); DeepSpeed's into flat ranges of
# its elements (FlatPart).


def load_weights(
    model: nn.Module,
    folder: Path,
    device: torch.device,
    adapter_seed: int,
    adapter: Path | None = None,
) -> None:
    """Allocate a meta-device model on `device`, with this rank's shards of the weights in `folder`.

    Parameters that already have memory are filled in place. Parameters keep their dtype. Adapters
    get those of the file `adapter`, or new values drawn from `adapter_seed`. Raises DataError
    naming the tensors that do not match config.json.

    Each rank reads and quantizes its own rows of a quantized linear's weight. Several tensors are
    read at a time.
    """
    stored, sources = match_tensors(model, folder)
    materialise(model, device)
    # The parameters are listed anew, since allocation may have replaced them.
    plain = base_parameters(model)
    quantized = quantized_linears(model)
    of_plain = list(zip(plain, sources[: len(plain)], strict=True))
    fills = []
    for (parameter, _), (_, _, copies) in of_plain:
        for piece in copies[0]:
            fills.append(partial(_fill, parameter, piece, stored[piece.name].copy_to))
    call_all(fills, "weights")
    for (parameter, _), (_, _, (_, *others)) in of_plain:
        for piece in chain.from_iterable(others):
            _refuse_other_values(parameter, piece, stored[piece.name])
    for (linear, name), (_, _, (first, *_)) in zip(quantized, sources[len(plain) :], strict=True):
        _quantize(linear, name, first, stored)
    if adapter is not None:
        _load_adapters(model, adapter)
    elif has_adapters(model):
        from pipeline_lib.model.lora import draw_adapters  # loads peft

        draw_adapters(model, adapter_seed, put, whole)


def _load_adapters(model: nn.Module, file: Path) -> None:
    """Fill this rank's shards of the adapters of `model` from `file`, which has peft's names.

    Raises DataError unless it holds exactly these tensors.
    """
    stored = {header.name: Stored(**vars(header)) for header in read_headers(file)}
    wanted = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            wanted[peft_name(name)] = parameter
    differing = sorted(stored.keys() ^ wanted.keys())
    for name in stored.keys() & wanted.keys():
        if stored[name].shape != tuple(whole_shape(wanted[name])):
            differing.append(name)
    if differing:
        raise DataError(
            f"{file}: not the adapters that train.lora describes on this model: "
            f"{', '.join(differing[:5])}; make rank, targets and dora those of the adapters"
        )
    fills = []
    for name, parameter in wanted.items():
        tensor = stored[name]
        everything = Piece(name, (0,) * len(tensor.shape), tensor.shape)
        fills.append(partial(_fill, parameter, everything, tensor.copy_to))
    call_all(fills, "adapters")


def match_tensors(
    model: nn.Module, folder: Path
) -> tuple[dict[str, Stored], list[tuple[nn.Parameter, list[str], list[list[Piece]]]]]:
    """Return the text model's tensors in `folder`, and the names and copies of base parameters.

    The base parameters are those of `model`. Tensors go by transformers' names; copies are those of
    `copies_of`.

    The weights of quantized linears come last, each as the parameter of its codes. Raises DataError
    unless the files hold exactly the tensors of the model.
    """
    stored = of_text(find_tensors(folder), folder)
    sources = []
    for parameter, names in base_parameters(model):
        copies = copies_of(whole_shape(parameter), names, stored)
        sources.append((parameter, names, copies))
    for linear, name in quantized_linears(model):
        shape = (linear.out_features, linear.in_features)
        sources.append((linear.codes, [name], copies_of(shape, [name], stored)))
    refuse_misfit(folder, [copies for _, _, copies in sources], stored)
    return stored, sources


def has_adapters(model: nn.Module) -> bool:
    """Return whether `model` has peft's adapters. It does not import peft, which takes seconds."""
    return any(".lora_" in name for name, _ in model.named_parameters())


def without_adapters(model: nn.Module) -> Any:
    """Return transformers' model, which `model` is or, as peft's, contains."""
    return model.get_base_model() if has_adapters(model) else model  # type: ignore[operator]


def base_parameters(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Return the parameters that the files hold, ordered, with their names: two if tied.

    Weights of quantized linears are left out.
    """
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    quantized = {id(part) for linear, _ in quantized_linears(model) for part in linear.parts}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".lora_" not in name and id(parameter) not in quantized:
            found.setdefault(id(parameter), (parameter, []))[1].append(_stored_name(name))
    return list(found.values())


def quantized_linears(model: nn.Module) -> list[tuple[Nf4Linear, str]]:
    """Return the quantized linears, in a fixed order, with their weights' names in the files."""
    named = model.named_modules()
    return [
        (module, f"{_stored_name(name)}.weight")
        for name, module in named
        if isinstance(module, Nf4Linear)
    ]


def _stored_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


@torch.no_grad()
def _quantize(
    linear: Nf4Linear, name: str, pieces: list[Piece], stored: Mapping[str, Stored]
) -> None:
    """Fill this rank's shards of `linear` from its weight in the files, which `pieces` make up.

    This is a collective. Raises DataError if a value is not finite.
    """
    local, (first, *_) = local_part(linear.codes)
    rows = torch.empty(len(local), linear.in_features, dtype=linear.compute_dtype)
    for piece in pieces:
        fill_box(rows, (first, 0), piece, stored[piece.name].copy_to)
    codes, absmax = quantize_rows(rows.to(local.device), name)
    local.copy_(codes)
    for parameter, values in zip(
        linear.parts[1:], quantize_absmax(_whole_of(absmax, linear.absmax)), strict=True
    ):
        put(parameter, values)


def _whole_of(local: Tensor, parameter: Tensor) -> Tensor:
    """Return the whole tensor of which every rank has `local`, sharded as `parameter` is.

    This is a collective.
    """
    if not isinstance(parameter, DTensor):
        return local
    shape = parameter.shape
    shards = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=(shape[1], 1),
    )
    return shards.full_tensor()


def materialise(model: nn.Module, device: torch.device) -> None:
    """Allocate uninitialized memory on `device` for all meta tensors, and move the buffers there.

    Parameters that already have memory stay where they are.
    """

    def place(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=device)
        return tensor if isinstance(tensor, nn.Parameter) else tensor.to(device)

    was_meta = any(parameter.is_meta for parameter in model.parameters())
    model._apply(place)  # type: ignore[no-untyped-call]
    if was_meta:
        without_adapters(
            model
        ).tie_weights()  # a plain tensor that two modules shared has become two


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's shard of `parameter`, sharing memory, and its offsets in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), (0,) * parameter.ndim
    (chunk,) = parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return parameter.to_local(), tuple(chunk.offsets)


def _local_boxes(parameter: Tensor) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield this rank's boxes of `parameter`, sharing memory, and their offsets in the whole."""
    part = flat_part(parameter)
    if part is None:
        yield local_part(parameter)
        return
    for begins, sizes, first in boxes(part):
        yield part.values[first : first + math.prod(sizes)].view(sizes), begins


@torch.no_grad()
def _fill(
    parameter: Tensor, piece: Piece, copy_to: Callable[[Tensor, tuple[slice, ...]], object]
) -> None:
    """Let `copy_to` copy this rank's slices of `piece` to their place in `parameter`."""
    for local, begins in _local_boxes(parameter):
        fill_box(local, begins, piece, copy_to)


def fill_box(
    local: Tensor,
    begins: tuple[int, ...],
    piece: Piece,
    copy_to: Callable[[Tensor, tuple[slice, ...]], object],
) -> None:
    """Let `copy_to` copy the intersection of `piece` and `local`, a box with offsets `begins`.

    `copy_to` gets that part of `local`, and the slices of `piece` that belong there.
    """
    here, there = [], []
    for begin, length, offset, size in zip(
        begins, local.shape, piece.offsets, piece.sizes, strict=True
    ):
        first = max(begin, offset)
        last = min(begin + length, offset + size)
        if first >= last:
            return
        here.append(slice(first - begin, last - begin))
        there.append(slice(first - offset, last - offset))
    copy_to(local[tuple(here)], tuple(there))


def _refuse_other_values(parameter: Tensor, piece: Piece, stored: Stored) -> None:
    """Raise DataError if a second stored copy of a tied parameter differs from the first."""
    for local, begins in _local_boxes(parameter):
        again = torch.empty_like(local)
        fill_box(again, begins, piece, stored.copy_to)
        if not torch.equal(again, local):
            raise DataError(
                f"{stored.path}: {stored.name} is not equal to the tensor that config.json ties it "
                "to; set tie_word_embeddings to false there if they are two"
            )


def put(parameter: Tensor, values: Tensor) -> None:
    """Copy this rank's shard of the whole `values`, which every rank has, into `parameter`."""
    everything = Piece("", (0,) * values.ndim, tuple(values.shape))
    _fill(parameter, everything, lambda target, slices: target.copy_(values[slices]))


def whole(parameter: Tensor) -> Tensor:
    """Return the whole `parameter`, gathered from all ranks. This is a collective."""
    part = flat_part(parameter)
    if part is not None:
        return gather(part, parameter.device)
    values: Any = parameter.detach()
    return cast(Tensor, values.full_tensor() if isinstance(parameter, DTensor) else values)
