"""A forward pass over many batches with one part of the weights in memory while the next is read.

The parts are the embedding, each decoder layer, and the final norm with the head. Each is read from
the files once and applied to all batches, whose hidden states wait in host memory between the
parts. So a model of any size is evaluated on a device with room for its two largest parts, in about
the time of reading it or of computing, whichever is longer. All arithmetic is transformers' own,
called with one layer at a time: results are those of the whole model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_lib.arch.weight_files import Piece
from pipeline_lib.config.rope import Rope
from pipeline_lib.core.threads import READERS
from pipeline_lib.data.blocks import Block
from pipeline_lib.model.attention import PACKED_FLASH
from pipeline_lib.model.batch import Batch, hidden_states, logits_at, make_batch, token_losses
from pipeline_lib.model.build import decoder_layers, empty_base
from pipeline_lib.model.kept import Kept
from pipeline_lib.model.probe import probe_positions
from pipeline_lib.model.weights import Stored, match_tensors

# fills a tensor of a parameter's shape with the parameter's values
Fill = Callable[[Tensor], object]


def fill_from(pieces: Sequence[Piece], stored: Mapping[str, Stored]) -> Fill:
    """Return what fills a parameter from the tensors `stored` in files: its `pieces`."""

    def fill(values: Tensor) -> None:
        for piece in pieces:
            everything = tuple(slice(0, size) for size in piece.sizes)
            stored[piece.name].copy_to(values[piece.slices], everything)

    return fill


@dataclass(frozen=True)
class _Slot:
    """A parameter of a part: its place in its module, its empty value, and its values' reader."""

    module: nn.Module
    name: str
    empty: nn.Parameter
    fill: Fill


def _slots(part: nn.Module, fills: Mapping[int, Fill]) -> list[_Slot]:
    """Return the slots of all parameters of `part`; `fills` are by the parameters' ids."""
    slots = []
    for module in part.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slots.append(_Slot(module, name, parameter, fills[id(parameter)]))
    return slots


