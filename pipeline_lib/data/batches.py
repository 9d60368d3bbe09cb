"""The work of the tokenize stage's workers: convert a batch of raw rows to arrays of tokens.

Everything that depends on a single row happens here, so the output is the same for any number of
workers.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.config.schema import Tokenize
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import canonical_json
from pipeline_lib.core.text import redact
from pipeline_lib.data.conversations import BadRow, Content, Reason, Text, WrongFile
from pipeline_lib.data.duplicates import PERMUTATIONS
from pipeline_lib.data.encode import Drop, Encoder, Rendered, Sample
from pipeline_lib.data.encoded import Encoded, TooLong
from pipeline_lib.data.keys import KeyCounts
from pipeline_lib.data.layouts import Layout, detect, to_content
from pipeline_lib.data.pool import Guard, LossCause, WorkerLost
from pipeline_lib.data.read_files import (
    EXCERPT_CHARS,
    Rejected,
    excerpt,
    printable,
    rejected,
    value_of,
)
from pipeline_lib.data.read_json import KEPT_BYTES, RawRow, RowPosition
from pipeline_lib.data.row_hashes import Prints, prints_of

NO_LIMIT_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class RowBatch:
    """A task: consecutive rows of one file with the layout to read them in."""

    rows: Sequence[RawRow]
    source: int  # number of the source
    source_key: str  # its key in the config, `data.train[0]`
    file: int  # number of the file in the source
    layout: Layout | None  # None: no row of the file had a known format so far
    columns: dict[str, str]
    first: str | None = None  # the row that determined the format, if the config did not set it
    # tokenize each row by itself, so that the one that exceeds the limits is known
    is_slow: bool = False

    def __call__(self, state: Encoder, guard: Guard) -> Encoded:
        """Encode the rows.

        Raises DataError, naming the row, if the template fails, or if the file mixes formats or is
        preference data.
        """
        keys = KeyCounts()
        prints: list[Prints] = []
        rendered: list[list[Rendered]] = []
        outcomes: list[list[Sample | Drop]] = []
        places: list[RowPosition] = []
        bad_rows: list[Rejected] = []
        for position, row in enumerate(self.rows):
            with guard.at(position, size_of(row)):
                try:
                    content = self._content(row, keys)
                except BadRow as bad:
                    bad_rows.append(rejected(row, bad))
                    continue
                except WrongFile as wrong:
                    raise wrong_file(row, wrong, self.source_key) from wrong
                try:
                    token = state.control_token_in(content)
                    turns = [] if token else state.render(content)
                except DataError as error:
                    raise DataError(f"{row.place}: {error}") from error
                if token is not None:
                    bad_rows.append(_forged(row, content, token))
                    continue
                prints.append(prints_of(content, turns, state.settings))
            if self.is_slow:
                with guard.at(position, _size_of_rendered(turns)):
                    outcomes += state.encode_rendered([turns])
            rendered.append(turns)
            places.append(row.place)
        if not self.is_slow:
            outcomes = state.encode_rendered(rendered)
        encoded = _encoded(self, bad_rows, keys, prints, rendered, outcomes, state)
        if state.settings.over_long == "error":
            return replace(encoded, too_long=_too_long(state, places, rendered, outcomes))
        return encoded

    def without(self, position: int, problem: str) -> "RowBatch":
        """Return the batch with the row at `position` put aside for its `problem`."""
        rows = list(self.rows)
        bad = BadRow(Reason.OVER_LIMITS, problem)
        text = rows[position].text
        beginning = None if text is None else text[:KEPT_BYTES]
        rows[position] = RawRow(rows[position].place, beginning, rows[position].value, bad)
        return replace(self, rows=rows)

    def place_of(self, position: int | None) -> str:
        """Return the place of the row at `position` in the batch, or all rows' range if None."""
        if position is not None:
            return str(self.rows[position].place)
        first = self.rows[0].place
        last = self.rows[-1].place
        return str(first) if first == last else f"{first} to {last.line or last.row}"

    def _content(self, row: RawRow, keys: KeyCounts) -> Content:
        value = value_of(row)
        if self.layout is None:
            # raises again, as it did when the parent looked for the format
            detect(value, self.columns)
            raise BadRow(Reason.WRONG_FORMAT, "the format of the file is not known")
        if self.first is not None:
            row_format = detect(value, self.columns)
            if row_format != self.layout.format:
                raise DataError(
                    f"{row.place}: this row is {row_format}, and the file began as "
                    f"{self.layout.format}: set `format` in {self.source_key} to use the rows of "
                    "one of the two, or put them into files of their own\n"
                    f"  {self.first}\n  {shown(row)}"
                )
        return to_content(value, self.layout, keys)


