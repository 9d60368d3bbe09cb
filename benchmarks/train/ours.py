"""One rank of our side: the pipeline's own model, strategy and step on packed blocks."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.train.cases import CASES, LORA, Case, documents_of
from benchmarks.train.rank import peak_bytes, rank_arguments, report
from pipeline_lib.calibrate.model import random_stepper, take_step
from pipeline_lib.config.schema import Train, read_settings
from pipeline_lib.data.document import Document
from pipeline_lib.data.shard.blocks import PADDING_DOCUMENT, Block
from pipeline_lib.data.shard.packing import pack
from pipeline_lib.train.batch import Batch, make_batch
from pipeline_lib.train.dist import World, die_with_parent, process_group

TIMEOUT_S = 240


def train_settings(case: Case) -> Train:
    """The section `train` of such a run."""
    lora = {"lora": LORA} if case.method == "lora" else {}
    known = {"method": case.method, "precision": case.precision, **lora, **case.train}
    return read_settings(Train, known)


def packed(documents: list[Document], block_tokens: int) -> list[Block]:
    """The documents in as few blocks as best fit makes of them."""
    bins = pack(np.array([len(document.tokens) for document in documents]), block_tokens, 0)
    return [_block([documents[number] for number in bins[index]], block_tokens) for index in range(len(bins))]


def _block(documents: list[Document], block_tokens: int) -> Block:
    tokens = np.concatenate([document.tokens for document in documents])
    supervised = np.concatenate([document.supervised for document in documents])
    owners = np.repeat(np.arange(len(documents), dtype=np.int32), [len(each.tokens) for each in documents])
    padding = (0, block_tokens - len(tokens))
    return Block(
        np.pad(tokens, padding), np.pad(supervised, padding), np.pad(owners, padding, constant_values=PADDING_DOCUMENT)
    )


def batches_of(case: Case, documents: list[Document], blocks: int) -> list[Batch]:
    """The micro-batches of one step: the documents in `blocks` blocks, the last of them of padding alone if need be."""
    micro = train_settings(case).micro_batch_blocks
    found = packed(documents, case.block_tokens)
    nothing = np.zeros(case.block_tokens, np.int32)
    empty = Block(nothing, nothing.astype(np.bool_), nothing + PADDING_DOCUMENT)
    found += [empty] * (blocks - len(found))
    return [make_batch(found[start : start + micro]) for start in range(0, blocks, micro)]


def main() -> None:
    """Take the steps, and report them on the first rank."""
    arguments = rank_arguments()
    case, folder = CASES[arguments.case], Path(arguments.folder)
    die_with_parent()
    world = World.from_env(os.environ, "cuda" if torch.cuda.is_available() else "cpu")
    train = train_settings(case)
    # Every rank makes the documents of all, since all take as many micro-batches in every step.
    of_ranks = [documents_of(case, rank, arguments.steps) for rank in range(world.size)]
    most = [max(len(packed(each[step], case.block_tokens)) for each in of_ranks) for step in range(arguments.steps)]
    micro = train.micro_batch_blocks
    blocks = -(-max(most) // micro) * micro
    with process_group(world, TIMEOUT_S):
        stepper = random_stepper(folder, train, blocks // micro, world)
        steps: list[dict[str, Any]] = []
        batches = batches_of(case, of_ranks[world.rank][0], blocks)
        stepper.warm_up(batches[0])
        for documents in of_ranks[world.rank]:
            start_s = time.perf_counter()
            result = take_step(stepper, batches_of(case, documents, blocks))
            steps.append({"step_s": time.perf_counter() - start_s, "loss": result.loss, "computed": result.duration_s})
        if world.is_first:
            print(json.dumps(report(case, "ours", of_ranks, steps, peak_bytes(world.device))), flush=True)


if __name__ == "__main__":
    main()
