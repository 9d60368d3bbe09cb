"""The results of the stages as typed values: the parts of their files and of plan.json that are shown."""

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from pipeline_lib.data.chat_template import Mode, trained_modes

# The results of the stages as typed values: the part of their files that the report shows.
#
# Every value is optional, since a report should tell what there is rather than fail over what there is not; but a row
# of document scores is whole, since a comparison without some of them would be another one.


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


# plan.json as typed values: what was chosen, what was expected of it, and in which words.
#
# Everything is optional, as in report/results.py: the plans of schema 2 held no prediction.

# What is neither true nor false, as an `auto` that nobody settled, is none.
Flag = Annotated[bool | None, BeforeValidator(lambda value: value if isinstance(value, bool) else None)]


class Memory(Lenient):
    """What one rank is predicted to hold at the worst moment of a step: state, what is used for a while, and a reserve.

    The reserve is what a GPU holds beside: CUDA's context, NCCL's buffers, and what is cut up.
    """

    weights_bytes: Count = None
    gradients_bytes: Count = None
    optimizer_bytes: Count = None
    gathered_bytes: Count = None
    exchanged_bytes: Count = None
    activations_bytes: Count = None
    loss_bytes: Count = None
    reserve_bytes: Count = None
    allocated_bytes: Count = None

    @property
    def state_bytes(self) -> int | None:
        """Weights, gradients and optimizer."""
        known = (self.weights_bytes, self.gradients_bytes, self.optimizer_bytes)
        return None if None in known else sum(part or 0 for part in known)


class Batch(Lenient):
    """The plan's arithmetic of blocks and steps."""

    block_tokens: Count = None
    blocks: Count = None
    global_batch_blocks: Count = None
    micro_batch_blocks: Count = None
    accumulation: Count = None
    steps_per_epoch: Count = None
    epochs: Number = None
    steps: Count = None
    last_step_blocks: Count = None
    tokens_per_step: Count = None
    padding_fraction: Number = None


class Ranks(Lenient):
    """Where the plan runs."""

    nodes: Count = None
    ranks: Count = None
    cpus_per_rank: Count = None
    device: Text = None

    @property
    def is_gpu(self) -> bool:
        """Whether the memory that counts is that of GPUs."""
        return self.device == "cuda"


class Chosen(Lenient):
    """What the plan decided."""

    strategy: Text = None


class Disk(Lenient):
    """What the plan expects on disk."""

    checkpoint_bytes: Count = None


class Rate(Lenient):
    """What the machine was taken to do, the band of that, and whose word it is."""

    value: Number = None
    low: Number = None
    high: Number = None
    source: Text = None


class Machine(Lenient):
    """The machines that the prediction is for."""

    name: Text = None
    nodes: Count = None
    ranks_per_node: Count = None
    gpu_memory_bytes: Count = None
    measured_parts: Count = None
    rates: dict[str, Rate] = {}


class Workload(Lenient):
    """What the prediction took the data to be like; lengths in tokens."""

    block_tokens: Count = None
    real_fraction: Number = None
    supervised_fraction: Number = None
    document_tokens: Number = None
    is_assumed: bool = False


class Figure(Lenient):
    """A predicted number and its band."""

    value: Number = None
    low: Number = None
    high: Number = None


class Segment(Lenient):
    """Something that goes on during a step, in one lane of its time line."""

    lane: str = ""
    name: str = ""
    start_s: Number = None
    duration_s: Number = None


class Exchanged(Lenient):
    """One kind of exchange between ranks, and what it costs a step."""

    name: str = ""
    phase: Text = None
    payload_bytes: Number = None
    times: Number = None
    link: Text = None
    seconds: Number = None
    exposed_s: Number = None


class Placement(Lenient):
    """How the model and the batch are spread in one way to train."""

    strategy: Text = None
    shard_ranks: Count = None
    micro_batch_blocks: Count = None
    recompute: Text = None
    offload: Text = None
    reshard: Flag = None
    compile: Flag = None


class Prediction(Lenient):
    """What is expected of one way to train. Seconds and bytes are of an optimizer step, but for the run's."""

    changes: Placement = Placement()
    accumulation: Count = None
    peak_memory_bytes: Figure = Figure()
    needed_memory_bytes: Figure = Figure()
    forward_s: Figure = Figure()
    backward_s: Figure = Figure()
    update_s: Figure = Figure()
    step_s: Figure = Figure()
    tokens_per_s_per_rank: Figure = Figure()
    mfu: Figure = Figure()
    network_bytes: Figure = Figure()
    run_s: Figure = Figure()
    gpu_hours: Figure = Figure()
    checkpoint_bytes: Count = None
    checkpoint_s: Figure = Figure()
    parts: dict[str, Number] = {}
    segments: list[Segment] = []
    exchanges: list[Exchanged] = []
    bound: Text = None
    fits: bool | None = None


class Words(Lenient):
    """What the plan says for people."""

    chosen: Text = None
    others: list[str] = []
    advice: list[str] = []


class Plan(Lenient):
    """The plan that the training ran under."""

    cluster: Ranks = Ranks()
    machine: Machine = Machine()
    workload: Workload = Workload()
    batch: Batch = Batch()
    memory: dict[str, Memory] = {}
    chosen: Chosen = Chosen()
    disk: Disk = Disk()
    prediction: Prediction = Prediction()
    others: dict[str, Prediction] = {}
    words: Words = Words()

    @property
    def chosen_memory(self) -> Memory:
        """What is predicted for the chosen strategy."""
        return self.memory.get(self.chosen.strategy or "", Memory())

    @property
    def has_prediction(self) -> bool:
        """Whether times were predicted, which plans of schema 2 did not."""
        return self.prediction.step_s.value is not None
