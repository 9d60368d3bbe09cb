"""The tokenize stage: conversations to supervised token arrays, with every row and every sample accounted for.

The parent reads and writes, in the order of the data; workers encode, and the model's chat template runs only
there, within limits. The same bytes come out for any number of workers.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.base.fsio import canonical_json, sha256_file, sha256_text, write_json
from pipeline_lib.base.stage import Job
from pipeline_lib.config.content import TOKENIZER_FILES
from pipeline_lib.config.schema import Tokenize, read_settings
from pipeline_lib.data.chat.bpe import WrongIds
from pipeline_lib.data.chat.calling import how_to_call, trained_modes
from pipeline_lib.data.chat.encoder import TOKENIZER_NAME
from pipeline_lib.data.chat.template import TEMPLATE_NAME, read_tokenizer_config
from pipeline_lib.data.progress import Progress
from pipeline_lib.data.samples import Samples
from pipeline_lib.data.tokenize.batches import Advice, Batch, Encoding, ThinkingDefault
from pipeline_lib.data.tokenize.duplicates import ExactDuplicates, NearDuplicates
from pipeline_lib.data.tokenize.encoded import Encoded
from pipeline_lib.data.tokenize.ledger import (
    FileLedger,
    SourceLedger,
    ledger_json,
    percentiles,
    table,
    total_of,
    unread_lines,
)
from pipeline_lib.data.tokenize.losses import (
    NAMED_REJECTS,
    named_drops,
    refuse_lost_rows,
    refuse_lost_samples,
    refuse_missing_columns,
)
from pipeline_lib.data.tokenize.pool import Pool
from pipeline_lib.data.tokenize.preview import preview_of
from pipeline_lib.data.tokenize.rendering import losses_explained
from pipeline_lib.data.tokenize.repetition import repetition
from pipeline_lib.data.tokenize.sample_writer import SampleWriter
from pipeline_lib.data.tokenize.sources import Source, fraction_read, open_sources
from pipeline_lib.data.tokenize.worker import Limits

LIMITS = Limits()
BYTES_PER_WORKER = 1 << 20  # of input; loading the tokenizer once more costs as much as half a second of its work
QUARANTINE_NAME = "quarantine.jsonl"


def run(job: Job, *, workers: int | None = None) -> dict[str, Any]:
    """Write the token arrays, ledger.json, quarantine.jsonl and preview.json. Raises DataError, Interrupted.

    At most `workers` processes encode, by default one for each core that this process may use.
    """
    cores = workers or len(os.sched_getaffinity(0))
    try:
        books = _tokenize(job, cores, fast=True)
    except WrongIds as difference:  # whoever found it, all of the data goes the same way
        job.say(f"tokenize: {difference}; beginning anew with tokenizers alone")
        books = _tokenize(job, cores, fast=False)
    shutil.copyfile(books.quarantine_path, job.out / QUARANTINE_NAME)
    total = total_of(books.ledgers).to_json()
    counts = {key: value for key, value in total.items() if key not in ("name", "format", "files")}
    digests = _digests(job.inputs["model"].folder(*TOKENIZER_FILES))
    return {**counts, "thinking_default": books.thinking_default, **digests}


def _tokenize(job: Job, cores: int, fast: bool) -> "_Books":
    """Write everything but the quarantine. Raises DataError, Interrupted, WrongIds if the `fast` way is wrong."""
    given = dict(job.spec.settings)
    sources = open_sources(job, given.pop("sources", None))
    settings = read_settings(Tokenize, given)
    model = job.inputs["model"].folder(*TOKENIZER_FILES)
    workers = worker_count(sum(sum(source.sizes) for source in sources), cores)
    with losses_explained(model), Pool(partial(Encoding, model, settings, fast), workers, LIMITS) as pool:
        books = _write_samples(job, settings, sources, pool)
        for line in refuse_missing_columns(books.ledgers, sources):
            job.say(line)
        if total_of(books.ledgers).prompts.total():
            (books.thinking_default,) = pool.map([ThinkingDefault()])
        samples = Samples(job.out)
        lengths = np.split(np.diff(samples.offsets), samples.source_offsets[1:-1])
        _report(job, books, settings, lengths, pool)
        write_json(job.out / "ledger.json", ledger_json(books.ledgers, lengths))
        (shown,) = pool.map([preview_of(samples, [source.name for source in sources])])
        write_json(job.out / "preview.json", shown)
    return books


def worker_count(size_bytes: int, cores: int) -> int:
    """Workers for an input of `size_bytes`: one for each of `cores`, fewer where little is to do."""
    return min(cores, 1 + size_bytes // BYTES_PER_WORKER)


def _digests(model: Path) -> dict[str, str]:
    """What decides the tokens beside the data: the content of the chat template and of the tokenizer."""
    template = model / TEMPLATE_NAME
    if template.is_file():
        template_sha256 = sha256_file(template)
    else:
        template_sha256 = sha256_text(canonical_json(read_tokenizer_config(model).get("chat_template")))
    return {"template_sha256": template_sha256, "tokenizer_sha256": sha256_file(model / TOKENIZER_NAME)}


class _Books:
    """Takes what the workers bring, in order: counts it, and puts samples and unusable rows where they belong."""

    def __init__(self, job: Job, settings: Tokenize, sources: Sequence[Source]) -> None:
        self.ledgers = [
            SourceLedger(source.name, [FileLedger(file.name) for file in source.files]) for source in sources
        ]
        self.quarantine_path = job.run_dir / QUARANTINE_NAME
        self.first_rejects: list[list[str]] = [[] for _ in sources]
        self.rows = 0
        self.how: set[str] = set()  # what tokenized
        self.thinking_default: str | None = None  # of the chat template; None where it has no switch
        self._say = job.say
        self._formats: set[tuple[int, str]] = set()
        self._drops_duplicates = settings.duplicates == "drop"
        self._exact = ExactDuplicates()
        self._near = None if settings.near_duplicates is None else NearDuplicates(settings.near_duplicates)

    def take(self, encoded: Encoded, writer: SampleWriter, quarantine: TextIO) -> None:
        """Book and write one batch. Raises IntegrityError if a turn was lost on the way."""
        encoded.check()
        ledger = self.ledgers[encoded.source]
        file = ledger.files[encoded.file]
        if encoded.format:
            file.format = encoded.format
            self._say_format(encoded.source, file)
        file.rows += encoded.rows
        file.keys.add(encoded.keys)
        ledger.rows += encoded.rows
        self.rows += encoded.rows
        self.how.add(encoded.how)
        for entry in encoded.rejected:
            ledger.quarantined[entry.reason.value] += 1
            quarantine.write(json.dumps(entry.to_json(), ensure_ascii=False) + "\n")
            if len(first_rejects := self.first_rejects[encoded.source]) < NAMED_REJECTS:
                first_rejects.append(f"{entry.place}: {entry.reason}: {entry.detail}")
        used = self._without_duplicates(encoded, ledger)
        ledger.count_samples(used)
        writer.append(used)

    def _say_format(self, source: int, file: FileLedger) -> None:
        if (source, file.format) not in self._formats:  # once, though a source may have a thousand files
            self._formats.add((source, file.format))
            self._say(f"tokenize: {file.name}: format {file.format}")

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


def _write_samples(job: Job, settings: Tokenize, sources: Sequence[Source], pool: Pool[Encoding]) -> _Books:
    books = _Books(job, settings, sources)
    progress = Progress(job.say, "tokenize", "rows")
    batches: Iterator[Batch] = (batch for source in sources for batch in source.batches())
    with SampleWriter(job.out) as writer, books.quarantine_path.open("w", encoding="utf-8") as quarantine:
        for encoded in pool.map(batches):
            books.take(encoded, writer, quarantine)
            progress.update(books.rows, fraction_read(sources, encoded.source))
        writer.finish(len(sources))
    return books


def _report(
    job: Job, books: _Books, settings: Tokenize, lengths: Sequence[NDArray[np.int64]], pool: Pool[Encoding]
) -> None:
    """Say what became of the data. Raises DataError if too much of it was lost."""
    total = total_of(books.ledgers)
    hints: dict[str, str] = {}
    if total.dropped:
        (hints,) = pool.map([Advice(sorted(total.dropped))])
    how = f"tokenize: tokenized by {', '.join(sorted(books.how))}"
    cost = repetition(total.conversations, total.kept, total.tokens, total.repeated_tokens)
    calls = how_to_call(trained_modes(total.prompts, books.thinking_default))
    told = (*unread_lines(books.ledgers), *filter(None, [cost]), *calls, *named_drops(total, hints))
    for line in (how, *table(books.ledgers), *told):
        job.say(line)
    refuse_lost_rows(books.ledgers, settings, books.first_rejects, books.quarantine_path)
    refuse_lost_samples(books.ledgers, settings, [percentiles(found) for found in lengths], hints)
