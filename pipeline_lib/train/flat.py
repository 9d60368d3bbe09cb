"""Parameters that are spread element by element: a rank keeps a range of the elements, in the order of their rows.

So DeepSpeed spreads weights and moments. Here are the boxes that such a range consists of, which is how files are
read, and its way to a whole tensor and back, bit by bit.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