class Streamed:
    """A model on `device`, for evaluation, with one part in memory, or two if one is being read."""

    def __init__(
        self,
        model: Any,
        fills: Mapping[int, Fill],
        dtype: torch.dtype,
        device: torch.device,
        reads_ahead: bool = True,
    ) -> None:
        """Take transformers' `model` without weights, adapters allowed, and activations in `dtype`.

        `fills` has each parameter's values, by the parameter's id.
        """
        self.dtype = dtype
        self.device = device
        self._reads_ahead = reads_ahead
        self._model = model
        self._model.train(False)
        self._base: Any = self._model.base_model
        self._norm: Any = self._base.norm
        self._layers = decoder_layers(self._model)
        for module in self._model.modules():  # rotary frequencies
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        self._embedding: Any = self._model.get_input_embeddings()
        head: Any = self._model.get_output_embeddings()
        self._slots = [_slots(self._embedding, fills)]
        for layer in self._layers:
            self._slots.append(_slots(layer, fills))
        self._slots.append(_slots(self._norm, fills) + _slots(head, fills))

    @property
    def hidden_size(self) -> int:
        """The width of a hidden state, in elements."""
        return int(self._model.config.hidden_size)

    def waiting_room(self, tokens: int) -> Tensor:
        """Return host memory [tokens, H] for the hidden states of so many tokens."""
        return torch.empty(tokens, self.hidden_size, dtype=self.dtype)

    def token_losses(self, batches: Sequence[Batch], waiting: Tensor) -> list[Tensor]:
        """Return `token_losses` of each batch, [B, T] in fp32 on the CPU.

        `waiting` [N, H] is host memory in the model's dtype for the hidden states of all tokens of
        `batches`, padding included. On a GPU, page-locked memory is faster.
        """
        return self._run(batches, waiting, partial(token_losses, self._model))

    def probe_logits(self, *blocks: Block, positions: Tensor | None = None) -> list[Tensor]:
        """Return the model's logits [K, V] at each block's probe positions, in fp32 on the CPU.

        `positions` [K] are others for the first block.
        """
        batches = [make_batch([block]) for block in blocks]
        of_batches = [probe_positions(batch) for batch in batches]
        if positions is not None:
            of_batches[0] = positions
        coming = iter(of_batches)

        def finish(there: Batch, hidden: Tensor) -> Tensor:
            return logits_at(self._model, there, next(coming).to(self.device), hidden)[0].float()

        tokens = sum(batch.tokens.numel() for batch in batches)
        return self._run(batches, self.waiting_room(tokens), finish)

    @torch.no_grad()
    def _run(
        self, batches: Sequence[Batch], waiting: Tensor, finish: Callable[[Batch, Tensor], Tensor]
    ) -> list[Tensor]:
        """Pass all batches through the model; `finish(batch, hidden)` computes the result."""
        places = []
        start = 0
        for batch in batches:
            end = start + batch.tokens.numel()
            places.append(waiting[start:end].view(*batch.tokens.shape, -1))
            start = end
        if self.device.type == "cuda":
            batches = [batch.pinned() for batch in batches]
        results = []
        for number in self._loaded_parts():
            for batch, place in zip(batches, places, strict=True):
                there = batch.to(self.device)
                if number == 0:
                    place.copy_(self._embedding(there.tokens), non_blocking=True)
                    continue
                hidden = place.to(self.device, non_blocking=True)
                if number <= len(self._layers):
                    place.copy_(hidden_states(self._base, there, hidden), non_blocking=True)
                    continue
                results.append(finish(there, hidden).cpu())
        return results

    def _loaded_parts(self) -> Iterator[int]:
        """Yield each part's number while its weights are loaded and the model is only that part."""
        last = len(self._slots) - 1
        select = None
        stream: Any = None
        readers = 1  # CPUs have a model to compute
        if self.device.type == "cuda":
            select = partial(torch.cuda.set_device, self.device)
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            readers = READERS
        with ThreadPoolExecutor(readers, "weights", initializer=select) as pool:

            def begin(number: int) -> "list[Future[nn.Parameter]]":
                return [pool.submit(self._read, slot, stream) for slot in self._slots[number]]

            coming = begin(0)
            for number in range(last + 1):
                values = [each.result() for each in coming]
                coming = []  # they hold the values too
                if number < last and self._reads_ahead:
                    coming = begin(number + 1)
                # transformers' forward passes through these layers and this norm, and no others.
                is_layer = 0 < number < last
                layers = self._layers[number - 1 : number] if is_layer else []
                self._base.layers = nn.ModuleList(layers)
                self._base.norm = self._norm if number == last else nn.Identity()
                for slot, value in zip(self._slots[number], values, strict=True):
                    slot.module._parameters[slot.name] = value
                try:
                    yield number
                    if stream is not None:  # the weights are in use until then
                        torch.cuda.current_stream(self.device).synchronize()
                finally:
                    del values, value
                    for slot in self._slots[number]:
                        slot.module._parameters[slot.name] = slot.empty
                if number < last and not self._reads_ahead:
                    coming = begin(number + 1)

    def _read(self, slot: _Slot, stream: Any) -> nn.Parameter:
        """Read a parameter to the device; on a GPU beside what it computes, in its own stream."""
        beside: AbstractContextManager[Any] = nullcontext()
        if stream is not None:
            beside = torch.cuda.stream(stream)
        with torch.no_grad(), beside:
            values = torch.empty(slot.empty.shape, dtype=slot.empty.dtype, device=self.device)
            slot.fill(values)
            if stream is not None:
                stream.synchronize()
        return nn.Parameter(values, requires_grad=False)


class StreamedModel(Streamed):
    """The model of a Hugging Face folder."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        rope: Rope | None = None,
        kept: Kept | None = None,
    ) -> None:
        """Build the model with `rope`, without weights; `dtype` is that of weights and activations.

        Values that `kept` has are not read again. Raises DataError unless the files hold exactly
        the model that config.json describes.
        """
        model = empty_base(folder, dtype, PACKED_FLASH, rope)
        stored, sources = match_tensors(model, folder)
        if kept is not None:
            stored = kept.tensors(stored)
        fills = {}
        for parameter, _, copies in sources:  # a tied weight may be stored twice
            fills[id(parameter)] = fill_from(copies[0], stored)
        super().__init__(model, fills, dtype, device)
