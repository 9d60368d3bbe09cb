"""The tokenize stage: convert conversations to supervised token arrays and account for every row and sample.

The parent reads and writes in the order of the data; workers encode. The model's chat template runs only in workers,
within limits. The output is byte-identical for any number of workers.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.arch.rope import positions_in
from pipeline_lib.config.content import TEMPLATES_FOLDER, TOKENIZER_FILES, tokenizer_files
from pipeline_lib.config.schema import IGNORE, VALIDATION_SOURCES, Rows, Tokenize, source_key
from pipeline_lib.config.section import read_settings
from pipeline_lib.core import units
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import canonical_json, read_json, sha256_file, sha256_text, write_json
from pipeline_lib.core.stage import Job, Sealed, open_sealed
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.core.text import Progress, did_you_mean
from pipeline_lib.data.batches import (
    Batch,
    ExactDuplicates,
    NearDuplicates,
    PuttingAside,
    hints_of,
    lacks_generation_prompt,
    losses_explained,
    shown,
    size_of,
    thinking_default,
    wrong_file,
)
from pipeline_lib.data.bpe import WrongIds
from pipeline_lib.data.chat_template import TEMPLATE_NAME, how_to_call, read_tokenizer_config, repetition, trained_modes
from pipeline_lib.data.conversations import BadRow, WrongFile
from pipeline_lib.data.documents import ARRAYS, Samples
from pipeline_lib.data.encode import TOKENIZER_NAME, Drop, Encoder
from pipeline_lib.data.layouts import Layout, layout_of
from pipeline_lib.data.ledger import (
    LEDGER_NAME,
    Encoded,
    FileLedger,
    Losses,
    SourceLedger,
    TooLong,
    ledger_json,
    percentiles,
    table,
    too_many_lost,
    too_many_unusable,
    total_of,
    unread_lines,
)
from pipeline_lib.data.pool import Guard, Limits, Pool
from pipeline_lib.data.read_files import CorpusFile, value_of
from pipeline_lib.data.read_json import RawRow

# Writes a one-dimensional .npy file in pieces, so that the array never has to fit into memory.


class NpyWriter:
    """A writer that appends to a .npy file; the file is a valid array once the `with` block ends."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        """Create `path` with an empty array of `dtype`."""
        self.length = 0
        self._dtype = np.dtype(dtype)
        self._file = path.open("wb")
        self._write_header()
        self._data_start = self._file.tell()

    def append(self, values: NDArray[Any]) -> None:
        """Append `values`, a one-dimensional array of the same type."""
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).tobytes())
        self.length += len(values)

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()
            # numpy pads the header so that the length can grow in place.
            if self._file.tell() != self._data_start:
                raise ValueError(f"the header of {self._file.name} outgrew its room")

    def _write_header(self) -> None:
        description = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": description, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)


# Writes the arrays that `documents.Samples` reads, batch by batch, so that they never have to fit into memory.


class SampleWriter(ExitStack):
    """A writer that appends batches of samples to the arrays in a folder, source by source."""

    def __init__(self, folder: Path) -> None:
        """Create empty arrays in `folder`."""
        super().__init__()
        self._arrays = {
            name: self.enter_context(NpyWriter(folder / f"{name}.npy", dtype)) for name, dtype in ARRAYS.items()
        }
        self._sources = 0
        self._arrays["offsets"].append(np.zeros(1, dtype=np.int64))

    def append(self, encoded: Encoded) -> None:
        """Append the samples of `encoded`. Sources have to arrive in order."""
        self._begin(encoded.source + 1)
        arrays = self._arrays
        ends = arrays["tokens"].length + np.cumsum(encoded.lengths)
        arrays["offsets"].append(ends)
        arrays["tokens"].append(encoded.tokens)
        arrays["supervised"].append(encoded.supervised)
        arrays["conversations"].append(arrays["content"].length + encoded.conversations)
        arrays["content"].append(encoded.content)
        arrays["prompts"].append(encoded.prompts)

    def finish(self, sources: int) -> None:
        """Complete `source_offsets.npy` for `sources` sources after the last sample."""
        self._begin(sources + 1)

    def _begin(self, sources: int) -> None:
        """Record where the sources before number `sources` begin, including sources without samples."""
        while self._sources < sources:
            self._arrays["source_offsets"].append(np.array([self._arrays["conversations"].length]))
            self._sources += 1


# The data sources: their files, the settings for their rows, and the rows in batches.
# A file with format `auto` has the format of its first usable row. A batch is bounded in rows and in bytes, so that
# long rows need no more memory than short ones.

BATCH_ROWS = 512
BATCH_BYTES = 1 << 20
LISTED_FILES = 3  # files that the name of a source lists
MADE_HERE = ("pydoc",)


@dataclass
class Source:
    """An entry of data.train or data.validation by its `key`, with the progress of reading its files."""

    number: int
    key: str
    name: str
    reading: Rows
    files: Sequence[CorpusFile]
    sizes: Sequence[int] = field(default_factory=list)  # size of each file in bytes
    file: int = 0  # number of the file in work

    @property
    def is_held_out(self) -> bool:
        """Whether it is a source of data.validation."""
        return self.key.startswith("data.validation")

    def batches(self) -> Iterator[Batch]:
        """Yield the rows in batches, up to `max_rows`. Raises DataError if a file is unreadable or not usable."""
        left = self.reading.max_rows
        for number, file in enumerate(self.files):
            if left == 0:
                return
            self.file = number
            file.refuse_media(self.reading.ignored)
            for batch in self._batches_of(islice(file, left)):
                left = None if left is None else left - len(batch.rows)
                yield batch

    def _batches_of(self, file: Iterator[RawRow]) -> Iterator[Batch]:
        reading = self.reading
        layout = None if reading.format == "auto" else Layout(reading.format, reading.columns, reading.roles)
        first = None
        rows: list[RawRow] = []
        size_bytes = 0
        for row in file:
            if layout is None:
                try:
                    layout = layout_of(value_of(row), reading)
                    first = shown(row)
                except BadRow:
                    pass  # a worker detects the format again and rejects the row
                except WrongFile as wrong:
                    raise wrong_file(row, wrong, self.key) from wrong
            rows.append(row)
            size_bytes += size_of(row)
            if len(rows) == BATCH_ROWS or size_bytes >= BATCH_BYTES:
                yield Batch(rows, self.number, self.key, self.file, layout, reading.columns, first)
                rows, size_bytes = [], 0
        if rows:
            yield Batch(rows, self.number, self.key, self.file, layout, reading.columns, first)


def open_sources(job: Job, readings: Sequence[dict[str, Any]] | None, validation_sources: int = 0) -> list[Source]:
    """Return the sources of the job in the order of the config; `readings` are their `Rows` settings.

    The last `validation_sources` are those of data.validation.
    """
    names = sorted((name for name in job.inputs if name.startswith("data.")), key=lambda name: int(name[5:]))
    sources: list[Source] = []
    taken: set[str] = set()
    for number, input_name in enumerate(names):
        sealed = job.inputs[input_name]
        key = source_key(number, len(names) - validation_sources)
        origin = sealed.manifest.spec["settings"]
        reading = read_settings(Rows, readings[number] if readings else {})
        own_keys = reading.columns.values()
        folder, files = sealed.folder(), []
        for name in sorted(sealed.manifest.files):
            if origin["source"] in MADE_HERE:
                shown_name = str(origin["source"])
            else:
                shown_name = f"{origin['name']}/{name}" if "name" in origin else name
            if shown_name in taken:  # two folders with a train.jsonl each
                shown_name = f"{key}/{shown_name}"
            files.append(CorpusFile(folder / name, shown_name, own_keys))
        taken.update(file.name for file in files)
        # Without local paths: the ledger must not depend on where the files are.
        if "name" in origin:  # of a hub
            source_name = ":".join(str(origin[key]) for key in ("name", "subset", "split") if key in origin)
        else:
            source_name = ", ".join(file.name for file in files[:LISTED_FILES])
            if len(files) > LISTED_FILES:
                source_name += f" and {len(files) - LISTED_FILES} more"
        sizes = [file.path.stat().st_size for file in files]
        sources.append(Source(number, key, source_name, reading, files, sizes))
    return sources


def fraction_read(sources: Sequence[Source], current: int) -> float:
    """Return the fraction of the bytes of all files that was read, with source number `current` in work."""
    total = sum(sum(source.sizes) for source in sources)
    done = sum(sum(source.sizes) for source in sources[:current])
    source = sources[current]
    done += sum(source.sizes[: source.file])
    return (done + source.sizes[source.file] * source.files[source.file].fraction_read) / max(1, total)


# Limits on lost data: the stage fails if it lost more than the config allows, with the numbers and a remedy.

NAMED_REJECTS = 5  # rows that a message lists; quarantine.jsonl has them all
ALWAYS_NAMED = (
    *(Drop.PROMPT_NOT_PREFIX, Drop.NO_END_OF_TURN, Drop.THINKING_NOT_RENDERED),
    *(Drop.CALLS_NOT_RENDERED, Drop.TOOLS_NOT_RENDERED, Drop.MESSAGE_NOT_RENDERED),
)
NAMED_KEYS = 20
OPTIONAL_KEYS = ("input", "history", "system", "tools", "tool_calls", "reasoning_content")  # rows may lack these
TRUNCATED = "truncated"
TRUNCATED_HINT = "their ends are cut off: raise tokenize.max_tokens, or set tokenize.over_long to drop or split"


def refuse_missing_columns(ledgers: Sequence[SourceLedger], sources: Sequence[Source]) -> list[str]:
    """Check that each key that `columns` of a source names is in a row of each file or in the file's schema.

    An optional key may be missing in some files of a source, but not in all of them. If it is missing in all and
    `max_rows` ended the reading, later rows may have it: then return a warning line instead of raising.
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
                raise _missing_column(where, missing[0], source.key, ours, theirs)
            what = f"{theirs!r}, which {source.key}.columns names as {ours}"
            lines.append(f"tokenize: {ledger.name}: of {units.count(ledger.rows, 'rows')} read none has {what}")
    return lines


