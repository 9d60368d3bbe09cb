"""The tokenize stage: convert conversations to supervised tokens and account for all of them.

The ledger accounts for every row and sample. The parent reads and writes in the order of the data;
workers encode. The model's chat template runs only in workers, within limits. The output is
byte-identical for any number of workers.
"""

import json
import os
import shutil
from collections.abc import Sequence
from functools import partial
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.config.content import TEMPLATES_FOLDER, TOKENIZER_FILES, tokenizer_files
from pipeline_lib.config.schema import VALIDATION_SOURCES, Tokenize
from pipeline_lib.config.section import read_settings
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import canonical_json, sha256_file, sha256_text, write_json
from pipeline_lib.core.stage import Job, open_sealed
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.core.text import Progress
from pipeline_lib.data.batches import (
    PuttingAside,
    hints_of,
    lacks_generation_prompt,
    thinking_default,
)
from pipeline_lib.data.bpe import WrongIds
from pipeline_lib.data.chat_template import TEMPLATE_NAME, read_tokenizer_config, repetition
from pipeline_lib.data.documents import Samples
from pipeline_lib.data.duplicates import ExactDuplicates, NearDuplicates
from pipeline_lib.data.encode import TOKENIZER_NAME, Encoder
from pipeline_lib.data.encoded import Encoded, TooLong
from pipeline_lib.data.how_to_call import how_to_call, trained_modes
from pipeline_lib.data.ledger import (
    FileLedger,
    SourceLedger,
    ledger_of,
    percentiles,
    table,
    too_many_left_out,
    total_of,
    unread_lines,
)
from pipeline_lib.data.lost_rows import (
    ALWAYS_NAMED,
    NAMED_REJECTS,
    idle_names,
    refuse_lost_rows,
    refuse_lost_samples,
    refuse_missing_columns,
    refuse_too_long,
)
from pipeline_lib.data.pool import Limits, Pool
from pipeline_lib.data.preview import preview_of
from pipeline_lib.data.samples_writer import SampleWriter
from pipeline_lib.data.sources import DataSource, fraction_read, open_sources
from pipeline_lib.data.template_worker import losses_explained
from pipeline_lib.records.data import LEDGER_NAME, PREVIEW_NAME, Ledger
from pipeline_lib.records.record import read_record, to_json

LIMITS = Limits()
READ_OF_MODEL = (*TOKENIZER_FILES, f"{TEMPLATES_FOLDER}/*")
# bytes of input; loading the tokenizer again costs as much as half a second of encoding
BYTES_PER_WORKER = 1 << 20
QUARANTINE_NAME = "quarantine.jsonl"
NO_GENERATION_PROMPT = (
    "tokenize: the chat template writes no generation prompt, so the model learns to begin its "
    "answers itself, with what the template writes before them; a server that adds a prompt of "
    "its own asks otherwise than in training"
)


def run(job: Job, *, workers: int | None = None) -> dict[str, Any]:
    """Write token arrays, ledger.json, quarantine.jsonl and preview.json; return the counts.

    It returns the digests too. At most `workers` processes encode, by default one for each core
    that this process may use. Raises DataError, Interrupted.
    """
    cores = workers or len(os.sched_getaffinity(0))
    try:
        books = _tokenize(job, cores, fast=True)
    except WrongIds as difference:  # all of the data has to be tokenized in the same way
        job.say(f"tokenize: {difference}; starting again with tokenizers alone")
        books = _tokenize(job, cores, fast=False)
    shutil.copyfile(books.quarantine_path, job.out / QUARANTINE_NAME)
    total = to_json(total_of(books.ledgers).counts())
    counts = {key: value for key, value in total.items() if key not in ("name", "format")}
    counts["prompts"] = total_of(books.trained).counts().prompts
    # The chat template and the tokenizer decide the tokens beside the data.
    model = job.inputs["model"].folder(*READ_OF_MODEL)
    if (model / TEMPLATE_NAME).is_file():
        template_sha256 = sha256_file(model / TEMPLATE_NAME)
    else:
        template_sha256 = sha256_text(
            canonical_json(read_tokenizer_config(model).get("chat_template"))
        )
    named = {
        name: sha256_file(model / name)
        for name in tokenizer_files(model)
        if name.startswith(TEMPLATES_FOLDER)
    }
    if named:
        template_sha256 = sha256_text(canonical_json([named, template_sha256]))
    return {
        **counts,
        "thinking_default": books.thinking_default,
        "template_sha256": template_sha256,
        "tokenizer_sha256": sha256_file(model / TOKENIZER_NAME),
    }


def refuse_losses(spec: Spec, store: Store) -> None:
    """Raise DataError if the sealed stage left out more than `spec` allows.

    No digest has these limits. A run of another config, with other limits, may have made it
    meanwhile.
    """
    sealed = open_sealed(spec.ref, store)
    ledger = read_record(Ledger, sealed.file(LEDGER_NAME))
    if problems := list(too_many_left_out(ledger, _settings_of(spec))):
        raise DataError("\n".join([f"{sealed.path}: made by a run with other limits:", *problems]))


def _settings_of(spec: Spec) -> Tokenize:
    others = ("sources", VALIDATION_SOURCES)
    given = {key: value for key, value in spec.settings.items() if key not in others}
    return read_settings(Tokenize, {**given, **spec.where})