def size_of(row: RawRow) -> int:
    """Return the approximate size of a row in bytes."""
    return text_size(row.value) if row.text is None else len(row.text)


def _size_of_rendered(turns: Sequence[Rendered]) -> int:
    return sum(len(turn.full) + len(turn.prompt or "") for turn in turns)


def text_size(value: Any) -> int:
    """Return the approximate size of `value`: its strings' characters, and 8 for other scalars."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(text_size, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(text_size, value))
    return 8


# rows put aside; more of them show that the template is at fault, and each takes seconds
MOST_OVER_LIMITS = 8


class PuttingAside:
    """What runs in place of a batch whose worker was lost: the batch without the offending row.

    That row exceeded the limits.
    """

    def __init__(self, settings: Tokenize) -> None:
        """Put no row aside if the `settings` allow no unusable row."""
        self._left = MOST_OVER_LIMITS if settings.max_quarantined_fraction else 0

    def __call__(self, lost: WorkerLost) -> RowBatch | None:
        """Return the task that replaces that of `lost`; None if the stage has to end."""
        if not isinstance(lost.task, RowBatch) or lost.cause is LossCause.KILLED:
            return None
        if lost.position is None:
            return None if lost.task.is_slow else replace(lost.task, is_slow=True)
        if not self._left:
            return None
        self._left -= 1
        return lost.task.without(lost.position, f"it took {lost}")


def thinking_default(state: Encoder, guard: Guard) -> str | None:
    """Return the template's default of `enable_thinking`: a task, since templates are untrusted."""
    with guard.at(0):
        return state.thinking_default()


def lacks_generation_prompt(state: Encoder, guard: Guard) -> bool:
    """Return whether the chat template writes no generation prompt: a task, as it is untrusted."""
    with guard.at(0):
        return state.lacks_generation_prompt()


def hints_of(drops: Sequence[str], state: Encoder, guard: Guard) -> dict[str, str]:
    """Return the remedy for each reason for dropped samples: a task, as templates decide some."""
    with guard.at(0):
        return {reason: state.hint(Drop(reason)) for reason in drops}


def wrong_file(row: RawRow, wrong: WrongFile, source_key: str) -> DataError:
    """Return the error for a row that shows its file is unusable; `source_key` is its source's."""
    return DataError(f"{row.place}: the row {wrong} ({source_key})\n  {shown(row)}")


def shown(row: RawRow) -> str:
    """Return the place and the beginning of `row`, for messages."""
    return f"{row.place}: {excerpt(row)}"