def idle_names(ledgers: Sequence[SourceLedger], sources: Sequence[Source]) -> Iterator[str]:
    """Yield a warning for each ignored key and for each role of a source's settings that none of its rows has."""
    for ledger, source in zip(ledgers, sources, strict=True):
        keys = [file.keys for file in ledger.files]
        seen = set().union(*(one.named for one in keys), *(file.schema_names() for file in source.files))
        roles = set[str]().union(*(one.roles for one in keys))
        rows = units.count(ledger.rows, "rows")
        for name in sorted(source.reading.ignored - seen):
            yield f"tokenize: {ledger.name}: of {rows} read none has {name!r}, which {source.key}.columns ignores"
        for name in source.reading.roles:
            if name not in roles:
                what = f"a turn of {name!r}, which {source.key}.roles names"
                yield f"tokenize: {ledger.name}: of {rows} read none has {what}"


def _missing_column(where: str, file: FileLedger, source_key: str, ours: str, theirs: str) -> DataError:
    hint = did_you_mean(theirs, file.keys.first)
    remedy = "remove it from `columns`" if ours in OPTIONAL_KEYS else "give a file that lacks it a source of its own"
    return DataError(
        f"{where}: no row has {theirs!r}, which {source_key}.columns names as {ours}; its first row has "
        f"{', '.join(map(repr, file.keys.first[:NAMED_KEYS]))}{hint}. Mend the name, or {remedy}"
    )


