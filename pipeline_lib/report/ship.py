"""The verdict on whether a tuned model may ship: by the section `ship` and the benchmarks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from pipeline_lib.config.benchmarks import Ship
from pipeline_lib.core import units
from pipeline_lib.core.language import N_, _
from pipeline_lib.records.benchmark import BenchmarkComparison, Benchmarks, Fault


class ShipDecision(StrEnum):
    """Whether the tuned model may ship."""

    SHIP = N_("ship")
    STAY = N_("do not ship")
    UNKNOWN = N_("not enough questions to tell")


@dataclass(frozen=True)
class ShipRule:
    """One rule of `ship`: its key, what it came to, and the figures in words."""

    key: str
    decision: ShipDecision
    text: str

    @property
    def decision_text(self) -> str:
        """The decision in words."""
        return _(self.decision)


@dataclass(frozen=True)
class ShipVerdict:
    """What all rules came to: the worst of them."""

    rules: tuple[ShipRule, ...]

    @property
    def decision(self) -> ShipDecision:
        """`ship` if all rules hold; one that is broken weighs more than one that is not known."""
        found = {rule.decision for rule in self.rules}
        for worst in (ShipDecision.STAY, ShipDecision.UNKNOWN):
            if worst in found:
                return worst
        return ShipDecision.SHIP

    @property
    def text(self) -> str:
        """The decision, with the rules that it is due to."""
        due = [rule for rule in self.rules if rule.decision == self.decision]
        reasons = "; ".join(rule.text for rule in due)
        text = _("{decision}: {reasons}.")
        return text.format(decision=_(self.decision).capitalize(), reasons=reasons)


def ship_verdict(ship: Ship, benchmarks: Benchmarks | None) -> ShipVerdict | None:
    """Return the verdict by the rules of `ship`; None without rules or without benchmarks."""
    if benchmarks is None:
        return None
    rules = [*_differences(ship, benchmarks), *_faults(ship, benchmarks)]
    return ShipVerdict(tuple(rules)) if rules else None


def _differences(ship: Ship, benchmarks: Benchmarks) -> Iterator[ShipRule]:
    for name, least in ship.differences.items():
        key = f"ship.gain.{name}" if name in ship.gain else f"ship.keep.{name}"
        found = benchmarks.compared[name]
        decision = ShipDecision.UNKNOWN
        questions = units.count(_wanted(found, least), _("questions"))
        more = _("; about {questions} would do").format(questions=questions)
        if found.low >= least or found.high < least:
            decision = ShipDecision.SHIP if found.low >= least else ShipDecision.STAY
            more = ""
        text = _("{name} {difference}, wanted {least} or more{more}").format(
            name=name, difference=difference_words(found), least=points(least), more=more
        )
        yield ShipRule(key, decision, text)


def difference_words(found: BenchmarkComparison) -> str:
    """Return the difference of the fractions right, with its interval."""
    return _("{difference} points ({low} to {high})").format(
        difference=points(found.difference), low=points(found.low), high=points(found.high)
    )


def points(fraction: float) -> str:
    """Return a difference of fractions in percentage points: `+4.0`."""
    return f"{100 * fraction:+.1f}"


def _wanted(found: BenchmarkComparison, least: float) -> int:
    """Return with how many questions the interval would leave `least` out, as far as is seen.

    An interval shrinks with the root of the number of questions.
    """
    reach = (found.high - found.low) / 2
    distance = abs(found.difference - least)
    if distance == 0:
        return 10 * found.tuned.questions
    wanted = found.tuned.questions * (reach / distance) ** 2
    return max(found.tuned.questions + 1, math.ceil(wanted))


def _faults(ship: Ship, benchmarks: Benchmarks) -> Iterator[ShipRule]:
    limits: dict[Fault, tuple[str, float | None]] = {
        "loop": ("loops", ship.loops),
        "unended": ("unended", ship.unended),
    }
    scores = [found.tuned for found in benchmarks.compared.values()]
    answers = sum(score.questions for score in scores)
    for fault, (key, most) in limits.items():
        if most is None:
            continue
        seen = sum(score.faults.get(fault, 0) for score in scores)
        decision = ShipDecision.SHIP if seen <= most * answers else ShipDecision.STAY
        text = _("{seen} of {answers} {fault}, at most {most} may").format(
            seen=units.count(seen, _("answers")),
            answers=units.count(answers),
            fault=_(_FAULTS[fault]),
            most=units.percent(most),
        )
        yield ShipRule(f"ship.{key}", decision, text)


_FAULTS: dict[Fault, str] = {"loop": N_("end in a loop"), "unended": N_("do not end")}
