"""What may be lost of the data: a stage that lost more than its config allows fails, with the numbers and a remedy."""

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import Tokenize
from pipeline_lib.config.sources import IGNORE
from pipeline_lib.data.chat.encoder import Drop
from pipeline_lib.data.tokenize.ledger import FileLedger, SourceLedger, total_of
from pipeline_lib.data.tokenize.sources import Source

NAMED_REJECTS = 5  # in a message; the file has them all
ALWAYS_NAMED = (Drop.PROMPT_NOT_PREFIX, Drop.NO_END_OF_TURN, Drop.THINKING_NOT_RENDERED)
NAMED_KEYS = 20
OPTIONAL_KEYS = ("input", "history", "system", "tools", "tool_calls", "reasoning_content")  # that rows can do without
TRUNCATED = "truncated"
TRUNCATED_HINT = "their ends are cut off: raise tokenize.max_tokens, or set tokenize.over_long to drop or split"


def refuse_missing_columns(ledgers: Sequence[SourceLedger], sources: Sequence[Source]) -> list[str]:
    """Raise DataError if a key that the `columns` of a source name is in no row of a file, nor in its schema.

    A key that rows can do without may be missing in files, but not in all of them. Where `max_rows` ended the reading,
    later rows may have it: then a line is returned, which says that those that were read do not.
    """
    lines = []
    for ledger, source in zip(ledgers, sources, strict=True):
        files = [pair for pair in zip(ledger.files, source.files, strict=True) if pair[0].keys.first]
        is_cut = ledger.rows == source.reading.max_rows
        for ours, theirs in source.reading.columns.items():
            if theirs == IGNORE:
                continue
            unseen = [(booked, file) for booked, file in files if theirs not in booked.keys.named]
            missing = [booked for booked, file in unseen if theirs not in file.schema_names()]
            if not missing or (ours in OPTIONAL_KEYS and len(missing) < len(files)):
                continue
            if ours not in OPTIONAL_KEYS or not is_cut:
                where = ledger.name if ours in OPTIONAL_KEYS else missing[0].name
                raise _missing_column(where, missing[0], source.number, ours, theirs)
            what = f"{theirs!r}, which data.train[{source.number}].columns names as {ours}"
            lines.append(f"tokenize: {ledger.name}: none of the {ledger.rows:,} rows that were read has {what}")
    return lines


def _missing_column(where: str, file: FileLedger, source: int, ours: str, theirs: str) -> DataError:
    close = difflib.get_close_matches(theirs, file.keys.first, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    remedy = "remove it from `columns`" if ours in OPTIONAL_KEYS else "give a file that lacks it a source of its own"
    return DataError(
        f"{where}: no row has {theirs!r}, which data.train[{source}].columns names as {ours}; its first row has "
        f"{', '.join(map(repr, file.keys.first[:NAMED_KEYS]))}{hint}. Mend the name, or {remedy}"
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
