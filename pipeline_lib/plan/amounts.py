"""The amount of training data before there are blocks, estimated from the first rows of local files."""

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline_lib.config.content import data_files
from pipeline_lib.config.schema import Config, FileData, Tokenize
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.conversations import Content, Text
from pipeline_lib.data.first_rows import first_contents
from pipeline_lib.data.read_files import ROWS_PER_UPDATE
from pipeline_lib.plan.workload import Workload

_READ_ROWS = (
    1024  # of a source's files together, or some of each; the others are extrapolated by the sizes of the files
)
_READ_FILES = 20  # of a source
_SMALL_VOCABULARY = 16_384  # as the demo's, which cuts words into more tokens
_MESSAGE_TOKENS = 5  # that the chat template adds to a message: its role, its start and its end
_THOUGHT_TOKENS = 4  # and to an answer: an empty thinking block
_END_TOKENS = 1  # of the message, which are trained on


@dataclass(frozen=True)
class _Ratio:
    """Tokens of a byte of UTF-8, and of a character that is counted apart because it has three bytes or more."""

    of_byte: float
    of_cjk: float


# Fewest, expected and most. English prose has 4 to 5 bytes a token, code and numbers fewer. Qwen3's vocabulary has 0.54
# tokens for a character of modern Chinese, 0.77 of old plays, 0.63 of Japanese. The demo's vocabulary has no such
# characters, so each is three tokens; a small one made for them has about one.
_RATIOS = (_Ratio(1 / 5.5, 0.45), _Ratio(1 / 4.0, 0.75), _Ratio(1 / 2.5, 1.1))
_RATIOS_OF_SMALL = (_Ratio(1 / 3.0, 1.0), _Ratio(1 / 2.0, 3.0), _Ratio(1 / 1.0, 3.5))
_CJK = re.compile(
    "[\u1100-\u11ff\u2e80-\ua4cf\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U00020000-\U0003ffff]+"
)


@dataclass(frozen=True)
class Amount:
    """Samples of the training data, their tokens, the supervised ones, and the sum of the samples' squared lengths."""

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
        return Amount(self.samples * factor, self.tokens * factor, self.supervised * factor, self.squares * factor)


def expected_workload(config: Config, vocabulary: int | None) -> Workload:
    """Return the workload by the first rows of the config's files; if they are not all here, what is assumed of any.

    `vocabulary` is the size of the model's, None if it is not known.
    """
    assumed, amounts = Workload.assumed(config), amounts_of(config, vocabulary)
    if amounts is None or not amounts[1].samples:
        return assumed
    expected, lengths = amounts[1], [amount.document_tokens for amount in amounts]
    positions = assumed.real_fraction * assumed.block_tokens
    held_out = expected.tokens * config.data.validation_fraction / (1 - config.data.validation_fraction)
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
    """Return what an epoch trains on, with the fewest, the expected and the most tokens of the texts.

    None if some of the data is not in files that can be read here.
    """
    ratios = _RATIOS_OF_SMALL if vocabulary is not None and vocabulary < _SMALL_VOCABULARY else _RATIOS
    found = [Amount()] * len(ratios)
    for source in config.data.train:
        own = _of_source(source, config.tokenize, ratios) if isinstance(source, FileData) else None
        if own is None:
            return None
        found = [amount + one * (1 - config.data.validation_fraction) for amount, one in zip(found, own, strict=True)]
    return found


