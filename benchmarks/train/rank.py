"""What ranks of all sides share: their arguments, and what the first of them says by line."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.train.cases import CASES, Case, changed

WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Side:
    """What a rank is told."""

    case: Case
    name: str  # of the side
    folder: Path  # with the model's config.json
    steps: int
    train: tuple[str, ...]  # of ours: keys that are set otherwise than in the case


def rank_arguments() -> Side:
    """The arguments of a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--side", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--set", nargs="*", default=[])
    parser.add_argument("--train", nargs="*", default=[])
    found = parser.parse_args()
    return Side(
        changed(CASES[found.case], found.set),
        found.side,
        found.folder,
        found.steps,
        tuple(found.train),
    )


def say(side: Side, kind: str, fields: Mapping[str, Any]) -> None:
    """Tell the parent: `start`, `step`, `end` and `profile`, in this order."""
    print(
        json.dumps({"name": f"{side.case.name}: {side.name}", "kind": kind, **fields}), flush=True
    )


def start_fields(device: torch.device, attention: str) -> dict[str, Any]:
    """Of the row `start`: what the speed depends on beside the code."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return {"gpu": gpu, "attention": attention}


def memory_fields(device: torch.device) -> dict[str, int]:
    """The most that any rank held: on the GPU, in tensors and reserved; else on the host.

    All ranks call it together, if there are several.
    """
    if device.type == "cuda":
        held = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)]
    else:
        held = [int(psutil.Process().memory_info().rss)] * 2
    most = torch.tensor(held, dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    peak, reserved = most.tolist()
    return {"peak_bytes": peak, "reserved_bytes": reserved}