def _refuse_lost_rows(
    ledgers: Sequence[SourceLedger],
    settings: Tokenize,
    first_rejects: Sequence[Sequence[str]],
    quarantine_path: Path,
) -> None:
    total = total_of(ledgers)
    for ledger, rejects in zip(ledgers, first_rejects, strict=True):
        if ledger.quarantined.total() == ledger.rows:
            details = _rejects_text(ledger, rejects, quarantine_path)
            raise DataError(
                f"{ledger.name}: of {units.count(ledger.rows, 'rows')} none is a usable conversation: {details}"
            )
    if problem := too_many_unusable(total, settings):
        details = _rejects_text(total, [line for rejects in first_rejects for line in rejects], quarantine_path)
        raise DataError(f"{problem}: mend the rows or raise it. {details}")


def _refuse_too_long(too_long: TooLong, rows: int, settings: Tokenize, model: Sealed) -> None:
    """Raise DataError if any of the `rows` are too long; it names the `max_tokens` that holds all of them.

    None is named that is beyond the positions of the model, which `model.rope` may raise.
    """
    if not too_long.rows:
        return
    config = read_json(model.file("config.json"))
    positions = positions_in(config.get("text_config", config))
    shorten = "shorten the rows, or set tokenize.over_long to drop, truncate or split"
    if too_long.tokens <= positions:
        remedy = f"set tokenize.max_tokens: {too_long.tokens} (and shard.block_tokens to no less), {shorten}"
    else:
        remedy = f"{shorten}; max_tokens beyond the {positions:,} positions of the model needs model.rope"
    raise DataError(
        f"rows longer than tokenize.max_tokens ({settings.max_tokens:,}): {too_long.rows:,} of {rows:,}, and "
        f"tokenize.over_long is error. The longest, {too_long.place}, has {too_long.tokens:,} tokens: {remedy}"
    )


