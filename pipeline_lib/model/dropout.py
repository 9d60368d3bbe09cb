"""Dropout of adapters: masks depend only on seed, step, block, place in it, and kind of device.

So a run draws the same masks on any number of ranks, with any micro-batches, in chunks or not, and
after a resume. Each module draws the masks of SEGMENT tokens of a block at a time, from a generator
with a key of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pipeline_lib.data.documents import key_of
from pipeline_lib.model.context import Part

SEGMENT = 1024
DRAWING = "drawing"  # the attribute of a model with such dropouts that holds what they share


@dataclass(frozen=True)
class Draws:
    """What decides a micro-batch's masks: one key for each of its blocks, which have equal parts.

    The part has `tokens` tokens, from the `first` of the block on; the whole block has
    `block_tokens`.
    """

    keys: tuple[int, ...]
    block_tokens: int
    first: int
    tokens: int

    def of(self, part: Part) -> "Draws":
        """Return the draws of `part` of whole blocks."""
        tokens = self.block_tokens // part.count
        return replace(self, first=part.number * tokens, tokens=tokens)


class Drawing:
    """What a model's dropouts share: the draws of the current micro-batch, and its first row."""

    def __init__(self) -> None:
        """Begin without draws: then masks come from torch's own random numbers."""
        self.draws: Draws | None = None
        self.first_row = 0


class SeededDropout(nn.Dropout):
    """The dropout of the adapter `number` of a model."""

    def __init__(self, p: float, number: int, drawing: Drawing) -> None:
        """Share `drawing` with the other adapters."""
        super().__init__(p)
        self.number, self.drawing = number, drawing

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden` [..., H], rows of the current micro-batch, with some elements as 0."""
        draws = self.drawing.draws
        if not self.training or draws is None:
            return super().forward(hidden)
        return hidden.masked_fill(self.dropped(hidden, draws), 0.0) / (1 - self.p)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dropped(self, hidden: Tensor, draws: Draws) -> Tensor:
        """Return which elements of `hidden` are dropped: bool[..., H]."""
        generator = torch.Generator(hidden.device)
        size = min(SEGMENT, draws.block_tokens)
        row = self.drawing.first_row
        end = self.drawing.first_row + hidden.shape[:-1].numel()
        pieces = []
        while row < end:
            block, place = divmod(row, draws.tokens)
            segment, skipped = divmod(draws.first + place, size)
            count = min(size - skipped, draws.tokens - place, end - row)
            generator.manual_seed(key_of(draws.keys[block], self.number, segment))
            drawn = torch.empty(size, hidden.shape[-1], dtype=torch.bool, device=hidden.device)
            drawn.bernoulli_(self.p, generator=generator)
            pieces.append(drawn[skipped : skipped + count])
            row += count
        return torch.cat(pieces).view(hidden.shape)


@contextmanager
def rows_from(layer: nn.Module, first: int) -> Iterator[None]:
    """Let the dropouts of `layer` take the micro-batch's rows from `first` on, in this context."""
    drawings = {module.drawing for module in layer.modules() if isinstance(module, SeededDropout)}
    for drawing in drawings:
        drawing.first_row = first
    try:
        yield
    finally:
        for drawing in drawings:
            drawing.first_row = 0
