"""The content of an experiment's report page and its order."""

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import cycle
from typing import Any

from pipeline_lib.core import units
from pipeline_lib.core.events import EventName
from pipeline_lib.core.language import N_, _
from pipeline_lib.core.text import cut
from pipeline_lib.data.chat_template import repetition
from pipeline_lib.data.how_to_call import warning_of
from pipeline_lib.records.benchmark import BenchmarkComparison, Fault, Overlaps
from pipeline_lib.records.data import BlockIndex, Counts
from pipeline_lib.records.evaluation import Score, Scores, UnigramScore
from pipeline_lib.records.plan import PlanDocument, bound_in_words
from pipeline_lib.report.charts import AMBER, BLUE, GREEN, GREY, PURPLE, RED, TEAL, render_page
from pipeline_lib.report.conclusion import conclusion
from pipeline_lib.report.curves import Curves
from pipeline_lib.report.facts import ReportFacts
from pipeline_lib.report.figures import figures_of
from pipeline_lib.report.plan_check import SETTLING_STEPS, settled, tally, verdict
from pipeline_lib.report.settings import date_of, setting_rows
from pipeline_lib.report.ship import points
from pipeline_lib.report.statistics import SampleEstimate, estimate_of

LIMITS = {
    "words": 12,
    "sources": 20,
    "samples": 20,
    "generations": 24,
    "attempts": 40,
    "events": 60,
    "losses": 30,
    "unread": 30,
    "hashes": 12,
    "ranks": 64,
}
FAULT_NAMES: Mapping[Fault, str] = {
    "unended": N_("without an end"),
    "loop": N_("a loop"),
    "empty": N_("empty"),
    "think": N_("broken think tags"),
}
MOST_TOUCHED = 40  # questions on the page; overlap.json has all
_MAX_EXPONENT = 700.0
SERIES = (GREY, TEAL, BLUE, PURPLE, GREEN, AMBER, RED)
_FADING = 0.45  # of the spans of a stage, each after the one before
SHOWN_VERSIONS = ("code", "python", "torch", "transformers", "tokenizers")


def render(facts: ReportFacts, curves: Curves) -> str:
    """Return the page as HTML."""
    events = _event_rows(facts)
    ledger = facts.ledger
    is_gpu = facts.plan is not None and facts.plan.cluster.is_gpu
    scores = facts.scores
    tuned = estimate_of(scores.tuned) if scores else None
    total = ledger.total
    by_source = []
    if scores is not None:
        for score in scores.by_source:
            by_source.append({"score": score, "losses": _interval(score.tuned)})
    links = []
    for link in facts.links:
        links.append(vars(link) | {"versions": _versions_text(link.versions)})
    values = {
        "facts": facts,
        "curves": curves,
        "date": date_of(facts),
        "settings": setting_rows(facts),
        "next_commands": _next_commands(facts.experiment),
        "lineage_gist": units.count(len(links), _("stages")),
        "limits": LIMITS,
        "settling_steps": SETTLING_STEPS,
        "cost": _cost(facts),
        "memory_of": _memory_of(facts.plan),
        "peak_of": _peak_text(is_gpu),
        "tuned_margin": "" if tuned is None else f"\u00b1 {units.real(tuned.high - tuned.value)}",
        "scores_rows": _score_rows(scores) if scores else [],
        "total": replace(
            total, name=_("All {number} sources").format(number=len(ledger.sources)), format=""
        ),
        "sources_rows": by_source,
        "benchmark_rows": _benchmark_rows(facts),
        "touched_rows": _touched_rows(facts.overlaps),
        "percentiles": _percentiles_text(ledger.length_percentiles),
        "duplicates": _duplicates_text(ledger.total),
        "mixture": _mixture_text(facts.train_index),
        "batch_text": _batch_text(facts.plan),
        "bound_text": _bound_text(facts.plan),
        "conclusion": conclusion(facts.evaluation),
        "call_warning": warning_of(facts.modes),
        "repetition": repetition(
            total.conversations, total.kept, total.tokens, total.repeated_tokens
        ),
        "times": _time_rows(facts),
        "links": links,
        "losses": _loss_rows(facts),
        "unread": _unread_rows(facts),
        "ranks": _rank_rows(facts),
        "rank_warnings": list(facts.rank_use.warnings().values()),
        "ways": _way_rows(facts.plan),
        "compared": facts.compared,
        "compared_text": verdict(facts.compared).replace("`", ""),
        "compared_gist": tally(facts.compared) if facts.compared else "",
        "settled_steps": len(settled(facts.planned_steps)),
        "attempts": facts.record.attempts[-LIMITS["attempts"] :],
        "events": events[-LIMITS["events"] :],
        "event_count": len(events),
    }
    return render_page("pipeline_lib.report", "page.html.jinja", figures_of(facts, curves), values)


