"""One rank of the grid that tests the plan: many ways to train, in turn, in one process group.

It uses the pipeline's own model, strategies and step, on random weights and documents, and reports
what a case took: seconds of a step by phase, and the peak of the allocator. Started by
`benchmarks.predictions`.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.sizes import config_json
from benchmarks.strategies import chat_documents
from pipeline_lib.calibrate.random_model import random_stepper, take_step
from pipeline_lib.config.section import read_settings
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.files import write_json
from pipeline_lib.core.processes import die_with_parent
from pipeline_lib.data.blocks import Block
from pipeline_lib.model.batch import Batch, make_batch
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.guards import Verdict
from pipeline_lib.train.step import Stepper

TIMEOUT_S = 240
MEASURED_STEPS = 3  # the last ones; those before warm up


def batch_of(random: np.random.Generator, blocks: int, tokens: int) -> Batch:
    """A micro-batch of full blocks."""
    made = []
    for _ in range(blocks):
        documents = chat_documents(random, tokens)
        made.append(
            Block(
                np.concatenate([document.tokens for document in documents]),
                np.concatenate([document.supervised for document in documents]),
                np.repeat(
                    np.arange(len(documents), dtype=np.int32), [len(d.tokens) for d in documents]
                ),
            )
        )
    return make_batch(made)


def batches_of(case: dict[str, Any], rank: int) -> list[Batch]:
    """The micro-batches that `rank` takes in each step: as many blocks, in any cut, are equal."""
    random = np.random.default_rng(rank)
    micro = read_settings(Train, case["train"]).micro_batch_blocks
    return [batch_of(random, micro, case["block_tokens"]) for _ in range(case["accumulation"])]


@dataclass(frozen=True)
class Ready:
    """A model spread over the ranks, warmed up as the training stage does, and its input."""

    stepper: Stepper
    batches: list[Batch]

    def step(self) -> dict[str, float]:
        """Take a step: its seconds, also by phase.

        Raises ValueError if its update was not made, which takes less.
        """
        result = take_step(self.stepper, self.batches)
        if result.judgement.verdict != Verdict.APPLY:
            raise ValueError(
                f"loss {result.loss:g}, gradient norm {result.grad_norm:g}: nothing to update by"
            )
        return {
            "step_s": result.duration_s,
            **result.phases,
            "tokens": result.tokens,
            "loss": result.loss,
        }


def prepare(case: dict[str, Any], world: World, folder: Path) -> Ready:
    """Build what `case` trains, and warm it up."""
    train = read_settings(Train, case["train"])
    model_folder = folder / case["size"]
    if world.is_first:
        model_folder.mkdir(parents=True, exist_ok=True)
        write_json(model_folder / "config.json", config_json(case["size"], case.get("config")))
    dist.barrier()
    stepper = random_stepper(model_folder, train, case["accumulation"], world)
    ready = Ready(stepper, batches_of(case, world.rank))
    ready.stepper.warm_up(ready.batches[0])
    return ready


def measure(case: dict[str, Any], world: World, folder: Path) -> dict[str, Any]:
    """What one case takes. The peak is of everything, loading too, on the rank with the highest."""
    is_gpu = world.device.type == "cuda"
    left_bytes = torch.cuda.memory_allocated() if is_gpu else 0
    start_s = time.monotonic()
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    ready = prepare(case, world, folder)
    ready_s = time.monotonic() - start_s
    rows = [ready.step() for _ in range(case["steps"])]
    late = rows[-MEASURED_STEPS:]
    found: dict[str, Any] = {
        name: statistics.median(row[name] for row in late)
        for name in ("step_s", "forward_s", "backward_s", "update_s")
    }
    found["tokens"] = rows[-1]["tokens"]
    found["supervised_tokens"] = sum(batch.supervised_tokens for batch in ready.batches)
    found["squared_lengths"] = sum(batch.squared_lengths for batch in ready.batches)
    found["all_step_s"] = [round(row["step_s"], 4) for row in rows]
    if is_gpu:
        of_ranks = torch.tensor(
            [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), left_bytes],
            device=world.device,
        )
        dist.all_reduce(of_ranks, op=dist.ReduceOp.MAX)
        found["peak_bytes"], found["reserved_bytes"], found["left_bytes"] = of_ranks.tolist()
    found["ready_s"], found["case_s"] = round(ready_s, 2), round(time.monotonic() - start_s, 2)
    return found


def clean_up(world: World) -> None:
    """Give back what a case had, so that the next begins as a process of its own would."""
    gc.collect()
    if world.device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def cases_in_time(path: Path, world: World, limit_s: float) -> Iterator[dict[str, Any]]:
    """The cases in the file `path`, until `limit_s` are over: all ranks stop at the same one."""
    begun_s = time.monotonic()
    for case in json.loads(path.read_text()):
        passed_s = torch.tensor([time.monotonic() - begun_s], device=world.device)
        dist.broadcast(passed_s, 0)
        if passed_s.item() > limit_s:
            return
        yield case
        clean_up(world)


def problem_of(error: Exception) -> str:
    """An error in a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def main() -> None:
    """Measure the cases in the command line's file; the first rank prints a line for each.

    After one that failed no rank knows how far the others are: the group ends, and is started anew
    for the rest.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/grid"))  # noqa: S108
    parser.add_argument("--limit-s", type=float, default=500)
    arguments = parser.parse_args()
    die_with_parent()
    world = World.from_env(os.environ, "cuda" if torch.cuda.is_available() else "cpu")
    with process_group(world, TIMEOUT_S):
        for case in cases_in_time(arguments.cases, world, arguments.limit_s):
            try:
                found = measure(case, world, arguments.folder)
            except (RuntimeError, ValueError, PipelineError) as error:
                print(
                    json.dumps(
                        {"name": case["name"], "rank": world.rank, "problem": problem_of(error)}
                    ),
                    flush=True,
                )
                os._exit(1)
            if world.is_first:
                print(json.dumps({"name": case["name"], **found}), flush=True)


if __name__ == "__main__":
    main()
