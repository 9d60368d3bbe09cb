"""What the ranks of both sides share: their arguments and their report."""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from benchmarks.train.cases import CASES, Case, model_config
from pipeline_lib.config.schema import Train
from pipeline_lib.data.document import Document
from pipeline_lib.plan.flops import step_flops
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.gpus import peak_flops

WARM_UP_STEPS = 3


def rank_arguments() -> argparse.Namespace:
    """The arguments of a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--folder", required=True, help="with the model's config.json")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--peer", type=int, default=0, help="which of the case's peers")
    return parser.parse_args()


def peak_bytes(device: torch.device) -> int:
    """The most that this rank held: on the GPU, else in its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def report(
    case: Case, side: str, of_ranks: Sequence[Sequence[Sequence[Document]]], steps: list[dict[str, Any]], peak: int
) -> dict[str, Any]:
    """The row of a side: medians over the steps after the warm-up, per rank. Padding is no token and no work."""
    late = range(WARM_UP_STEPS, len(steps))
    tokens = {step: [len(each.tokens) for of_rank in of_ranks for each in of_rank[step]] for step in late}
    rates = [sum(tokens[step]) / steps[step]["step_s"] / len(of_ranks) for step in late]
    row: dict[str, Any] = {
        "name": f"{case.name}: {side}",
        "side": side,
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_range": [min(rates), max(rates)],
        "documents_per_s": statistics.median(case.rank_documents / steps[step]["step_s"] for step in late),
        "step_s": statistics.median(steps[step]["step_s"] for step in late),
        "peak_bytes": peak,
        "losses": [step["loss"] for step in steps],
    }
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    if possible := peak_flops(name, case.precision):
        train = Train.model_validate({"method": case.method, "precision": case.precision})
        found = [
            step_flops(Geometry.from_config(model_config(case.size)), train, sum(lengths), sum(n * n for n in lengths))
            for lengths in tokens.values()
        ]
        seconds = [steps[step]["step_s"] * possible * len(of_ranks) for step in late]
        row["mfu"] = statistics.median(each.causal / one for each, one in zip(found, seconds, strict=True))
        row["mfu_full"] = statistics.median(each.full_attention / one for each, one in zip(found, seconds, strict=True))
    return row