def _refuse_lost_samples(
    ledgers: Sequence[SourceLedger],
    settings: Tokenize,
    length_percentiles: Sequence[Mapping[str, float]],
    hints: Mapping[str, str],
) -> None:
    total = total_of(ledgers)
    if not total.kept:
        raise DataError(
            f"no sample is left of {units.count(total.conversations, 'conversations')}:{_advice(total, hints)}"
        )
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
    return "".join(
        f"\n  {number:,} {reason}: {hints.get(reason, TRUNCATED_HINT)}" for reason, number in lost.most_common()
    )


def _rejects_text(ledger: SourceLedger, rejects: Sequence[str], quarantine_path: Path) -> str:
    listed = "\n".join(f"  {line}" for line in rejects[:NAMED_REJECTS])
    counts = ", ".join(f"{number} {reason}" for reason, number in ledger.quarantined.most_common())
    return f"{counts}; the first:\n{listed}\nAll of them: {quarantine_path}"


# The preview: samples from all sources as text, cut where supervision begins and ends, to show what is trained on.

PREVIEW_SAMPLES = 20


@dataclass(frozen=True)
class Preview:
    """A task for a worker, which has the tokenizer: decode the samples of the preview."""

    sources: Sequence[str]  # [samples], the name of each sample's source
    samples: Sequence[tuple[NDArray[np.int32], NDArray[np.bool_]]]  # tokens and their supervision mask

    def __call__(self, state: Encoder, guard: Guard) -> list[dict[str, Any]]:
        """Return the content of preview.json: source, number of tokens and pieces of each sample."""
        entries = []
        for source, (tokens, supervised) in zip(self.sources, self.samples, strict=True):
            bounds = [0, *(np.flatnonzero(np.diff(supervised)) + 1).tolist(), len(tokens)]
            pieces = [
                {
                    "text": state.tokenizer.decode(tokens[start:end].tolist(), skip_special_tokens=False),
                    "supervised": bool(supervised[start]),
                }
                for start, end in pairwise(bounds)
            ]
            entries.append({"source": source, "tokens": len(tokens), "pieces": pieces})
        return entries


def preview_of(samples: Samples, names: Sequence[str]) -> Preview:
    """Return the preview of the first sources, `names`: at least one sample of each, the rest in proportion to size."""
    sizes = np.diff(samples.source_offsets)[: len(names)]
    counts = np.minimum(sizes, 1)
    while counts.sum() < min(PREVIEW_SAMPLES, sizes.sum()):  # D'Hondt's method
        counts[np.argmax(np.where(counts < sizes, sizes / (counts + 1), 0.0))] += 1
    sources, arrays = [], []
    for name, first, size, count in zip(names, samples.source_offsets[: len(names)], sizes, counts, strict=True):
        for number in np.linspace(first, first + size - 1, count):
            document = samples[int(number)]
            sources.append(name)
            arrays.append((np.array(document.tokens), np.array(document.supervised)))
    return Preview(sources, arrays)


# The stage itself: read the sources, encode in workers, write the arrays, and report.

LIMITS = Limits()
READ_OF_MODEL = (*TOKENIZER_FILES, f"{TEMPLATES_FOLDER}/*")
BYTES_PER_WORKER = 1 << 20  # bytes of input; loading the tokenizer again costs as much as half a second of encoding
QUARANTINE_NAME = "quarantine.jsonl"
NO_GENERATION_PROMPT = (
    "tokenize: the chat template writes no generation prompt, so the model learns to begin its answers itself, with "
    "what the template writes before them; a server that adds a prompt of its own asks otherwise than in training"
)


