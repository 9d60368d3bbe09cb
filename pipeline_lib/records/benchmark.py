"""What the benchmark stage leaves in files: each answer, and the scores by benchmark."""

from dataclasses import dataclass, field
from typing import Literal

from pipeline_lib.records.record import Record

BENCHMARK_NAME = "benchmark.json"
ANSWERS_NAME = "answers.jsonl"
OVERLAP_NAME = "overlap.json"

# What may be wrong with an answer, whatever it says.
Fault = Literal["unended", "loop", "empty", "think"]


@dataclass(frozen=True, kw_only=True)
class BenchmarkAnswer(Record):
    """A line of answers.jsonl: a model's answer to a question; of a choice, the chosen text.

    `question` is a hash of its content, equal in all runs.
    """

    benchmark: str
    question: str
    prompt: str
    right: tuple[str, ...]
    answer: str
    is_right: bool
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BenchmarkScore(Record):
    """How many questions of a benchmark a model answered right, and how many answers had a fault."""

    questions: int
    right: int
    faults: dict[Fault, int] = field(default_factory=dict)

    @property
    def fraction(self) -> float:
        """The fraction of right answers."""
        return self.right / self.questions


@dataclass(frozen=True, kw_only=True)
class BaseBenchmarks(Record):
    """The scores of the base model by benchmark, and the precision that it answered in."""

    precision: Literal["bf16", "fp32"]
    scores: dict[str, BenchmarkScore]


@dataclass(frozen=True, kw_only=True)
class BenchmarkComparison(Record):
    """Both models' scores on the same questions, and the difference of their fractions right.

    `gained` questions the tuned model alone answered right, `lost` the base model alone.
    `low` and `high` are the ends of the 95 % interval of the difference, tuned minus base.
    """

    base: BenchmarkScore
    tuned: BenchmarkScore
    gained: int
    lost: int
    difference: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Benchmarks(Record):
    """The tuned model beside the base model, by benchmark."""

    precision: Literal["bf16", "fp32"]
    compared: dict[str, BenchmarkComparison]


@dataclass(frozen=True, kw_only=True)
class TouchedQuestion(Record):
    """A question that stands in a training row: its hash, its text, and the words they share."""

    question: str
    prompt: str
    shared: str


@dataclass(frozen=True, kw_only=True)
class BenchmarkOverlap(Record):
    """The questions of a benchmark in the training rows, and how many are too short to tell."""

    touched: tuple[TouchedQuestion, ...]
    too_short: int


@dataclass(frozen=True, kw_only=True)
class Overlaps(Record):
    """What the overlap stage leaves in overlap.json, by benchmark."""

    benchmarks: dict[str, BenchmarkOverlap]
