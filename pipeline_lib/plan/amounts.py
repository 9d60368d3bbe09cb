"""The amount of training data before there are blocks, estimated from local files' first rows."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from pipeline_lib.config.content import data_files
from pipeline_lib.config.schema import Config, FileData, Tokenize
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.conversations import Content, Text
from pipeline_lib.data.first_rows import Stamp, first_rows, stamp_of
from pipeline_lib.data.thinking import thinking_of, without_thinking
from pipeline_lib.plan.workload import assumed_workload
from pipeline_lib.records.plan import Workload

_READ_ROWS = 1024  # of the files of a source together
_READ_ROWS_OF_FILE = 64  # of each at least
_READ_FILES = 20  # of a source; the others are extrapolated by their sizes
_SMALL_VOCABULARY = 16_384  # as the demo's, which cuts words into more tokens
_MESSAGE_TOKENS = 5  # that the chat template adds to a message: its role, its start and its end
_THOUGHT_TOKENS = 4  # and to an answer: an empty thinking block
_END_TOKENS = 1  # of the message, which are trained on


@dataclass(frozen=True)
class _Ratio:
    """Tokens per byte of UTF-8, and per character of three bytes or more, counted apart."""

    of_byte: float
    of_cjk: float


# Fewest, expected and most. English prose has 4 to 5 bytes a token, code and numbers fewer. Qwen3's
# vocabulary has 0.54 tokens for a character of modern Chinese, 0.77 of old plays, 0.63 of Japanese.
# The demo's vocabulary has no such characters, so each is three tokens; a small one made for them
# has about one.
_RATIOS = (_Ratio(1 / 5.5, 0.45), _Ratio(1 / 4.0, 0.75), _Ratio(1 / 2.5, 1.1))
_RATIOS_OF_SMALL = (_Ratio(1 / 3.0, 1.0), _Ratio(1 / 2.0, 3.0), _Ratio(1 / 1.0, 3.5))
_CJK = re.compile(
    "[\u1100-\u11ff\u2e80-\ua4cf\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U00020000-\U0003ffff]+"
)


@dataclass(frozen=True)
class Amount:
    """Samples of training data, their tokens, supervised ones, and the sum of squared lengths."""

    samples: float = 0.0
    tokens: float = 0.0
    supervised: float = 0.0
    squares: float = 0.0

    @property
    def tokens_per_sample(self) -> float:
        """The mean length of a sample."""
        return self.tokens / max(1.0, self.samples)

    @property
    def document_tokens(self) -> float:
        """The mean length of a sample weighted by tokens."""
        return self.squares / max(1.0, self.tokens)

    def __add__(self, other: "Amount") -> "Amount":
        """Return both together."""
        return Amount(
            self.samples + other.samples,
            self.tokens + other.tokens,
            self.supervised + other.supervised,
            self.squares + other.squares,
        )

    def __mul__(self, factor: float) -> "Amount":
        """Return so many times the same samples."""
        return Amount(
            self.samples * factor,
            self.tokens * factor,
            self.supervised * factor,
            self.squares * factor,
        )


_Source = tuple[float, tuple[Amount, ...]]  # the weight of a source, and what is in it


def expected_workload(config: Config, vocabulary: int | None) -> Workload:
    """Return the workload by the first rows of the files, or an assumption if some are not here.

    `vocabulary` is the size of the model's, None if it is not known.
    """
    assumed = assumed_workload(config)
    sources = _of_sources(config, vocabulary)
    amounts = _trained(config, sources)
    if amounts is None:
        return assumed
    expected = amounts[1]
    lengths = [amount.document_tokens for amount in amounts if amount.samples]
    positions = assumed.real_fraction * assumed.block_tokens
    # The weights are of the training.
    trained = len(config.data.train)
    held_out = config.data.held_out_fraction * sum(own[1].tokens for _, own in sources[:trained])
    held_out += sum(own[1].tokens for _, own in sources[trained:])
    return replace(
        assumed,
        is_estimated=True,
        supervised_fraction=assumed.real_fraction * expected.supervised / expected.tokens,
        document_tokens=expected.document_tokens,
        document_band=(min(lengths), max(lengths)),
        samples_per_block=max(1.0, positions / expected.tokens_per_sample),
        validation_blocks=math.ceil(held_out / positions),
    )


def amounts_of(config: Config, vocabulary: int | None) -> list[Amount] | None:
    """Return what an epoch trains on, with the fewest, expected and most tokens of the texts.

    None if some of the data is not in files that can be read here, or if no sample is expected.
    """
    return _trained(config, _of_sources(config, vocabulary))


def _trained(config: Config, sources: list[_Source]) -> list[Amount] | None:
    found = [Amount()] * len(_RATIOS)
    for weight, own in sources[: len(config.data.train)]:
        used = weight * (1 - config.data.held_out_fraction)
        found = [amount + one * used for amount, one in zip(found, own, strict=True)]
    return found if found[1].samples else None


def _of_sources(config: Config, vocabulary: int | None) -> list[_Source]:
    """Return all sources, held-out ones last; none if some file cannot be read here."""
    ratios = (
        _RATIOS_OF_SMALL if vocabulary is not None and vocabulary < _SMALL_VOCABULARY else _RATIOS
    )
    found = []
    for source in config.data.sources:
        if not isinstance(source, FileData):
            return []
        try:
            files = tuple((path, stamp_of(path)) for path in data_files(source.path, source.split))
        except (DataError, OSError):  # named where the files are hashed
            return []
        own = _of_source(source.model_dump_json(), config.tokenize.model_dump_json(), ratios, files)
        if own is None:
            return []
        found.append((source.weight, own))
    return found


@lru_cache(maxsize=256)
def _of_source(
    source_json: str,
    tokenize_json: str,
    ratios: tuple[_Ratio, ...],
    files: tuple[tuple[Path, Stamp], ...],
) -> tuple[Amount, ...] | None:
    """Return what is in `files` of a source, for each of `ratios`; None if nothing can be read.

    Cached: the experiments of a sweep share their files. Where `max_rows` are read, they are the
    first.
    """
    source = FileData.model_validate_json(source_json)
    tokenize = Tokenize.model_validate_json(tokenize_json)
    each = max(_READ_ROWS_OF_FILE, _READ_ROWS // max(1, len(files)))
    row_of = partial(
        _Row.of,
        system=_Length.of(tokenize.system or ""),
        tools=_Length.of(" ".join(tokenize.tools)),
    )
    left = float(source.max_rows or math.inf)
    found = (Amount(),) * len(ratios)
    all_bytes = 0
    read_bytes = 0
    for number, (path, stamp) in enumerate(files):
        all_bytes += stamp.size
        if number >= _READ_FILES or left <= 0:
            continue
        first = first_rows(path, source, each, row_of)
        rows = len(first.used) * first.times
        share = min(1.0, left / max(1.0, rows))
        left -= rows
        for row in first.used:
            own = row.amounts(tokenize, ratios)
            found = tuple(
                amount + one * (first.times * share) for amount, one in zip(found, own, strict=True)
            )
        read_bytes += stamp.size if first.used else 0
    if not read_bytes:
        return None
    others = all_bytes / read_bytes
    if source.max_rows:  # the files that were not read have some of the rows that are left, or none
        rows_read = source.max_rows - left
        others = min(others, max(1.0, source.max_rows / max(1.0, rows_read)))
    return tuple(amount * others for amount in found)


@dataclass(frozen=True)
class _Length:
    """The length of a text: Chinese, Japanese and Korean characters, UTF-8 bytes of the rest."""

    rest_bytes: int = 0
    cjk: int = 0

    def tokens(self, ratio: _Ratio) -> float:
        return self.rest_bytes * ratio.of_byte + self.cjk * ratio.of_cjk

    @classmethod
    def of(cls, text: str) -> "_Length":
        runs = _CJK.findall(text)
        cjk = sum(map(len, runs))
        cjk_bytes = sum(len(run.encode(errors="replace")) for run in runs)
        return cls(len(text.encode(errors="replace")) - cjk_bytes, cjk)

    @classmethod
    def of_json(cls, value: Any) -> "_Length":
        return cls.of(json.dumps(value, ensure_ascii=False, default=str)) if value else cls()


@dataclass(frozen=True)
class _Message:
    """A message's text with its calls, the thinking before it, and whether it is trained on."""

    role: str
    text: _Length
    calls: _Length
    thinking: _Length
    is_trained: bool


