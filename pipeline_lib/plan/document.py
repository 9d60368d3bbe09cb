"""plan.json: everything that is predicted of a run, from what is known of it.

The stage makes it from sealed blocks, the command from whatever there is; what is not known stays None.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import PLACEMENT_KEYS, Cluster, Tracking, Train, settings_of
from pipeline_lib.plan.arithmetic import BatchPlan, batch_without_data, plan_batches
from pipeline_lib.plan.checkpoints import checkpoint_bytes
from pipeline_lib.plan.choice import Choice, Setting, choose, predictions
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.compute import shape_of
from pipeline_lib.plan.feasible import Wanted, host_memory, leanest, what_would_fit
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.known import Blocks
from pipeline_lib.plan.machine import Machine, Ranks
from pipeline_lib.plan.measured import read_measured
from pipeline_lib.plan.memory import Memory, predict_all
from pipeline_lib.plan.placement import settled
from pipeline_lib.plan.prediction import Prediction, fits_on_gpu, host_need_of_node, lacks_host_memory
from pipeline_lib.plan.units import gib, gigabytes
from pipeline_lib.plan.words import advice, describe, why_chosen, why_not_others
from pipeline_lib.plan.workload import Workload

SCHEMA = 3  # keys may be added
_NAME_IT = "name the GPUs as cluster.gpu: then time is predicted too, and whether it fits"


@dataclass(frozen=True)
class Question:
    """What a plan is asked about. `blocks` are None while there are none, and `workload` is then assumed.

    `held` are keys that `strategy: auto` leaves as they are, `measured` what a cluster.json holds. `repetition` says
    what it costs that conversations become several samples; empty where it costs nothing, or there are none yet.
    """

    experiment: str
    geometry: Geometry
    train: Train
    cluster: Cluster
    tracking: Tracking
    workload: Workload
    blocks: Blocks | None
    held: Collection[str]
    measured: Mapping[str, Any] | None
    has_deepspeed: bool
    repetition: str = ""

    @property
    def ranks(self) -> Ranks:
        """Those of the cluster."""
        cluster = self.cluster
        return Ranks(cluster.ranks, cluster.ranks // cluster.nodes, has_triton=cluster.device == "cuda")

    @property
    def settled(self) -> Train:
        """What is trained where there is no machine to choose by."""
        return settled(self.train, self.ranks.has_triton)

    @property
    def machine(self) -> Machine | None:
        """The cluster's; None where its GPUs are not named. Raises ConfigError."""
        measured = read_measured(self.measured) if self.measured is not None else None
        return machine_of(self.cluster, self.train.precision, measured)

    def batch(self, train: Train) -> BatchPlan:
        """The batches with that micro-batch. Raises DataError if there is no step."""
        if self.blocks is None:
            return batch_without_data(train, self.cluster.ranks, self.workload.block_tokens)
        return plan_batches(train, self.cluster.ranks, self.blocks.training, self.blocks.validation_blocks)

    def wanted(self, machine: Machine) -> Wanted:
        """What is to be trained, on that machine. Raises DataError if there is no step."""
        batch = self.batch(self.train)
        setting = Setting(self.geometry, machine, self.workload, batch.global_batch_blocks, batch.steps)
        return Wanted(setting, self.train, self.held, self.has_deepspeed)


@dataclass(frozen=True)
class Answer:
    """The content of plan.json, with what was chosen of what; `refusal` says why it cannot be run, if it cannot.

    Where the GPU is not named there is nothing to choose by.
    """

    content: dict[str, Any]
    wanted: Wanted | None
    choice: Choice | None
    refusal: str | None


def answer(question: Question, is_explained: bool = True) -> Answer:
    """Predict, and with `strategy: auto` choose. Raises DataError if there is nothing to train on, ConfigError.

    Most of the time goes into words: what is not `is_explained` has none.
    """
    machine = question.machine
    if machine is None:
        words = {"chosen": f"{question.train.strategy}: as the config says", "others": [], "advice": [_NAME_IT]}
        return Answer(_content(question, None, None, words), None, None, None)
    wanted = question.wanted(machine)
    choice, refusal = _choice(wanted)
    if not is_explained:
        return Answer(_content(question, machine, choice, {}), wanted, choice, refusal)
    is_auto = question.train.strategy == "auto"
    words = {
        "chosen": why_chosen(choice, wanted.setting, is_auto),
        "others": why_not_others(choice, wanted.setting),
        "advice": advice(choice, wanted.setting, question.has_deepspeed),
    }
    if refusal is not None and is_auto:
        words["chosen"] = f"{describe(choice.chosen)}: lacks the least memory, and does not fit"
    elif not choice.chosen.fits:
        too_large = [lacking(choice.chosen.train, choice.chosen.memory, machine)]
        too_large += what_would_fit(wanted) if machine.is_gpu else []
        if is_hopeless(choice.chosen.memory, machine):
            refusal = in_lines(too_large)
        else:
            words["advice"] = [*too_large, *words["advice"]]
    return Answer(_content(question, machine, choice, words), wanted, choice, refusal)


