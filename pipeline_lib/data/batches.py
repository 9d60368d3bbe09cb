"""What the workers of the tokenize stage do: a batch of raw rows in, arrays of tokens out."""

import hashlib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.config.schema import MOST_TOKENS, Tokenize
from pipeline_lib.core.errors import DataError, Interrupted
from pipeline_lib.core.files import canonical_json
from pipeline_lib.core.text import redact
from pipeline_lib.data.chat_template import ChatTemplate
from pipeline_lib.data.conversations import BadRow, Content, Conversation, Message, Reason, Text, WrongFile
from pipeline_lib.data.encode import Drop, Encoder, Rendered, Sample
from pipeline_lib.data.layouts import KeyCounts, Layout, detect, to_content
from pipeline_lib.data.ledger import Encoded
from pipeline_lib.data.pool import Cause, Guard, Limits, Pool, WorkerLost
from pipeline_lib.data.read_files import EXCERPT_CHARS, Place, RawRow, Rejected, excerpt, printable, rejected, value_of

# Finds conversations that were seen before: equal ones by a 64-bit hash, similar ones by MinHash.
#
# Both are asked in the order of the data, so the first of several is the one that stays, on every machine.
# Similar ones need the library datasketch (the extra `dedup`).

PERMUTATIONS = 128  # of a signature: the error of an estimated similarity is about 1 / sqrt of it, 0.09 at the most
SHINGLE_CHARS = 5


class ExactDuplicates:
    """The hashes seen so far, in sorted arrays that double in size: 8 bytes each, and 16 while two are merged."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self._levels: list[NDArray[np.uint64]] = []  # the largest first

    def seen(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of `hashes`, uint64[n], occurred before, here or in an earlier call; all of them are remembered."""
        found = np.ones(len(hashes), dtype=np.bool_)
        found[np.unique(hashes, return_index=True)[1]] = False
        for level in self._levels:
            places = np.minimum(np.searchsorted(level, hashes), len(level) - 1)
            found |= level[places] == hashes
        if not found.all():
            self._remember(np.sort(hashes[~found]))
        return found

    def _remember(self, level: NDArray[np.uint64]) -> None:
        while self._levels and len(self._levels[-1]) < 2 * len(level):
            level = np.concatenate([self._levels.pop(), level])
            level.sort(kind="stable")  # two sorted runs: a merge
        self._levels.append(level)


