"""What the evaluate stage leaves in files: scores, the verdict on them, and answers."""

from dataclasses import dataclass
from typing import Literal

from pydantic import FiniteFloat, NonNegativeInt

from pipeline_lib.records.record import Record

# Held-out documents: with fewer, the longest ones dominate, and intervals come out too short.
MIN_DOCUMENTS = 20

EVALUATION_NAME = "metrics.json"
SCORES_NAME = "scores.jsonl"
GENERATIONS_NAME = "generations.jsonl"


@dataclass(frozen=True, kw_only=True)
class Conditions(Record):
    """How a model was evaluated: the losses' precision, prompt count, and answer length.

    `precision` is None if nothing was held out.
    """

    precision: Literal["bf16", "fp32"] | None
    prompts: int
    generations: int
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class BaseEvaluation(Record):
    """The evaluation of the base model by itself.

    `answers` says why fewer or shorter answers were generated than asked for.
    """

    conditions: Conditions
    answers: str | None = None


@dataclass(frozen=True, kw_only=True)
class BaseScore(Record):
    """A line of the base model's scores.jsonl: a held-out document's loss, summed, in nats."""

    nats: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class BaseAnswer(Record):
    """A line of the base model's generations.jsonl: a prompt and the answer to it."""

    prompt: str
    reference: str | None
    answer: str


@dataclass(frozen=True, kw_only=True)
class UnigramScore(Record):
    """A held-out loss on answers, in nats per supervised token, and its perplexity."""

    loss: float
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class Score(Record):
    """A model's held-out loss on answers and its standard error, in nats per supervised token.

    `standard_error` is None if `documents`, the number of them with supervised tokens, is below 2.
    """

    loss: float
    perplexity: float
    standard_error: float | None
    documents: int


@dataclass(frozen=True, kw_only=True)
class SourceScore(Record):
    """Both models' losses on a source's held-out samples, with their number and their tokens.

    Without supervised tokens there are no losses.
    """

    source: str
    samples: int
    supervised_tokens: int
    base: Score | None = None
    tuned: Score | None = None


@dataclass(frozen=True, kw_only=True)
class Scores(Record):
    """The scores of all evaluated models, and the number of tokens and samples they cover.

    `shuffled` is None if no answer fits behind another prompt. `by_source` is empty unless samples
    of several sources are held out. `last` is the last checkpoint's score where the tuned model is
    the mean of several.
    """

    base: Score
    tuned: Score
    unigram: UnigramScore
    shuffled: Score | None
    supervised_tokens: int
    samples: int
    by_source: tuple[SourceScore, ...] = ()
    last: Score | None = None


@dataclass(frozen=True, kw_only=True)
class NoScores(Record):
    """What stands for the scores where nothing was held out."""

    samples: Literal[0]


@dataclass(frozen=True, kw_only=True)
class EvaluationVerdict(Record):
    """The evaluation's conclusion from the scores.

    `is_mean_told_apart` says of a mean of checkpoints that it differs from the last one alone by
    more than chance.
    """

    improved: bool
    beats_unigram: bool
    uses_prompt: bool
    text: str
    is_mean_told_apart: bool = False


@dataclass(frozen=True, kw_only=True)
class NoVerdict(Record):
    """What stands for the verdict where nothing was held out."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """The evaluation of the tuned model beside the base model.

    `answers` says why fewer or shorter answers were generated than asked for.
    """

    eval: Scores | NoScores
    verdict: EvaluationVerdict | NoVerdict
    answers: str | None = None

    @property
    def scores(self) -> Scores | None:
        """The scores; None if nothing was held out."""
        return self.eval if isinstance(self.eval, Scores) else None


@dataclass(frozen=True, kw_only=True)
class DocumentScore(Record):
    """Both models' losses on a held-out document, summed over its supervised tokens, in nats.

    `document` is a hash of its content, equal in all runs.
    """

    document: str
    tokens: NonNegativeInt
    base: FiniteFloat
    tuned: FiniteFloat


@dataclass(frozen=True, kw_only=True)
class Generation(Record):
    """One prompt and the answers of both models to it; `reference` is the held-out answer."""

    prompt: str
    reference: str | None
    base: str
    tuned: str