def _tokenize(job: Job, cores: int, fast: bool) -> "_Books":
    """Write all of `job.out` but quarantine.jsonl.

    Raises DataError, Interrupted, WrongIds if the `fast` ids differ.
    """
    given = job.spec.settings
    settings = _settings_of(job.spec)
    sources = open_sources(job, given.get("sources"), given.get(VALIDATION_SOURCES, 0))
    model = job.inputs["model"].folder(*READ_OF_MODEL)
    workers = worker_count(sum(sum(source.sizes) for source in sources), cores)
    with (
        losses_explained(model),
        Pool(partial(Encoder, model, settings, fast), workers, LIMITS) as pool,
    ):
        books = _Books(job, settings, sources)
        progress = Progress(job.say, "tokenize", "rows")
        with (
            SampleWriter(job.out) as writer,
            books.quarantine_path.open("w", encoding="utf-8") as quarantine,
        ):
            batches = (batch for source in sources for batch in source.batches())
            for encoded in pool.map(batches, PuttingAside(settings)):
                books.take(encoded, writer, quarantine)
                progress.update(books.rows, fraction_read(sources, encoded.source))
            writer.finish(len(sources))
        refuse_too_long(books.too_long, books.rows, settings, job.inputs["model"])
        for line in (
            *refuse_missing_columns(books.ledgers, sources),
            *idle_names(books.ledgers, sources),
        ):
            job.say(line)
        if total_of(books.ledgers).prompts.total():
            (books.thinking_default,) = pool.map([thinking_default])
            if any(pool.map([lacks_generation_prompt])):
                job.say(NO_GENERATION_PROMPT)
        samples = Samples(job.out)
        lengths = np.split(np.diff(samples.offsets), samples.source_offsets[1:-1])
        _report(job, books, settings, lengths, pool)
        ledger = ledger_of(books.ledgers, lengths, len(books.trained))
        write_json(job.out / LEDGER_NAME, to_json(ledger))
        (preview,) = pool.map([preview_of(samples, [ledger.name for ledger in books.trained])])
        write_json(job.out / PREVIEW_NAME, to_json(preview))
    return books


def worker_count(size_bytes: int, cores: int) -> int:
    """Return the number of workers for `size_bytes` of input: at most `cores`, fewer if small."""
    return min(cores, 1 + size_bytes // BYTES_PER_WORKER)


class _Books:
    """A run's ledgers: they count encoded batches in order and write samples and unusable rows."""

    def __init__(self, job: Job, settings: Tokenize, sources: Sequence[DataSource]) -> None:
        self.ledgers = [
            SourceLedger(source.name, [FileLedger(file.name) for file in source.files])
            for source in sources
        ]
        # Those of the sources to train on; the others are held out.
        self.trained = [
            ledger
            for ledger, source in zip(self.ledgers, sources, strict=True)
            if not source.is_held_out
        ]
        self.quarantine_path = job.run_dir / QUARANTINE_NAME
        self.first_rejects: list[list[str]] = [[] for _ in sources]
        self.rows = 0
        self.too_long = TooLong()
        self.how: set[str] = set()  # the tokenizer implementations used
        self.thinking_default: str | None = (
            None  # the chat template's default; None if it has no switch
        )
        self._say = job.say
        self._formats: set[tuple[int, str]] = set()
        self._drops_duplicates = settings.duplicates == "drop"
        self._exact = ExactDuplicates()
        self._near = (
            None if settings.near_duplicates is None else NearDuplicates(settings.near_duplicates)
        )

    def take(self, encoded: Encoded, writer: SampleWriter, quarantine: TextIO) -> None:
        """Count and write one batch. Raises IntegrityError if a turn was lost during encoding."""
        encoded.check()
        ledger = self.ledgers[encoded.source]
        file = ledger.files[encoded.file]
        if encoded.format:
            file.format = encoded.format
            if (
                encoded.source,
                file.format,
            ) not in self._formats:  # once, though a source may have a thousand files
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
    job: Job,
    books: _Books,
    settings: Tokenize,
    lengths: Sequence[NDArray[np.int64]],
    pool: Pool[Encoder],
) -> None:
    total = total_of(books.ledgers)
    hints: dict[str, str] = {}
    if total.dropped:
        (hints,) = pool.map([partial(hints_of, sorted(total.dropped))])
    how = f"tokenize: tokenized by {', '.join(sorted(books.how))}"
    cost = repetition(total.conversations, total.kept, total.tokens, total.repeated_tokens)
    prompts = total_of(books.trained).prompts
    calls = how_to_call(
        trained_modes(prompts, books.thinking_default, settings.chat_template_kwargs)
    )
    drops = []
    for reason in ALWAYS_NAMED:
        if total.dropped[reason]:
            number = f"{total.dropped[reason]:,} of {total.samples:,}"
            drops.append(f"{number} samples dropped as {reason}: {hints[reason]}")
    for line in (
        how,
        *table(books.ledgers),
        *unread_lines(books.ledgers),
        *filter(None, [cost]),
        *calls,
        *drops,
    ):
        job.say(line)
    refuse_lost_rows(books.ledgers, settings, books.first_rejects, books.quarantine_path)
    refuse_lost_samples(books.ledgers, settings, [percentiles(found) for found in lengths], hints)
