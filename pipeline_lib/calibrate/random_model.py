"""A model with random weights, trained by the pipeline's strategies on synthetic batches."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from pipeline_lib.config.train import Train
from pipeline_lib.data.blocks import Block
from pipeline_lib.launch.ranks import StopRequest
from pipeline_lib.model.batch import Batch, make_batch
from pipeline_lib.model.build import build_trainable
from pipeline_lib.model.weights import local_part, materialise, put, quantized_linears
from pipeline_lib.train.dist import World
from pipeline_lib.train.guards import Judgement, Verdict
from pipeline_lib.train.step import Stepper, StepResult
from pipeline_lib.train.strategies import make_strategy

_LR = 1e-5
_STD = 0.02


def load_random(model: nn.Module, device: torch.device) -> None:
    """Allocate `model` on `device` with realistic weights, since zeros make matmuls faster.

    The weights are random.
    """
    materialise(model, device)
    with torch.no_grad():
        for parameter in model.parameters():
            values = getattr(parameter, "ds_tensor", parameter)
            if values.is_floating_point():
                values.normal_(0.0, _STD)
            else:  # codes of a quantized base, under torch's own strategies
                local_part(parameter)[0].random_(0, 256)
        for linear, _ in quantized_linears(model):
            put(
                linear.statistics,
                torch.full((linear.statistics.numel() // 4,), 2 * _STD).view(torch.uint8),
            )


def random_stepper(folder: Path, train: Train, accumulation: int, world: World) -> Stepper:
    """Build the model in `folder` with random weights, sharded for `train` and ready to train."""
    strategy = make_strategy(world, train, accumulation)
    model = build_trainable(folder, train)
    wrapped = strategy.spread(model, partial(load_random, device=world.device))
    wrapped.train()
    return Stepper(wrapped, strategy, world, StopRequest())


def take_step(stepper: Stepper, batches: list[Batch]) -> StepResult:
    """Take one optimizer step, without update if loss or gradient norm is not finite."""

    def judge(loss: float, grad_norm: float, _: int) -> Judgement:
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        return Judgement(Verdict.APPLY if is_finite else Verdict.SKIP)

    return stepper.step(batches, _LR, judge, False)


def batch_of_documents(
    tokens: int, document_tokens: float, supervised_fraction: float, vocab: int
) -> Batch:
    """Return one block of `tokens` random tokens, in documents of `document_tokens` tokens.

    The last `supervised_fraction` of each document is supervised.
    """
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
