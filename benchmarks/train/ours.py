"""One rank of our side: the pipeline's model, strategy, reading ahead and step, on blocks."""

import os
import time
from functools import partial

import numpy as np
import torch
from torch import nn

from benchmarks.train.cases import Case, train_settings
from benchmarks.train.documents import documents_of
from benchmarks.train.rank import (
    WARM_UP_STEPS,
    Side,
    memory_fields,
    rank_arguments,
    say,
    start_fields,
)
from benchmarks.train.weights import fill
from pipeline_lib.calibrate.random_model import take_step
from pipeline_lib.config.train import Train
from pipeline_lib.core.events import EventLog
from pipeline_lib.core.processes import die_with_parent
from pipeline_lib.data.blocks import PADDING_DOCUMENT, Block
from pipeline_lib.data.documents import Document
from pipeline_lib.data.packing import pack
from pipeline_lib.launch.ranks import StopRequest
from pipeline_lib.model.batch import Batch, BatchShare, make_batch
from pipeline_lib.model.build import build_trainable
from pipeline_lib.model.lora import draw_adapters
from pipeline_lib.model.prefetch import Prefetcher
from pipeline_lib.model.weights import materialise, put, whole
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.gpu_activity import StepProfiler
from pipeline_lib.train.gpu_sampler import GpuSampler, gpu_sampler
from pipeline_lib.train.mesh import batch_share_of
from pipeline_lib.train.step import Stepper
from pipeline_lib.train.strategies import make_strategy

TIMEOUT_S = 240


def packed(documents: list[Document], case: Case) -> list[Block]:
    """The documents in the case's blocks, by best fit."""
    bins = pack(np.array([len(document.tokens) for document in documents]), case.block_tokens, 0)
    filled = [
        _block([documents[number] for number in bins[index]], case.block_tokens)
        for index in range(len(bins))
    ]
    return filled + [_block([], case.block_tokens)] * (case.rank_blocks - len(filled))


def _block(documents: list[Document], block_tokens: int) -> Block:
    tokens = np.concatenate([np.zeros(0, np.int32), *(document.tokens for document in documents)])
    supervised = np.concatenate(
        [np.zeros(0, np.bool_), *(document.supervised for document in documents)]
    )
    owners = np.repeat(
        np.arange(len(documents), dtype=np.int32), [len(each.tokens) for each in documents]
    )
    padding = (0, block_tokens - len(tokens))
    return Block(
        np.pad(tokens, padding),
        np.pad(supervised, padding),
        np.pad(owners, padding, constant_values=PADDING_DOCUMENT),
    )


def batches_of(case: Case, documents: list[Document], micro: int) -> list[Batch]:
    """The micro-batches of one step, of `micro` blocks each."""
    blocks = packed(documents, case)
    return [make_batch(blocks[start : start + micro]) for start in range(0, len(blocks), micro)]


def make_stepper(side: Side, train: Train, world: World) -> Stepper:
    """The model, spread as `train` says, and filled with the weights that all sides have."""

    def load(model: nn.Module) -> None:
        materialise(model, world.device)
        fill(model, world.device, put)
        draw_adapters(model, train.seed, put, whole)

    strategy = make_strategy(
        world, train, side.case.rank_blocks * train.ranks_per_block // train.micro_batch_blocks
    )
    wrapped = strategy.spread(build_trainable(side.folder, train), load)
    wrapped.train()
    return Stepper(wrapped, strategy, world, StopRequest())


def main() -> None:
    """Take the steps, and one more under the profiler; the first rank tells of them."""
    side = rank_arguments()
    die_with_parent()
    world = World.from_env(os.environ, "cuda" if torch.cuda.is_available() else "cpu")
    train = train_settings(side.case, side.train)
    with (
        process_group(world, TIMEOUT_S),
        gpu_sampler(world.device if world.is_first else None) as sampler,
    ):
        share = batch_share_of(world, train)
        # of the ranks whose documents this one's group takes
        first = share.group * train.ranks_per_block
        documents = [
            documents_of(side.case, rank, side.steps + 1)
            for rank in range(first, first + train.ranks_per_block)
        ]
        read = partial(_read, side.case, documents, train.micro_batch_blocks, share)
        if world.is_first:
            say(side, "start", start_fields(world.device, getattr(train, "attention", "packed")))
        stepper = make_stepper(side, train, world)
        with Prefetcher(read, side.steps + 1, world.device) as prefetcher:
            stepper.warm_up(prefetcher.take(0)[0][0])
            _measure(side, stepper, prefetcher, sampler)
            _profile(side, stepper, prefetcher)


def _read(
    case: Case, documents: list[list[list[Document]]], micro: int, share: BatchShare, step: int
) -> list[Batch]:
    """Return this rank's micro-batches of `documents`' step, by rank of its group and step."""
    return [share.of(batch) for mine in documents for batch in batches_of(case, mine[step], micro)]


def _measure(side: Side, stepper: Stepper, prefetcher: Prefetcher, sampler: GpuSampler) -> None:
    """The steps, each with the wait for its data."""
    world = stepper.world
    for step in range(side.steps):
        if step == WARM_UP_STEPS:
            sampler.take()
        start_s = time.perf_counter()
        batches, _ = prefetcher.take(step)
        result = take_step(stepper, batches)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        if world.is_first:
            say(side, "step", {"step_s": time.perf_counter() - start_s, "loss": result.loss})
    sampled, memory = sampler.take(), memory_fields(world.device)
    if world.is_first:
        say(side, "end", {**memory, **sampled})


def _profile(side: Side, stepper: Stepper, prefetcher: Prefetcher) -> None:
    """What the GPU's time goes into, of a step that is not counted."""
    if stepper.world.device.type != "cuda":
        return
    profiler = StepProfiler(stepper.world, 1, EventLog(None))
    batches, _ = prefetcher.take(side.steps)
    with profiler.around(1):
        take_step(stepper, batches)
    if stepper.world.is_first:
        say(side, "profile", profiler.take())


if __name__ == "__main__":
    main()
