"""What may be lost of the data: a stage that lost more than its config allows fails, with the numbers and a remedy."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import Tokenize
from pipeline_lib.data.chat.encoder import Drop
from pipeline_lib.data.tokenize.ledger import SourceLedger

ALWAYS_NAMED = (Drop.PROMPT_NOT_PREFIX, Drop.NO_END_OF_TURN)


def refuse_losses(
    total: SourceLedger,
    settings: Tokenize,
    first_rejects: Sequence[str],
    quarantine_path: Path,
    length_percentiles: Mapping[str, float],
    hints: Mapping[str, str],
) -> None:
    """Raise DataError if more was lost than `settings` allow, or nothing is left.

    `length_percentiles` are those of the kept samples, in tokens; `hints` say what to do about each reason.
    """
    _refuse_rows(total, settings, first_rejects, quarantine_path)
    if not total.kept:
        advice = "".join(f"\n  {reason}: {hint}" for reason, hint in hints.items())
        raise DataError(
            f"no sample is left of {total.conversations} conversations: {counts_text(total.dropped)}{advice}"
        )
    lost = total.dropped[Drop.OVER_LONG] + total.truncated
    if lost > settings.max_dropped_fraction * total.samples:
        lengths = ", ".join(f"{name} {value:,.0f}" for name, value in length_percentiles.items())
        raise DataError(
            f"{lost} of {total.samples} samples ({lost / total.samples:.2%}) are longer than tokenize.max_tokens "
            f"({settings.max_tokens}), and tokenize.max_dropped_fraction allows {settings.max_dropped_fraction:.2%}: "
            f"raise one of the two, or see tokenize.over_long. The samples that are left have {lengths} tokens"
        )
    for reason, number in total.dropped.items():
        if reason != Drop.OVER_LONG and number > settings.max_dropped_fraction * total.samples:
            raise DataError(
                f"{number} of {total.samples} samples ({number / total.samples:.2%}) are dropped as {reason}, and "
                f"tokenize.max_dropped_fraction allows {settings.max_dropped_fraction:.2%}: "
                f"{hints[reason]}"
            )


def named_drops(total: SourceLedger, hints: Mapping[str, str]) -> list[str]:
    """A line for each reason that is never passed over, however few samples it took, with what to do about it."""
    return [
        f"{total.dropped[reason]:,} of {total.samples:,} samples dropped as {reason}: {hints[reason]}"
        for reason in ALWAYS_NAMED
        if total.dropped[reason]
    ]


def counts_text(counter: Counter[str]) -> str:
    """The counts as text, the largest first."""
    return ", ".join(f"{number} {reason}" for reason, number in counter.most_common())


def _refuse_rows(total: SourceLedger, settings: Tokenize, first_rejects: Sequence[str], quarantine_path: Path) -> None:
    quarantined = total.quarantined.total()
    listed = "\n".join(f"  {line}" for line in first_rejects)
    details = f"{counts_text(total.quarantined)}; the first:\n{listed}\nAll of them: {quarantine_path}"
    if not total.conversations:
        raise DataError(f"none of the {total.rows} rows is a usable conversation: {details}")
    if quarantined > settings.max_quarantined_fraction * total.rows:
        raise DataError(
            f"{quarantined} of {total.rows} rows cannot be used ({quarantined / total.rows:.2%}), and "
            f"tokenize.max_quarantined_fraction allows {settings.max_quarantined_fraction:.2%}: "
            f"mend the rows or raise it. {details}"
        )
