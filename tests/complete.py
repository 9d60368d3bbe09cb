"""Complete records with values that a test does not care for, and JSON of them."""

import math
from pathlib import Path
from typing import Any

from pipeline_lib.records.data import Counts, Histogram, Ledger, Source
from pipeline_lib.records.evaluation import (
    Evaluation,
    EvaluationVerdict,
    NoScores,
    NoVerdict,
    Score,
    Scores,
    UnigramScore,
)
from pipeline_lib.records.merge import Parity
from pipeline_lib.records.plan import PlanDocument
from pipeline_lib.records.record import AnyRecord, parse
from pipeline_lib.records.training import Step, Training
from tests.report.fake_plans import plan


def training_json(**changes: Any) -> dict[str, Any]:
    """The content of a training's summary.json."""
    found: dict[str, Any] = {
        "steps": 118, "updates": 118, "total_steps": 118, "result_step": 118, "best_step": None,
        "best_validation_loss": None, "stopped_early": False, "skipped_steps": 0, "epochs": 2,
        "world_size": 2, "strategy": "ddp", "method": "full", "precision": "fp32",
        "parameters": 1_049_600, "trainable_parameters": 1_049_600, "tokens": 936_000,
        "supervised_tokens": 604_000, "train_s": 57.4, "training_time_s": 62.0,
        "tokens_per_s": 19_400.0, "attempts": 2, "final_loss": 2.318, "blocks": 1884,
        "batch_blocks": 32,
    }  # fmt: skip
    return found | changes


def training(**changes: Any) -> Training:
    """A training's summary."""
    return Training(**training_json(**changes))


def step_json(number: int, **changes: Any) -> dict[str, Any]:
    """A row of metrics.jsonl."""
    found: dict[str, Any] = {
        "step": number, "epoch": 0, "loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "tokens": 100,
        "supervised_tokens": 50, "step_s": 1.0, "forward_s": 0.3, "backward_s": 0.6,
        "update_s": 0.05, "checkpoint_wait_s": 0.0, "elapsed_s": float(number), "attempt": 1,
        "tokens_per_s": 100.0, "supervised_tokens_per_s": 50.0, "data_wait_s": 0.0,
        "peak_memory_bytes": 600_000_000,
    }  # fmt: skip
    return found | changes


def step(number: int, **changes: Any) -> Step:
    """A step."""
    return Step(**step_json(number, **changes))


def parity(**changes: Any) -> Parity:
    """The proof of an export."""
    found: dict[str, Any] = {
        "compared_logits": 1_048_576, "max_abs_difference": 9.5e-07, "relative_difference": 1.2e-07,
        "tolerance": 1e-05, "top1_agreement": 1.0, "positions_apart": 0, "value_difference": 2.0e-07,
        "value_tolerance": 1e-05, "rounding_difference": 0.0031, "compared_tensors": 24,
    }  # fmt: skip
    return Parity(**found | changes)


_COUNTS: dict[str, Any] = {
    **{"format": "messages", "rows": 3, "conversations": 3, "quarantined": {}, "duplicates": {}},
    **{"duplicates_dropped": 0, "turns": 3, "samples": 3, "kept": 3, "truncated": 0, "split": 0},
    **{"dropped": {}, "prompts": {}, "tokens": 30, "repeated_tokens": 0, "supervised_tokens": 9},
}


def source(name: str, **changes: Any) -> Source:
    """A source in the ledger."""
    return Source(**{**_COUNTS, "name": name, "files": (), "length_percentiles": {}, **changes})


def ledger(*sources: Source) -> Ledger:
    """A ledger of those sources."""
    total = Counts(**{**_COUNTS, "name": "total"})
    return Ledger(
        sources=sources,
        total=total,
        length_percentiles={},
        length_histogram=Histogram(edges=(0.0, 10.0), counts=(3,)),
    )


def record(kind: type[AnyRecord], value: Any) -> AnyRecord:
    """The record of a JSON value, as if it were read from a file."""
    return parse(kind, value, Path("of a test"))


def evaluation(loss: float | None) -> Evaluation:
    """An evaluation whose tuned model has that loss; None: nothing was held out."""
    if loss is None:
        return Evaluation(eval=NoScores(samples=0), verdict=NoVerdict(text=""))
    score = Score(loss=loss, perplexity=math.exp(loss), standard_error=0.1, documents=40)
    scores = Scores(
        base=score,
        tuned=score,
        unigram=UnigramScore(loss=9.0, perplexity=math.exp(9.0)),
        shuffled=None,
        supervised_tokens=100,
        samples=40,
    )
    verdict = EvaluationVerdict(improved=False, beats_unigram=False, uses_prompt=False, text="")
    return Evaluation(eval=scores, verdict=verdict)


def plan_document(steps: int = 118, **changes: Any) -> PlanDocument:
    """The demo's plan on CPUs with `changes`, which may be nested."""
    return record(PlanDocument, merged(plan(steps), changes))


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`values` with `changes`, in which dicts only change some keys."""
    found = dict(values)
    for key, change in changes.items():
        old = found.get(key)
        if isinstance(old, dict) and isinstance(change, dict):
            found[key] = merged(old, change)
        else:
            found[key] = change
    return found