class NearDuplicates:
    """The signatures of the conversations that were like no earlier one. About 1 kB each."""

    def __init__(self, similarity: float) -> None:
        """Conversations of an estimated Jaccard similarity of at least `similarity` are alike. Raises DataError."""
        sketch = _datasketch()
        self._similarity = similarity
        self._min_hash = sketch.MinHash
        self._index = sketch.MinHashLSH(threshold=similarity, num_perm=PERMUTATIONS)
        self._signatures: list[NDArray[Any]] = []

    def seen(self, signatures: NDArray[Any], skip: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which of `signatures`, [n, PERMUTATIONS], are like an earlier one; those in `skip` are left alone."""
        found = np.zeros(len(signatures), dtype=np.bool_)
        for number in np.flatnonzero(~skip).tolist():
            signature = signatures[number]
            sketch = self._min_hash(num_perm=PERMUTATIONS)
            sketch.hashvalues = signature
            candidates = self._index.query(sketch)
            found[number] = any(self._alike(signature, self._signatures[key]) for key in candidates)
            if not found[number]:
                self._index.insert(len(self._signatures), sketch)
                self._signatures.append(signature)
        return found

    def _alike(self, one: NDArray[Any], other: NDArray[Any]) -> bool:
        return float(np.mean(one == other)) >= self._similarity


def signature_of(text: str) -> NDArray[Any]:
    """The MinHash signature of the 5-grams of `text`, [PERMUTATIONS]. Raises DataError without datasketch."""
    shingles = {text[start : start + SHINGLE_CHARS] for start in range(max(1, len(text) - SHINGLE_CHARS + 1))}
    sketch = _datasketch().MinHash(num_perm=PERMUTATIONS)
    sketch.update_batch([shingle.encode(errors="replace") for shingle in shingles])
    signature: NDArray[Any] = sketch.hashvalues
    return signature


def _datasketch() -> Any:
    try:
        import datasketch  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(
            "tokenize.near_duplicates needs the library datasketch, which is not installed: "
            "pip install 'qwen3-pipeline[dedup]', or leave the key out"
        ) from error
    return datasketch


# What the workers of the tokenize stage do: a batch of raw rows in, arrays of tokens out.
#
# Everything that depends on one row alone happens here, so that any number of workers makes the same bytes.

NO_LIMIT_TOKENS = 2**31 - 1


class Encoding:
    """What a worker has: the encoder of a model, and the settings it came from."""

    def __init__(self, folder: Path, settings: Tokenize, fast: bool = True) -> None:
        """Load both from the model in `folder`. Raises DataError."""
        self.settings = settings
        self.encoder = Encoder(folder, settings, fast)


@dataclass(frozen=True)
class Batch:
    """Consecutive rows of one file, and how they are read."""

    rows: Sequence[RawRow]
    source: int  # number of the entry in data.train
    file: int  # number of the file in the source
    layout: Layout | None  # None: no row of the file was understood so far
    columns: dict[str, str]
    first: str | None = None  # the row that settled the format, where it was not given

    def run(self, state: Encoding, guard: Guard) -> Encoded:
        """Encode the rows.

        Raises DataError, naming the row, if the template fails, or if the file mixes formats or is preference data.
        """
        keys = KeyCounts()
        contents: list[Content] = []
        rendered: list[list[Rendered]] = []
        places: list[Place] = []
        bad_rows: list[Rejected] = []
        for position, row in enumerate(self.rows):
            try:
                content = self._content(row, keys)
            except BadRow as bad:
                bad_rows.append(rejected(row, bad))
                continue
            except WrongFile as wrong:
                raise wrong_file(row, wrong, self.source) from wrong
            if (token := state.encoder.control_token_in(content)) is not None:
                bad_rows.append(_forged(row, content, token))
                continue
            with guard.at(position):
                rendered.append(_render(state.encoder, row, content))
            contents.append(content)
            places.append(row.place)
        outcomes = state.encoder.encode_rendered(rendered)
        if state.settings.over_long == "error":
            _refuse_over_long(state.encoder, places, rendered, outcomes)
        return _encoded(self, bad_rows, keys, contents, rendered, outcomes, state)

    def place_of(self, position: int | None) -> str:
        """Where a row of the batch lies; all of them if none is given."""
        if position is not None:
            return str(self.rows[position].place)
        first, last = self.rows[0].place, self.rows[-1].place
        return str(first) if first == last else f"{first} to {last.line or last.row}"

    def _content(self, row: RawRow, keys: KeyCounts) -> Content:
        value = value_of(row)
        if self.layout is None:
            detect(value, self.columns)  # as it did before, it raises
            raise BadRow(Reason.WRONG_FORMAT, "the format of the file is not known")
        if self.first is not None:
            self._check_format(row, value, self.layout)
        return to_content(value, self.layout, keys)

    def _check_format(self, row: RawRow, value: Any, layout: Layout) -> None:
        """A file whose format was guessed has to hold rows of that format alone."""
        found = detect(value, self.columns)
        if found != layout.format:
            raise DataError(
                f"{row.place}: this row is {found}, and the file began as {layout.format}: set `format` in "
                f"data.train[{self.source}] to use the rows of one of the two, or put them into files of their own\n"
                f"  {self.first}\n  {shown(row)}"
            )


@dataclass(frozen=True)
class ThinkingDefault:
    """Asks for the chat template's default of `enable_thinking`; it is code of others, so a worker answers."""

    def run(self, state: Encoding, guard: Guard) -> str | None:
        """`on`, `off`, `other`, or None where the template has no such switch."""
        with guard.at(0):
            return state.encoder.thinking_default()


@dataclass(frozen=True)
class Advice:
    """Asks what to do about dropped samples; the template decides it, so a worker answers."""

    drops: Sequence[str]

    def run(self, state: Encoding, guard: Guard) -> dict[str, str]:
        """The hint for each reason."""
        with guard.at(0):
            return {reason: state.encoder.hint(Drop(reason)) for reason in self.drops}


def wrong_file(row: RawRow, wrong: WrongFile, source: int) -> DataError:
    """The error for a row that shows what is wrong with its file."""
    return DataError(f"{row.place}: the row {wrong} (data.train[{source}])\n  {shown(row)}")


def shown(row: RawRow) -> str:
    """A row's place and how it begins, for messages."""
    return f"{row.place}: {excerpt(row)}"


def samples_hash(content: Content, rendered: Sequence[Rendered]) -> int:
    """64 bits of what `content` is rendered to: equal if the same is asked and trained on, however it was written.

    Each turn to be trained on is in it, be its sample kept or dropped, so equal hashes hide no loss. Where there is no
    such turn, it is the content itself.
    """
    turns = [(turn.prompt, turn.full, turn.thinking, *filter(None, [turn.drop])) for turn in rendered]
    return _hash(canonical_json(turns or vars(content)))


def prompt_hash(content: Content, shared_system: str | None = None) -> int:
    """64 bits of the first question, or of the text: what all rows and answers of one conversation have in common.

    A system message that the row itself brings is part of the question: it may hold the document that is asked about.
    `shared_system` is not: conversations that bring none are given it, and are equal to those that bring it.
    Templates trim space and tokenizers compose characters, so neither counts.
    """
    if isinstance(content, Text):
        return _hash(_composed(content.text))
    question = _composed(next(message["content"] for message in content.messages if message["role"] == "user"))
    first = content.messages[0]
    system = _composed(first["content"]) if first["role"] == "system" else ""
    is_own = system not in ("", _composed(shared_system or ""))
    return _hash(canonical_json([system, question]) if is_own else question)


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text.strip())


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _render(encoder: Encoder, row: RawRow, content: Content) -> list[Rendered]:
    try:
        return encoder.render(content)
    except DataError as error:
        raise DataError(f"{row.place}: {error}") from error


