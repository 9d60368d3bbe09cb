"""A question about a run and its answer: the content of plan.json, in numbers and in words."""

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.arch.layers import recompute_of
from pipeline_lib.config.schema import Cluster, Config, Evaluate, FileData, Tracking
from pipeline_lib.config.section import settings_of
from pipeline_lib.config.train import AUTO, PLACEMENT_KEYS, Train, fixed_keys, in_file
from pipeline_lib.core.errors import DataError, PipelineError
from pipeline_lib.core.language import N_, _
from pipeline_lib.core.store import Store
from pipeline_lib.core.units import GIGA, gib, gigabytes, rounded
from pipeline_lib.plan.amounts import expected_workload
from pipeline_lib.plan.benchmarks import Asking, askings_of
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.choose import Choice, choose
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.context import not_shared, sharing_counts
from pipeline_lib.plan.counterfactuals import Change, advice
from pipeline_lib.plan.fitting import host_limit_in_words, host_memory, what_would_fit
from pipeline_lib.plan.host import host_need
from pipeline_lib.plan.known import Blocks, blocks_of, geometry_of, repetition_of
from pipeline_lib.plan.machine import Machine, Ranks
from pipeline_lib.plan.measured import Measured, measured_of
from pipeline_lib.plan.memory import predict_all
from pipeline_lib.plan.near import missed
from pipeline_lib.plan.passes import shape_of
from pipeline_lib.plan.predict import (
    Prediction,
    fits_on_gpu,
    host_need_of_node,
    lacks_host_memory,
    predict_step,
)
from pipeline_lib.plan.road import road_of
from pipeline_lib.plan.stages import Run, local_data_bytes, needs_of
from pipeline_lib.plan.steps import Steps, plan_batches, step_warnings
from pipeline_lib.plan.trained import checkpoint_bytes
from pipeline_lib.plan.words import (
    describe,
    given,
    near_miss_in_words,
    verdicts,
    why_chosen,
    why_not_others,
)
from pipeline_lib.plan.workload import in_words, settled
from pipeline_lib.records.plan import (
    FITS,
    NOT_CHECKED,
    SCHEMA,
    TIGHT,
    TOO_LARGE,
    Chosen,
    Disk,
    Figure,
    Memory,
    Need,
    PlanDocument,
    PlannedBatch,
    PlannedCluster,
    PlannedMachine,
    PlannedTracking,
    Sizes,
    Summary,
    Verdict,
    Words,
    Workload,
)

# plan.json: the plan stage makes it from sealed blocks, the command from whatever is known. Unknown
# values are None.

_NAME_IT = "set cluster.gpu: the plan then also predicts the time, and whether the run fits"
_CALIBRATE = N_(
    "qwen3 calibrate CONFIG, which measures the speeds and narrows the bands once "
    "`cluster.measured: cluster.json` stands in CONFIG"
)
_WORTH_MEASURING_S = 600.0  # of the whole run; measuring takes a minute or two
_TYPICAL = "typical"  # source of rates that are neither measured nor given
_NO_WORDS = Words(chosen="", verdicts={}, others=(), advice=())
_NEXT = 2  # changes among what to do next; all of them stand under `what would help`


