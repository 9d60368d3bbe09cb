"""The HTML page of a comparison: one file that needs no network and escapes everything it shows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.compare.comparison import Comparison
from pipeline_lib.compare.figures import LineStyle, figures_of, line_styles, swept_id, swept_keys
from pipeline_lib.compare.ranking import BEST
from pipeline_lib.compare.show import SECTIONS, UNKNOWN_CELL, cost_cells, footnotes, loss_cells
from pipeline_lib.compare.subjects import MAX_COMPARED, Subject
from pipeline_lib.compare.verdict import among, listed, lowest, verdict
from pipeline_lib.config.dag import RESULTS, Dag
from pipeline_lib.core import units
from pipeline_lib.core.files import write_text
from pipeline_lib.report.charts import (
    render_page,
)
from pipeline_lib.report.facts import Results
from pipeline_lib.report.outcomes import outcomes

PAGE_NAME = "compare.html"
MAX_PROMPTS = 24
MAX_COLUMNS = 5  # of experiments side by side in a table; more are listed below each other
ANSWER_CHARS = 12_000  # for all answers to one prompt
MAX_ANSWER_CHARS = 3000
_NOTHING = {UNKNOWN_CELL, "0"}


@dataclass(frozen=True)
class Card:
    """A key number of the comparison: its name, value and unit, and the experiment that has it."""

    name: str
    value: str
    unit: str
    beside: str


def write_page(comparison: Comparison, path: Path) -> int:
    """Write the page to `path`, and return its size in bytes."""
    text = render(comparison)
    write_text(path, text)
    return len(text.encode())


def write_sweep_page(dag: Dag, results: Path = RESULTS) -> Path | None:
    """Write a page that compares the experiments of a sweep, or its best 20, and return its path.

    Write nothing and return None as long as no experiment is done.
    """
    by_name = {experiment.name: experiment for experiment in dag.experiments}
    found = outcomes(dag)
    if not found[0].is_done:
        return None
    path = results / dag.name / PAGE_NAME
    best = [by_name[outcome.name] for outcome in found[:MAX_COMPARED]]
    write_page(Comparison.of([Subject.of(experiment, dag) for experiment in best]), path)
    return path


def render(comparison: Comparison) -> str:
    """Return the page as HTML."""
    names = comparison.names
    answers = generations(comparison)
    values = {
        "title": comparison.title,
        "verdict": verdict(comparison),
        "names": names,
        "swatches": [swatch(style) for style in line_styles(comparison)],
        "cards": cards(comparison),
        "order": comparison.order,
        "is_across": len(names) > MAX_COLUMNS,
        "results": result_rows(comparison),
        "cost_columns": _cost_columns(comparison),
        "footnotes": footnotes(comparison),
        "stopped": any(known.stop is not None for known in comparison.found),
        "swept": [(swept_id(key), key) for key in swept_keys(comparison)],
        "sections": {
            name: (title, getattr(comparison.differences, name)) for name, title in SECTIONS
        },
        "same": comparison.telling_texts,
        "generations": answers[:MAX_PROMPTS],
        "more_generations": max(0, len(answers) - MAX_PROMPTS),
        "answer_chars": min(MAX_ANSWER_CHARS, ANSWER_CHARS // len(names)),
        "notes": comparison.notes,
    }
    return render_page("pipeline_lib.compare", "compare.html.jinja", figures_of(comparison), values)


def _cost_columns(comparison: Comparison) -> list[str]:
    """Return the names of the costs that any experiment has, and that are not 0 in all."""
    rows = [cost_cells(numbers) for numbers in comparison.measured]
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if {row.get(name, UNKNOWN_CELL) for row in rows} - _NOTHING]


def swatch(style: LineStyle) -> str:
    """Return the CSS background that represents an experiment's line."""
    striped = f"repeating-linear-gradient(90deg, {style.colour} 0 3px, transparent 3px 5px)"
    return striped if style.is_dashed else style.colour


