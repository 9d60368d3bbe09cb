"""The answer in a sentence or two: which is best, by how much, and what of that may be noise."""

from collections.abc import Sequence

from pipeline_lib.compare.comparison import Comparison
from pipeline_lib.compare.versus import PAIRED, UNKNOWN, Versus
from pipeline_lib.publish import units

UNIT = "nats/token"
_NAMED = 3  # experiments that a sentence names


def verdict(comparison: Comparison) -> str:
    """What to say first."""
    names, best = comparison.names, comparison.ranking.best
    if comparison.is_identical:
        if len(names) == 2:
            return comparison.same_told[0]
        return f"All {len(names)} are identical: the same curves to the last bit, and the same model files."
    unknown = [place for place, known in enumerate(comparison.found) if known.loss is None]
    without = f"No held-out loss: {listed([f'{names[place]} ({_why(comparison, place)})' for place in unknown])}."
    versus = {place: one for place, one in comparison.ranking.versus.items() if place != best}
    if best is None:
        said = _of_none(comparison) if versus else "Nothing can be said of the results yet."
    elif not versus:
        said = f"Only {names[best]} has a held-out loss, {units.real(comparison.ranking.loss, UNIT, 4)}."
    elif len(versus) == 1:
        said = _of_two(comparison, *next(iter(versus.items())))
    else:
        said = _of_many(comparison, versus)
    return f"{said} {without}" if unknown else said


def _why(comparison: Comparison, place: int) -> str:
    state = comparison.measured[place].state
    return "damaged" if state == "done" else state


def interval(versus: Versus) -> str:
    """`0.0312 (0.0121 to 0.0503)`."""
    difference = units.real(versus.difference, "", 4)
    if versus.low is None:
        return difference
    return f"{difference} ({_ends(versus)})"


def basis(versus: Versus) -> str:
    """What the interval rests on, as the end of a sentence."""
    if versus.kind == PAIRED:
        return f", on the same {versus.documents:,} held-out documents"
    shared = f"only {versus.documents:,} held-out documents are" if versus.documents else "no held-out document is"
    return f"; {shared} shared, so the difference of the documents counts as noise"


def among(comparison: Comparison) -> str:
    """How many the best is the best of: `3`, or `the 2 that can be compared`."""
    ranking = comparison.ranking
    count = len(ranking.ranked)
    return f"{count}" if count == len(ranking.versus) else f"the {count} that can be compared"


def lowest(comparison: Comparison) -> str:
    """What the best has the lowest of: its loss on all that was held out, or on what all were scored on."""
    ranking = comparison.ranking
    if not ranking.is_part:
        return "lowest held-out loss"
    return f"lowest loss on the {ranking.shared:,} held-out documents that all were scored on"


def listed(names: Sequence[str]) -> str:
    """`a, b and c`, or of many the first few and how many more."""
    if not names:
        return ""
    if len(names) > _NAMED + 1:
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _of_none(comparison: Comparison) -> str:
    """Where no two can be compared."""
    places = list(comparison.ranking.versus)
    losses = [f"{comparison.names[place]} {units.real(comparison.found[place].loss, '', 4)}" for place in places]
    why = next(one.why for one in comparison.ranking.versus.values())
    return f"No two of them can be compared: {why}. Held-out losses, in {UNIT}: {listed(losses)}."


def _of_two(comparison: Comparison, place: int, versus: Versus) -> str:
    best, other = comparison.names[comparison.ranking.best or 0], comparison.names[place]
    if versus.kind == UNKNOWN:
        ends = [units.real(comparison.measured[each].loss, UNIT, 4) for each in (comparison.ranking.best or 0, place)]
        told = f"{best} has a held-out loss of {ends[0]}, {other} of {ends[1]}"
        return f"{told}; whether that is noise cannot be told: {versus.why}."
    if not versus.difference:
        return f"No difference: {best} and {other} have the same held-out loss{basis(versus)}."
    gap = f"{units.real(versus.difference, UNIT, 4)} lower, 95 % interval {_ends(versus)}{basis(versus)}"
    if versus.is_worse:
        return f"{best} is better than {other} by more than chance: its held-out loss is {gap}."
    return f"The difference between {best} and {other} is noise: the held-out loss of the first is {gap}."


def _ends(versus: Versus) -> str:
    return f"{units.real(versus.low, '', 4)} to {units.real(versus.high, '', 4)}"


def _of_many(comparison: Comparison, versus: dict[int, Versus]) -> str:
    names, ranking = comparison.names, comparison.ranking
    best, loss = names[ranking.best or 0], units.real(ranking.loss, UNIT, 4)
    worse = [names[place] for place, one in versus.items() if one.is_worse]
    noise = [names[place] for place, one in versus.items() if one.is_noise]
    untold = [names[place] for place, one in versus.items() if one.kind == UNKNOWN]
    if worse and len(worse) == len(ranking.ranked) - 1:
        nearest = min((one for one in versus.values() if one.is_worse), key=lambda one: one.difference or 0.0)
        said = (
            f"{best} is the best of {among(comparison)} by more than chance, at {loss}: the next is "
            f"{units.real(nearest.difference, UNIT, 4)} above it, 95 % interval {_ends(nearest)}{basis(nearest)}."
        )
    else:
        said = f"{best} has the {lowest(comparison)} of {among(comparison)}, {loss}"
        said += f", but its lead over {listed(noise)} is within noise." if noise else "."
        said += f" It is better than {listed(worse)} by more than chance." if worse else ""
    if better := [names[place] for place, one in versus.items() if one.is_better]:
        said += f" On the documents that they share, {listed(better)} {_has(better, 'is', 'are')} better."
    if untold:
        said += f" It cannot be told of {listed(untold)}: {next(one.why for one in versus.values() if one.why)}."
    return said


def _has(names: Sequence[str], one: str = "has", several: str = "have") -> str:
    return one if len(names) == 1 else several
