"""From what a side told, line by line, to its row: medians of the steps after the warm-up.

Padding is no work.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.sizes import model_config
from benchmarks.train.cases import Case
from benchmarks.train.documents import lengths_of
from benchmarks.train.rank import WARM_UP_STEPS
from pipeline_lib.arch.families import geometry_in
from pipeline_lib.arch.geometry import StepFlops, step_flops
from pipeline_lib.config.train import Train
from pipeline_lib.plan.gpus import peak_flops

FLOPS = (
    "the same for all sides: no padding, no recomputation, the head for supervised tokens "
    "only, r=16 adapters"
)


def row_of(
    case: Case, side: str, ranks: int, told: Sequence[dict[str, Any]], start_s: float | None
) -> dict[str, Any]:
    """The row of a side. `told` may end early; without a step after the warm-up there are no rates.

    `start_s` is from the start of its processes to the end of its first step.
    """
    steps = [line for line in told if line["kind"] == "step"]
    row: dict[str, Any] = {
        "name": f"{case.name}: {side}",
        **{
            "case": case.name,
            "side": side,
            "ranks": ranks,
            "layers": model_config(case.size, case.layers)[_LAYERS],
        },
        **{
            "start_s": start_s,
            "losses": [step["loss"] for step in steps],
            "steps_s": [s["step_s"] for s in steps],
        },
    }
    for line in told:
        if line["kind"] != "step":
            row |= {key: value for key, value in line.items() if key not in ("name", "kind")}
    seconds = [step["step_s"] for step in steps][WARM_UP_STEPS:]
    if seconds:
        row |= _rates(case, ranks, len(steps), seconds) | _mfu(
            case, ranks, row.get("gpu", ""), len(steps), seconds
        )
    profiled = {key: value for key, value in row.items() if key.startswith("profile_")}
    if profiled:
        row["exposed_communication"] = profiled["profile_exposed_communication_s"] / sum(
            profiled.values()
        )
    return row


_LAYERS = "num_hidden_layers"


def _rates(case: Case, ranks: int, steps: int, seconds: Sequence[float]) -> dict[str, Any]:
    """Of a rank.

    Lengths are drawn step by step, so the first are the same however many there are.
    """
    tokens = [
        sum(int(of_rank[step].sum()) for of_rank in _lengths(case, ranks, steps))
        for step in range(steps)
    ]
    rates = [each / one / ranks for each, one in zip(tokens[WARM_UP_STEPS:], seconds, strict=True)]
    return {
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_range": [min(rates), max(rates)],
        "documents_per_s": ranks * case.rank_documents / statistics.median(seconds),  # of all ranks
        "step_s": statistics.median(seconds),
    }


def _lengths(case: Case, ranks: int, steps: int) -> list[Any]:
    return [lengths_of(case, rank, steps) for rank in range(ranks)]


def _mfu(case: Case, ranks: int, gpu: str, steps: int, seconds: Sequence[float]) -> dict[str, Any]:
    """Shares of the GPUs' peak, by both conventions; nothing where the peak is not known."""
    possible = peak_flops(gpu, case.precision)
    if not possible:
        return {}
    of_ranks = _lengths(case, ranks, steps)
    works = [
        _work(case, [int(n) for of_rank in of_ranks for n in of_rank[step]])
        for step in range(steps)
    ]
    spans = [one * possible * ranks for one in seconds]
    pairs = list(zip(works[WARM_UP_STEPS:], spans, strict=True))
    return {
        "mfu": statistics.median(work.causal / span for work, span in pairs),
        "mfu_full": statistics.median(work.full_attention / span for work, span in pairs),
        "flops": FLOPS,
    }


def _work(case: Case, lengths: Sequence[int]) -> StepFlops:
    """Of documents of those lengths: the first token of each is predicted by nothing."""
    geometry = geometry_in(model_config(case.size, case.layers))
    train = Train.model_validate({"method": case.method, "precision": case.precision})
    predicted = sum(length - max(1, int(length * case.supervised_from)) for length in lengths)
    return step_flops(
        geometry, train, sum(lengths), sum(length**2 for length in lengths), predicted
    )
