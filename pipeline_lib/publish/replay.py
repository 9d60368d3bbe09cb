"""A model's logits with one layer's weights in memory at a time: transformers' own forward, fed from the files.

Each part (embedding, decoder layers, final norm, head) reads its weights when it is called and forgets them when it has
answered. Non-goal: gradients.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_lib.data.shard.blocks import Block
from pipeline_lib.model.weights import Piece, copies_of, refuse_misfit
from pipeline_lib.train.flat import whole_shape
from pipeline_lib.train.layers import decoder_layers
from pipeline_lib.train.model import empty_base
from pipeline_lib.train.model_files import Stored, find_tensors
from pipeline_lib.train.probe import probe_logits
from pipeline_lib.train.weights import base_parameters


def replayed_logits(folder: Path, dtype: torch.dtype, block: Block) -> Tensor:
    """What `probe_logits` gives for the model in `folder`, in `dtype` on the CPU, without all of it in memory.

    Raises DataError if the files do not hold the model that config.json describes, and nothing else.
    """
    model = empty_base(folder, dtype)
    stored = find_tensors(folder)
    parameters = base_parameters(model)
    copies = [copies_of(whole_shape(parameter), names, stored) for parameter, names in parameters]
    refuse_misfit(folder, copies, stored)
    pieces = {id(parameter): first for (parameter, _), (first, *_) in zip(parameters, copies, strict=True)}
    for part in _parts(model):
        feeder = _Feeder(pieces, stored)
        part.register_forward_pre_hook(feeder.feed)
        part.register_forward_hook(feeder.forget)
    model.train(False)
    return probe_logits(model, block, torch.device("cpu"))


def _parts(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, and every module outside of them that has weights of its own."""
    layers = decoder_layers(model)
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if id(module) not in inside and module._parameters]
    return [*layers, *outside]


@dataclass
class _Feeder:
    """Gives a module its weights for one call."""

    pieces: dict[int, list[Piece]]
    stored: dict[str, Stored]

    def feed(self, part: nn.Module, args: Any) -> None:
        """Read the weights of `part` from the files, in place of the empty ones."""
        self._empty = [
            (module, name, parameter)
            for module in part.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        for module, name, parameter in self._empty:
            module._parameters[name] = nn.Parameter(self._read(parameter), requires_grad=False)

    def forget(self, part: nn.Module, args: Any, output: Any) -> None:
        """Let go of them."""
        for module, name, parameter in self._empty:
            module._parameters[name] = parameter

    def _read(self, parameter: nn.Parameter) -> Tensor:
        values = torch.empty(parameter.shape, dtype=parameter.dtype)
        for piece in self.pieces[id(parameter)]:
            ranges = zip(piece.offsets, piece.sizes, strict=True)
            here = tuple(slice(begin, begin + size) for begin, size in ranges)
            self.stored[piece.name].copy_to(values[here], tuple(slice(0, size) for size in piece.sizes))
        return values