@dataclass(frozen=True)
class Question:
    """All that a plan is computed from.

    `blocks` is None while there are none; `workload` is estimated or assumed then. `fixed` are keys
    that `strategy: auto` keeps, `measured` is what a cluster.json says. `repetition` says what it
    costs that conversations become several samples; it is empty if that costs nothing or is not
    known yet. `estimated` are the steps by the first rows of the files, where there are no blocks.
    `data_bytes` is the size of the raw data, None if it is not known or read already; near
    duplicates in it are searched for if `has_near_duplicates`. `askings` are what the benchmarks
    ask, `exports` the kinds of exports, and `averaged` the number of checkpoints in the merge.
    """

    experiment: str
    geometry: Geometry
    train: Train
    cluster: Cluster
    tracking: Tracking
    workload: Workload
    blocks: Blocks | None
    fixed: Collection[str]
    measured: Measured | None
    has_deepspeed: bool
    repetition: str = ""
    estimated: Steps | None = None
    evaluate: Evaluate = Evaluate()
    data_bytes: int | None = None
    has_near_duplicates: bool = False
    askings: tuple[Asking, ...] = ()
    exports: tuple[str, ...] = ()
    averaged: int = 1

    @property
    def ranks(self) -> Ranks:
        """The ranks of the cluster."""
        return Ranks.of_cluster(self.cluster)

    @property
    def machine(self) -> Machine | None:
        """The cluster's machine, or None if its GPUs are not named. Raises ConfigError."""
        return machine_of(self.cluster, self.train.precision, self.measured, self.train.attention)

    def batch(self, train: Train) -> PlannedBatch:
        """Return the batches for the micro-batch size of `train`.

        Raise DataError if there is no step.
        """
        training = self.blocks.training if self.blocks else None
        return plan_batches(train, self.cluster.ranks, training, self.workload)

    def case(self, machine: Machine, batch: PlannedBatch) -> Case:
        """Return what the choice is made for, on that machine, with these batches."""
        return Case(
            self.geometry,
            self.train,
            machine,
            self.workload,
            batch.global_batch_blocks,
            batch.steps,
            batch.steps_per_epoch,
            self.fixed,
            self.has_deepspeed,
        )


def question_of(config: Config, store: Store) -> Question:
    """Return the input of the plan.

    Raise DataError for an unknown model, ConfigError for a wrong cluster.json.
    """
    geometry = geometry_of(config, store)
    blocks = blocks_of(config, store)
    return Question(
        experiment=config.experiment,
        geometry=geometry,
        train=config.train,
        cluster=config.cluster,
        tracking=config.tracking,
        workload=blocks.workload if blocks else expected_workload(config, geometry.vocab),
        blocks=blocks,
        fixed=fixed_keys(config.train),
        measured=measured_of(config),
        has_deepspeed=find_spec("deepspeed") is not None,
        repetition=repetition_of(config, store),
        evaluate=config.asked,
        data_bytes=_data_bytes(config),
        has_near_duplicates=config.tokenize.near_duplicates is not None,
        askings=askings_of(config),
        exports=config.export,
        averaged=config.merge.averaged,
    )


def _data_bytes(config: Config) -> int | None:
    """Return the size of the data, None if it is not all in local files that exist."""
    if not all(isinstance(one, FileData) for one in config.data.sources):
        return None
    with suppress(PipelineError, OSError):  # missing files are named where they are hashed
        return local_data_bytes(config)
    return None


@dataclass(frozen=True)
class Answer:
    """The content of plan.json and the choice it reports; `refusal` is why a run cannot start.

    `case` and `choice` are None if the GPU is not named.
    """

    content: PlanDocument
    case: Case | None
    choice: Choice | None
    refusal: str | None


def answer(question: Question, is_explained: bool = True) -> Answer:
    """Predict the run, and with `strategy: auto` choose how to train.

    Raise DataError if there is nothing to train on, no legal way to train, or if ranks would be
    idle with any number of them to a block, and ConfigError for a wrong machine. Most of the time
    goes into sentences; without `is_explained` they are left out.
    """
    machine = question.machine
    batch = question.batch(question.train)
    train = question.train
    ranks = question.ranks
    sizes = (question.workload.block_tokens, batch.global_batch_blocks)
    counts = sharing_counts(question.geometry, train, question.fixed, ranks, *sizes)
    if not counts:
        raise DataError(not_shared(train, ranks.total, *sizes))
    if machine is None:
        question = replace(question, train=train.model_copy(update={"context_ranks": counts[0]}))
        set_there = f"{question.train.strategy}: {given(question.train)}"
        unnamed = Words(chosen=set_there, verdicts={}, others=(), advice=())
        return Answer(_content(question, None, None, unnamed, [_NAME_IT]), None, None, None)
    case = question.case(machine, batch)
    choice = choose(case)
    chosen = choice.chosen
    is_auto = train.strategy == AUTO
    lacks = _lacks(case, choice)
    is_refused = bool(lacks) and (is_auto or is_hopeless(chosen.memory, machine))
    if not is_explained:
        refusal = in_lines(lacks) if is_refused else None
        return Answer(_content(question, case, choice, _NO_WORDS, []), case, choice, refusal)
    would_fit = what_would_fit(case) if lacks else []
    changes = advice(choice, case)
    words = Words(
        chosen=why_chosen(choice, case, is_auto),
        verdicts=dict(verdicts(choice, case, is_auto)),
        others=tuple(why_not_others(choice, case)),
        advice=tuple(change.sentence for change in changes),
    )
    if choice.near is not None:
        words = replace(words, near_miss=near_miss_in_words(choice, choice.near, machine))
    if lacks and is_auto:
        least = f"{describe(chosen)}: needs the least memory, and does not fit"
        words = replace(words, chosen=least)
    elif lacks and not is_refused:
        words = replace(words, advice=(*lacks, *would_fit, *words.advice))
    actions = _next(would_fit, changes, case, chosen.run_s)
    refusal = in_lines([*lacks, *would_fit]) if is_refused else None
    return Answer(_content(question, case, choice, words, actions), case, choice, refusal)


