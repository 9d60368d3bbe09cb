"""The tokenize stage: conversations to supervised token arrays, with every row and every sample accounted for."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.fsio import write_json
from pipeline_lib.base.stage import Job, Sealed
from pipeline_lib.config.schema import Tokenize, read_settings
from pipeline_lib.data.corpus import Conversation, CorpusFile, Rejected, RowFormat, printable
from pipeline_lib.data.encode import Encoder, Sample
from pipeline_lib.data.ledger import SourceLedger, ledger_json, total_of
from pipeline_lib.data.progress import Progress
from pipeline_lib.data.rows import Reason
from pipeline_lib.data.samples import Samples, SampleWriter

BATCH_CONVERSATIONS = 512
PREVIEW_SAMPLES = 20
NAMED_REJECTS = 5  # in a message; the file has them all
QUARANTINE_NAME = "quarantine.jsonl"


def run(job: Job) -> dict[str, Any]:
    """Write the token arrays, ledger.json, quarantine.jsonl and preview.json. Raises DataError."""
    settings = dict(job.spec.settings)
    formats = settings.pop("formats", None)
    limits = read_settings(Tokenize, settings)
    encoder = Encoder(job.inputs["model"].path, limits.max_tokens, limits.over_long)
    quarantine_path = job.run_dir / QUARANTINE_NAME
    with SampleWriter(job.out) as writer, quarantine_path.open("w", encoding="utf-8") as quarantine:
        work = _Tokenizing(job, encoder, writer, quarantine)
        for file in _source_files(job, formats):
            work.read(file)
    total = total_of(work.sources)
    job.say(
        f"tokenize: {total.rows:,} rows, {total.quarantined.total():,} of them quarantined; {total.kept:,} samples "
        f"kept, {total.truncated:,} of them truncated, {total.dropped.total():,} dropped; {total.tokens:,} tokens, "
        f"{total.supervised_tokens:,} of them supervised"
    )
    _check_limits(total, limits, work.first_rejects, quarantine_path)
    shutil.copyfile(quarantine_path, job.out / QUARANTINE_NAME)
    samples = Samples(job.out)
    write_json(job.out / "ledger.json", ledger_json(work.sources, np.diff(samples.offsets)))
    write_json(job.out / "preview.json", _preview(encoder, samples))
    return {key: value for key, value in total.to_json().items() if key not in ("name", "format")}


class _Tokenizing:
    """The work in progress: where samples and unusable rows go, and the books about them."""

    def __init__(self, job: Job, encoder: Encoder, writer: SampleWriter, quarantine: TextIO) -> None:
        self.sources: list[SourceLedger] = []
        self.first_rejects: list[str] = []
        self._job = job
        self._encoder = encoder
        self._writer = writer
        self._quarantine = quarantine
        self._conversations = 0

    def read(self, file: CorpusFile) -> None:
        """Take in all rows of `file`, a batch at a time."""
        source = SourceLedger(file.name)
        self.sources.append(source)
        progress = Progress(self._job.say, f"tokenize: {file.name}", "rows")
        rendered = self._rendered(file, source)
        while batch := list(islice(rendered, BATCH_CONVERSATIONS)):
            for outcomes in self._encoder.encode_rendered(batch):
                for outcome in outcomes:
                    source.count_sample(outcome)
                    if isinstance(outcome, Sample):
                        self._writer.append(outcome, self._conversations)
                self._conversations += 1
            progress.update(source.rows, file.fraction_read)
        source.format = file.format or ""
        self._job.say(f"tokenize: {file.name}: {source.rows:,} rows, format {file.format or 'not recognised'}")

    def _rendered(self, file: CorpusFile, source: SourceLedger) -> Iterator[list[str]]:
        """The conversations of `file` as the encoder renders them; unusable rows are booked and put into quarantine."""
        for row in file:
            source.rows += 1
            checked = _refuse_control_tokens(row, self._encoder) if isinstance(row, Conversation) else row
            if isinstance(checked, Conversation):
                source.conversations += 1
                yield self._render(checked)
                continue
            source.quarantined[checked.reason.value] += 1
            self._quarantine.write(json.dumps(checked.to_json(), ensure_ascii=False) + "\n")
            if len(self.first_rejects) < NAMED_REJECTS:
                self.first_rejects.append(f"{checked.place}: {checked.reason}: {printable(checked.detail)}")

    def _render(self, conversation: Conversation) -> list[str]:
        try:
            return self._encoder.render(conversation.messages)
        except DataError as error:
            raise DataError(f"{conversation.place}: {error}") from error


def _refuse_control_tokens(conversation: Conversation, encoder: Encoder) -> Conversation | Rejected:
    """Text that holds a control token could end a turn or forge another: it is data, and has to stay data."""
    token = encoder.control_token_in(conversation.messages)
    if token is None:
        return conversation
    text = next(text for message in conversation.messages for text in message.values() if token in text)
    start = max(0, text.index(token) - 80)
    return Rejected(Reason.CONTROL_TOKEN, f"the text holds {token}", conversation.place, text[start : start + 200])


def _source_files(job: Job, formats: Sequence[RowFormat] | None) -> list[CorpusFile]:
    """The files of all data inputs, in the order of the config."""
    files = []
    names = sorted((name for name in job.inputs if name.startswith("data.")), key=lambda name: int(name[5:]))
    for number, input_name in enumerate(names):
        sealed = job.inputs[input_name]
        for name in sorted(sealed.manifest.files):
            row_format: RowFormat = formats[number] if formats else "auto"
            files.append(CorpusFile(sealed.path / name, row_format, _shown_name(sealed, name)))
    return files


def _shown_name(sealed: Sealed, name: str) -> str:
    """Users know their files by name; what was made here goes by its source."""
    source = str(sealed.manifest.spec["settings"]["source"])
    return name if source == "file" else source


def _check_limits(total: SourceLedger, limits: Tokenize, first_rejects: Sequence[str], quarantine_path: Path) -> None:
    """Raise DataError if more was lost than the config allows, or nothing is left."""
    quarantined = total.quarantined.total()
    listed = "\n".join(f"  {line}" for line in first_rejects)
    details = f"{_counts(total.quarantined)}; the first:\n{listed}\nAll of them: {quarantine_path}"
    if not total.conversations:
        raise DataError(f"none of the {total.rows} rows is a usable conversation: {details}")
    if quarantined > limits.max_quarantined_fraction * total.rows:
        raise DataError(
            f"{quarantined} of {total.rows} rows cannot be used ({quarantined / total.rows:.2%}), and "
            f"tokenize.max_quarantined_fraction allows {limits.max_quarantined_fraction:.2%}: "
            f"mend the rows or raise it. {details}"
        )
    if not total.kept:
        raise DataError(f"no sample is left of {total.conversations} conversations: {_counts(total.dropped)}")
    lost = total.dropped["over_long"] + total.truncated
    if lost > limits.max_dropped_fraction * total.samples:
        raise DataError(
            f"{lost} of {total.samples} samples ({lost / total.samples:.2%}) are longer than tokenize.max_tokens "
            f"({limits.max_tokens}), and tokenize.max_dropped_fraction allows {limits.max_dropped_fraction:.2%}: "
            "raise one of the two"
        )


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in counter.most_common())


def _preview(encoder: Encoder, samples: Samples) -> list[dict[str, Any]]:
    """Some samples from all over the data as text, cut where supervision begins and ends."""
    chosen = np.unique(np.linspace(0, len(samples) - 1, min(PREVIEW_SAMPLES, len(samples))).astype(int))
    shown = []
    for number in chosen.tolist():
        sample = samples[number]
        cuts = np.flatnonzero(np.diff(sample.supervised)) + 1
        bounds = [0, *cuts.tolist(), len(sample.tokens)]
        pieces = [
            {
                "text": encoder.tokenizer.decode(sample.tokens[start:end].tolist(), skip_special_tokens=False),
                "supervised": bool(sample.supervised[start]),
            }
            for start, end in zip(bounds, bounds[1:], strict=False)
        ]
        shown.append({"pieces": pieces})
    return shown