def _forged(row: RawRow, content: Content, token: str) -> Rejected:
    if isinstance(content, Text):
        text = redact(content.text)
    else:
        text = redact(canonical_json([content.messages, content.tools]))
    start = max(0, text.find(token) - EXCERPT_CHARS // 2)
    beginning = printable(text[start : start + EXCERPT_CHARS])
    return Rejected(Reason.CONTROL_TOKEN, f"the text holds {token}", row.place, beginning)


def _too_long(
    encoder: Encoder,
    places: Sequence[RowPosition],
    rendered: Sequence[Sequence[Rendered]],
    outcomes: Sequence[Sequence[Sample | Drop]],
) -> TooLong:
    """Return the rows with too long samples, encoded again without limit to know their length."""
    rows = [number for number, samples in enumerate(outcomes) if Drop.OVER_LONG in samples]
    unlimited = copy(encoder)
    unlimited.settings = encoder.settings.model_copy(update={"max_tokens": NO_LIMIT_TOKENS})
    encoded = unlimited.encode_rendered([rendered[number] for number in rows])
    found = TooLong()
    for number, whole in zip(rows, encoded, strict=True):
        tokens = max(len(sample.tokens) for sample in whole if isinstance(sample, Sample))
        found += TooLong(1, tokens, str(places[number]))
    return found


def _encoded(
    batch: RowBatch,
    bad_rows: Sequence[Rejected],
    keys: KeyCounts,
    prints: Sequence[Prints],
    rendered: Sequence[Sequence[Rendered]],
    outcomes: Sequence[Sequence[Sample | Drop]],
    state: Encoder,
) -> Encoded:
    kept: list[Sample] = []
    kept_of: list[int] = []  # the number of the conversation that each is of
    drops: list[tuple[int, str]] = []
    for number, samples in enumerate(outcomes):
        for outcome in samples:
            if isinstance(outcome, Sample):
                kept.append(outcome)
                kept_of.append(number)
            else:
                drops.append((number, outcome.value))
    return Encoded(
        source=batch.source,
        file=batch.file,
        format=batch.layout.format if batch.layout else None,
        rows=len(batch.rows),
        rejected=bad_rows,
        keys=keys,
        place=batch.place_of(None),
        content=np.array([row.content for row in prints], dtype=np.uint64),
        prompts=np.array([row.prompt for row in prints], dtype=np.uint64),
        turns=np.array([len(turns) for turns in rendered], dtype=np.int32),
        turns_found=_turns_found(rendered, outcomes),
        signatures=_signatures(prints, state.settings),
        drops=drops,
        conversations=np.array(kept_of, dtype=np.int32),
        lengths=np.array([len(sample.tokens) for sample in kept], dtype=np.int64),
        truncated=np.array([sample.truncated for sample in kept], dtype=np.bool_),
        split=np.array([sample.split for sample in kept], dtype=np.bool_),
        asked_to_think=_asked_to_think(kept),
        tokens=_joined([sample.tokens for sample in kept], np.int32),
        supervised=_joined([sample.supervised for sample in kept], np.bool_),
        how=state.how,
    )


def _signatures(prints: Sequence[Prints], settings: Tokenize) -> NDArray[np.uint32] | None:
    """Return the signatures of the rows that have one; None if near duplicates are not looked for."""
    if settings.near_duplicates is None:
        return None
    rows = [row.signature for row in prints if row.signature is not None]
    return np.stack(rows) if rows else np.zeros((0, PERMUTATIONS), dtype=np.uint32)


def _asked_to_think(samples: Sequence[Sample]) -> NDArray[np.int32]:
    """Return [samples, 2]: how many turns of each are asked not to think, and how many to think."""
    counts = np.zeros((len(samples), 2), dtype=np.int32)
    for number, sample in enumerate(samples):
        counts[number] = (sample.asked_to_think.count(False), sample.asked_to_think.count(True))
    return counts


def _joined(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """Return all `arrays` as one; of none, an empty one."""
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)


def _turns_found(
    rendered: Sequence[Sequence[Rendered]], outcomes: Sequence[Sequence[Sample | Drop]]
) -> NDArray[np.int32]:
    """Return how many turns of each conversation are in a sample or a drop, by supervised spans.

    The turns of an over-long sample cannot be counted, so all turns of its conversation are assumed
    to be present.
    """
    found = np.zeros(len(rendered), dtype=np.int32)
    for number, samples in enumerate(outcomes):
        kept = [outcome for outcome in samples if isinstance(outcome, Sample)]
        if Drop.OVER_LONG in samples or any(sample.truncated or sample.split for sample in kept):
            found[number] = len(rendered[number])
            continue
        found[number] = len(samples) - len(kept)
        # one run of supervised tokens for each turn, because unsupervised tokens separate turns
        for sample in kept:
            starts = np.diff(sample.supervised, prepend=False) & sample.supervised
            found[number] += np.count_nonzero(starts)
    return found
