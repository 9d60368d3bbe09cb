"""Steps of one of torch's strategies by hand, for tests that need more than a curve."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_lib.config.train import Train
from pipeline_lib.data.blocks import BlockReader
from pipeline_lib.model.batch import loss_sum, read_batch
from pipeline_lib.model.build import build_trainable
from pipeline_lib.model.weights import load_weights
from pipeline_lib.train.adamw_8bit import is_8bit, values_of
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.native import Native
from pipeline_lib.train.strategies import STRATEGY_CLASSES
from tests.train.conftest import Arena


def state_of(native: Native, kinds: tuple[str, ...] | None = None) -> dict[str, Any]:
    """This rank's state in fp32, by checkpoint name: tensors in use, copies of 8-bit moments."""
    stored = native._stored(kinds)
    return {
        name: values_of(tensor) if is_8bit(tensor) else tensor for name, tensor in stored.items()
    }


@dataclass(frozen=True)
class Hand:
    """A strategy with its model, after the warm-up that the loop makes."""

    strategy: Any
    wrapped: nn.Module
    world: World
    reader: BlockReader

    def accumulate(self, step: int, micro_batches: int = 1) -> None:
        """Gradients of this rank's blocks of a step."""
        first = step * self.world.size * micro_batches + self.world.rank * micro_batches
        for micro in range(micro_batches):
            batch = read_batch(self.reader, [(first + micro) % len(self.reader)]).to(
                self.world.device
            )
            with self.strategy.accumulating(micro == micro_batches - 1):
                with self.strategy.autocast():
                    loss = loss_sum(self.wrapped, batch)
                self.strategy.backward(loss / 20 / micro_batches)

    def step(self, step: int) -> float:
        """One update, unless the norm is not finite; the norm."""
        self.accumulate(step)
        norm = float(self.strategy.grad_norm())
        if math.isfinite(norm):
            self.strategy.update(1e-2, norm)
        else:
            self.strategy.discard(norm)
        return norm

    def weights(self) -> dict[str, Tensor]:
        """What this rank holds of the weights."""
        return {
            name: tensor.clone() for name, tensor in state_of(self.strategy, ("weights",)).items()
        }

    def state(self) -> dict[str, Tensor]:
        """What this rank holds of all."""
        return {name: tensor.clone() for name, tensor in state_of(self.strategy).items()}


@contextmanager
def by_hand(
    environ: Mapping[str, str], arena: Arena, device: str = "cpu", **settings: Any
) -> Iterator[Hand]:
    """A rank's strategy, spread and warmed up."""
    world = World.from_env(environ, device)
    train = Train.model_validate({"precision": "fp32", **settings})
    with process_group(world, 60):
        strategy = STRATEGY_CLASSES[train.strategy](world, train, 1)
        if not isinstance(strategy, Native):
            raise TypeError(f"{train.strategy} is not torch's own")
        folder = arena.store.sealed(arena.model)
        load = partial(load_weights, folder=folder, device=world.device, adapter_seed=train.seed)
        wrapped = strategy.spread(build_trainable(folder, train), load)
        hand = Hand(
            strategy, wrapped, world, BlockReader(arena.store.sealed(arena.shard) / "train")
        )
        hand.accumulate(0)
        strategy.discard()
        yield hand


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether both have the same names and bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
