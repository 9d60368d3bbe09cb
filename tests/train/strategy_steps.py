"""Steps of a strategy without a loop, several runs in one set of processes, and their traces."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_lib.config.train import Train
from pipeline_lib.data.blocks import BlockReader
from pipeline_lib.launch.ranks import StopRequest
from pipeline_lib.model.build import build_trainable
from pipeline_lib.model.weights import load_weights
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.guards import Judgement, Verdict
from pipeline_lib.train.loop import Batches, learning_rate
from pipeline_lib.train.mesh import batch_share_of
from pipeline_lib.train.saved_tensors import save_tensors
from pipeline_lib.train.step import Stepper
from pipeline_lib.train.strategies import make_strategy
from pipeline_lib.train.strategy import Strategy
from tests.train.helpers import load_tensors

BATCH_BLOCKS = 4


@dataclass(frozen=True)
class Run:
    """What to run: `count` steps from `first` on, of the model and blocks in those folders."""

    model: Path
    blocks: Path
    train: Train
    count: int
    first: int = 0
    load: Path | None = None  # state to begin from, after `first` updates
    save: Path | None = None  # where to leave the state
    device: str = "cpu"
    # throw a step away before each, every other one with gradients that are not finite
    discards: bool = False


def do_runs(environ: Mapping[str, str], *runs: Run) -> list[dict[str, Any]]:
    """As a rank: each run's `losses` and `norms`, and the `names` and `bytes` of state it kept."""
    torch.set_num_threads(1)
    world = World.from_env(environ, runs[0].device)
    with process_group(world, 60):
        return [_do(world, run) for run in runs]


def _do(world: World, run: Run) -> dict[str, Any]:
    train, reader = run.train, BlockReader(run.blocks)
    strategy = make_strategy(world, train, train.accumulation(BATCH_BLOCKS, world.size))
    model = build_trainable(run.model, train)
    wrapped = strategy.spread(
        model, lambda empty: load_weights(empty, run.model, world.device, train.seed)
    )
    wrapped.train()
    frozen = frozen_bits(model)
    stepper = Stepper(wrapped, strategy, world, StopRequest())
    batches = Batches(
        reader, train.seed, BATCH_BLOCKS, train.micro_batch_blocks, batch_share_of(world, train)
    )
    stepper.warm_up(batches.of_step(run.first)[0])
    if run.load is not None:
        folder = run.load
        strategy.restore(lambda tensors: load_tensors(folder, tensors), run.first)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(run.first, run.first + run.count):
        if run.discards:
            throw_away(stepper, model, batches, step)
        rate = learning_rate(train, step + 1, run.first + run.count)
        result = stepper.step(
            batches.of_step(step), rate, lambda *_: Judgement(Verdict.APPLY), False
        )
        found["losses"].append(result.loss)
        found["norms"].append(result.grad_norm)
    assert_same_bits(frozen_bits(model), frozen)
    state = strategy.snapshot()
    if run.save is not None:
        save_tensors(run.save, state)
    return {
        **found,
        "names": sorted(state),
        "bytes": sum(tensor.nbytes for tensor in state.values()),
    }


def throw_away(stepper: Stepper, model: nn.Module, batches: Batches, step: int) -> None:
    """Discard a step, and see that not a bit of weights and moments changed."""
    strategy: Strategy = stepper.strategy
    before, weights = strategy.snapshot(), dict(computed_with(model))
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    tokens = math.nan if step % 2 else 100.0
    stepper.accumulate(batches.of_step(step + 1), lambda: (tokens, tokens))
    norm = float(strategy.grad_norm())
    assert math.isfinite(norm) == math.isfinite(tokens)
    strategy.discard(norm)
    assert_same_bits(strategy.snapshot(), before)
    assert_same_bits(dict(computed_with(model)), weights)


def computed_with(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """This rank's weights in the arithmetic's precision, with those that DeepSpeed gathers."""
    for name, parameter in model.named_parameters():
        yield name, getattr(parameter, "ds_tensor", parameter.detach())


def frozen_bits(model: nn.Module) -> dict[str, Tensor]:
    """Copies of this rank's frozen weights."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor.clone() for name, tensor in computed_with(model) if name in frozen}


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Every tensor has the bits of the one of its name."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        bits = [local(part).contiguous().view(torch.uint8) for part in (tensor, expected[name])]
        assert torch.equal(*bits), name


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return (
        tensor.to_local()
        if isinstance(tensor, torch.distributed.tensor.DTensor)
        else tensor.detach()
    )
