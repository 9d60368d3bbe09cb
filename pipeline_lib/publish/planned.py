"""plan.json as typed values: what was chosen, what was expected of it, and in which words.

Everything is optional, as in publish/results.py: the plans of schema 2 held no prediction.
"""

from typing import Annotated

from pydantic import BeforeValidator

from pipeline_lib.publish.results import Count, Lenient, Number, Text

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
