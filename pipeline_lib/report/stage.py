"""The report stage: render all stages' sealed results as a page, a summary and training curves."""

from collections.abc import Mapping
from typing import Any

from pipeline_lib.config.benchmarks import Ship
from pipeline_lib.config.schema import Config
from pipeline_lib.config.section import read_settings
from pipeline_lib.core.files import write_json, write_text
from pipeline_lib.core.language import Language, speaking
from pipeline_lib.core.stage import Job
from pipeline_lib.records.benchmark import BenchmarkComparison
from pipeline_lib.records.evaluation import Scores
from pipeline_lib.report.curves import curves_csv, curves_of
from pipeline_lib.report.facts import ReportFacts, read_facts
from pipeline_lib.report.page import render

# The numbers that experiments are compared by. DVC shows every value of a metrics file as a column
# of `dvc exp show`, so it has few. The settings among them tell which experiment of a sweep ran;
# DVC's parameters are the config's keys.

METRICS = (
    "eval.tuned.loss",
    "eval.base.loss",
    "train.tokens_per_s",
    "train.train_s",
    "train.peak_memory_mb",
)
SETTINGS = ("method", "lr", "global_batch_tokens")


def summary_of(facts: ReportFacts) -> dict[str, Any]:
    """Return the known numbers: losses in nats per supervised token, seconds, MB (1e6 bytes).

    The plan's errors are fractions of the predicted values: 0.1 where the measured value is a tenth
    higher.
    """
    training = facts.training
    way = facts.plan.prediction if facts.plan else None
    peak_bytes = facts.peak_memory_bytes
    throughput = facts.tokens_per_s
    errors = {one.key: one.error_fraction for one in facts.compared}
    found = {
        "eval": _losses(facts.scores),
        "benchmark": _fractions(facts),
        "ship": facts.ship.decision.value if facts.ship else None,
        "train": {
            "final_loss": training.final_loss,
            "steps": training.steps,
            "supervised_tokens": training.supervised_tokens,
            "tokens_per_s": None if throughput is None else round(throughput),
            "train_s": None if facts.training_time_s is None else round(facts.training_time_s, 3),
            "peak_memory_mb": None if peak_bytes is None else round(peak_bytes / 1e6),
        },
        "plan": {
            "step_s": way.step_s.value if way else None,
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


def _losses(scores: Scores | None) -> dict[str, dict[str, float]]:
    """Return the losses of the models; all empty if nothing was held out."""
    if scores is None:
        return {"base": {}, "tuned": {}, "unigram": {}, "shuffled": {}}
    return {
        "base": {"loss": scores.base.loss, "perplexity": scores.base.perplexity},
        "tuned": {"loss": scores.tuned.loss, "perplexity": scores.tuned.perplexity},
        "unigram": {"loss": scores.unigram.loss},
        "shuffled": {"loss": scores.shuffled.loss} if scores.shuffled else {},
    }


def _fractions(facts: ReportFacts) -> dict[str, dict[str, Any]] | None:
    """Return the fractions right of base and tuned model, and their difference, by benchmark.

    `clean` has them without the questions that stand in the training rows, if there are any.
    """
    if facts.benchmarks is None:
        return None
    fractions = {name: _sides(found) for name, found in facts.benchmarks.compared.items()}
    for name, found in facts.clean.items():
        fractions[name]["clean"] = {"questions": found.tuned.questions, **_sides(found)}
    return fractions


def _sides(found: BenchmarkComparison) -> dict[str, Any]:
    return {
        "base": found.base.fraction,
        "tuned": found.tuned.fraction,
        "difference": found.difference,
    }


def metrics_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of METRICS that `summary` has, nested as they are there.

    With them are the tuned model's scores in all benchmarks.
    """
    nested: dict[str, Any] = {}
    scores = [f"benchmark.{name}.tuned" for name in summary.get("benchmark", {})]
    for key in (*METRICS, *scores):
        value = _at(summary, key)
        if value is not None:
            *sections, name = key.split(".")
            inner = nested
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
    return nested


def settings_of_run(config: Config) -> dict[str, Any]:
    """Return the experiment's name, its model and SETTINGS."""
    source = config.model
    model = getattr(source, "name", None) or getattr(source, "path", None) or source.source
    shown: dict[str, Any] = {"experiment": config.experiment, "model": model}
    for key in SETTINGS:
        if key not in config.train.replaced_keys:
            shown[key] = getattr(config.train, key)
    return shown


def _at(values: Any, key: str) -> Any:
    for name in key.split("."):
        if not isinstance(values, dict):
            return None
        values = values.get(name)
    return values


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items() if item is not None}
    return round(value, 6) if isinstance(value, float) else value


# The stage itself.

REPORT_NAME, SUMMARY_NAME, CURVES_NAME = "report.html", "summary.json", "curves.csv"


def run(job: Job) -> dict[str, Any]:
    """Write report.html, summary.json and curves.csv from the sealed inputs; return counts."""
    settings = job.spec.settings
    ship = read_settings(Ship, settings.get("ship", {}))
    # It is in the digest: who runs the stage, and in which language, changes no byte of the page.
    language: Language = job.spec.settings.get("language", "en")
    with speaking(language):
        facts = read_facts(str(settings["experiment"]), job.inputs, ship)
        curves = curves_of(facts.steps)
        page = render(facts, curves)
    write_text(job.out / REPORT_NAME, page)
    write_json(job.out / SUMMARY_NAME, summary_of(facts))
    write_text(job.out / CURVES_NAME, curves_csv(curves))
    size_bytes = len(page.encode())
    job.say(
        f"report: {REPORT_NAME} is {size_bytes / 1e6:.1f} MB; open it in any browser, it needs no "
        "network"
    )
    return {"page_bytes": size_bytes, "steps": len(facts.steps), "points": len(curves.step)}
