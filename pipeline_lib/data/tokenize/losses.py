"""What may be lost of the data: a stage that lost more than its config allows fails, with the numbers and a remedy."""

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import Tokenize
from pipeline_lib.config.sources import IGNORE
from pipeline_lib.data.chat.encoder import Drop
from pipeline_lib.data.tokenize.ledger import SourceLedger, total_of

NAMED_REJECTS = 5  # in a message; the file has them all
ALWAYS_NAMED = (Drop.PROMPT_NOT_PREFIX, Drop.NO_END_OF_TURN, Drop.THINKING_NOT_RENDERED)
NAMED_KEYS = 20
TRUNCATED = "truncated"
TRUNCATED_HINT = "their ends are cut off: raise tokenize.max_tokens, or set tokenize.over_long to drop or split"


def refuse_missing_columns(ledgers: Sequence[SourceLedger], columns: Sequence[Mapping[str, str]]) -> None:
    """Raise DataError if no row of a file has a key that the `columns` of its source name."""
    for number, (ledger, named) in enumerate(zip(ledgers, columns, strict=True)):
        for file in ledger.files:
            for ours, theirs in named.items():
                if file.keys.first and theirs != IGNORE and theirs not in file.keys.named:
                    close = difflib.get_close_matches(theirs, file.keys.first, n=1)
                    hint = f"; did you mean {close[0]!r}?" if close else ""
                    raise DataError(
                        f"{file.name}: no row has {theirs!r}, which data.train[{number}].columns names as {ours}; its "
                        f"first row has {', '.join(map(repr, file.keys.first[:NAMED_KEYS]))}{hint}. Mend the name; a "
                        "file that lacks the column needs a source of its own"
                    )


def refuse_lost_rows(
    ledgers: Sequence[SourceLedger],
    settings: Tokenize,
    first_rejects: Sequence[Sequence[str]],
    quarantine_path: Path,
) -> None:
    """Raise DataError if more rows cannot be used than `settings` allow, or all of a source.

    `first_rejects` are lines about the first of them, of each source.
    """
    total = total_of(ledgers)
    for ledger, rejects in zip(ledgers, first_rejects, strict=True):
        if ledger.quarantined.total() == ledger.rows:
            details = _rejects_text(ledger, rejects, quarantine_path)
            raise DataError(f"{ledger.name}: none of the {ledger.rows} rows is a usable conversation: {details}")
    quarantined = total.quarantined.total()
    if quarantined > settings.max_quarantined_fraction * total.rows:
        details = _rejects_text(total, [line for rejects in first_rejects for line in rejects], quarantine_path)
        raise DataError(
            f"{quarantined} of {total.rows} rows cannot be used ({quarantined / total.rows:.2%}), and "
            f"tokenize.max_quarantined_fraction allows {settings.max_quarantined_fraction:.2%}: "
            f"mend the rows or raise it. {details}"
        )


def refuse_lost_samples(
    ledgers: Sequence[SourceLedger],
    settings: Tokenize,
    length_percentiles: Sequence[Mapping[str, float]],
    hints: Mapping[str, str],
) -> None:
    """Raise DataError if more samples of a source are dropped or cut than `settings` allow, or nothing is left of all.

    `length_percentiles` are those of the kept samples of each source, in tokens; `hints` say what to do about each
    reason for a drop.
    """
    total = total_of(ledgers)
    if not total.kept:
        raise DataError(f"no sample is left of {total.conversations} conversations:{_advice(total, hints)}")
    problems = []
    for ledger, lengths in zip(ledgers, length_percentiles, strict=True):
        lost = ledger.dropped.total() + ledger.truncated
        if lost > settings.max_dropped_fraction * ledger.samples:
            left = ", ".join(f"{name} {value:,.0f}" for name, value in lengths.items())
            problems.append(
                f"{ledger.name}: {lost} of {ledger.samples} samples ({lost / ledger.samples:.2%}) are dropped or cut, "
                f"and tokenize.max_dropped_fraction allows {settings.max_dropped_fraction:.2%}:"
                f"{_advice(ledger, hints)}" + (f"\n  The samples that are left have {left} tokens" if left else "")
            )
    if problems:
        raise DataError("\n".join(problems))


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


def _advice(ledger: SourceLedger, hints: Mapping[str, str]) -> str:
    """A line for each reason for which samples of `ledger` are lost, the most frequent first."""
    lost = ledger.dropped + Counter({TRUNCATED: ledger.truncated})
    return "".join(
        f"\n  {number:,} {reason}: {hints.get(reason, TRUNCATED_HINT)}" for reason, number in lost.most_common()
    )


def _rejects_text(ledger: SourceLedger, rejects: Sequence[str], quarantine_path: Path) -> str:
    listed = "\n".join(f"  {line}" for line in rejects[:NAMED_REJECTS])
    return f"{counts_text(ledger.quarantined)}; the first:\n{listed}\nAll of them: {quarantine_path}"
