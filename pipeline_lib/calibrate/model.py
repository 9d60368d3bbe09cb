"""A model of random weights that is trained by the pipeline's own strategies, and batches to feed it with."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pipeline_lib.config.schema import Train
from pipeline_lib.data.shard.blocks import Block
from pipeline_lib.train.batch import Batch, make_batch
from pipeline_lib.train.dist import World
from pipeline_lib.train.guards import Judgement, Verdict
from pipeline_lib.train.model import build_trainable
from pipeline_lib.train.parallel import make_strategy
from pipeline_lib.train.step import Stepper, StepResult
from pipeline_lib.train.stop import StopRequest
from pipeline_lib.train.weights import materialise

_LR = 1e-5
_STD = 0.02


def load_random(model: nn.Module, device: torch.device) -> None:
    """Random weights, as large as real ones: zeros would be multiplied faster."""
    materialise(model, device)
    with torch.no_grad():
        for parameter in model.parameters():
            values = getattr(parameter, "ds_tensor", parameter)
            if values.is_floating_point():
                values.normal_(0.0, _STD)


def random_stepper(folder: Path, train: Train, accumulation: int, world: World) -> Stepper:
    """The model of `folder`'s config.json with random weights, spread as `train` says and ready to train."""
    strategy = make_strategy(world, train, accumulation)
    model = build_trainable(folder, train)
    wrapped = strategy.spread(model, partial(load_random, device=world.device))
    wrapped.train()
    return Stepper(wrapped, strategy, world, StopRequest())


def take_step(stepper: Stepper, batches: list[Batch]) -> StepResult:
    """One optimizer step, whose update is made if its numbers are finite."""
    return stepper.step(batches, _LR, _judge, False)


def _judge(loss: float, grad_norm: float, _: int) -> Judgement:
    is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
    return Judgement(Verdict.APPLY if is_finite else Verdict.SKIP)


def batch_of_documents(tokens: int, document_tokens: float, supervised_fraction: float, vocab: int) -> Batch:
    """One block of `tokens` tokens in documents of that length, the last part of each supervised."""
    length = max(2, min(tokens, round(document_tokens)))
    places = np.arange(tokens)
    unsupervised = length - round(length * supervised_fraction)
    random = np.random.default_rng(0)
    return make_batch(
        [
            Block(
                tokens=random.integers(0, vocab, tokens, dtype=np.int32),
                supervised=places % length >= unsupervised,
                documents=(places // length).astype(np.int32),
            )
        ]
    )