def run(job: Job, *, workers: int | None = None) -> dict[str, Any]:
    """Write the token arrays, ledger.json, quarantine.jsonl and preview.json; return the total counts and digests.

    At most `workers` processes encode, by default one for each core that this process may use. Raises DataError,
    Interrupted.
    """
    cores = workers or len(os.sched_getaffinity(0))
    try:
        books = _tokenize(job, cores, fast=True)
    except WrongIds as difference:  # all of the data has to be tokenized in the same way
        job.say(f"tokenize: {difference}; starting again with tokenizers alone")
        books = _tokenize(job, cores, fast=False)
    shutil.copyfile(books.quarantine_path, job.out / QUARANTINE_NAME)
    total = total_of(books.ledgers).to_json()
    counts = {key: value for key, value in total.items() if key not in ("name", "format", "files")}
    counts["prompts"] = total_of(books.trained).to_json()["prompts"]
    # The chat template and the tokenizer decide the tokens beside the data.
    model = job.inputs["model"].folder(*READ_OF_MODEL)
    if (model / TEMPLATE_NAME).is_file():
        template_sha256 = sha256_file(model / TEMPLATE_NAME)
    else:
        template_sha256 = sha256_text(canonical_json(read_tokenizer_config(model).get("chat_template")))
    named = {name: sha256_file(model / name) for name in tokenizer_files(model) if name.startswith(TEMPLATES_FOLDER)}
    if named:
        template_sha256 = sha256_text(canonical_json([named, template_sha256]))
    return {
        **counts,
        "thinking_default": books.thinking_default,
        "template_sha256": template_sha256,
        "tokenizer_sha256": sha256_file(model / TOKENIZER_NAME),
    }


def refuse_losses(spec: Spec, store: Store) -> None:
    """Raise DataError if the sealed stage left out more than the limits of `spec` allow, which no digest has.

    A run of another config, with other limits, may have made it meanwhile.
    """
    sealed = open_sealed(spec.ref, store)
    losses = Losses.model_validate(read_json(sealed.file(LEDGER_NAME)))
    if problems := list(losses.beyond(_settings_of(spec))):
        raise DataError("\n".join([f"{sealed.path}: made by a run with other limits:", *problems]))


def _settings_of(spec: Spec) -> Tokenize:
    others = ("sources", VALIDATION_SOURCES)
    given = {key: value for key, value in spec.settings.items() if key not in others}
    return read_settings(Tokenize, {**given, **spec.where})


def _tokenize(job: Job, cores: int, fast: bool) -> "_Books":
    """Write all of `job.out` but quarantine.jsonl. Raises DataError, Interrupted, WrongIds if the `fast` ids differ."""
    given, settings = job.spec.settings, _settings_of(job.spec)
    sources = open_sources(job, given.get("sources"), given.get(VALIDATION_SOURCES, 0))
    model = job.inputs["model"].folder(*READ_OF_MODEL)
    workers = worker_count(sum(sum(source.sizes) for source in sources), cores)
    with losses_explained(model), Pool(partial(Encoder, model, settings, fast), workers, LIMITS) as pool:
        books = _Books(job, settings, sources)
        progress = Progress(job.say, "tokenize", "rows")
        with SampleWriter(job.out) as writer, books.quarantine_path.open("w", encoding="utf-8") as quarantine:
            batches = (batch for source in sources for batch in source.batches())
            for encoded in pool.map(batches, PuttingAside(settings)):
                books.take(encoded, writer, quarantine)
                progress.update(books.rows, fraction_read(sources, encoded.source))
            writer.finish(len(sources))
        _refuse_too_long(books.too_long, books.rows, settings, job.inputs["model"])
        for line in (*refuse_missing_columns(books.ledgers, sources), *idle_names(books.ledgers, sources)):
            job.say(line)
        if total_of(books.ledgers).prompts.total():
            (books.thinking_default,) = pool.map([thinking_default])
            if any(pool.map([lacks_generation_prompt])):
                job.say(NO_GENERATION_PROMPT)
        samples = Samples(job.out)
        lengths = np.split(np.diff(samples.offsets), samples.source_offsets[1:-1])
        _report(job, books, settings, lengths, pool)
        write_json(job.out / LEDGER_NAME, ledger_json(books.ledgers, lengths, len(books.trained)))
        (preview,) = pool.map([preview_of(samples, [ledger.name for ledger in books.trained])])
        write_json(job.out / "preview.json", preview)
    return books


