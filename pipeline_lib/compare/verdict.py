"""The verdict in a sentence or two: the best experiment, its lead, and whether that is noise."""

from collections.abc import Sequence

from pipeline_lib.compare.comparison import Comparison
from pipeline_lib.compare.ranking import PAIRED, UNKNOWN, Versus
from pipeline_lib.core import units

UNIT = "nats/token"
_NAMED = 3  # experiments listed by name in a sentence


def verdict(comparison: Comparison) -> str:
    """Return the verdict of the comparison."""
    names = comparison.names
    best = comparison.ranking.best
    if comparison.is_identical:
        if len(names) == 2:
            return comparison.same_texts[0]
        return (
            f"All {len(names)} are identical: the same curves to the last bit, and the same "
            "model files."
        )
    reasons = []
    stopped = []
    for name, one in zip(names, comparison.found, strict=True):
        if one.loss is not None:
            continue
        if one.stop is not None:
            stopped.append(name)
        else:
            state = "damaged" if one.state == "done" else one.state
            reasons.append(f"{name} ({state})")
    versus = {place: one for place, one in comparison.ranking.versus.items() if place != best}
    loss = units.real(comparison.ranking.loss, UNIT, 4)
    if best is None:
        text = _of_none(comparison) if versus else "There are no results to compare yet."
    elif not versus and stopped:
        text = (
            f"{names[best]} won its sweep, which stopped {listed(stopped)}: its held-out loss "
            f"is {loss}."
        )
    elif not versus:
        text = f"Only {names[best]} has a held-out loss, {loss}."
    elif len(versus) == 1:
        [(place, other)] = versus.items()
        text = _of_two(comparison, place, other)
    else:
        text = _of_many(comparison, versus)
    if versus and stopped:
        text += f" The sweep stopped {listed(stopped)} before."
    if reasons:
        text += f" No held-out loss: {listed(reasons)}."
    return text


def interval(versus: Versus) -> str:
    """Return text like `0.0312 (0.0121 to 0.0503)`."""
    difference = units.real(versus.difference, "", 4)
    return difference if versus.low is None else f"{difference} ({_ends(versus)})"


def basis(versus: Versus) -> str:
    """Return the documents that the interval is based on, as the end of a sentence."""
    if versus.kind == PAIRED:
        return f", on the same {versus.documents:,} held-out documents"
    shared = "no held-out document is"
    if versus.documents:
        shared = f"only {versus.documents:,} held-out documents are"
    return f"; {shared} shared, so the difference of the documents counts as noise"


def among(comparison: Comparison) -> str:
    """Return the number of ranked experiments: `3`, or `the 2 that can be compared`."""
    ranking = comparison.ranking
    count = len(ranking.ranked)
    return f"{count}" if count == len(ranking.versus) else f"the {count} that can be compared"


def lowest(comparison: Comparison) -> str:
    """Return the criterion of the best: lowest held-out loss, or lowest on shared documents.

    Shared documents are those that all experiments have.
    """
    ranking = comparison.ranking
    if not ranking.is_part:
        return "lowest held-out loss"
    return f"lowest loss on the {ranking.shared:,} held-out documents that all were scored on"


def listed(names: Sequence[str]) -> str:
    """Return `a, b and c`, or for long lists the first names and the number of further ones."""
    if not names:
        return ""
    if len(names) > _NAMED + 1:
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _of_none(comparison: Comparison) -> str:
    losses = []
    for place in comparison.ranking.versus:
        loss = units.real(comparison.found[place].loss, "", 4)
        losses.append(f"{comparison.names[place]} {loss}")
    why = next(one.why for one in comparison.ranking.versus.values())
    return f"No two of them can be compared: {why}. Held-out losses, in {UNIT}: {listed(losses)}."


def _of_two(comparison: Comparison, place: int, versus: Versus) -> str:
    first = comparison.ranking.best or 0
    best = comparison.names[first]
    other = comparison.names[place]
    if versus.kind == UNKNOWN:
        of_best = units.real(comparison.measured[first].loss, UNIT, 4)
        of_other = units.real(comparison.measured[place].loss, UNIT, 4)
        text = f"{best} has a held-out loss of {of_best}, {other} of {of_other}"
        return f"{text}; whether the difference is noise is unknown: {versus.why}."
    if not versus.difference:
        return f"No difference: {best} and {other} have the same held-out loss{basis(versus)}."
    gap = (
        f"{units.real(versus.difference, UNIT, 4)} lower, 95% interval "
        f"{_ends(versus)}{basis(versus)}"
    )
    if versus.is_worse:
        return f"{best} is better than {other} by more than chance: its held-out loss is {gap}."
    return (
        f"The difference between {best} and {other} is noise: the held-out loss of {best} is {gap}."
    )


def _ends(versus: Versus) -> str:
    return f"{units.real(versus.low, '', 4)} to {units.real(versus.high, '', 4)}"


def _of_many(comparison: Comparison, versus: dict[int, Versus]) -> str:
    names = comparison.names
    worse = [one for one in versus.values() if one.is_worse]
    better = [names[place] for place, one in versus.items() if one.is_better]
    unknown = [names[place] for place, one in versus.items() if one.kind == UNKNOWN]
    if worse and len(worse) == len(comparison.ranking.ranked) - 1:
        text = _of_clear_best(comparison, worse)
    else:
        text = _of_lowest(comparison, versus)
    if better:
        verb = "is" if len(better) == 1 else "are"
        text += f" On the documents that they share, {listed(better)} {verb} better."
    if unknown:
        why = next(one.why for one in versus.values() if one.why)
        text += f" Whether it is better than {listed(unknown)} is unknown: {why}."
    return text


def _of_clear_best(comparison: Comparison, worse: Sequence[Versus]) -> str:
    """Return the sentence on a best that is better than all others, which are `worse`."""
    ranking = comparison.ranking
    best = comparison.names[ranking.best or 0]
    nearest = min(worse, key=lambda one: one.difference or 0.0)
    return (
        f"{best} is the best of {among(comparison)} by more than chance, at "
        f"{units.real(ranking.loss, UNIT, 4)}: the next is "
        f"{units.real(nearest.difference, UNIT, 4)} above it, 95% interval "
        f"{_ends(nearest)}{basis(nearest)}."
    )


def _of_lowest(comparison: Comparison, versus: dict[int, Versus]) -> str:
    """Return the sentences on a best whose lead over some is within noise, or unknown."""
    ranking = comparison.ranking
    names = comparison.names
    worse = [names[place] for place, one in versus.items() if one.is_worse]
    noise = [names[place] for place, one in versus.items() if one.is_noise]
    loss = units.real(ranking.loss, UNIT, 4)
    text = f"{names[ranking.best or 0]} has the {lowest(comparison)} of {among(comparison)}, {loss}"
    text += f", but its lead over {listed(noise)} is within noise" if noise else ""
    text += "."
    if worse:
        text += f" It is better than {listed(worse)} by more than chance."
    return text