def _peak_text(is_gpu: bool) -> str:
    """Return what the peak memory of a rank counts."""
    if is_gpu:
        return _("Of a rank, the largest of the step: the allocator's.")
    return _("Of a rank, the largest of the step: its whole process.")


def _percentiles_text(percentiles: Mapping[str, float]) -> str:
    """Return the percentiles of the samples' lengths, the shortest first; empty without any."""
    if not percentiles:
        return ""
    ordered = sorted(percentiles.items(), key=lambda item: item[1])
    text = ", ".join(f"{name} {units.count(value)}" for name, value in ordered)
    return _("Percentiles: {percentiles} tokens.").format(percentiles=text)


def _duplicates_text(total: Counts) -> str:
    """Return how many rows equal or resemble an earlier one; empty if there are none."""
    if not total.duplicates:
        return ""
    kinds = ", ".join(f"{kind} {units.count(number)}" for kind, number in total.duplicates.items())
    text = _("{rows} equal or resemble an earlier one ({kinds}); {dropped} of them were dropped.")
    return text.format(
        rows=units.count(sum(total.duplicates.values()), _("rows")),
        kinds=kinds,
        dropped=units.count(total.duplicates_dropped),
    )


def _mixture_text(index: BlockIndex) -> str:
    """Return the blocks of each weight, and how many an epoch uses."""
    groups = []
    for group in index.groups:
        text = _("{blocks} of weight {weight}")
        blocks = units.count(group.blocks, _("blocks"))
        groups.append(text.format(blocks=blocks, weight=units.compact(group.weight)))
    return _("Mixture: {groups}; the first epoch uses {blocks}.").format(
        groups=", ".join(groups), blocks=units.count(index.epoch_blocks, _("blocks"))
    )


def _batch_text(plan: PlanDocument | None) -> str:
    """Return what a step is made of, and the first epoch; empty if nothing was packed."""
    if plan is None or not plan.batch.blocks:
        return ""
    batch = plan.batch
    sentences = [
        _(
            "An optimizer step takes {blocks} of {tokens}: {ranks} × {micro} × {accumulation}."
        ).format(
            blocks=units.count(batch.global_batch_blocks, _("blocks")),
            tokens=units.count(batch.block_tokens, _("tokens")),
            ranks=units.count(plan.cluster.ranks, _("ranks")),
            micro=units.count(batch.micro_batch_blocks, _("blocks")),
            accumulation=units.count(batch.accumulation, _("accumulated micro-batches")),
        )
    ]
    if batch.samples_per_step:
        samples = units.count(batch.samples_per_step, _("samples"))
        sentences.append(_("It has {samples} on average.").format(samples=samples))
    blocks = units.count(batch.blocks, _("training blocks"))
    sentences.append(_("There are {blocks}.").format(blocks=blocks))
    if batch.steps_per_epoch:
        text = _("The first epoch has {steps}, and its last step has {blocks}.")
        steps = units.count(batch.steps_per_epoch, _("steps"))
        blocks = units.count(batch.last_step_blocks, _("blocks"))
        sentences.append(text.format(steps=steps, blocks=blocks))
    return " ".join(sentences)


def _bound_text(plan: PlanDocument | None) -> str:
    """Return what bounds a step by the prediction; empty without one."""
    if plan is None or plan.prediction is None:
        return ""
    cause = _(bound_in_words(plan.prediction.bound))
    return _("The step is bound by {cause}.").format(cause=cause)


def _next_commands(experiment: str) -> list[tuple[str, str]]:
    """Return commands with what each does, for the reader of the results."""
    name = shlex.quote(experiment)
    return [
        (f"qwen3 chat {name}", _("talk to the model; /base asks the base model")),
        (
            f"qwen3 compare {name} OTHER",
            _("whether the difference to another experiment is noise"),
        ),
        (f"qwen3 trace {name}", _("check what the model was made from")),
        (
            f"cp -rL results/{name}/model FOLDER",
            _("copy the model, to load, serve or share it"),
        ),
    ]


def _memory_of(plan: PlanDocument | None) -> str:
    """Return what the peak memory is of, and what there is."""
    if plan is None:
        return _("of a rank")
    if not plan.cluster.is_gpu:
        return _("of a rank's process while training")
    if not plan.gpu_memory_bytes:
        return _("of a rank")
    return _("of a rank, of {size} on its GPU").format(size=units.gib(plan.gpu_memory_bytes))