def _of_source(source: FileData, tokenize: Tokenize, ratios: tuple[_Ratio, ...]) -> list[Amount] | None:
    """Return what is in a source times its weight, for each of `ratios`; None if nothing can be read."""
    try:
        files = [(path, path.stat()) for path in data_files(source.path, source.split)]
    except (DataError, OSError):  # named where the files are hashed
        return None
    each = max(1, _READ_ROWS // ROWS_PER_UPDATE // max(1, len(files))) * ROWS_PER_UPDATE
    count, found = 0.0, [Amount()] * len(ratios)
    all_bytes, read_bytes = 0, 0
    reading = source.model_dump_json(include={"source", "path", "format", "columns", "roles"})
    for number, (path, status) in enumerate(files):
        all_bytes += status.st_size
        if number < _READ_FILES:
            rows, scale = _rows_of_file(path, (status.st_size, status.st_mtime_ns), reading, each)
            count += len(rows) * scale
            for row in rows:
                own = row.amounts(tokenize, ratios)
                found = [amount + one * scale for amount, one in zip(found, own, strict=True)]
            read_bytes += status.st_size if rows else 0
    if not count:
        return None
    all_files = all_bytes / max(1, read_bytes)
    used = min(1.0, source.max_rows / (count * all_files)) if source.max_rows else 1.0
    return [amount * (all_files * used * source.weight) for amount in found]


@dataclass(frozen=True)
class _Length:
    """The length of texts: characters of Chinese, Japanese and Korean, and bytes of UTF-8 of the rest."""

    rest_bytes: int = 0
    cjk: int = 0

    def __add__(self, other: "_Length") -> "_Length":
        return _Length(self.rest_bytes + other.rest_bytes, self.cjk + other.cjk)

    def tokens(self, ratio: _Ratio) -> float:
        return self.rest_bytes * ratio.of_byte + self.cjk * ratio.of_cjk

    @classmethod
    def of(cls, value: Any) -> "_Length":
        """Return the length of all texts in `value`."""
        if isinstance(value, str):
            runs = _CJK.findall(value)
            cjk, cjk_bytes = sum(map(len, runs)), sum(len(run.encode(errors="replace")) for run in runs)
            return cls(len(value.encode(errors="replace")) - cjk_bytes, cjk)
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return sum(map(cls.of, parts), cls())


@dataclass(frozen=True)
class _Message:
    text: _Length
    is_trained: bool


@dataclass(frozen=True)
class _Row:
    """The texts of a row: a raw text alone, or messages and tools."""

    raw: _Length
    messages: tuple[_Message, ...]

    @classmethod
    def of(cls, content: Content) -> "_Row":
        if isinstance(content, Text):
            return cls(_Length.of(content.text), ())
        texts = [_Length.of([text for key, text in message.items() if key != "role"]) for message in content.messages]
        messages = (_Message(text, number in content.supervised) for number, text in enumerate(texts))
        return cls(_Length.of(content.tools), tuple(messages))

    def amounts(self, tokenize: Tokenize, ratios: tuple[_Ratio, ...]) -> list[Amount]:
        """Return what the tokenize stage makes of the row, for each of `ratios`.

        A sample counts as dropped if even the fewest tokens are too many: the stage fails if more than a few are.
        Answers of one conversation share a sample under some chat templates: so it is with the fewest tokens only.
        """
        found = []
        for number, ratio in enumerate(ratios):
            are_shared = number == 0
            samples = zip(*(self._samples(one, tokenize, are_shared) for one in (ratio, ratios[0])), strict=True)
            found.append(sum((self._kept(sample, fewest, tokenize) for sample, fewest in samples), Amount()))
        return found

    def _samples(self, ratio: _Ratio, tokenize: Tokenize, are_shared: bool) -> list[Amount]:
        """Return each sample as long as it is."""
        tokens, supervised = self.raw.tokens(ratio), 0.0
        if not self.messages:
            return [Amount(1, tokens, tokens, tokens * tokens)]
        found = []
        for message in self.messages:
            tokens += message.text.tokens(ratio) + _MESSAGE_TOKENS
            if message.is_trained:
                trained = message.text.tokens(ratio) + _END_TOKENS
                supervised = supervised + trained if are_shared else trained
                full = tokens + _THOUGHT_TOKENS
                found.append(Amount(1, full, supervised, full * full))
        return found[-1:] if are_shared or tokenize.train_on == "last_assistant" else found

    def _kept(self, sample: Amount, fewest: Amount, tokenize: Tokenize) -> Amount:
        """Return what is left of a sample; of a conversation that is split, what ends within the limit."""
        most = tokenize.max_tokens
        if sample.tokens <= most:
            return sample
        if tokenize.over_long == "split" and not self.messages:
            pieces = math.ceil(sample.tokens / most)
            return replace(sample, samples=pieces, squares=sample.squares / pieces)
        if tokenize.over_long == "truncate":
            supervised = sample.supervised - (sample.tokens - most)
        else:
            supervised = sample.supervised if fewest.tokens <= most else 0.0
        return Amount(1, most, supervised, most * most) if supervised > 0 else Amount()


@lru_cache(maxsize=1024)
def _rows_of_file(path: Path, _stamp: tuple[int, int], reading: str, most: int) -> tuple[list[_Row], float]:
    """Return a file's first rows, `most` at most, and how many times as many rows it has.

    Cached by the file's size and time: the experiments of a sweep share their files.
    """
    contents, scale = first_contents(path, FileData.model_validate_json(reading), most)
    return [_Row.of(content) for content in contents], scale