def _lacks(case: Case, choice: Choice) -> list[str]:
    """Return what a choice lacks that does not fit, in a sentence; empty if it fits."""
    chosen = choice.chosen
    if chosen.fits:
        return []
    if case.train.strategy == AUTO:
        return [lacking_at_least(chosen.train, chosen.memory, case.machine)]
    return [lacking(chosen.train, chosen.memory, case.machine)]


def _next(
    would_fit: list[str], changes: list[Change], case: Case, run_s: Figure | None
) -> list[str]:
    """Return what to do next: make the run fit or take the largest gains; then measure speeds.

    A short run is over before that has paid.
    """
    if would_fit:
        return [text.partition(": ")[2] for text in would_fit[:_NEXT]]
    actions = [change.briefly for change in changes[:_NEXT]]
    can_measure = _TYPICAL in _sources_of_rates(case.machine) and case.geometry.delta is None
    is_short = run_s is not None and run_s.value < _WORTH_MEASURING_S
    if can_measure and not is_short:
        actions.append(_(_CALIBRATE))
    return actions


def in_lines(sentences: list[str]) -> str:
    """Join a problem of a ConfigError and what to do about it, indented below it."""
    return "\n      ".join(sentences)


def is_hopeless(memory: Memory, machine: Machine) -> bool:
    """Return whether the way fits not even without a margin; it is then refused, else warned of.

    Without GPUs it is always a warning: cluster.memory_gb is what a job asks for, and a machine may
    have more.
    """
    limit = machine.gpu_memory_bytes
    return limit is not None and (lacks_host_memory(memory, machine) or memory.total_bytes > limit)


def lacking_at_least(train: Train, memory: Memory, machine: Machine) -> str:
    """Return what even the way that lacks least lacks, with `strategy: auto`, in words."""
    least = lacking(train, memory, machine).removeprefix("train.strategy: ")
    return f"train.strategy: auto finds no way that fits: even {least}"


def lacking(train: Train, memory: Memory, machine: Machine) -> str:
    """Return by how much that memory is too small, in words."""
    needed = memory.total_bytes
    has = machine.gpu_memory_bytes
    of_gpu = f"{gib(has or 0)} of each {machine.name}"
    too_large = f"train.strategy: {train.strategy} needs {gib(needed)}"
    if has is None or needed <= has:
        too_large += f" of the {of_gpu}, too close to the limit"
    else:
        too_large += f", {gib(needed - has)} more than the {of_gpu}"
    if lacks_host_memory(memory, machine):
        host = host_need_of_node(memory, machine)
        has_host = host_limit_in_words(machine)
        on_host = (
            f"{gigabytes(host.total_bytes)} of host memory on each node ({host}), and {has_host}"
        )
        if not fits_on_gpu(memory, machine):
            return f"{too_large}, and {on_host}"
        key = "strategy" if train.offload == "none" else "offload"
        copies = ", or leave out train.save_async: true" if train.save_async is True else ""
        return (
            f"train.{key}: {getattr(train, key)} needs {on_host}; set "
            f"{host_memory(host.total_bytes)}{copies}"
        )
    return too_large


