"""The best step by measured parts: each in its fastest way, in turn, nothing between them."""

import math
from dataclasses import asdict, dataclass

from benchmarks.kernels.attention import DOCUMENTS
from benchmarks.kernels.documents import Documents
from benchmarks.kernels.head import SUPERVISED
from benchmarks.kernels.report import Report
from pipeline_lib.arch.geometry import step_flops
from pipeline_lib.config.train import Train

POINTWISE = ("residual and norm", "norm alone", "norms of heads and RoPE", "SwiGLU")
ONLY_FULL = ("embedding", "copies of FSDP", "update")


@dataclass(frozen=True)
class Step:
    """A step of one micro-batch: seconds by part.

    `mfu` counts all tokens in the head, as benchmarks/train does.
    """

    method: str
    documents: str
    supervised: float
    products_s: float
    attention_s: float
    pointwise_s: float
    head_s: float
    other_s: float
    total_s: float
    tokens_s: float
    mfu: float


def summarise(report: Report) -> list[Step]:
    """Print the ways of each part, and the steps that follow; returns these."""
    report.say("\npart of a step, and the ways to compute it, ms:")
    for part, ways in report.ways.items():
        found = sorted(ways.items(), key=lambda way: way[1])
        report.say(
            f"  {part:<26} " + "; ".join(f"{name} {1000 * seconds:.2f}" for name, seconds in found)
        )
    report.say(
        f"  products take {report.heat:.3f} times as long one after the other; the steps below "
        "count that in"
    )
    steps = [
        step_of(report, method, documents, supervised)
        for method in ("full", "lora")
        for documents in DOCUMENTS
        for supervised in SUPERVISED
    ]
    known = [step for step in steps if math.isfinite(step.total_s)]
    if not known:
        report.say("\nno best step: not all parts were measured")
        return []
    columns = ("products", "attention", "pointwise", "head", "other", "step ms", "tokens/s", "MFU")
    report.say(f"\n{'best step':<28}" + "".join(f"{column:>11}" for column in columns))
    for step in known:
        parts = (
            step.products_s,
            step.attention_s,
            step.pointwise_s,
            step.head_s,
            step.other_s,
            step.total_s,
        )
        name = f"{step.method}, {step.documents}, {step.supervised:.0%}"
        numbers = "".join(f"{1000 * seconds:>11.1f}" for seconds in parts)
        report.say(f"{name:<28}{numbers}{step.tokens_s:>11,.0f}{step.mfu:>11.1%}")
    return known


def step_of(report: Report, method: str, documents: str, supervised: float) -> Step:
    """The best step of a method over such documents; infinite where a part was not measured."""
    products_s = report.heat * report.best(f"products {method}")
    attention_s = report.best(f"attention {documents}")
    pointwise_s = sum(report.best(part) for part in POINTWISE)
    head_s = report.best(f"head {method} {supervised:.0%}")
    other_s = sum(report.best(part) for part in ONLY_FULL) if method == "full" else 0.0
    total_s = products_s + attention_s + pointwise_s + head_s + other_s
    train = Train.model_validate({"method": method, "lora": {"rank": 16}})
    flops = step_flops(
        report.geometry, train, report.tokens, Documents.drawn(documents, report.tokens).squared
    )
    return Step(
        method,
        documents,
        supervised,
        products_s,
        attention_s,
        pointwise_s,
        head_s,
        other_s,
        total_s,
        report.tokens / total_s,
        flops.causal / total_s / report.gpu.half_flop_s,
    )


def rows_of(steps: list[Step]) -> list[dict[str, object]]:
    """For JSON."""
    return [asdict(step) for step in steps]
