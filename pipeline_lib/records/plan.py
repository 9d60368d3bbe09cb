"""The content of plan.json as typed values, and its one reader.

Values are optional: without a known machine there is no prediction, and a value that a plan does
not have is not known.
"""

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, model_validator

from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.files import read_json
from pipeline_lib.core.lenient import Count, Lenient, Number, Text, unusable

Value = TypeVar("Value")

# A value that is not a boolean, such as an unresolved `auto`, is None.
Flag = Annotated[
    bool | None, BeforeValidator(lambda value: value if isinstance(value, bool) else None)
]


class PlanPart(Lenient):
    """A part of a plan, in which a null is a value that is not known: it takes its default."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        found: dict[str, Any] = {}
        for name, each in value.items():
            default = cls.model_fields[name].default if name in cls.model_fields else None
            if isinstance(each, list) and isinstance(default, list):
                found[name] = [item for item in each if item is not None]
            elif isinstance(each, dict) and isinstance(default, dict):
                found[name] = {key: item for key, item in each.items() if item is not None}
            elif each is not None or default is None:
                found[name] = each
        return found


class Memory(PlanPart):
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
    host_bytes: Count = None
    checkpoint_bytes: Count = None
    copied_bytes: Count = None
    cpu_rank_bytes: Count = None
    allocated_bytes: Count = None
    total_bytes: Count = None
    moment: Text = None

    @property
    def state_bytes(self) -> int | None:
        """Bytes of weights, gradients and optimizer state; None if one of them is not known."""
        known = (self.weights_bytes, self.gradients_bytes, self.optimizer_bytes)
        return None if None in known else sum(part or 0 for part in known)


class PlannedBatch(PlanPart, extra="allow"):
    """The plan's arithmetic of blocks and steps."""

    block_tokens: Count = None
    blocks: Count = None
    epoch_blocks: Count = None
    global_batch_blocks: Count = None
    micro_batch_blocks: Count = None
    accumulation: Count = None
    steps_per_epoch: Count = None
    epochs: int | float | None = None
    steps: Count = None
    last_step_blocks: Count = None
    tokens_per_step: Count = None
    padding_fraction: Number = None
    samples_per_step: Number = None
    supervised_tokens_per_step: Number = None


class Ranks(PlanPart, extra="allow"):
    """The nodes, ranks and devices that the plan is for."""

    nodes: Count = None
    ranks: Count = None
    cpus_per_rank: Count = None
    device: Text = None
    launcher: Text = None
    max_requeues: Count = None

    @property
    def is_gpu(self) -> bool:
        """Whether the ranks run on GPUs."""
        return self.device == "cuda"


class Chosen(PlanPart, extra="allow"):
    """The plan's decision: a value for each of PLACEMENT_KEYS."""

    strategy: Text = None
    shard_ranks: Count = None
    micro_batch_blocks: Count = None
    recompute: Text = None
    offload: Text = None
    reshard: bool | str | None = None
    compile: bool | str | None = None
    save_async: bool | str | None = None
    offload_activations: bool | str = "auto"
    kept_attention_layers: int | str = "auto"
    context_ranks: int = 1
    save_every_steps: int | str | None = None
    keep_last: Count = None
    timeout_s: Count = None
    start_timeout_s: Count = None
    deterministic: bool = False


class Disk(PlanPart):
    """The plan's expected disk usage."""

    checkpoint_bytes: Count = None
    needed_bytes: Count = None


class Need(PlanPart):
    """What a stage needs: host and GPU memory, disk of the store, and seconds of work."""

    stage: str = ""
    cpus: Count = None
    gpus: int = 0
    host_bytes: Count = None
    gpu_bytes: Count = None
    disk_bytes: Count = None
    work_s: Number = None
    note: str = ""


class PlannedTracking(PlanPart):
    """The trackers that are fed."""

    to: list[str] = []
    project: str = ""


class Sizes(PlanPart):
    """Numbers of the model's parameters."""

    parameters: int = 0
    trainable_parameters: int = 0


class Figure(PlanPart):
    """A predicted number and its band."""

    value: Number = None
    low: Number = None
    high: Number = None


class Rate(Figure):
    """An assumed rate of the machine, its band, and the source of the number."""

    source: Text = None


class Machine(PlanPart):
    """The machines that the prediction is for."""

    name: Text = None
    nodes: Count = None
    ranks_per_node: Count = None
    gpu_memory_bytes: Count = None
    host_memory_bytes: Count = None
    assumed_host_memory_bytes: Count = None
    measured_parts: Count = None
    other_parts: Count = None
    rates: dict[str, Rate] = {}


class Workload(PlanPart):
    """The data that the prediction assumes; lengths in tokens."""

    block_tokens: Count = None
    real_fraction: Number = None
    supervised_fraction: Number = None
    document_tokens: Number = None
    is_assumed: bool = False
    samples_per_block: Number = None


