"""The content of plan.json: the plan stage makes it, the launcher, the report and others read it.

Values that a plan cannot know are None: without a known machine there is no prediction.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.language import N_
from pipeline_lib.records.record import Record, parse, read_record, read_sealed_json

SCHEMA: Literal[3] = 3

Number = int | float


@dataclass(frozen=True)
class Figure(Record):
    """A predicted number and its band, from `low` to `high`."""

    value: Number
    low: Number
    high: Number

    @staticmethod
    def around(value: float, fraction: float) -> "Figure":
        """Return `value` with the band from value * (1 - fraction) to value * (1 + fraction)."""
        return Figure(value, value * (1 - fraction), value * (1 + fraction))

    def __add__(self, other: "Figure") -> "Figure":
        """Return the sum, whose band goes from the sum of the low ends to that of the high ends."""
        return Figure(self.value + other.value, self.low + other.low, self.high + other.high)

    def scaled(self, factor: float) -> "Figure":
        """Return the figure times `factor`, which is not negative."""
        return Figure(self.value * factor, self.low * factor, self.high * factor)

    def inverse(self, amount: float) -> "Figure":
        """Return `amount` divided by the figure: the rate of a time, or the time at a rate."""
        return Figure(amount / self.value, amount / self.high, amount / self.low)

    def holds(self, measured: float) -> bool:
        """Return whether `measured` is within the band."""
        return self.low <= measured <= self.high


@dataclass(frozen=True)
class Rate(Record):
    """A rate of the machine with its expected band and its source; `low` <= `value` <= `high`."""

    value: Number
    low: Number
    high: Number
    source: str

    @staticmethod
    def around(value: float, fraction: float, source: str) -> "Rate":
        """Return `value` with the band from value / (1 + fraction) to value * (1 + fraction)."""
        return Rate(value, value / (1 + fraction), value * (1 + fraction), source)


@dataclass(frozen=True)
class Memory(Record):
    """A rank's bytes on its device at a step's worst moment; `host_bytes` is what is offloaded.

    `checkpoint_bytes` is the size of a whole checkpoint, `copied_bytes` what this rank copies to
    host memory at a time. `cpu_rank_bytes` is all that the process of this rank holds at its peak
    if its device is CPUs. `gathered_bytes` are weights of other ranks, or casts of the rank's own,
    while in use. `exchanged_bytes` are gradients that are not reduced yet, with their buffers.
    `loss_bytes` are logits and what is computed from them. `reserve_bytes` is GPU memory outside
    tensors: the CUDA context, NCCL's buffers, and fragmentation. `error` is that of the prediction,
    as a fraction. Three are sums: `state_bytes` are kept between steps (weights, gradients where
    they persist, and the optimizer's), `allocated_bytes` is the peak that torch's allocator will
    report, and `total_bytes` what the device needs.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    exchanged_bytes: int
    activations_bytes: int
    loss_bytes: int
    reserve_bytes: int
    host_bytes: int
    checkpoint_bytes: int
    copied_bytes: int
    cpu_rank_bytes: int
    moment: str
    error: float
    state_bytes: int
    allocated_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class PlannedBatch(Record):
    """The division of the blocks into optimizer steps.

    `epoch_blocks` and `steps_per_epoch` are for the first epoch, and `last_step_blocks` is the size
    of its last step; with fractional weights, later epochs may have a few blocks more. `steps` is
    for the whole run. Samples and supervised tokens of a step are means. Fields that depend on the
    blocks are None while there are none.
    """

    writes_defaults: ClassVar[bool] = True

    block_tokens: int
    global_batch_blocks: int
    micro_batch_blocks: int
    accumulation: int
    epochs: Number
    tokens_per_step: int
    blocks: int | None = None
    epoch_blocks: int | None = None
    validation_blocks: int | None = None
    steps_per_epoch: int | None = None
    steps: int | None = None
    last_step_blocks: int | None = None
    padding_fraction: float | None = None
    samples_per_step: float | None = None
    supervised_tokens_per_step: float | None = None


@dataclass(frozen=True)
class PlannedCluster(Record):
    """The nodes, ranks and devices that the plan is for."""

    nodes: int
    ranks: int
    device: str
    launcher: str
    cpus_per_rank: int
    max_requeues: int

    @property
    def is_gpu(self) -> bool:
        """Whether the ranks run on GPUs."""
        return self.device == "cuda"


@dataclass(frozen=True)
class Chosen(Record):
    """The plan's decision: a value for each of PLACEMENT_KEYS, none of them `auto`."""

    attention: str
    compile: bool | str
    context_ranks: int
    deepspeed_json: Any
    deterministic: bool
    keep_last: int
    kept_attention_layers: int | str
    micro_batch_blocks: int
    offload: str
    offload_activations: bool | str
    profile_every_steps: int | None
    recompute: str
    reshard: bool | str
    sample_every_steps: int | None
    save_async: bool | str
    save_every_steps: int | str | None
    shard_ranks: int | None
    start_timeout_s: int
    strategy: str
    timeout_s: int
    unit_layers: int


@dataclass(frozen=True)
class Disk(Record):
    """The plan's expected disk usage."""

    checkpoint_bytes: int
    needed_bytes: int


@dataclass(frozen=True)
class Need(Record):
    """What a stage needs: memory of host and GPUs, what it writes to the store, and work seconds.

    `disk_bytes` and `work_s` are None if they are not known; `work_s` is at the slow end of usual
    rates.
    """

    writes_defaults: ClassVar[bool] = True

    stage: str
    cpus: int
    host_bytes: int
    work_s: float | None = None
    gpus: int = 0
    gpu_bytes: int = 0
    disk_bytes: int | None = None
    note: str = ""


@dataclass(frozen=True)
class RoadPart(Record):
    """What one part of a run takes from the command to the report: `start`, or a stage's name."""

    stage: str
    seconds: Figure


@dataclass(frozen=True)
class PlannedTracking(Record):
    """The trackers that are fed."""

    to: tuple[str, ...]
    project: str


@dataclass(frozen=True)
class Sizes(Record):
    """The sizes of the model."""

    parameters: int
    trainable_parameters: int
    matmul_parameters: int
    layers: int
    hidden_size: int
    vocab_tokens: int


@dataclass(frozen=True)
class PlannedMachine(Record):
    """The machines that the prediction is for.

    `measured_parts` counts the measured parts of a model of this shape, `other_parts` all others.
    """

    name: str
    nodes: int
    ranks_per_node: int
    gpu_memory_bytes: int | None
    peak_flop_s: float | None
    host_memory_bytes: int | None
    assumed_host_memory_bytes: int | None
    rates: dict[str, Rate]
    measured_parts: int
    other_parts: int


@dataclass(frozen=True)
class Workload(Record):
    """Blocks of `block_tokens` positions; fractions are relative to positions.

    `document_tokens` is the mean length of a document weighted by tokens, sum(n^2) / sum(n), which
    the cost of attention is proportional to. `blocks` and `epoch_blocks` are None while there is no
    data. `samples_per_block` is a mean over the blocks that an epoch uses. With `is_assumed`, all
    but `block_tokens` is assumed; with `is_estimated`, lengths and supervised tokens are by the
    first rows of the files. `document_band` has the least and the most that `document_tokens` may
    be, where that is assumed.
    """

    writes_defaults: ClassVar[bool] = True

    block_tokens: int
    real_fraction: float
    supervised_fraction: float
    document_tokens: float
    blocks: int | None
    epoch_blocks: int | None
    validation_blocks: int = 0
    is_assumed: bool = False
    is_estimated: bool = False
    samples_per_block: float = 1.0
    document_band: tuple[float, float] | None = None

    def with_documents(self, tokens: float) -> "Workload":
        """Return the workload with documents of another mean length, for what-if questions."""
        samples = self.samples_per_block
        if self.is_assumed:
            samples = max(1.0, self.real_fraction * self.block_tokens / tokens)
        return replace(self, document_tokens=tokens, samples_per_block=samples, document_band=None)


@dataclass(frozen=True)
class Segment(Record):
    """An activity during a step, in one lane of its timeline."""

    lane: str
    name: str
    start_s: float
    duration_s: float


@dataclass(frozen=True)
class PlannedExchange(Record):
    """One kind of exchange between ranks, and what it costs a step."""

    name: str
    phase: str
    payload_bytes: Number
    times: Number
    link: str
    seconds: float
    exposed_s: float


@dataclass(frozen=True)
class Placement(Record):
    """How one way to train distributes the model and the batch."""

    strategy: str
    shard_ranks: int | None
    context_ranks: int
    micro_batch_blocks: int
    recompute: str
    offload: str
    reshard: bool | str
    compile: bool | str
    save_async: bool | str


# What users read for names that plan.json has for parts of the memory and of a step, and for what a
# step is bound by.
PART_NAMES = {
    "activations": N_("activations"),
    "backward": N_("backward"),
    "exchange": N_("communication"),
    "exchanged": N_("unreduced gradients"),
    "forward": N_("forward"),
    "gathered": N_("gathered weights"),
    "gradients": N_("gradients"),
    "loss": N_("loss"),
    "offload": N_("offload"),
    "optimizer": N_("optimizer"),
    "recompute": N_("recompute"),
    "reserve": N_("reserve"),
    "update": N_("update"),
    "weights": N_("weights"),
}
_BOUNDS = {
    "device": N_("computing"),
    "exchange": N_("communication"),
    "host": N_("host"),
    "offload": N_("host copies"),
}


TO_A_BLOCK = "ranks to a block"  # after their number, which is `context_ranks`


def bound_in_words(bound: str | None) -> str:
    """Return what a step is bound by, as users read it."""
    return _BOUNDS.get(bound or "", bound or "")


Bound = Literal["device", "host", "exchange", "offload"]


@dataclass(frozen=True, kw_only=True)
class PlannedWay(Record):
    """The prediction for one way to train on one machine.

    Values are of one optimizer step, except those of the run and the checkpoint. Phases are those
    that train/step.py measures, and include their exchanges. `words` begin with the strategy.
    `parts` are seconds that add up to the expected step time. `network_bytes` is what a node sends
    to others. `mfu` is None if the GPU's peak is not known, `run_s` while the number of steps is
    not, `gpu_hours` without GPUs too. Only the chosen way has `segments`.
    """

    changes: Placement
    words: tuple[str, ...]
    accumulation: int
    peak_memory_bytes: Figure
    needed_memory_bytes: Figure
    forward_s: Figure
    backward_s: Figure
    update_s: Figure
    step_s: Figure
    tokens_per_s_per_rank: Figure
    mfu: Figure | None
    network_bytes: Figure
    run_s: Figure | None
    gpu_hours: Figure | None
    checkpoint_bytes: int
    checkpoint_s: Figure
    parts: dict[str, float]
    segments: tuple[Segment, ...] = ()
    exchanges: tuple[PlannedExchange, ...]
    bound: Bound
    fits: bool


@dataclass(frozen=True)
class Lacks(Record):
    """The bytes that a GPU, with margin, and a node's host lack; `is_margin` if only the margin."""

    gpu_bytes: int
    host_bytes: int
    is_margin: bool


@dataclass(frozen=True)
class PlannedNearMiss(Record):
    """The fastest way that nearly fits and would beat the chosen one, and what it lacks."""

    lacks: Lacks
    prediction: PlannedWay


Verdict = Literal["fits", "tight", "too large", "not checked"]
FITS: Verdict = "fits"
TIGHT: Verdict = "tight"
TOO_LARGE: Verdict = "too large"
NOT_CHECKED: Verdict = "not checked"


@dataclass(frozen=True, kw_only=True)
class Summary(Record):
    """The plan's answers: whether the run fits, its steps, how it trains, and what to do next.

    `host_needed_bytes` are those of a node. `cost` is that of the training's GPU-hours, in the
    currency of `gpu_hour_price`.
    """

    verdict: Verdict
    host_needed_bytes: int
    steps: Figure | None
    gpu_hour_price: float | None
    cost: Figure | None
    way: str
    assumed: tuple[str, ...]
    next: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Words(Record):
    """The plan's texts for people.

    `verdicts` has one for each strategy, `others` more about those not chosen. `before_packing` is
    another plan that the data had before it was packed, and why it differs.
    """

    chosen: str
    verdicts: dict[str, str]
    others: tuple[str, ...]
    advice: tuple[str, ...]
    near_miss: str = ""
    warnings: tuple[str, ...] = ()
    repetition: str = ""
    steps: str = ""
    before_packing: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanDocument(Record):
    """The content of plan.json.

    `train` has the settings that differ from their defaults. `memory` and `others` are by strategy.
    """

    schema: Literal[3]
    experiment: str
    model: Sizes
    cluster: PlannedCluster
    machine: PlannedMachine | None
    workload: Workload
    train: dict[str, Any]
    tracking: PlannedTracking
    batch: PlannedBatch
    memory: dict[str, Memory]
    chosen: Chosen
    disk: Disk
    stages: tuple[Need, ...]
    prediction: PlannedWay | None
    others: dict[str, PlannedWay]
    near_miss: PlannedNearMiss | None
    summary: Summary
    words: Words
    road: tuple[RoadPart, ...] = ()  # empty if machine, model or length of the training is unknown

    @property
    def chosen_memory(self) -> Memory:
        """The predicted memory for the chosen strategy."""
        return self.memory[self.chosen.strategy]

    @property
    def run_steps(self) -> int:
        """The number of steps of the run.

        Raises IntegrityError if the plan was made before there were blocks, as none is sealed.
        """
        if self.batch.steps is None:
            raise IntegrityError(
                "plan.json has no number of steps: delete its folder and run snakemake again"
            )
        return self.batch.steps

    @property
    def gpu_memory_bytes(self) -> int | None:
        """The memory of a GPU; None if it is not known."""
        return self.machine.gpu_memory_bytes if self.machine else None


def read_plan(path: Path) -> PlanDocument:
    """Return the plan in the file at `path`.

    Raise OSError, or IntegrityError naming the file and the key if it is damaged or of another
    schema.
    """
    return read_record(PlanDocument, path)


def read_plan_of_training(path: Path) -> PlanDocument | None:
    """Return the plan that a verified training was sealed with; None if earlier code made it.

    A training stays as it is when plans get other keys, and is not computed again for its plan.
    Raise OSError, or IntegrityError naming the file if it is damaged.
    """
    found = read_sealed_json(path)
    try:
        return parse(PlanDocument, found, path)
    except IntegrityError:
        return None