@dataclass(frozen=True)
class _Row:
    """The texts of a row: a raw text alone, or messages and tools."""

    raw: _Length
    tools: _Length
    messages: tuple[_Message, ...]

    @classmethod
    def of(cls, content: Content, system: _Length, tools: _Length) -> "_Row":
        """Return the texts of `content`; `system` and `tools` are for conversations without own."""
        if isinstance(content, Text):
            return cls(_Length.of(content.text), _Length(), ())
        messages = tuple(
            _Message(
                message["role"],
                _Length.of(without_thinking(message)["content"]),
                _Length.of_json(message.get("tool_calls")),
                _Length.of(thinking_of(message) if message["role"] == "assistant" else ""),
                number in content.supervised,
            )
            for number, message in enumerate(content.messages)
        )
        if system != _Length() and messages[0].role != "system":
            messages = (
                _Message("system", system, _Length(), _Length(), is_trained=False),
                *messages,
            )
        return cls(_Length(), _Length.of_json(content.tools) if content.tools else tools, messages)

    def amounts(self, tokenize: Tokenize, ratios: tuple[_Ratio, ...]) -> list[Amount]:
        """Return what the tokenize stage makes of the row, for each of `ratios`.

        A sample counts as dropped if even the fewest tokens are too many: the stage fails if more
        than a few are. Answers of one conversation share a sample under some chat templates: so it
        is with the fewest tokens, if that sample is not too long.
        """
        each = [list(self._samples(ratio, tokenize)) for ratio in ratios]
        fewest = each[0]
        found = [
            sum(
                (self._kept(*pair, tokenize) for pair in zip(samples, fewest, strict=True)),
                Amount(),
            )
            for samples in each
        ]
        if len(fewest) > 1 and fewest[-1].tokens <= tokenize.max_tokens:
            found[0] = replace(fewest[-1], supervised=sum(sample.supervised for sample in fewest))
        return found

    def _samples(self, ratio: _Ratio, tokenize: Tokenize) -> Iterator[Amount]:
        """Yield each sample's length: a raw text, or a conversation up to each trained answer."""
        if not self.messages:
            yield _sample(self.raw.tokens(ratio), self.raw.tokens(ratio))
            return
        tokens = self.tools.tokens(ratio)
        last = max(
            number for number, message in enumerate(self.messages) if message.role == "assistant"
        )
        for number, message in enumerate(self.messages):
            written = message.text.tokens(ratio) + message.calls.tokens(ratio)
            thought = 0.0 if tokenize.thinking == "strip" else message.thinking.tokens(ratio)
            tokens += written + _MESSAGE_TOKENS
            if message.is_trained and (tokenize.train_on != "last_assistant" or number == last):
                trained = written + _END_TOKENS + (thought if tokenize.thinking == "keep" else 0.0)
                yield _sample(tokens + thought + _THOUGHT_TOKENS, trained)

    def _kept(self, sample: Amount, fewest: Amount, tokenize: Tokenize) -> Amount:
        """Return what is left of a sample."""
        most = tokenize.max_tokens
        if sample.tokens <= most:
            return sample
        if tokenize.over_long == "split" and not self.messages:
            pieces = math.ceil(sample.tokens / most)
            return replace(sample, samples=pieces, squares=sample.squares / pieces)
        cut = max(0.0, fewest.tokens - most)
        if cut and (tokenize.over_long != "truncate" or fewest.supervised <= cut):
            return Amount()  # also if truncation would leave only the prompt
        return Amount(1, most, max(0.0, sample.supervised - (sample.tokens - most)), most * most)


def _sample(tokens: float, supervised: float) -> Amount:
    return Amount(1, tokens, supervised, tokens * tokens)
