"""The results of the stages as typed values: the part of their files that the report shows.

Every value is optional, since a report should tell what there is rather than fail over what there is not; but a row
of document scores is whole, since a comparison without some of them would be another one.
"""

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from pipeline_lib.data.chat.calling import Mode, trained_modes


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]
Count = int | None
Text = str | None


class Lenient(BaseModel):
    """Base of what is read: a missing value is None, and what the report does not show is left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class SourceFile(Lenient):
    """A file of a source: how many values of each column or key were not read, and of further ones together."""

    name: str = "unnamed"
    unread: dict[str, int] | None = None
    unread_others: int = 0


class Source(Lenient):
    """A line of the token ledger: what became of the rows of one source."""

    name: str = "unnamed"
    files: list[SourceFile] = []
    format: Text = None
    rows: Count = None
    conversations: Count = None
    quarantined: dict[str, int] = {}
    duplicates: dict[str, int] = {}
    duplicates_dropped: Count = None
    samples: Count = None
    kept: Count = None
    truncated: Count = None
    split: Count = None
    dropped: dict[str, int] = {}
    tokens: Count = None
    repeated_tokens: Count = None
    supervised_tokens: Count = None


class Prompts(Lenient):
    """How the answers that were trained on were asked for: counts of the tokenize stage, none of them of older code."""

    prompts: dict[str, int] = {}
    thinking_default: Text = None

    @property
    def modes(self) -> list[Mode]:
        """The switches for thinking that were trained; none where the template has none, or it is not known."""
        return trained_modes(self.prompts, self.thinking_default)


class Histogram(Lenient):
    """Counts of samples between `edges`, in tokens."""

    edges: list[float] = []
    counts: list[int] = []


class Ledger(Lenient):
    """The ledger of the tokenize stage."""

    sources: list[Source] = []
    total: Source = Source()
    length_percentiles: dict[str, float | None] = {}
    length_histogram: Histogram = Histogram()


class BlockGroup(Lenient):
    """Blocks of sources of one weight."""

    weight: Number = None
    blocks: Count = None


class Index(Lenient):
    """The packed blocks of one split."""

    groups: list[BlockGroup] = []
    epoch_blocks: Count = None
    blocks: Count = None
    block_tokens: Count = None
    tokens: Count = None
    supervised_tokens: Count = None
    documents: Count = None

    @property
    def packing_efficiency(self) -> float | None:
        """Fraction of the block positions that hold a token rather than padding."""
        if not self.blocks or not self.block_tokens or self.tokens is None:
            return None
        return self.tokens / (self.blocks * self.block_tokens)

    @property
    def padding_fraction(self) -> float | None:
        """The rest of the positions."""
        return None if self.packing_efficiency is None else 1 - self.packing_efficiency


class Training(Lenient):
    """Summary of the training run."""

    steps: Count = None
    epochs: Number = None
    world_size: Count = None
    strategy: Text = None
    method: Text = None
    precision: Text = None
    parameters: Count = None
    trainable_parameters: Count = None
    tokens: Count = None
    supervised_tokens: Count = None
    train_s: Number = None
    attempts: Count = None
    final_loss: Number = None
    best_step: Count = None
    best_validation_loss: Number = None
    result_step: Count = None
    stopped_early: bool = False
    skipped_steps: Count = None
    blocks: Count = None
    batch_blocks: Count = None


class Step(Lenient):
    """One line of metrics.jsonl: one optimizer step, and which attempt took it. A number that is not finite is None."""

    step: int
    loss: Number = None
    lr: Number = None
    grad_norm: Number = None
    step_s: Number = None
    forward_s: Number = None
    backward_s: Number = None
    update_s: Number = None
    data_wait_s: Number = None
    elapsed_s: Number = None
    tokens_per_s: Number = None
    mfu: Number = None
    peak_memory_bytes: Number = None
    device_memory_bytes: Number = None
    node_sent_bytes: Number = None
    profile_compute_s: Number = None
    validation_loss: Number = None
    verdict: Text = None
    attempt: Count = None

    @property
    def peak_memory_mb(self) -> float | None:
        """In units of 1e6 bytes, as tables of experiments show it."""
        return None if self.peak_memory_bytes is None else self.peak_memory_bytes / 1e6


class Score(Lenient):
    """How well a model predicts the held-out answers; the loss and its standard error in nats per supervised token."""

    loss: Number = None
    perplexity: Number = None
    standard_error: Number = None
    documents: Count = None


class DocumentScore(Lenient):
    """The losses of both models on one held-out document, summed over its supervised tokens, in nats."""

    document: str
    tokens: Annotated[int, Field(ge=0)]
    base: FiniteFloat
    tuned: FiniteFloat


class Scores(Lenient):
    """All models that were scored, and on how much."""

    base: Score = Score()
    tuned: Score = Score()
    unigram: Score = Score()
    shuffled: Score = Score()
    supervised_tokens: Count = None
    samples: Count = None


class Verdict(Lenient):
    """What the scores say."""

    improved: bool | None = None
    beats_unigram: bool | None = None
    uses_prompt: bool | None = None
    text: str = "The evaluation gave no verdict."


class Evaluation(Lenient):
    """Metrics of the evaluate stage."""

    eval: Scores = Scores()
    verdict: Verdict = Verdict()


class Generation(Lenient):
    """One prompt and the answers to it."""

    prompt: str = ""
    reference: Text = None
    base: Text = None
    tuned: Text = None


class Piece(Lenient):
    """A stretch of a training sample that is, or is not, trained on."""

    text: str = ""
    supervised: bool = False


class Sample(Lenient):
    """A training sample as the model sees it, `tokens` long."""

    source: Text = None
    tokens: Count = None
    pieces: list[Piece] = []


class Parity(Lenient):
    """The exported model's logits against those of the model that was trained."""

    compared_logits: Count = None
    max_abs_difference: Number = None
    relative_difference: Number = None
    tolerance: Number = None
    top1_agreement: Number = None
