"""The work of the tokenize stage's workers: convert a batch of raw rows to arrays of tokens.

Everything that depends on a single row happens here, so the output is the same for any number of workers.
"""

import hashlib
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.config.schema import Tokenize
from pipeline_lib.config.section import MOST_TOKENS
from pipeline_lib.core.errors import DataError, Interrupted
from pipeline_lib.core.files import canonical_json
from pipeline_lib.core.text import how_to_install, redact
from pipeline_lib.data.chat_template import ChatTemplate
from pipeline_lib.data.conversations import BadRow, Content, Message, Reason, Text, WrongFile
from pipeline_lib.data.encode import Drop, Encoder, Rendered, Sample
from pipeline_lib.data.keys import KeyCounts
from pipeline_lib.data.layouts import Layout, detect, to_content
from pipeline_lib.data.ledger import Encoded, TooLong
from pipeline_lib.data.pool import Guard, Limits, LossCause, Pool, WorkerLost
from pipeline_lib.data.read_files import EXCERPT_CHARS, Rejected, excerpt, printable, rejected, value_of
from pipeline_lib.data.read_json import KEPT_BYTES, RawRow, RowPosition

# Detection of duplicate conversations: equal ones by a 64-bit hash, similar ones by MinHash.
# Both run in the order of the data, so the first of several duplicates stays, on every machine. Similar conversations
# need the library datasketch (the extra `dedup`).

PERMUTATIONS = 128  # length of a signature; the error of an estimated similarity is at most about 1 / sqrt(128) = 0.09
SHINGLE_CHARS = 5
SHINGLES_AT_ONCE = 1 << 14  # each takes 1 kB while it is hashed