class Segment(PlanPart):
    """An activity during a step, in one lane of its timeline."""

    lane: str = ""
    name: str = ""
    start_s: Number = None
    duration_s: Number = None


class Exchanged(PlanPart):
    """One kind of exchange between ranks, and what it costs a step."""

    name: str = ""
    phase: Text = None
    payload_bytes: Number = None
    times: Number = None
    link: Text = None
    seconds: Number = None
    exposed_s: Number = None


class Placement(PlanPart):
    """How one way to train distributes the model and the batch."""

    strategy: Text = None
    shard_ranks: Count = None
    context_ranks: Count = None
    micro_batch_blocks: Count = None
    recompute: Text = None
    offload: Text = None
    reshard: Flag = None
    compile: Flag = None
    save_async: Flag = None


# What users read for names that plan.json has for parts of the memory and of a step, and for what a
# step is bound by.
PART_NAMES = {
    "exchange": "communication",
    "exchanged": "unreduced gradients",
    "gathered": "gathered weights",
}
_BOUNDS = {"device": "computing", "exchange": "communication", "offload": "host copies"}


TO_A_BLOCK = "ranks to a block"  # after their number, which is `context_ranks`


def bound_in_words(bound: str | None) -> str:
    """Return what a step is bound by, as users read it."""
    return _BOUNDS.get(bound or "", bound or "")


class Prediction(PlanPart):
    """The prediction for one way to train.

    Values are of one optimizer step, except those of the run and the checkpoint. `words` begin with
    the strategy.
    """

    changes: Placement = Placement()
    words: list[str] = []
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


class Lacks(PlanPart):
    """The bytes that a GPU, with margin, and a node's host lack; `is_margin` if only the margin."""

    gpu_bytes: Count = None
    host_bytes: Count = None
    is_margin: bool = False


class NearMiss(PlanPart):
    """The fastest way that nearly fits and would beat the chosen one, and what it lacks."""

    lacks: Lacks = Lacks()
    prediction: Prediction = Prediction()


class Summary(PlanPart):
    """The plan's answers: whether the run fits, its steps, how it trains, and what to do next.

    `verdict` is FITS, TIGHT, TOO_LARGE or NOT_CHECKED; `host_needed_bytes` are those of a node.
    `cost` is that of the training's GPU-hours, in the currency of `gpu_hour_price`.
    """

    verdict: Text = None
    host_needed_bytes: Count = None
    steps: Figure = Figure()
    gpu_hour_price: Number = None
    cost: Figure = Figure()
    way: str = ""
    assumed: list[str] = []
    next: list[str] = []


FITS, TIGHT, TOO_LARGE, NOT_CHECKED = ("fits", "tight", "too large", "not checked")


class Words(PlanPart):
    """The plan's texts for people.

    `verdicts` has one for each strategy, `others` more about those not chosen.
    """

    chosen: Text = None
    near_miss: Text = None
    verdicts: dict[str, str] = {}
    others: list[str] = []
    advice: list[str] = []
    warnings: list[str] = []
    repetition: Text = None
    steps: Text = None


class PlanDocument(PlanPart):
    """The content of plan.json.

    `train` has the settings that differ from their defaults; it may be missing.
    """

    experiment: str = ""
    model: Sizes = Sizes()
    cluster: Ranks = Ranks()
    machine: Machine = Machine()
    workload: Workload = Workload()
    train: dict[str, Any] | None = None
    tracking: PlannedTracking = PlannedTracking()
    batch: PlannedBatch = PlannedBatch()
    memory: dict[str, Memory] = {}
    chosen: Chosen = Chosen()
    disk: Disk = Disk()
    stages: list[Need] = []
    prediction: Prediction = Prediction()
    others: dict[str, Prediction] = {}
    near_miss: NearMiss = NearMiss()
    summary: Summary = Summary()
    words: Words = Words()

    @property
    def chosen_memory(self) -> Memory:
        """The predicted memory for the chosen strategy."""
        return self.memory.get(self.chosen.strategy or "", Memory())

    @property
    def has_prediction(self) -> bool:
        """Whether times are predicted; without a known machine they are not."""
        return self.prediction.step_s.value is not None


def read_plan(path: Path) -> PlanDocument:
    """Return the plan in the file at `path`; an empty one if there is no file.

    Raise IntegrityError naming the file if it is damaged or of another schema.
    """
    try:
        return PlanDocument.model_validate(read_json(path)) if path.exists() else PlanDocument()
    except ValueError as error:
        raise unusable(path, error) from error


def known(value: Value | None) -> Value:
    """Return a value of a plan that a run cannot do without.

    Raise IntegrityError if the plan does not have it.
    """
    if value is None:
        raise IntegrityError(
            "plan.json lacks a value that a run needs: delete its folder and run snakemake again"
        )
    return value
