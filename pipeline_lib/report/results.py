"""The parts of the stages' result files and of plan.json that are shown, as typed values.

Values are optional, so that a report shows what exists instead of failing over what is missing.
"""

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from pipeline_lib.data.chat_template import Mode, trained_modes

# Results of the stages. Every value is optional except in a row of document scores, which is complete: a comparison
# without some of its values would be a different one.


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]
Count = int | None
Text = str | None


class Lenient(BaseModel):
    """A base model for result files: a missing value takes its default, and unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class SourceFile(Lenient):
    """A file of a source: the number of unread values by column or key, and of further keys together."""

    name: str = "unnamed"
    unread: dict[str, int] | None = None
    unread_others: int = 0


class Source(Lenient):
    """A line of the token ledger: counts of the rows and samples of one source."""

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
    """Counts of the trained prompts by their switch for thinking, from the tokenize stage; empty in older ledgers."""

    prompts: dict[str, int] = {}
    thinking_default: Text = None

    @property
    def modes(self) -> list[Mode]:
        """The switches for thinking that were trained; empty if the template has none, or if they are not known."""
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


class Step(Lenient):
    """One line of metrics.jsonl: one optimizer step and the attempt that took it. A non-finite number is None."""

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
        """The peak memory in MB (1e6 bytes), the unit of experiment tables."""
        return None if self.peak_memory_bytes is None else self.peak_memory_bytes / 1e6


class Score(Lenient):
    """A model's loss on the held-out answers and its standard error, both in nats per supervised token."""

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
    """The scores of all evaluated models, and the number of tokens and samples they cover."""

    base: Score = Score()
    tuned: Score = Score()
    unigram: Score = Score()
    shuffled: Score = Score()
    supervised_tokens: Count = None
    samples: Count = None


class Verdict(Lenient):
    """The evaluation's conclusion from the scores."""

    improved: bool | None = None
    beats_unigram: bool | None = None
    uses_prompt: bool | None = None
    text: str = "The evaluation gave no verdict."


class Evaluation(Lenient):
    """The metrics of the evaluate stage."""

    eval: Scores = Scores()
    verdict: Verdict = Verdict()


class Generation(Lenient):
    """One prompt and the answers to it."""

    prompt: str = ""
    reference: Text = None
    base: Text = None
    tuned: Text = None


class Piece(Lenient):
    """A stretch of a training sample that is or is not supervised."""

    text: str = ""
    supervised: bool = False


class Sample(Lenient):
    """A training sample as the model sees it, `tokens` long."""

    source: Text = None
    tokens: Count = None
    pieces: list[Piece] = []


class Parity(Lenient):
    """The difference between the logits of the exported model and of the trained model."""

    compared_logits: Count = None
    max_abs_difference: Number = None
    relative_difference: Number = None
    tolerance: Number = None
    top1_agreement: Number = None


# The plan (plan.json): the chosen strategy and its predictions. Every value is optional, since plans of schema 2 have
# no prediction.

# A value that is not a boolean, such as an unresolved `auto`, is None.
Flag = Annotated[bool | None, BeforeValidator(lambda value: value if isinstance(value, bool) else None)]


class Memory(Lenient):
    """Predicted memory of one rank at the peak of a step: state, working memory, and a reserve.

    The reserve is GPU memory outside tensors: the CUDA context, NCCL's buffers, and fragmentation.
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
        """Bytes of weights, gradients and optimizer state; None if one of them is not known."""
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
    """The nodes, ranks and devices that the plan is for."""

    nodes: Count = None
    ranks: Count = None
    cpus_per_rank: Count = None
    device: Text = None

    @property
    def is_gpu(self) -> bool:
        """Whether the ranks run on GPUs."""
        return self.device == "cuda"


class Chosen(Lenient):
    """The plan's decision."""

    strategy: Text = None


class Disk(Lenient):
    """The plan's expected disk usage."""

    checkpoint_bytes: Count = None


class Rate(Lenient):
    """An assumed rate of the machine, its band, and the source of the number."""

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
    """The data that the prediction assumes; lengths in tokens."""

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
    """An activity during a step, in one lane of its timeline."""

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
    """How one way to train distributes the model and the batch."""

    strategy: Text = None
    shard_ranks: Count = None
    micro_batch_blocks: Count = None
    recompute: Text = None
    offload: Text = None
    reshard: Flag = None
    compile: Flag = None


class Prediction(Lenient):
    """The prediction for one way to train.

    Values are of one optimizer step, except those of the run and the checkpoint.
    """

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
    """The plan's texts for people."""

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
        """The predicted memory for the chosen strategy."""
        return self.memory.get(self.chosen.strategy or "", Memory())

    @property
    def has_prediction(self) -> bool:
        """Whether times are predicted; plans of schema 2 have no predicted times."""
        return self.prediction.step_s.value is not None