class ExactDuplicates:
    """The hashes seen so far, in sorted arrays of doubling size: 8 bytes a hash, 16 while arrays are merged."""

    def __init__(self) -> None:
        """Start without hashes."""
        self._levels: list[NDArray[np.uint64]] = []  # the largest first

    def seen(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of `hashes`, uint64[n], occurred before, here or in an earlier call; remember all of them."""
        is_known = np.ones(len(hashes), dtype=np.bool_)
        is_known[np.unique(hashes, return_index=True)[1]] = False
        for level in self._levels:
            places = np.minimum(np.searchsorted(level, hashes), len(level) - 1)
            is_known |= level[places] == hashes
        if not is_known.all():
            new = np.sort(hashes[~is_known])
            while self._levels and len(self._levels[-1]) < 2 * len(new):
                new = np.concatenate([self._levels.pop(), new])
                new.sort(kind="stable")  # merges two sorted runs
            self._levels.append(new)
        return is_known


class NearDuplicates:
    """The signatures of conversations that are similar to no earlier one, about 1 kB each."""

    def __init__(self, similarity: float) -> None:
        """Start without signatures; `similarity` is the least estimated Jaccard similarity of near duplicates.

        Raises DataError without datasketch.
        """
        sketch = _datasketch()
        self._similarity = similarity
        self._min_hash = sketch.MinHash
        self._index = sketch.MinHashLSH(threshold=similarity, num_perm=PERMUTATIONS)
        self._signatures: list[NDArray[Any]] = []

    def seen(self, signatures: NDArray[Any], skip: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which of `signatures`, [n, PERMUTATIONS], are similar to an earlier one; ignore those in `skip`."""
        is_known = np.zeros(len(signatures), dtype=np.bool_)
        for number in np.flatnonzero(~skip).tolist():
            signature = signatures[number]
            sketch = self._min_hash(num_perm=PERMUTATIONS)
            sketch.hashvalues = signature
            earlier = (self._signatures[key] for key in self._index.query(sketch))
            is_known[number] = any(float(np.mean(signature == other)) >= self._similarity for other in earlier)
            if not is_known[number]:
                self._index.insert(len(self._signatures), sketch)
                self._signatures.append(signature)
        return is_known


def signature_of(text: str) -> NDArray[Any]:
    """Return the MinHash signature of the character 5-grams of `text`, [PERMUTATIONS].

    Raises DataError without datasketch.
    """
    sketch = _datasketch().MinHash(num_perm=PERMUTATIONS)
    count = max(1, len(text) - SHINGLE_CHARS + 1)
    for first in range(0, count, SHINGLES_AT_ONCE):
        starts = range(first, min(count, first + SHINGLES_AT_ONCE))
        shingles = {text[start : start + SHINGLE_CHARS] for start in starts}
        sketch.update_batch([shingle.encode(errors="replace") for shingle in shingles])
    signature: NDArray[Any] = sketch.hashvalues
    return signature


def _datasketch() -> Any:
    try:
        import datasketch  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(
            "tokenize.near_duplicates needs the library datasketch, which is not installed: "
            f"{how_to_install('dedup')}, or leave the key out"
        ) from error
    return datasketch


# The tasks of the workers. Their state is the encoder of the model.

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
    is_slow: bool = False  # tokenize each row by itself, so that the one that exceeds the limits is known

    def __call__(self, state: Encoder, guard: Guard) -> Encoded:
        """Encode the rows.

        Raises DataError, naming the row, if the template fails, or if the file mixes formats or is preference data.
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
                prints.append(_prints(content, turns, state.settings))
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
        """Return the place of the row at `position` in the batch, or the range of all rows if it is None."""
        if position is not None:
            return str(self.rows[position].place)
        first, last = self.rows[0].place, self.rows[-1].place
        return str(first) if first == last else f"{first} to {last.line or last.row}"

    def _content(self, row: RawRow, keys: KeyCounts) -> Content:
        value = value_of(row)
        if self.layout is None:
            detect(value, self.columns)  # raises again, as it did when the parent looked for the format
            raise BadRow(Reason.WRONG_FORMAT, "the format of the file is not known")
        if self.first is not None and (row_format := detect(value, self.columns)) != self.layout.format:
            raise DataError(
                f"{row.place}: this row is {row_format}, and the file began as {self.layout.format}: set `format` in "
                f"{self.source_key} to use the rows of one of the two, or put them into files of their own\n"
                f"  {self.first}\n  {shown(row)}"
            )
        return to_content(value, self.layout, keys)


def size_of(row: RawRow) -> int:
    """Return the approximate size of a row in bytes."""
    return text_size(row.value) if row.text is None else len(row.text)


def _size_of_rendered(turns: Sequence[Rendered]) -> int:
    return sum(len(turn.full) + len(turn.prompt or "") for turn in turns)


def text_size(value: Any) -> int:
    """Return the approximate size of `value`: the characters of its strings, and 8 for any other scalar."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(text_size, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(text_size, value))
    return 8


# What a row may cost is limited, and a row that costs more is put aside, if the config allows unusable rows.

MOST_OVER_LIMITS = 8  # rows put aside; more of them show that the template is at fault, and each takes seconds


class PuttingAside:
    """What runs in the place of a batch whose worker was lost: the batch without the row that exceeded the limits."""

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
    """Return the chat template's default of `enable_thinking`: a task, because a template is untrusted code."""
    with guard.at(0):
        return state.thinking_default()


def lacks_generation_prompt(state: Encoder, guard: Guard) -> bool:
    """Return whether the chat template writes no generation prompt: a task, because a template is untrusted code."""
    with guard.at(0):
        return state.lacks_generation_prompt()


def hints_of(drops: Sequence[str], state: Encoder, guard: Guard) -> dict[str, str]:
    """Return the remedy for each reason why samples are dropped: a task, because the template decides some."""
    with guard.at(0):
        return {reason: state.hint(Drop(reason)) for reason in drops}


def wrong_file(row: RawRow, wrong: WrongFile, source_key: str) -> DataError:
    """Return the error for a row that shows that its file cannot be used; `source_key` is its source's key."""
    return DataError(f"{row.place}: the row {wrong} ({source_key})\n  {shown(row)}")


def shown(row: RawRow) -> str:
    """Return the place and the beginning of `row`, for messages."""
    return f"{row.place}: {excerpt(row)}"


def samples_hash(content: Content, rendered: Sequence[Rendered]) -> int:
    """Return a 64-bit hash of the rendered turns: equal for equal prompts and trained text, whatever the row's format.

    It covers each turn to be trained on, whether its sample is kept or dropped, so equal hashes hide no loss. Without
    such a turn, it is a hash of the content itself.
    """
    turns = [(turn.prompt, turn.full, turn.thinking, *filter(None, [turn.drop])) for turn in rendered]
    return _hash(canonical_json(turns or vars(content)))


def prompt_hash(content: Content, shared_system: str | None = None) -> int:
    """Return a 64-bit hash of the first question, or of the text; equal for all rows and answers of a conversation.

    A row's own system message is part of the question, because it may contain the document that is asked about.
    `shared_system` is not part of it: rows without a system message get it, and must equal rows that contain it.
    Surrounding whitespace and Unicode composition do not matter, because templates trim and tokenizers normalize.
    """
    if isinstance(content, Text):
        return _hash(_composed(content.text))
    question = _composed(next(message["content"] for message in content.messages if message["role"] == "user"))
    first = content.messages[0]
    system = _composed(first["content"]) if first["role"] == "system" else ""
    is_own = system not in ("", _composed(shared_system or ""))
    return _hash(canonical_json([system, question]) if is_own else question)


def _composed(text: str) -> str:
    """Return `text` without surrounding whitespace in NFC, in linear time: Python sorts marks in quadratic time."""
    text = text.strip()
    if unicodedata.is_normalized("NFC", text):
        return text
    decomposed = text.translate({ord(letter): unicodedata.normalize("NFD", letter) for letter in set(text)})
    in_order: list[str] = []
    for is_mark, run in groupby(decomposed, key=_is_mark):
        letters = list(run)
        if is_mark:
            letters.sort(key=unicodedata.combining)
        in_order += letters
    return unicodedata.normalize("NFC", "".join(in_order))


def _is_mark(letter: str) -> bool:
    return unicodedata.combining(letter) != 0


class Prints(NamedTuple):
    """What rows are compared by."""

    content: int  # `samples_hash`
    prompt: int  # `prompt_hash`
    signature: NDArray[Any] | None  # of its text, if near duplicates are looked for


def _prints(content: Content, turns: Sequence[Rendered], settings: Tokenize) -> Prints:
    signature = None if settings.near_duplicates is None else signature_of(_text_of(content))
    return Prints(samples_hash(content, turns), prompt_hash(content, settings.system), signature)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _forged(row: RawRow, content: Content, token: str) -> Rejected:
    whole = content.text if isinstance(content, Text) else canonical_json([content.messages, content.tools])
    text = redact(whole)
    start = max(0, text.find(token) - EXCERPT_CHARS // 2)
    beginning = printable(text[start : start + EXCERPT_CHARS])
    return Rejected(Reason.CONTROL_TOKEN, f"the text holds {token}", row.place, beginning)


def _too_long(
    encoder: Encoder,
    places: Sequence[RowPosition],
    rendered: Sequence[Sequence[Rendered]],
    outcomes: Sequence[Sequence[Sample | Drop]],
) -> TooLong:
    """Return the rows with samples that are too long, encoded again without a limit to know their length."""
    rows = [number for number, samples in enumerate(outcomes) if Drop.OVER_LONG in samples]
    unlimited = copy(encoder)
    unlimited.settings = encoder.settings.model_copy(update={"max_tokens": NO_LIMIT_TOKENS})
    found = TooLong()
    for number, whole in zip(rows, unlimited.encode_rendered([rendered[number] for number in rows]), strict=True):
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
    numbered = [(number, outcome) for number, samples in enumerate(outcomes) for outcome in samples]
    samples = [(number, outcome) for number, outcome in numbered if isinstance(outcome, Sample)]
    signatures = None
    if state.settings.near_duplicates is not None:
        rows = [row.signature for row in prints if row.signature is not None]
        signatures = np.stack(rows) if rows else np.zeros((0, PERMUTATIONS), dtype=np.uint32)
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
        signatures=signatures,
        drops=[(number, outcome.value) for number, outcome in numbered if isinstance(outcome, Drop)],
        conversations=np.array([number for number, _ in samples], dtype=np.int32),
        lengths=np.array([len(sample.tokens) for _, sample in samples], dtype=np.int64),
        truncated=np.array([sample.truncated for _, sample in samples], dtype=np.bool_),
        split=np.array([sample.split for _, sample in samples], dtype=np.bool_),
        asked_to_think=np.array(
            [[sample.asked_to_think.count(mode) for mode in (False, True)] for _, sample in samples], dtype=np.int32
        ).reshape(-1, 2),
        tokens=np.concatenate([np.zeros(0, dtype=np.int32), *(sample.tokens for _, sample in samples)]),
        supervised=np.concatenate([np.zeros(0, dtype=np.bool_), *(sample.supervised for _, sample in samples)]),
        how=state.how,
    )


def _turns_found(
    rendered: Sequence[Sequence[Rendered]], outcomes: Sequence[Sequence[Sample | Drop]]
) -> NDArray[np.int32]:
    """Return how many turns of each conversation are in a sample or a drop, counted by supervised spans.

    The turns of an over-long sample cannot be counted, so all turns of its conversation are assumed to be present.
    """
    found = np.zeros(len(rendered), dtype=np.int32)
    for number, samples in enumerate(outcomes):
        kept = [outcome for outcome in samples if isinstance(outcome, Sample)]
        if Drop.OVER_LONG in samples or any(sample.truncated or sample.split for sample in kept):
            found[number] = len(rendered[number])
            continue
        found[number] = len(samples) - len(kept)
        for sample in kept:  # one run of supervised tokens for each turn, because unsupervised tokens separate turns
            starts = np.diff(sample.supervised, prepend=False) & sample.supervised
            found[number] += np.count_nonzero(starts)
    return found


def _text_of(content: Content) -> str:
    """Return the messages, thinking and calls of `content` as text, without template text and roles.

    Assistant messages that are not trained on are left out, so that they do not make conversations similar.
    """
    if isinstance(content, Text):
        return content.text
    said = []
    for number, message in enumerate(content.messages):
        if message["role"] == "assistant" and number not in content.supervised:
            continue
        said += [message.get("reasoning_content", ""), message["content"]]
        said += [canonical_json(call["function"]) for call in message.get("tool_calls") or ()]
    return "\n".join(text for text in said if text)


# Rendering through a model's chat template in a limited process, and the errors for a lost worker.
# jinja2 computes constant expressions while it compiles a template, so a template is compiled within the limits too.


def _no_state() -> None:
    """Return the state of a worker whose task compiles the template: what a worker loads has no limits."""


def _check_template(folder: Path, state: None, guard: Guard) -> None:
    question: Message = {"role": "user", "content": "?"}
    with guard.at(0):
        template = ChatTemplate.load(folder)
        with suppress(DataError):  # it may want another conversation
            template.render([question], add_generation_prompt=True)


def check_template(folder: Path, limits: Limits | None = None) -> None:
    """Compile the chat template of the model in `folder` in a limited process, and render a question.

    Raises DataError if it does not compile or exceeds its limits, Interrupted if the process is killed.
    """
    with losses_explained(folder), Pool(_no_state, 1, limits) as pool:
        list(pool.map([partial(_check_template, folder)]))


def _prompts(
    load: Callable[[], ChatTemplate],
    conversations: Sequence[Sequence[Message]],
    variables: Mapping[str, Any],
    state: None,
    guard: Guard,
) -> list[str]:
    with guard.at(0):
        template = load()
    prompts = []
    for number, messages in enumerate(conversations):
        with guard.at(number):
            prompts.append(template.render(messages, add_generation_prompt=True, **variables))
    return prompts


def render_prompts(
    folder: Path,
    conversations: Sequence[Sequence[Message]],
    limits: Limits | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **variables: Any,
) -> list[str]:
    """Return the generation prompt of each conversation for the model in `folder`, rendered in a limited process.

    `variables` are passed to the template, and `kwargs` too, which it has to read. Raises DataError if the template
    fails or exceeds its limits, Interrupted if the process is killed.
    """
    load = partial(ChatTemplate.load, folder, kwargs)
    with losses_explained(folder), Pool(_no_state, 1, limits) as pool:
        (prompts,) = pool.map([partial(_prompts, load, conversations, variables)])
    return prompts


def end_of_turn(folder: Path, limits: Limits | None = None) -> int | None:
    """Return the id of the token that ends an answer of the model in `folder`, found in a limited process.

    Return None if the chat template ends no answer with a control token, fails or exceeds its limits: then no
    conversation was trained. Raises Interrupted if the process is killed.
    """
    load = partial(Encoder, folder, Tokenize(max_tokens=MOST_TOKENS), fast=False)
    try:
        with losses_explained(folder), Pool(load, 1, limits) as pool:
            (end,) = pool.map([_end_of_turn])
    except DataError:
        return None
    return end


def _end_of_turn(state: Encoder, guard: Guard) -> int | None:
    with guard.at(0):
        return state.end_of_turn()


def refuse_unrendered_defaults(folder: Path, settings: Tokenize, limits: Limits | None = None) -> None:
    """Raise DataError if the template in `folder` leaves out the system message or the tools of `settings`.

    It is rendered in a limited process. Raises Interrupted if the process is killed.
    """
    with losses_explained(folder), Pool(partial(Encoder, folder, settings, fast=False), 1, limits) as pool:
        list(pool.map([_refuse_unrendered_defaults]))


def _refuse_unrendered_defaults(state: Encoder, guard: Guard) -> None:
    with guard.at(0):
        state.refuse_unrendered_defaults()


@contextmanager
def losses_explained(model: Path) -> Iterator[None]:
    """Convert WorkerLost into DataError or Interrupted, with the template or row in work and a remedy."""
    try:
        yield
    except WorkerLost as lost:
        place = f"{lost.task.place_of(lost.position)}: " if isinstance(lost.task, RowBatch) else ""
        if lost.cause is LossCause.KILLED:
            raise Interrupted(
                f"{place}a worker process was {lost.detail}, most likely because memory ran out: give the job more, "
                "or fewer cores, and run again"
            ) from lost
        if lost.position is None:
            doing, remedy = "tokenizing", "Look for rows of many megabytes there, or for a template that writes as much"
        else:
            doing = f"rendering the chat template of {model}"
            remedy = "Take the template of the model's publisher"
            if place:
                remedy = (
                    f"Look at the row; if it is in order, the template is not. {remedy}, or allow such rows to be put "
                    "aside with tokenize.max_quarantined_fraction"
                )
        raise DataError(f"{place}a worker process was ended while {doing}: {lost.detail}. {remedy}") from lost
