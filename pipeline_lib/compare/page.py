"""The page of a comparison: one file, in the style of the report, that needs no network and trusts nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.base.fsio import write_text
from pipeline_lib.compare.comparison import Comparison
from pipeline_lib.compare.figures import Look, figures_of, looks
from pipeline_lib.compare.select import MAX_COMPARED, Subject
from pipeline_lib.compare.table import SECTIONS, cost_cells, footnotes, loss_cells
from pipeline_lib.compare.verdict import among, listed, lowest, verdict
from pipeline_lib.compare.versus import Versus
from pipeline_lib.config.dag import RESULTS, Dag
from pipeline_lib.publish import units
from pipeline_lib.publish.html import render_page
from pipeline_lib.publish.sweep import outcomes

PAGE_NAME = "compare.html"
MAX_PROMPTS = 24
MAX_COLUMNS = 5  # of experiments, beside each other in a table; more are below each other
ANSWER_CHARS = 12_000  # of all answers to one prompt
MAX_ANSWER_CHARS = 3000


@dataclass(frozen=True)
class Card:
    """One of the numbers that matter: what it is, its value and unit, and whose it is."""

    name: str
    value: str
    unit: str
    beside: str


def write_page(comparison: Comparison, path: Path) -> int:
    """Write the page to `path`; its size in bytes."""
    text = render(comparison)
    write_text(path, text)
    return len(text.encode())


def write_sweep_page(dag: Dag, results: Path = RESULTS) -> Path | None:
    """Compare the experiments of a sweep, of more than 20 the best, in RESULTS/NAME; returns the page.

    None, and nothing is written, as long as no experiment is done.
    """
    by_name, found = {experiment.name: experiment for experiment in dag.experiments}, outcomes(dag)
    if not found[0].is_done:
        return None
    path = results / dag.name / PAGE_NAME
    best = [by_name[outcome.name] for outcome in found[:MAX_COMPARED]]
    write_page(Comparison.of([Subject.of(experiment, dag.store) for experiment in best]), path)
    return path


def render(comparison: Comparison) -> str:
    """The page as text."""
    names = comparison.names
    values = {
        "title": comparison.title,
        "verdict": verdict(comparison),
        "names": names,
        "swatches": [swatch(look) for look in looks(comparison)],
        "cards": cards(comparison),
        "order": comparison.order,
        "is_across": len(names) > MAX_COLUMNS,
        "results": result_rows(comparison),
        "cost_columns": _cost_columns(comparison),
        "footnotes": footnotes(comparison),
        "sections": {name: (title, getattr(comparison.differences, name)) for name, title in SECTIONS},
        "same": [] if comparison.is_identical and len(names) == 2 else comparison.same_told,
        "generations": generations(comparison)[:MAX_PROMPTS],
        "more_generations": max(0, len(generations(comparison)) - MAX_PROMPTS),
        "answer_chars": min(MAX_ANSWER_CHARS, ANSWER_CHARS // len(names)),
        "notes": comparison.notes,
    }
    return render_page("pipeline_lib.compare", "compare.html.jinja", figures_of(comparison), values)


def swatch(look: Look) -> str:
    """The background that stands for an experiment's line."""
    striped = f"repeating-linear-gradient(90deg, {look.colour} 0 3px, transparent 3px 5px)"
    return striped if look.is_dashed else look.colour