def cards(comparison: Comparison) -> list[Card]:
    """Return the key numbers of the comparison."""
    names = comparison.names
    found = _loss_cards(comparison)
    keys = [row.name for row in comparison.differences.changing]
    named = listed(keys) or "none that changes the result"
    found.append(Card("Keys that differ", str(len(keys)), "", named))
    # others do not compete
    trained = [known if known.is_trained else Results() for known in comparison.found]
    if fastest := _whose([known.tokens_per_s for known in trained], max, names):
        found.append(Card("Fastest", units.compact(fastest[0]), "tokens/s", fastest[1]))
    if leanest := _whose([known.peak_memory_bytes for known in trained], min, names):
        digits, _, unit = units.gib(leanest[0]).partition(" ")
        found.append(Card("Least memory of a rank", digits, unit, leanest[1]))
    if hours := _hours_card(comparison):
        found.append(hours)
    return found


def _hours_card(comparison: Comparison) -> Card | None:
    """Return what all trainings took; None if unknown, or on devices of different kinds."""
    of_training: dict[str | None, float | None] = {}  # experiments may share a training
    for known, numbers in zip(comparison.found, comparison.measured, strict=True):
        of_training[known.subject.parts.get("train")] = numbers.device_hours
    hours = [spent for spent in of_training.values() if spent is not None]
    kinds = {numbers.device for numbers in comparison.measured}
    if not hours or len(kinds) > 1:
        return None
    least = units.small(min(hours))
    most = units.small(max(hours))
    beside = f"{least} each" if least == most else f"{least} to {most} each"
    if len(hours) < len(of_training):
        beside += f", of {len(hours)} of them"
    unit = f"{kinds.pop().removeprefix('CPU ')}-hours"
    return Card("Training of all", units.small(sum(hours)), unit, beside)


def _loss_cards(comparison: Comparison) -> list[Card]:
    best = comparison.ranking.best
    if best is None:
        return []
    ranking = comparison.ranking
    whose = comparison.names[best]
    of_part = f", of {among(comparison)}" if len(ranking.ranked) < len(ranking.versus) else ""
    title = lowest(comparison)
    loss = units.real(ranking.loss, "", 4)
    found = [Card(title[0].upper() + title[1:], loss, "nats/token", f"{whose}{of_part}")]
    others = []
    for place, one in ranking.versus.items():
        if place != best and one.low is not None:
            others.append(one)
    if others:
        nearest = min(others, key=lambda one: one.difference or 0.0)
        ends = f"{units.real(nearest.low, '', 4)} to {units.real(nearest.high, '', 4)}"
        meaning = nearest.meaning
        if nearest.is_noise:
            meaning = "noise"
        elif nearest.is_worse:
            meaning = "more than chance"
        found.append(
            Card(
                "Ahead of the next",
                units.real(nearest.difference, "", 4),
                "nats/token",
                f"{ends}: {meaning}",
            )
        )
    return found


def _whose(
    values: Sequence[float | None], choose: Callable[..., float], names: Sequence[str]
) -> tuple[float, str] | None:
    """Return the largest or smallest of the known values, and the names that have it."""
    known = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    if not known:
        return None
    value = choose(known.values())
    those = [name for name in known if known[name] == value]
    return value, "all alike" if len(those) == len(names) else listed(those)


def result_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Return a table row for each experiment, the best first."""
    found = []
    for place in comparison.order:
        numbers = comparison.measured[place]
        versus = comparison.ranking.versus.get(place)
        loss, above, meaning = loss_cells(numbers, versus)
        style = ""
        if meaning == BEST:
            style = "yes"
        elif versus and versus.is_worse:
            style = "no"
        found.append(
            {
                "place": place,
                "loss": loss,
                "above": above,
                "meaning": meaning,
                "class": style,
                "state": numbers.state,
                "costs": cost_cells(numbers),
            }
        )
    return found


def generations(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the prompts that any experiment answered, with the answers by experiment, or None.

    The base model's answer is included if it is the same in all experiments. Prompts with the
    fewest missing answers come first.
    """
    prompts: dict[tuple[str, str | None], list[Any]] = {}
    for place, known in enumerate(comparison.found):
        for item in known.generations:
            slots = prompts.setdefault(
                (item.prompt, item.reference), [None] * len(comparison.found)
            )
            slots[place] = slots[place] or item
    found = []
    for (prompt, reference), slots in prompts.items():
        bases = {item.base for item in slots if item is not None}
        answers = [item.tuned if item else None for item in slots]
        base = bases.pop() if len(bases) == 1 else None
        found.append({"prompt": prompt, "reference": reference, "base": base, "answers": answers})
    return sorted(found, key=lambda one: sum(answer is None for answer in one["answers"]))