def _with_data(words: Words, question: Question, train: Train, batch: PlannedBatch) -> Words:
    """Return `words` with the plan's texts about samples, steps and idle keys."""
    steps = Steps.of(batch) or question.estimated
    warnings = list(step_warnings(train, batch, steps, question.cluster.ranks)) if steps else []
    return replace(
        words,
        repetition=question.repetition,
        steps=question.estimated.in_words() if question.estimated else "",
        warnings=(*warnings, *_idle_keys(question.train, train)),
    )


def _idle_keys(given: Train, chosen: Train) -> Iterator[str]:
    """Yield the keys of `given` that do nothing beside what `auto` has become in `chosen`."""
    kept = given.kept_attention_layers
    recompute = recompute_of(chosen)
    if kept != AUTO and recompute != "full":
        why = f"has no effect, because {in_file('recompute')}: auto is {recompute} here"
        yield f"train.kept_attention_layers: {kept} {why}; remove it, or set that to full"


def run_of(question: Question) -> Run:
    """Return what the stages of the run are sized by. Raises ConfigError."""
    cluster = question.cluster
    train = question.train
    evaluate = question.evaluate
    return Run(
        cluster,
        train,
        evaluate,
        question.geometry,
        question.workload,
        question.machine,
        question.askings,
        question.exports,
        question.averaged,
    )


def _stages(question: Question, run: Run, memory: Memory, host_bytes: int) -> tuple[Need, ...]:
    of_data = question.data_bytes, question.has_near_duplicates
    return tuple(needs_of(run, host_bytes, memory.total_bytes, *of_data))


def _steps(steps: Steps | None) -> Figure | None:
    if steps is None:
        return None
    low, value, high = steps.run
    return Figure(value, low, high)


def _cost(way: Prediction | None, gpu_hour_price: float | None) -> Figure | None:
    if way is None or way.gpu_hours is None or gpu_hour_price is None:
        return None
    return way.gpu_hours.scaled(gpu_hour_price)


def _verdict(machine: Machine | None, way: Prediction | None) -> Verdict:
    if (
        machine is None
        or way is None
        or (machine.gpu_memory_bytes is None and machine.host_limit_bytes is None)
    ):
        return NOT_CHECKED
    if way.fits:
        return FITS
    lacks = missed(way, machine)
    return TIGHT if lacks.is_margin and not lacks.host_bytes else TOO_LARGE


def _assumed(workload: Workload, machine: Machine | None) -> Iterator[str]:
    """Yield what the plan takes for granted: what is neither given nor measured."""
    if workload.is_assumed:
        text = _("{supervised:.0%} supervised in blocks {filled:.0%} full").format(
            supervised=workload.supervised_fraction, filled=workload.real_fraction
        )
        is_told = workload.document_band is None  # as a what-if question may
        if not is_told:
            documents = _("documents of {tokens:,.0f} tokens, ")
            text = documents.format(tokens=workload.document_tokens) + text
        yield _("by the first rows, ") + text if workload.is_estimated else text
    if machine is None:
        return
    if machine.is_host_assumed:
        size = rounded((machine.host_limit_bytes or 0) / GIGA, "GB")
        yield _("{size} of host memory").format(size=size)
    sources = _sources_of_rates(machine)
    if typical := sources.count(_TYPICAL):
        text = _("speeds are typical of {machine}")
        if "measured" in sources:
            text = _("{typical} of {speeds} speeds are typical of {machine}")
        yield text.format(typical=typical, speeds=len(sources), machine=_whose(machine))


def _whose(machine: Machine) -> str:
    """Return whose typical speeds are assumed, and what those of products rest on."""
    if not machine.is_gpu:
        return _("CPUs, so times are rough")
    source = machine.rates["matmul_flop_s"].source
    _typical, comma, known = source.partition(", ")
    return f"{machine.name} ({known})" if comma else machine.name


def _sources_of_rates(machine: Machine) -> list[str]:
    """Return `measured`, config key or _TYPICAL, for each rate, without those of absent links."""
    absent = ("between_",) * (machine.nodes == 1) + ("in_node_",) * (machine.ranks_per_node == 1)
    sources = [rate.source for name, rate in machine.rates.items() if not name.startswith(absent)]
    return [
        source if source == "measured" or source.startswith("cluster.") else _TYPICAL
        for source in sources
    ]