def _cost(facts: ReportFacts) -> dict[str, str]:
    """Return the amount, like `3.1 GPU-hours`, and a text that explains it."""
    found = facts.spent
    if found is None:
        return {
            "amount": _("Cost n/a:"),
            "beside": _("the duration of the training is not recorded"),
        }
    is_gpu = found.device == "GPU"
    unit = _("GPU-hours") if is_gpu else _("CPU core-hours")
    hours = units.rounded(found.hours, unit) if found.hours >= 1 else units.small(found.hours, unit)
    devices = units.count(found.devices, _("GPUs") if is_gpu else _("CPU cores"))
    sentences = [
        _("to train: {devices} held for {time}, {attempts}, starting and ending included.").format(
            devices=devices,
            time=units.seconds(found.held_s),
            attempts=units.count(facts.attempts, _("attempts")),
        )
    ]
    if found.used_fraction is not None:
        text = _(
            "{fraction} of it in steps of the model; the rest was startup, saving, validation and "
            "repeated steps."
        )
        sentences.append(text.format(fraction=units.percent(found.used_fraction)))
    way = facts.plan.prediction if facts.plan else None
    if way is not None and way.gpu_hours is not None:
        planned = way.gpu_hours
        text = _("The plan predicted {value} for the steps ({low} to {high}).").format(
            value=units.rounded(planned.value),
            low=units.rounded(planned.low),
            high=units.rounded(planned.high),
        )
        sentences.append(text)
    return {"amount": hours, "beside": " ".join(sentences)}


def _score_rows(scores: Scores) -> list[dict[str, Any]]:
    """Return a row for every model, with the intervals of its loss and perplexity."""
    named: dict[str, Score | UnigramScore] = {
        _("base"): scores.base,
        _("unigram"): scores.unigram,
    }
    if scores.shuffled is not None:
        named[_("tuned, shuffled prompts")] = scores.shuffled
    if scores.last is not None:
        named[_("tuned, last checkpoint alone")] = scores.last
    named[_("tuned")] = scores.tuned
    rows = []
    for name, score in named.items():
        one = estimate_of(score) if isinstance(score, Score) else None
        perplexities = ""  # empty where the standard error is not known
        if one is not None:
            low = math.exp(min(one.low, _MAX_EXPONENT))
            high = math.exp(min(one.high, _MAX_EXPONENT))
            perplexities = _("{low} to {high}").format(
                low=units.rounded(low), high=units.rounded(high)
            )
        rows.append(
            {"name": name, "score": score, "losses": _ends(one), "perplexities": perplexities}
        )
    return rows


def _benchmark_rows(facts: ReportFacts) -> list[dict[str, Any]]:
    """Return a row for each benchmark, and one without the questions in the training rows."""
    rows = []
    for name, found in facts.benchmarks.compared.items() if facts.benchmarks else ():
        rows.append(_benchmark_row(name, found))
        if name in facts.clean:
            label = _("{name}, without those in the training rows").format(name=name)
            rows.append(_benchmark_row(label, facts.clean[name]))
    return rows


def _benchmark_row(label: str, found: BenchmarkComparison) -> dict[str, Any]:
    style = ""
    if found.low > 0 or found.high < 0:
        style = "yes" if found.low > 0 else "no"
    return {
        "name": label,
        "questions": found.tuned.questions,
        "base": units.percent(found.base.fraction),
        "tuned": units.percent(found.tuned.fraction),
        "difference": points(found.difference),
        "interval": _("{low} to {high}").format(low=points(found.low), high=points(found.high)),
        "class": style,
        "faults": _fault_text(found),
    }


def _touched_rows(overlaps: Overlaps | None) -> list[dict[str, str]]:
    """Return the first questions that stand in the training rows, with what they share."""
    rows = []
    for name, overlap in overlaps.benchmarks.items() if overlaps else ():
        for one in overlap.touched:
            rows.append({"name": name, "question": cut(one.prompt, 200), "shared": one.shared})
    return rows[:MOST_TOUCHED]


def _fault_text(found: BenchmarkComparison) -> str:
    """Return how many answers of the base and the tuned model have each fault: `loop 3, 0`."""
    texts = []
    for fault in sorted(found.base.faults.keys() | found.tuned.faults.keys()):
        base = found.base.faults.get(fault, 0)
        tuned = found.tuned.faults.get(fault, 0)
        texts.append(f"{_(FAULT_NAMES[fault])} {base:,}, {tuned:,}")
    return "; ".join(texts) or _("none")


def _interval(score: Score | None) -> str:
    """Return the interval of a loss; empty where its standard error is not known."""
    return _ends(estimate_of(score)) if score else ""


