"""The few numbers that experiments are compared by: one row of `dvc exp show`."""

from typing import Any

from pipeline_lib.publish.facts import Facts


def summary_of(facts: Facts) -> dict[str, Any]:
    """Losses in nats per supervised token, times in seconds, memory in MB (1e6 bytes), without what is not known.

    The plan's errors are fractions of what it predicted: 0.1 where a tenth more was measured. Kept to about a dozen
    and a half of values, since each is a column; the rest is in the report and the manifests.
    """
    scores, training = facts.evaluation.eval, facts.training
    peak_bytes, throughput = facts.peak_memory_bytes, facts.tokens_per_s
    errors = {one.key: one.error_fraction for one in facts.compared}
    found = {
        "eval": {
            "base": {"loss": scores.base.loss, "perplexity": scores.base.perplexity},
            "tuned": {"loss": scores.tuned.loss, "perplexity": scores.tuned.perplexity},
            "unigram": {"loss": scores.unigram.loss},
            "shuffled": {"loss": scores.shuffled.loss},
        },
        "train": {
            "final_loss": training.final_loss,
            "steps": training.steps,
            "supervised_tokens": training.supervised_tokens,
            "tokens_per_s": None if throughput is None else round(throughput),
            "train_s": training.train_s,
            "peak_memory_mb": None if peak_bytes is None else round(peak_bytes / 1e6),
        },
        "plan": {
            "step_s": facts.plan.prediction.step_s.value,
            "step_error": errors.get("step_s"),
            "memory_error": errors.get("peak_memory_bytes"),
        },
        "data": {
            "samples_kept": facts.ledger.total.kept,
            "packing_efficiency": facts.train_index.packing_efficiency,
        },
    }
    pruned: dict[str, Any] = _known(found)
    return pruned


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items() if item is not None}
    return round(value, 6) if isinstance(value, float) else value
