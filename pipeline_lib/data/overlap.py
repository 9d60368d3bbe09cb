"""The overlap stage: which questions of benchmarks stand in the rows that are trained on.

The rows are read as text, since a question in a prompt has other tokens than in an answer. A word
counts as one unit, and so does a character of a script without spaces between words. In memory are
the questions and one block of rows.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from pipeline_lib.config.content import WEIGHTS_SUFFIXES
from pipeline_lib.config.questions import BenchmarkQuestion
from pipeline_lib.core.files import write_json
from pipeline_lib.core.stage import Job
from pipeline_lib.core.text import Progress
from pipeline_lib.core.units import count
from pipeline_lib.data.asked import asked_in
from pipeline_lib.data.blocks import BlockReader, documents_of
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.records.benchmark import (
    OVERLAP_NAME,
    BenchmarkOverlap,
    Overlaps,
    TouchedQuestion,
)
from pipeline_lib.records.record import to_json

GRAM = 13  # units in a row, as GPT-3 was checked by
# Fewer say nothing: any row may have them. Shorter questions than GRAM are looked for as a whole.
LEAST = 5
_WITHOUT_SPACES = "\u2e80-\u9fff\uf900-\ufaff\uac00-\ud7af\u0e00-\u0eff\U00020000-\U0003ffff"
_UNIT = re.compile(rf"[{_WITHOUT_SPACES}]|[^\W_{_WITHOUT_SPACES}]+")

Gram = tuple[str, ...]


def units_of(text: str) -> list[str]:
    """Return the words of `text`, and the characters of scripts without spaces, in order."""
    return _UNIT.findall(unicodedata.normalize("NFKC", text).casefold())


@dataclass
class Searched:
    """Questions by number, and their grams by what these begin with: LEAST units."""

    grams: dict[Gram, list[tuple[Gram, int]]] = field(default_factory=lambda: defaultdict(list))
    found: dict[int, Gram] = field(default_factory=dict)

    def add(self, number: int, text: str) -> bool:
        """Look for the question `number`; return False if its text is too short for that."""
        units = units_of(text)
        if len(units) < LEAST:
            return False
        size = min(GRAM, len(units))
        for gram in set(_grams(units, size)):
            self.grams[gram[:LEAST]].append((gram, number))
        return True

    def read(self, text: str) -> None:
        """Note which questions have a gram in `text`."""
        units = units_of(text)
        for place, start in enumerate(_grams(units, LEAST)):
            for gram, number in self.grams.get(start, ()):
                if number not in self.found and tuple(units[place : place + len(gram)]) == gram:
                    self.found[number] = gram


def _grams(units: Sequence[str], size: int) -> Iterator[Gram]:
    for place in range(len(units) - size + 1):
        yield tuple(units[place : place + size])


def run(job: Job) -> dict[str, Any]:
    """Write overlap.json: the questions of each benchmark that stand in the training rows."""
    asked: list[tuple[str, BenchmarkQuestion]] = []
    for benchmark in asked_in(job):
        for question in benchmark.questions.asked:
            asked.append((benchmark.settings.name, question))
    searched = Searched()
    short = set()
    for number, (_, question) in enumerate(asked):
        if not searched.add(number, question.text):
            short.add(number)
    model = job.inputs["model"]
    names = [name for name in model.manifest.files if not name.endswith(WEIGHTS_SUFFIXES)]
    reader = BlockReader(job.inputs["shard"].folder("train/*") / "train")
    job.say(f"overlap: {count(len(asked), 'questions')} in {count(len(reader), 'blocks')} of rows")
    progress = Progress(job.say, "overlap", "blocks")
    for done, text in _texts(reader, load_tokenizer(model.folder(*names))):
        searched.read(text)
        progress.update(done, done / len(reader))
    overlaps = _overlaps(asked, searched, short)
    write_json(job.out / OVERLAP_NAME, to_json(overlaps))
    touched = {name: len(each.touched) for name, each in overlaps.benchmarks.items()}
    for name, questions in touched.items():
        job.say(f"overlap: {name}: {count(questions, 'questions')} stand in the training rows")
    return {"touched": touched}


def _texts(reader: BlockReader, tokenizer: Tokenizer) -> Iterator[tuple[int, str]]:
    """Yield the text of each training sample, with the number of blocks that were read."""
    for block in range(len(reader)):
        ids = [document.tokens.tolist() for document in documents_of(reader[block])]
        for text in tokenizer.decode_batch(ids, skip_special_tokens=True):
            yield block + 1, text


def _overlaps(
    asked: Iterable[tuple[str, BenchmarkQuestion]], searched: Searched, short: set[int]
) -> Overlaps:
    touched: dict[str, list[TouchedQuestion]] = {}
    too_short: dict[str, int] = {}
    for number, (name, question) in enumerate(asked):
        touched.setdefault(name, [])
        too_short[name] = too_short.get(name, 0) + (number in short)
        if number in searched.found:
            shared = " ".join(searched.found[number])
            one = TouchedQuestion(question=question.key, prompt=question.text, shared=shared)
            touched[name].append(one)
    return Overlaps(
        benchmarks={
            name: BenchmarkOverlap(touched=tuple(found), too_short=too_short[name])
            for name, found in touched.items()
        }
    )