def worker_count(size_bytes: int, cores: int) -> int:
    """Return the number of workers for an input of `size_bytes`: at most `cores`, fewer for a small input."""
    return min(cores, 1 + size_bytes // BYTES_PER_WORKER)


class _Books:
    """The ledgers of a run: they count encoded batches in order and write their samples and unusable rows."""

    def __init__(self, job: Job, settings: Tokenize, sources: Sequence[Source]) -> None:
        self.ledgers = [
            SourceLedger(source.name, [FileLedger(file.name) for file in source.files]) for source in sources
        ]
        # Those of the sources to train on; the others are held out.
        self.trained = [ledger for ledger, source in zip(self.ledgers, sources, strict=True) if not source.is_held_out]
        self.quarantine_path = job.run_dir / QUARANTINE_NAME
        self.first_rejects: list[list[str]] = [[] for _ in sources]
        self.rows = 0
        self.too_long = TooLong()
        self.how: set[str] = set()  # the tokenizer implementations used
        self.thinking_default: str | None = None  # the chat template's default; None if it has no switch
        self._say = job.say
        self._formats: set[tuple[int, str]] = set()
        self._drops_duplicates = settings.duplicates == "drop"
        self._exact = ExactDuplicates()
        self._near = None if settings.near_duplicates is None else NearDuplicates(settings.near_duplicates)

    def take(self, encoded: Encoded, writer: SampleWriter, quarantine: TextIO) -> None:
        """Count and write one batch. Raises IntegrityError if a turn was lost during encoding."""
        encoded.check()
        ledger = self.ledgers[encoded.source]
        file = ledger.files[encoded.file]
        if encoded.format:
            file.format = encoded.format
            if (encoded.source, file.format) not in self._formats:  # once, though a source may have a thousand files
                self._formats.add((encoded.source, file.format))
                self._say(f"tokenize: {file.name}: format {file.format}")
        file.rows += encoded.rows
        file.keys.add(encoded.keys)
        ledger.rows += encoded.rows
        self.rows += encoded.rows
        self.too_long += encoded.too_long
        self.how.add(encoded.how)
        for entry in encoded.rejected:
            ledger.quarantined[entry.reason.value] += 1
            quarantine.write(json.dumps(entry.to_json(), ensure_ascii=False) + "\n")
            if len(first_rejects := self.first_rejects[encoded.source]) < NAMED_REJECTS:
                first_rejects.append(f"{entry.place}: {entry.reason}: {entry.detail}")
        used = self._without_duplicates(encoded, ledger)
        ledger.count_samples(used)
        writer.append(used)

    def _without_duplicates(self, encoded: Encoded, ledger: SourceLedger) -> Encoded:
        seen = self._exact.seen(encoded.content)
        ledger.duplicates["exact"] += int(seen.sum())
        if self._near is not None and encoded.signatures is not None:
            near = self._near.seen(encoded.signatures, skip=seen)
            ledger.duplicates["near"] += int(near.sum())
            seen |= near
        if not self._drops_duplicates:
            return encoded
        ledger.duplicates_dropped += int(seen.sum())
        return encoded.only(~seen)


def _report(
    job: Job, books: _Books, settings: Tokenize, lengths: Sequence[NDArray[np.int64]], pool: Pool[Encoder]
) -> None:
    total = total_of(books.ledgers)
    hints: dict[str, str] = {}
    if total.dropped:
        (hints,) = pool.map([partial(hints_of, sorted(total.dropped))])
    how = f"tokenize: tokenized by {', '.join(sorted(books.how))}"
    cost = repetition(total.conversations, total.kept, total.tokens, total.repeated_tokens)
    prompts = total_of(books.trained).prompts
    calls = how_to_call(trained_modes(prompts, books.thinking_default, settings.chat_template_kwargs))
    drops = [
        f"{total.dropped[reason]:,} of {total.samples:,} samples dropped as {reason}: {hints[reason]}"
        for reason in ALWAYS_NAMED
        if total.dropped[reason]
    ]
    for line in (how, *table(books.ledgers), *unread_lines(books.ledgers), *filter(None, [cost]), *calls, *drops):
        job.say(line)
    _refuse_lost_rows(books.ledgers, settings, books.first_rejects, books.quarantine_path)
    _refuse_lost_samples(books.ledgers, settings, [percentiles(found) for found in lengths], hints)