def _ends(estimate: SampleEstimate | None) -> str:
    """Return the interval of an estimate; empty without one."""
    if estimate is None:
        return ""
    return _("{low} to {high}").format(
        low=units.real(estimate.low, "", 4), high=units.real(estimate.high, "", 4)
    )


def _rank_rows(facts: ReportFacts) -> list[dict[str, Any]]:
    """Return every rank's use, for several ranks or a GPU: the cards have one CPU process."""
    use = facts.rank_use
    if len(use.peak_memory_bytes) < 2 and not use.utilization:
        return []
    utilization = use.utilization or (None,) * len(use.peak_memory_bytes)
    pairs = zip(utilization, use.peak_memory_bytes, strict=True)
    return [
        {"rank": rank, "utilization": used, "memory": memory}
        for rank, (used, memory) in enumerate(pairs)
    ]


def _time_rows(facts: ReportFacts) -> list[dict[str, Any]]:
    """Return a row for every span of the stages, with its colour; a stage's spans share shades."""
    colours = dict(zip(facts.manifests, cycle(SERIES), strict=False))
    shades: Counter[str] = Counter()
    total_s = facts.total_s or 1.0
    rows = []
    for span in facts.spans:
        rows.append(
            {
                "span": span,
                "name": _(span.name) if span.name else _("all"),
                "is_first": not shades[span.part],
                "share": span.duration_s / total_s,
                "colour": colours[span.part],
                "opacity": 1 / (1 + _FADING * shades[span.part]),
                "memory": facts.manifests[span.part].peak_rss_bytes,
            }
        )
        shades[span.part] += 1
    return rows


def _versions_text(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {versions[name]}" for name in SHOWN_VERSIONS if name in versions)


def _way_rows(plan: PlanDocument | None) -> list[dict[str, Any]]:
    """Return each strategy's best prediction: the chosen one, then the others, fastest first."""
    if plan is None or plan.prediction is None:
        return []
    others = sorted(plan.others.values(), key=lambda way: way.step_s.value)
    rows = []
    for way in (plan.prediction, *others):
        strategy, *settings = way.words
        said = strategy
        if way is plan.prediction:
            said = _("{strategy}, chosen").format(strategy=strategy)
        rows.append({"name": said, "way": way, "settings": ", ".join(settings) or units.NONE})
    return rows


def _loss_rows(facts: ReportFacts) -> list[dict[str, Any]]:
    """Return the unused rows and samples by source and reason, the largest numbers first."""
    rows: list[dict[str, Any]] = []
    for source in facts.ledger.sources:
        duplicates = {_("duplicates"): source.duplicates_dropped}
        rows += _losses_of(source.name, _("quarantined"), _("rows"), source.quarantined)
        rows += _losses_of(source.name, _("dropped"), _("rows"), duplicates)
        rows += _losses_of(source.name, _("dropped"), _("samples"), source.dropped)
    return sorted(rows, key=lambda row: -row["number"])


def _losses_of(
    source: str, fate: str, unit: str, by_reason: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    for reason, number in by_reason.items():
        if number:
            yield {
                "source": source,
                "fate": fate,
                "reason": reason,
                "number": number,
                "unit": unit,
            }


def _unread_rows(facts: ReportFacts) -> list[dict[str, str]]:
    """Return the unread columns and keys by file, those with the largest counts first."""
    rows = []
    for source in facts.ledger.sources:
        for file in source.files:
            if not file.unread:
                continue
            keys = sorted(file.unread.items(), key=lambda item: -item[1])
            counts = [f"{name} {units.count(number)}" for name, number in keys]
            if file.unread_others:
                counts.append(
                    _("further keys {number}").format(number=units.count(file.unread_others))
                )
            rows.append({"file": file.name, "keys": ", ".join(counts)})
    return rows


def _event_rows(facts: ReportFacts) -> list[dict[str, Any]]:
    """Return every event but step.begin and step.end, with its time since the first, as text."""
    known = {"at", "monotonic_s", "event"}
    start: float | None = None
    rows = []
    for event in facts.record.events:
        if event.get("event") in (EventName.STEP_BEGIN, EventName.STEP_END):
            continue
        after_s = None
        at = event.get("at")
        if isinstance(at, (int, float)):
            if start is None:
                start = at
            after_s = at - start
        fields = [_field_text(key, value) for key, value in event.items() if key not in known]
        rows.append(
            {
                "after_s": after_s,
                "name": str(event.get("event", "unnamed")),
                "fields": ", ".join(fields),
            }
        )
    return rows


def _field_text(key: str, value: Any) -> str:
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    if is_number and key.endswith("bytes"):
        return units.size(value)
    if is_number and key.endswith("_s"):
        return f"{key.removesuffix('_s')} {units.seconds(value)}"
    return f"{key} {value}"
