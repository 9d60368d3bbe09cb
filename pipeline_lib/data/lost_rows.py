"""Limits on lost data: the stage fails if it lost more than allowed, and names a remedy."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from pipeline_lib.arch.rope import positions_in
from pipeline_lib.config.schema import IGNORE, Tokenize
from pipeline_lib.core import units
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json
from pipeline_lib.core.stage import Sealed
from pipeline_lib.core.text import did_you_mean
from pipeline_lib.data.encode import Drop
from pipeline_lib.data.encoded import TooLong
from pipeline_lib.data.ledger import (
    FileLedger,
    SourceLedger,
    too_many_lost,
    too_many_unusable,
    total_of,
)
from pipeline_lib.data.sources import DataSource

NAMED_REJECTS = 5  # rows that a message lists; quarantine.jsonl has them all
ALWAYS_NAMED = (
    Drop.PROMPT_NOT_PREFIX,
    Drop.NO_END_OF_TURN,
    Drop.THINKING_NOT_RENDERED,
    Drop.CALLS_NOT_RENDERED,
    Drop.TOOLS_NOT_RENDERED,
    Drop.MESSAGE_NOT_RENDERED,
)
NAMED_KEYS = 20
# rows may lack these
OPTIONAL_KEYS = ("input", "history", "system", "tools", "tool_calls", "reasoning_content")
TRUNCATED = "truncated"
TRUNCATED_HINT = (
    "their ends are cut off: raise tokenize.max_tokens, or set tokenize.over_long to drop or split"
)


def refuse_missing_columns(
    ledgers: Sequence[SourceLedger], sources: Sequence[DataSource]
) -> list[str]:
    """Check that each key in a source's `columns` is in a row of each file or in its schema.

    An optional key may be missing in some files of a source, but not in all of them. If it is
    missing in all and `max_rows` ended the reading, later rows may have it: then return a warning
    line instead of raising.
    """
    lines = []
    for ledger, source in zip(ledgers, sources, strict=True):
        with_rows = sum(bool(file.keys.first) for file in ledger.files)
        is_cut = ledger.rows == source.reading.max_rows
        for ours, theirs in source.reading.columns.items():
            if theirs == IGNORE:
                continue
            missing = _files_without(ledger, source, theirs)
            is_optional = ours in OPTIONAL_KEYS
            if not missing or (is_optional and len(missing) < with_rows):
                continue
            if not is_optional or not is_cut:
                where = ledger.name if is_optional else missing[0].name
                raise _missing_column(where, missing[0], source.key, ours, theirs)
            read = f"of {units.count(ledger.rows, 'rows')} read none has {theirs!r}"
            names = f"which {source.key}.columns names as {ours}"
            lines.append(f"tokenize: {ledger.name}: {read}, {names}")
    return lines


def _files_without(ledger: SourceLedger, source: DataSource, key: str) -> list[FileLedger]:
    """Return the files with rows of which none has `key`, and whose schema does not name it."""
    missing = []
    for booked, file in zip(ledger.files, source.files, strict=True):
        is_unseen = booked.keys.first and key not in booked.keys.named
        if is_unseen and key not in file.schema_names():
            missing.append(booked)
    return missing


def idle_names(ledgers: Sequence[SourceLedger], sources: Sequence[DataSource]) -> Iterator[str]:
    """Yield a warning for each ignored key and each role in settings that no row has."""
    for ledger, source in zip(ledgers, sources, strict=True):
        seen = set[str]()
        roles = set[str]()
        for file in source.files:
            seen.update(file.schema_names())
        for booked in ledger.files:
            seen.update(booked.keys.named)
            roles.update(booked.keys.roles)
        none_has = f"tokenize: {ledger.name}: of {units.count(ledger.rows, 'rows')} read none has"
        for name in sorted(source.reading.ignored - seen):
            yield f"{none_has} {name!r}, which {source.key}.columns ignores"
        for name in source.reading.roles:
            if name not in roles:
                yield f"{none_has} a turn of {name!r}, which {source.key}.roles names"


def _missing_column(
    where: str, file: FileLedger, source_key: str, ours: str, theirs: str
) -> DataError:
    keys = ", ".join(map(repr, file.keys.first[:NAMED_KEYS]))
    hint = did_you_mean(theirs, file.keys.first)
    remedy = "give a file that lacks it a source of its own"
    if ours in OPTIONAL_KEYS:
        remedy = "remove it from `columns`"
    return DataError(
        f"{where}: no row has {theirs!r}, which {source_key}.columns names as {ours}; its first "
        f"row has {keys}{hint}. Mend the name, or {remedy}"
    )


def refuse_lost_rows(
    ledgers: Sequence[SourceLedger],
    settings: Tokenize,
    first_rejects: Sequence[Sequence[str]],
    quarantine_path: Path,
) -> None:
    """Raise DataError if more rows are unusable than `settings` allow, or a whole source.

    It names the first such row.
    """
    total = total_of(ledgers)
    for ledger, rejects in zip(ledgers, first_rejects, strict=True):
        if ledger.quarantined.total() == ledger.rows:
            details = _rejects_text(ledger, rejects, quarantine_path)
            rows = units.count(ledger.rows, "rows")
            text = f"{ledger.name}: of {rows} none is a usable conversation: {details}"
            raise DataError(text)
    if problem := too_many_unusable(total, settings):
        rejects_of_all = list(chain.from_iterable(first_rejects))
        details = _rejects_text(total, rejects_of_all, quarantine_path)
        raise DataError(f"{problem}: fix the rows or raise it. {details}")


def refuse_too_long(too_long: TooLong, rows: int, settings: Tokenize, model: Sealed) -> None:
    """Raise DataError if any of the `rows` are too long; it names a sufficient `max_tokens`.

    None is named that is beyond the positions of the model, which `model.rope` may raise.
    """
    if not too_long.rows:
        return
    config = read_json(model.file("config.json"))
    positions = positions_in(config.get("text_config", config))
    shorten = "shorten the rows, or set tokenize.over_long to drop, truncate or split"
    if too_long.tokens <= positions:
        enough = f"set tokenize.max_tokens: {too_long.tokens} (and shard.block_tokens to no less)"
        remedy = f"{enough}, {shorten}"
    else:
        limit = f"max_tokens beyond the {positions:,} positions of the model needs model.rope"
        remedy = f"{shorten}; {limit}"
    raise DataError(
        f"rows longer than tokenize.max_tokens ({settings.max_tokens:,}): {too_long.rows:,} of "
        f"{rows:,}, and tokenize.over_long is error. The longest, {too_long.place}, has "
        f"{too_long.tokens:,} tokens: {remedy}"
    )


def refuse_lost_samples(
    ledgers: Sequence[SourceLedger],
    settings: Tokenize,
    length_percentiles: Sequence[Mapping[str, float]],
    hints: Mapping[str, str],
) -> None:
    """Raise DataError if more samples are lost than `settings` allow, or all; `hints` help.

    The hints say what helps, by reason.
    """
    total = total_of(ledgers)
    if not total.kept:
        conversations = units.count(total.conversations, "conversations")
        raise DataError(f"no sample is left of {conversations}:{_advice(total, hints)}")
    problems = []
    for ledger, lengths in zip(ledgers, length_percentiles, strict=True):
        if problem := too_many_lost(ledger, settings):
            left = ", ".join(f"{name} {value:,.0f}" for name, value in lengths.items())
            of_left = f"\n  The samples that are left have {left} tokens" if left else ""
            problems.append(f"{problem}:{_advice(ledger, hints)}{of_left}")
    if problems:
        raise DataError("\n".join(problems))


def _advice(ledger: SourceLedger, hints: Mapping[str, str]) -> str:
    lost = ledger.dropped + Counter({TRUNCATED: ledger.truncated})
    text = ""
    for reason, number in lost.most_common():
        text += f"\n  {number:,} {reason}: {hints.get(reason, TRUNCATED_HINT)}"
    return text


def _rejects_text(ledger: SourceLedger, rejects: Sequence[str], quarantine_path: Path) -> str:
    listed = "\n".join(f"  {line}" for line in rejects[:NAMED_REJECTS])
    counts = ", ".join(f"{number} {reason}" for reason, number in ledger.quarantined.most_common())
    return f"{counts}; the first:\n{listed}\nAll of them: {quarantine_path}"
