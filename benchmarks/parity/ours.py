"""Our side: the training stage's strategies, model and step, on equal weights and blocks."""

import math
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.parity.reference import Run
from pipeline_lib.data.blocks import Block
from pipeline_lib.launch.environment import LOOPBACK, free_port
from pipeline_lib.launch.ranks import StopRequest
from pipeline_lib.model.batch import make_batch
from pipeline_lib.model.build import build_trainable
from pipeline_lib.model.weights import load_weights
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.guards import Judgement, Verdict
from pipeline_lib.train.loop import learning_rate
from pipeline_lib.train.step import Stepper
from pipeline_lib.train.strategies import make_strategy

TIMEOUT_S = 240
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": LOOPBACK,
}


def losses(folder: Path, run: Run, steps: list[list[Block]]) -> Generator[float]:
    """The loss of each step in nats per supervised token, as training goes on."""
    world = World.from_env(ALONE, run.device.type)
    with _alone(), process_group(world, TIMEOUT_S):
        stepper = _stepper(folder, run, world, len(steps[0]) // run.micro_blocks)
        stepper.warm_up(make_batch(steps[0][: run.micro_blocks]))
        for step, blocks in enumerate(steps, start=1):
            starts = range(0, len(blocks), run.micro_blocks)
            batches = [make_batch(blocks[start : start + run.micro_blocks]) for start in starts]
            result = stepper.step(
                batches, learning_rate(run.train, step, run.total_steps), _finite, False
            )
            if result.judgement.verdict != Verdict.APPLY:
                raise ValueError(
                    f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}"
                )
            try:
                yield result.loss
            except (
                GeneratorExit
            ):  # who listens has heard enough: leave the group in order, so that another can follow
                break


@contextmanager
def _alone() -> Iterator[None]:
    """The environment of a rank that has no peers, for torch and DeepSpeed, which read it."""
    before = dict(os.environ)
    os.environ.update({**ALONE, "MASTER_PORT": str(free_port())})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _stepper(folder: Path, run: Run, world: World, accumulation: int) -> Stepper:
    """As a rank of the training stage makes it."""
    strategy = make_strategy(world, run.train, accumulation)
    model = build_trainable(folder, run.train)
    load = partial(load_weights, folder=folder, device=world.device, adapter_seed=run.train.seed)
    wrapped = strategy.spread(model, load)
    wrapped.train()
    return Stepper(wrapped, strategy, world, StopRequest())


def _finite(loss: float, grad_norm: float, _: int) -> Judgement:
    is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
    return Judgement(Verdict.APPLY if is_finite else Verdict.SKIP)