def _choice(wanted: Wanted) -> tuple[Choice, str | None]:
    """What is chosen, or, where nothing fits, what lacks least, and why it is refused: as preflight does."""
    setting = wanted.setting
    try:
        return choose(setting, wanted.train, wanted.held, wanted.has_deepspeed), None
    except DataError as error:
        found, ways = predictions(setting, wanted.train, wanted.held), leanest(wanted)
        if not found or not ways:
            raise
        train, memory = ways[0]
        least = lacking(train, memory, setting.machine).removeprefix("train.strategy: ")
        found.sort(key=lambda one: one.needed_memory_bytes.value, reverse=True)
        best: dict[str, Prediction] = {one.train.strategy: one for one in found}
        refusal = in_lines([f"{error}: at the least, {least}", *what_would_fit(wanted)])
        return Choice(setting.predict(train), best, len(found), {}), refusal


def in_lines(said: list[str]) -> str:
    """One problem of a ConfigError, with what to do below it."""
    return "\n      ".join(said)


def is_hopeless(memory: Memory, machine: Machine) -> bool:
    """Whether it is predicted not to fit even without a margin: then it is refused, and else warned of.

    Without GPUs it is warned of: cluster.memory_gb is what a job asks for, and a machine may have more.
    """
    limit = machine.gpu_memory_bytes
    return limit is not None and (lacks_host_memory(memory, machine) or memory.total_bytes > limit)


def lacking(train: Train, memory: Memory, machine: Machine) -> str:
    """By how much that memory is too small, in words."""
    needed, has = memory.total_bytes, machine.gpu_memory_bytes
    of_gpu = f"{gib(has or 0)} of each {machine.name}"
    too_large = (
        f"train.strategy: {train.strategy} needs {gib(needed)}, {gib(needed - (has or 0))} more than the {of_gpu}"
    )
    if has is None or needed <= has:
        too_large = (
            f"train.strategy: {train.strategy} needs {gib(needed)} of the {of_gpu}, too near to it to be sure of"
        )
    if lacks_host_memory(memory, machine):
        host, gives = host_need_of_node(memory, machine), gigabytes(machine.host_memory_bytes or 0)
        on_host = (
            f"{gigabytes(host.total_bytes)} of host memory on each node ({host}), and cluster.memory_gb gives {gives}"
        )
        if not fits_on_gpu(memory, machine):
            return f"{too_large}, and {on_host}"
        key = "strategy" if train.offload == "none" else "offload"
        return f"train.{key}: {getattr(train, key)} needs {on_host}; set {host_memory(host.total_bytes)}"
    return too_large


def _content(
    question: Question, machine: Machine | None, choice: Choice | None, words: dict[str, Any]
) -> dict[str, Any]:
    train = choice.chosen.train if choice else question.settled
    one_checkpoint = checkpoint_bytes(question.geometry, train)
    others = {name: one.as_json() for name, one in choice.best.items() if name != train.strategy} if choice else {}
    for each in others.values():
        del each["segments"]
    return {
        "schema": SCHEMA,
        "experiment": question.experiment,
        "model": _model(question.geometry, train),
        "cluster": _cluster(question.cluster),
        "machine": _machine(machine, question.geometry) if machine else None,
        "workload": asdict(question.workload),
        "train": settings_of(train),
        "tracking": question.tracking.model_dump(mode="json"),
        "batch": asdict(question.batch(train)),
        "memory": _memory(question, choice),
        "chosen": {key: getattr(train, key) for key in sorted(PLACEMENT_KEYS)},
        "disk": {
            "checkpoint_bytes": one_checkpoint,
            "needed_bytes": one_checkpoint * (train.keep_last + train.keep_best + 1),
        },
        "prediction": choice.chosen.as_json() if choice else None,
        "others": others,
        "words": {**words, **({"repetition": question.repetition} if question.repetition else {})},
    }


def _model(geometry: Geometry, train: Train) -> dict[str, int]:
    return {
        "parameters": geometry.parameters,
        "trainable_parameters": geometry.trained_parameters(train),
        "matmul_parameters": geometry.matmul_parameters,
        "layers": geometry.layers,
        "hidden_size": geometry.hidden,
        "vocab_tokens": geometry.vocab,
    }


def _machine(machine: Machine, geometry: Geometry) -> dict[str, Any]:
    """With the measured parts that are of this model, and those of others, which say nothing of it."""
    own = sum(part.shape == shape_of(geometry) for part in machine.measured)
    return {**machine.as_json(), "measured_parts": own, "other_parts": len(machine.measured) - own}


def _cluster(cluster: Cluster) -> dict[str, Any]:
    return {
        "nodes": cluster.nodes,
        "ranks": cluster.ranks,
        "device": cluster.device,
        "launcher": cluster.launcher,
        "cpus_per_rank": cluster.cpus_per_rank,
        "max_requeues": cluster.max_requeues,
    }


def _memory(question: Question, choice: Choice | None) -> dict[str, Any]:
    """Of the best of every strategy."""
    if choice is not None:
        best = {**choice.best, choice.chosen.train.strategy: choice.chosen}
        return {name: one.memory.as_json() for name, one in best.items()}
    train = question.settled
    accumulation, block_tokens = question.batch(train).accumulation, question.workload.block_tokens
    found = predict_all(question.geometry, train, question.ranks, block_tokens, accumulation)
    return {name: memory.as_json() for name, memory in found.items()}