def _forged(row: RawRow, content: Content, token: str) -> Rejected:
    """Text that holds a control token could end a turn or forge another: it is data, and has to stay data."""
    whole = content.text if isinstance(content, Text) else canonical_json([content.messages, content.tools])
    text = redact(whole)
    start = max(0, text.find(token) - EXCERPT_CHARS // 2)
    beginning = printable(text[start : start + EXCERPT_CHARS])
    return Rejected(Reason.CONTROL_TOKEN, f"the text holds {token}", row.place, beginning)


def _refuse_over_long(
    encoder: Encoder,
    places: Sequence[Place],
    rendered: Sequence[Sequence[Rendered]],
    outcomes: Sequence[Sequence[Sample | Drop]],
) -> None:
    """Raise DataError for the first sample that is longer than allowed, with its length."""
    for place, turns, samples in zip(places, rendered, outcomes, strict=True):
        if Drop.OVER_LONG in samples:
            unlimited = copy(encoder)
            unlimited.settings = encoder.settings.model_copy(update={"max_tokens": NO_LIMIT_TOKENS})
            (whole,) = unlimited.encode_rendered([turns])
            length = max(len(sample.tokens) for sample in whole if isinstance(sample, Sample))
            raise DataError(
                f"{place}: a sample of {length:,} tokens is longer than tokenize.max_tokens "
                f"({encoder.settings.max_tokens:,}), and tokenize.over_long is error: raise max_tokens, shorten the "
                "row, or choose drop, truncate or split"
            )


def _encoded(
    batch: Batch,
    bad_rows: Sequence[Rejected],
    keys: KeyCounts,
    contents: Sequence[Content],
    rendered: Sequence[Sequence[Rendered]],
    outcomes: Sequence[Sequence[Sample | Drop]],
    state: Encoding,
) -> Encoded:
    numbered = [(number, outcome) for number, samples in enumerate(outcomes) for outcome in samples]
    samples = [(number, outcome) for number, outcome in numbered if isinstance(outcome, Sample)]
    return Encoded(
        source=batch.source,
        file=batch.file,
        format=batch.layout.format if batch.layout else None,
        rows=len(batch.rows),
        rejected=bad_rows,
        keys=keys,
        place=batch.place_of(None),
        content=np.array(list(map(samples_hash, contents, rendered)), dtype=np.uint64),
        prompts=np.array([prompt_hash(content, state.settings.system) for content in contents], dtype=np.uint64),
        turns=np.array([len(turns) for turns in rendered], dtype=np.int32),
        turns_found=_turns_found(rendered, outcomes),
        signatures=_signatures(contents) if state.settings.near_duplicates is not None else None,
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
        how=state.encoder.how,
    )


def _turns_found(
    rendered: Sequence[Sequence[Rendered]], outcomes: Sequence[Sequence[Sample | Drop]]
) -> NDArray[np.int32]:
    """How many turns of each conversation are in a sample or a drop, counted from what is supervised.

    Of a sample that is over-long, nothing tells how many turns it had: they are taken to be all there.
    """
    found = np.zeros(len(rendered), dtype=np.int32)
    for number, samples in enumerate(outcomes):
        if any(outcome is Drop.OVER_LONG or _is_cut(outcome) for outcome in samples):
            found[number] = len(rendered[number])
        else:
            found[number] = sum(1 if isinstance(outcome, Drop) else _spans(outcome) for outcome in samples)
    return found


def _is_cut(outcome: Sample | Drop) -> bool:
    return isinstance(outcome, Sample) and (outcome.truncated or outcome.split)


def _spans(sample: Sample) -> int:
    """The stretches of supervised tokens: one for each turn, since somebody else speaks between two."""
    return int(np.count_nonzero(np.diff(sample.supervised, prepend=False) & sample.supervised))


def _signatures(contents: Sequence[Content]) -> NDArray[Any]:
    signatures = [signature_of(_text_of(content)) for content in contents]
    return np.stack(signatures) if signatures else np.zeros((0, PERMUTATIONS), dtype=np.uint32)


def _text_of(content: Content) -> str:
    """What is said, thought and called, without what all conversations have in common.

    What the assistant says is left out where it is not trained on, so that such a turn is not taken for one that is.
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


# Rendering through a model's chat template where it can do no harm, and what to say if it tries.


@dataclass(frozen=True)
class _Prompts:
    conversations: Sequence[Sequence[Message]]
    variables: Mapping[str, Any]

    def run(self, state: ChatTemplate, guard: Guard) -> list[str]:
        """The prompt of each conversation."""
        prompts = []
        for number, messages in enumerate(self.conversations):
            with guard.at(number):
                prompts.append(state.render(messages, add_generation_prompt=True, **self.variables))
        return prompts


def render_prompts(
    folder: Path, conversations: Sequence[Sequence[Message]], limits: Limits | None = None, **variables: Any
) -> list[str]:
    """What the model in `folder` is given to answer each conversation, rendered in a limited process of its own.

    `variables` are passed to the template. Raises DataError if the template fails or outgrows its limits,
    Interrupted if the process is killed.
    """
    with losses_explained(folder), Pool(partial(ChatTemplate.load, folder), 1, limits) as pool:
        (prompts,) = pool.map([_Prompts(conversations, variables)])
    return prompts


@dataclass(frozen=True)
class _EndOfTurn:
    def run(self, state: Encoding, guard: Guard) -> int | None:
        """The last token of an answer, if there is one."""
        # It thinks, because some templates let every turn begin with thinking.
        answer: Message = {"role": "assistant", "content": "!", "reasoning_content": "?"}
        conversation = Conversation([{"role": "user", "content": "?"}, answer], tools=None, supervised=(1,))
        with guard.at(0):
            sample = state.encoder.encode([conversation])[0][-1]
        return int(sample.tokens[-1]) if isinstance(sample, Sample) else None


def end_of_turn(folder: Path, limits: Limits | None = None) -> int:
    """The id of the token that ends an answer of the model in `folder`, found in a limited process of its own.

    Raises DataError if there is none, or if the template fails or outgrows its limits; Interrupted if the process is
    killed.
    """
    load = partial(Encoding, folder, Tokenize(max_tokens=MOST_TOKENS), fast=False)
    with losses_explained(folder), Pool(load, 1, limits) as pool:
        (end,) = pool.map([_EndOfTurn()])
    if end is None:
        raise DataError(f"{folder}: the chat template has no end of turn")
    return end


@contextmanager
def losses_explained(model: Path) -> Iterator[None]:
    """Turn the loss of a worker into an error that says which template and row it was at, and what to do."""
    try:
        yield
    except WorkerLost as lost:
        place = f"{lost.task.place_of(lost.position)}: " if isinstance(lost.task, Batch) else ""
        if lost.cause is Cause.KILLED:
            raise Interrupted(
                f"{place}a worker process was {lost.detail}, most likely because memory ran out: give the job more, "
                "or fewer cores, and run again"
            ) from lost
        if lost.position is None:
            doing, remedy = "tokenizing", "Look for rows of many megabytes there, or for a template that writes as much"
        else:
            doing = f"rendering the chat template of {model}"
            remedy = "Look at the row; if it is in order, the template is not: take that of the model's publisher"
        raise DataError(f"{place}a worker process was ended while {doing}: {lost.detail}. {remedy}") from lost
