"""The shown parts of the stages' result files, as typed values; `plan.py` has those of plan.json.

Values are optional, so that a report shows what exists instead of failing over what is missing.
"""

from typing import Annotated

from pydantic import Field, FiniteFloat

from pipeline_lib.core.lenient import Count, Lenient, Number, Text

# Results of the stages. Every value is optional except in a row of document scores, which is
# complete: a comparison without some of its values would be a different one.


class SourceFile(Lenient):
    """A source's file: the number of unread values by column or key, and of further keys."""

    name: str = "unnamed"
    unread: dict[str, int] = {}
    unread_others: int = 0


class Source(Lenient):
    """A line of the token ledger: rows and samples of a source, held out or trained on."""

    name: str = "unnamed"
    held_out: bool = False
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
    """Counts of the trained prompts by their switch for thinking, from the tokenize stage."""

    prompts: dict[str, int] = {}
    thinking_default: Text = None
    chat_template_kwargs: dict[str, bool | int | str] = {}


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
    """The blocks of all sources with the same weight."""

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
        """The fraction of block positions that hold a token rather than padding."""
        if not self.blocks or not self.block_tokens or self.tokens is None:
            return None
        return self.tokens / (self.blocks * self.block_tokens)

    @property
    def padding_fraction(self) -> float | None:
        """The fraction of block positions that hold padding."""
        return None if self.packing_efficiency is None else 1 - self.packing_efficiency


class Training(Lenient):
    """The summary of the training run."""

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

    def has_lost_best(self, keeps_best: bool) -> bool:
        """Return whether the best step should be the result but its checkpoint was lost.

        `keeps_best` is `train.keep_best` of the run.
        """
        return keeps_best and self.best_step is not None and self.result_step != self.best_step


class Step(Lenient):
    """One line of metrics.jsonl: one optimizer step and the attempt that took it.

    A non-finite number is None.
    """

    step: int
    epoch: Count = None
    tokens: Count = None
    supervised_tokens: Count = None
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
    gpu_utilization_of_ranks: tuple[float, ...] | None = None
    peak_memory_bytes_of_ranks: tuple[float, ...] | None = None
    node_sent_bytes: Number = None
    profile_compute_s: Number = None
    validation_loss: Number = None
    verdict: Text = None
    attempt: Count = None

    @property
    def peak_memory_mb(self) -> float | None:
        """The peak memory in MB (1e6 bytes), the unit of experiment tables."""
        return None if self.peak_memory_bytes is None else self.peak_memory_bytes / 1e6


class Score(Lenient):
    """A model's held-out loss on answers and its standard error, in nats per supervised token."""

    loss: Number = None
    perplexity: Number = None
    standard_error: Number = None
    documents: Count = None


class DocumentScore(Lenient):
    """Both models' losses on a held-out document, summed over its supervised tokens, in nats."""

    document: str
    tokens: Annotated[int, Field(ge=0)]
    base: FiniteFloat
    tuned: FiniteFloat


class SourceScore(Lenient):
    """Both models' losses on a source's held-out samples, with their number and their tokens."""

    source: str = "unnamed"
    samples: Count = None
    supervised_tokens: Count = None
    base: Score = Score()
    tuned: Score = Score()


class Scores(Lenient):
    """The scores of all evaluated models, and the number of tokens and samples they cover.

    `by_source` is empty unless samples of several sources are held out.
    """

    base: Score = Score()
    tuned: Score = Score()
    unigram: Score = Score()
    shuffled: Score = Score()
    supervised_tokens: Count = None
    samples: Count = None
    by_source: list[SourceScore] = []

    @property
    def are_of_nothing(self) -> bool:
        """Whether it is known that nothing was held out, so that there are no scores."""
        return self.samples == 0


class EvaluationVerdict(Lenient):
    """The evaluation's conclusion from the scores."""

    improved: bool | None = None
    beats_unigram: bool | None = None
    uses_prompt: bool | None = None
    text: str = "The evaluation gave no verdict."


class Evaluation(Lenient):
    """The evaluate stage's metrics; `answers` says why fewer or shorter ones were generated."""

    eval: Scores = Scores()
    verdict: EvaluationVerdict = EvaluationVerdict()
    answers: Text = None


class Generation(Lenient):
    """One prompt and the answers to it."""

    prompt: str = ""
    reference: Text = None
    base: Text = None
    tuned: Text = None


class PreviewPiece(Lenient):
    """A stretch of a training sample that is or is not supervised."""

    text: str = ""
    supervised: bool = False


class PreviewSample(Lenient):
    """A training sample as the model sees it, `tokens` long."""

    source: Text = None
    tokens: Count = None
    pieces: list[PreviewPiece] = []


class Parity(Lenient):
    """The difference between the exported model and the trained one, or why it was not measured."""

    unproven: Text = None
    compared_logits: Count = None
    max_abs_difference: Number = None
    relative_difference: Number = None
    tolerance: Number = None
    top1_agreement: Number = None
    positions_apart: Count = None
    value_difference: Number = None
    value_tolerance: Number = None
    rounding_difference: Number = None