def _with_estimated_run(way: Prediction, case: Case, steps: Steps | None) -> Prediction:
    """Return `way` with the time of as many steps as are estimated, if the length is unknown."""
    if way.run_s is not None or steps is None:
        return way
    epochs = steps.epoch or (None, None, None)
    lengths = zip(steps.run, epochs, strict=True)
    of_way = case.by(way.train)
    ends = [predict_step(replace(of_way, steps=run, epoch_steps=epoch)) for run, epoch in lengths]
    run_s = _over([one.run_s for one in ends])
    gpu_hours = _over([one.gpu_hours for one in ends])
    return replace(way, run_s=run_s, gpu_hours=gpu_hours)


def _over(figures: list[Figure | None]) -> Figure | None:
    """Return the figure from the low end of the first of three to the high end of the last one."""
    low, value, high = figures
    return (
        None
        if low is None or value is None or high is None
        else Figure(value.value, low.low, high.high)
    )


def _described(machine: Machine, geometry: Geometry) -> PlannedMachine:
    """Return the content of a machine, with how many parts were measured of this model's shape."""
    own = sum(part.shape == shape_of(geometry) for part in machine.measured)
    return machine.planned(measured_parts=own, other_parts=len(machine.measured) - own)


def _content(
    question: Question,
    case: Case | None,
    choice: Choice | None,
    words: Words,
    actions: list[str],
) -> PlanDocument:
    geometry = question.geometry
    machine = case.machine if case else None
    train = choice.chosen.train if choice else settled(question.train, question.ranks.has_triton)
    batch = question.batch(train)
    if choice is not None:
        best = {**choice.best, choice.chosen.train.strategy: choice.chosen}
        memories = {name: way.memory for name, way in best.items()}
    else:
        memories = predict_all(
            geometry, train, question.ranks, question.workload.block_tokens, batch.accumulation
        )
    described = None if machine is None else _described(machine, geometry)
    way = None
    if choice and case:
        way = _with_estimated_run(choice.chosen, case, question.estimated)
    memory = memories[train.strategy]
    parts = memory.host_bytes, memory.copied_bytes, memory.cpu_rank_bytes
    host_bytes = host_need(*parts, question.ranks, question.cluster.device == "cuda").total_bytes
    one_checkpoint = checkpoint_bytes(geometry, train)
    run = replace(run_of(question), train=train)
    others = {}
    if choice is not None:
        for name, other in choice.best.items():
            if name != train.strategy:
                others[name] = replace(other.planned(), segments=())
    cluster = question.cluster
    return PlanDocument(
        schema=SCHEMA,
        experiment=question.experiment,
        model=Sizes(
            parameters=geometry.parameters,
            trainable_parameters=geometry.trained_parameters(train),
            matmul_parameters=geometry.matmul_parameters,
            layers=geometry.layers,
            hidden_size=geometry.hidden,
            vocab_tokens=geometry.vocab,
        ),
        cluster=PlannedCluster(
            nodes=cluster.nodes,
            ranks=cluster.ranks,
            device=cluster.device,
            launcher=cluster.launcher,
            cpus_per_rank=cluster.cpus_per_rank,
            max_requeues=cluster.max_requeues,
        ),
        machine=described,
        workload=question.workload,
        train=settings_of(train),
        tracking=PlannedTracking(question.tracking.to, question.tracking.project),
        batch=batch,
        memory=dict(memories),
        chosen=Chosen(**{key: getattr(train, key) for key in PLACEMENT_KEYS}),
        disk=Disk(one_checkpoint, one_checkpoint * train.checkpoints_on_disk),
        stages=_stages(question, run, memory, host_bytes),
        prediction=way.planned() if way else None,
        others=others,
        near_miss=choice.near.planned() if choice and choice.near else None,
        summary=Summary(
            verdict=_verdict(machine, way),
            host_needed_bytes=host_bytes,
            steps=_steps(Steps.of(batch) or question.estimated),
            gpu_hour_price=cluster.gpu_hour_price,
            cost=_cost(way, cluster.gpu_hour_price),
            way=", ".join(in_words(train, batch.accumulation)),
            assumed=tuple(_assumed(question.workload, machine)),
            next=tuple(actions),
        ),
        words=_with_data(words, question, train, batch),
        road=road_of(run, way.run_s if way else None),
    )