def cards(comparison: Comparison) -> list[Card]:
    """The numbers that matter."""
    numbers, names = comparison.measured, comparison.names
    found = _loss_cards(comparison)
    keys = [row.name for row in comparison.differences.changing]
    found.append(Card("Keys that differ", str(len(keys)), "", listed(keys) or "none that changes the result"))
    trained = [known.is_trained for known in comparison.found]  # one that was stopped early is no winner
    speeds = [one.tokens_per_s if is_whole else None for one, is_whole in zip(numbers, trained, strict=True)]
    if fastest := _whose(speeds, max, names):
        found.append(Card("Fastest", units.compact(fastest[0]), "tokens/s", fastest[1]))
    memory = [one.peak_memory_bytes if is_whole else None for one, is_whole in zip(numbers, trained, strict=True)]
    if leanest := _whose(memory, min, names):
        digits, _, unit = units.gib(leanest[0]).partition(" ")
        found.append(Card("Least memory of a rank", digits, unit, leanest[1]))
    trainings = [known.subject.parts.get("train") for known in comparison.found]  # what two share is paid for once
    of_training = {training: one.device_hours for training, one in zip(trainings, numbers, strict=True)}
    hours = [spent for spent in of_training.values() if spent is not None]
    kinds = {one.device for one in numbers}
    if hours and len(kinds) == 1:
        least, most = units.small(min(hours)), units.small(max(hours))
        beside = f"{least} each" if least == most else f"{least} to {most} each"
        beside += f", of {len(hours)} of them" if len(hours) < len(of_training) else ""
        found.append(
            Card("Training of all", units.small(sum(hours)), f"{kinds.pop().removeprefix('CPU ')}-hours", beside)
        )
    return found


def _loss_cards(comparison: Comparison) -> list[Card]:
    best = comparison.ranking.best
    if best is None:
        return []
    ranking, whose = comparison.ranking, comparison.names[best]
    of_part = f", of {among(comparison)}" if len(ranking.ranked) < len(ranking.versus) else ""
    said = lowest(comparison)
    loss = units.real(ranking.loss, "", 4)
    found = [Card(said[0].upper() + said[1:], loss, "nats/token", f"{whose}{of_part}")]
    others = [one for place, one in comparison.ranking.versus.items() if place != best and one.low is not None]
    if others:
        nearest = min(others, key=lambda one: one.difference or 0.0)
        ends = f"{units.real(nearest.low, '', 4)} to {units.real(nearest.high, '', 4)}"
        meaning = "noise" if nearest.is_noise else "more than chance" if nearest.is_worse else nearest.meaning
        found.append(
            Card("Ahead of the next", units.real(nearest.difference, "", 4), "nats/token", f"{ends}: {meaning}")
        )
    return found


def _whose(
    values: Sequence[float | None], choose: Callable[..., float], names: Sequence[str]
) -> tuple[float, str] | None:
    """The largest or smallest of what is known, and who has it."""
    known = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    if not known:
        return None
    value = choose(known.values())
    those = [name for name in known if known[name] == value]
    return value, "all alike" if len(those) == len(names) else listed(those)


def result_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """A row of the table each, the best first."""
    found = []
    for place in comparison.order:
        numbers, versus = comparison.measured[place], comparison.ranking.versus.get(place)
        loss, above, meaning = loss_cells(numbers, versus)
        found.append(
            {
                "place": place,
                "loss": loss,
                "above": above,
                "meaning": meaning,
                "class": _class(versus),
                "state": numbers.state,
                "costs": cost_cells(numbers),
            }
        )
    return found


def _class(versus: Versus | None) -> str:
    return "yes" if versus and versus.meaning == "best" else "no" if versus and versus.is_worse else ""


def _cost_columns(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(name for numbers in comparison.measured for name in cost_cells(numbers)))


def generations(comparison: Comparison) -> list[dict[str, Any]]:
    """The prompts that any experiment answered, with the answers by experiment; None where one has none.

    What the base model said is shown where it is the same for all of them.
    """
    prompts: dict[tuple[str, str | None], list[Any]] = {}
    for place, known in enumerate(comparison.found):
        for item in known.generations:
            slots = prompts.setdefault((item.prompt, item.reference), [None] * len(comparison.found))
            slots[place] = slots[place] or item
    found = []
    for (prompt, reference), slots in prompts.items():
        bases = {item.base for item in slots if item is not None}
        answers = [item.tuned if item else None for item in slots]
        base = bases.pop() if len(bases) == 1 else None
        found.append({"prompt": prompt, "reference": reference, "base": base, "answers": answers})
    return sorted(found, key=lambda one: sum(answer is None for answer in one["answers"]))
