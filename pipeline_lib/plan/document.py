"""The content of plan.json: everything that is predicted of a run, in numbers and in words."""

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline_lib.config.schema import Cluster, Evaluate, Tracking
from pipeline_lib.config.section import settings_of
from pipeline_lib.config.train import PLACEMENT_KEYS, Train
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.units import GIGA, brief, gbit_per_s, gib, gigabytes, rounded
from pipeline_lib.model.geometry import Geometry
from pipeline_lib.plan.choose import (
    Choice,
    Wanted,
    choose,
    fastest,
    host_limit_in_words,
    host_memory,
    leanest,
    leanest_choice,
    what_would_fit,
)
from pipeline_lib.plan.cluster import Measured, machine_of
from pipeline_lib.plan.content import (
    FITS,
    NOT_CHECKED,
    PART_NAMES,
    TIGHT,
    TOO_LARGE,
    bound_in_words,
)
from pipeline_lib.plan.context import not_shared, sharing_counts
from pipeline_lib.plan.known import Blocks
from pipeline_lib.plan.machine import Figure, Machine, Ranks
from pipeline_lib.plan.memory import MARGIN, PARTS, Memory, checkpoint_bytes, host_need, predict_all
from pipeline_lib.plan.near import NearMiss, missed
from pipeline_lib.plan.predict import Prediction, fits_on_gpu, host_bytes_of_node, host_need_of_node, lacks_host_memory
from pipeline_lib.plan.search import Setting
from pipeline_lib.plan.stages import Run, needs_of
from pipeline_lib.plan.step_time import shape_of
from pipeline_lib.plan.steps import BatchPlan, Steps, plan_batches, step_warnings
from pipeline_lib.plan.workload import (
    AUTO,
    Workload,
    can_compile,
    has_fused_adapters,
    in_words,
    settled,
)

# The plan in words: why this way to train, why not the others, and which single change would help most.

AT_MOST = 3  # pieces of advice
_WORTH_SAYING = 1.05  # the least speedup worth a sentence
_HIDDEN = 0.1  # fraction of a step: communication that costs less counts as hidden
_LARGER_BATCHES = (2, 4, 8, 16)
_FASTER = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100)  # factors of the bandwidth between nodes
_NAMED_PARTS = 3


def why_chosen(choice: Choice, setting: Setting, is_auto: bool) -> str:
    """Return one or two sentences about the chosen way to train."""
    way = choice.chosen
    tried = f"{choice.fitting} of {choice.considered} ways to train"
    if is_auto:
        how = f"{tried} fit, and this is the simplest one within {setting.as_good:.0%} of the fastest"
    else:
        how = "set in the config" + (f"; {tried} with this strategy fit" if choice.considered > 1 else "")
    text = f"{describe(way)}: {how}. {_bound_by(way)}"
    if way.fits and way.memory.host_bytes and setting.machine.is_host_assumed:
        needed = gigabytes(host_bytes_of_node(way.memory, setting.machine))
        text += f" Each node needs {needed} of host memory; {host_limit_in_words(setting.machine)}."
    if not way.fits:
        text += f" It does not fit: {_too_large(way, setting)}."
    return text


def _near_miss(choice: Choice, near: NearMiss, machine: Machine) -> str:
    in_words = near.in_words(machine, choice.chosen, host_limit_in_words(machine))
    return f"{describe(near.way)}: {in_words}"


def why_not_others(choice: Choice, setting: Setting) -> list[str]:
    """Return a sentence for the best way of every other strategy, the fastest first, and for each one left out."""
    others = [way for name, way in choice.best.items() if name != choice.chosen.train.strategy]
    others.sort(key=lambda way: (not way.fits, way.step_s.value))
    sentences = [f"{describe(way)}: {_why_not(way, choice.chosen, setting)}" for way in others]
    return [*sentences, *(f"{name}: {reason}" for name, reason in choice.left_out.items())]


def verdicts(choice: Choice, setting: Setting, is_auto: bool) -> dict[str, str]:
    """Return for each strategy, in a few words, that it is chosen, or why not."""
    chosen, found = choice.chosen, dict(choice.left_out)
    for name, way in {**choice.best, chosen.train.strategy: chosen}.items():
        if way is chosen:
            auto = "chosen" if way.fits else "needs the least memory"
            words = [auto if is_auto else "set in the config"]
        else:
            words = [_longer(way, chosen, setting)] if way.fits else []
        if not way.fits:
            words.append(missed(way, setting.machine).briefly(setting.machine))
        elif way.bound != chosen.bound:
            words.append(f"bound by {bound_in_words(way.bound)}")
        found[name] = ", ".join(words)
    return found


@dataclass(frozen=True)
class Change:
    """A change that helps: how many times as fast the training would be, what to change, and more in a sentence."""

    gain: float
    what: str
    sentence: str

    @property
    def briefly(self) -> str:
        """What to change, and its gain."""
        return f"{self.what} ({self.gain:.2f} times as fast)"


def advice(choice: Choice, setting: Setting, has_deepspeed: bool) -> list[Change]:
    """Return up to AT_MOST changes: what `auto` would choose if no other key were given, then further ones.

    Gains of the further changes are relative to that best choice, so that none is credited with another's gain.
    """
    chosen = choice.chosen
    best = _best(chosen, setting, has_deepspeed)
    first = []
    if best is not None and (not chosen.fits or chosen.step_s.value > _WORTH_SAYING * best.step_s.value):
        took, free = brief(best.step_s.value), "train.strategy: auto, with no other placement key set"
        text = f"{free}, would choose {describe(best)}: {took} a step"
        first.append(Change(chosen.step_s.value / best.step_s.value, free, text))
    now = best or chosen
    found = [
        *_faster_network(now, setting),
        *_larger_batch(now, setting, has_deepspeed),
        *_fewer_nodes(now, setting, has_deepspeed),
        *_without_dropout(now, setting),
    ]
    if not setting.workload.is_assumed:
        real = setting.workload.real_fraction
        text = f"{1 - real:.0%} of the tokens are padding: longer blocks (shard.block_tokens) need less of it"
        found.append(Change(1 / real, "a larger shard.block_tokens, at most", text))
    found.sort(key=lambda change: -change.gain)
    return [*first, *(change for change in found if change.gain >= _WORTH_SAYING)][:AT_MOST]


def describe(way: Prediction) -> str:
    """Return a summary such as `fsdp, micro-batch 2 x accumulation 4, selective activation checkpointing, compiled`."""
    return ", ".join(way.words)


def _bound_by(way: Prediction) -> str:
    total, parts = way.step_s.value, way.parts
    if way.bound == "exchange":
        return f"A step takes {brief(total)}, bound by communication: {_traffic(way)}."
    if way.bound == "offload":
        took = brief(parts["offload"])
        return f"A step takes {brief(total)}, bound by copies to host memory and the update there ({took})."
    if way.bound == "host":
        return f"A step takes {brief(total)}, bound by the host, which launches kernels more slowly than they run."
    return f"A step takes {brief(total)}, bound by computing ({1 - parts['exchange'] / total:.0%} of the time)."


def _traffic(way: Prediction) -> str:
    """Return the largest collectives: `all-gather of weights 4 x 3.1 GB between nodes; 8.2 s of waiting, ...`."""
    slowest = sorted(way.exchanges, key=lambda each: -each.exposed_s)[:_NAMED_PARTS]
    places, moved = set(), []
    for exchange, crosses_nodes in ((each.exchange, each.crosses_nodes) for each in slowest if each.seconds):
        times = exchange.times
        count = f"{times:g} x " if times > 1 else f"every {1 / times:g} steps " if times < 1 else ""
        place = " between nodes" if crosses_nodes else " within nodes"
        places.add(place)
        moved.append((f"{exchange.kind} of {exchange.name} {count}{gigabytes(exchange.payload_bytes)}", place))
    if len(places) == 1:
        text = ", ".join(what for what, _ in moved) + places.pop()
    else:
        text = ", ".join(what + place for what, place in moved)
    computing = way.step_s.value - way.parts["exchange"] - way.parts["offload"]
    return f"{text}; {brief(way.parts['exchange'])} of waiting, {brief(computing)} of computing"


def _why_not(way: Prediction, chosen: Prediction, setting: Setting) -> str:
    if not way.fits:
        return f"does not fit: {_too_large(way, setting)}"
    text = f"{brief(way.step_s.value)} a step, {_longer(way, chosen, setting)}"
    is_as_good = abs(way.step_s.value / chosen.step_s.value - 1) <= setting.as_good
    return f"{text}; {_traffic(way)}" if way.bound == "exchange" and not is_as_good else text


def _longer(way: Prediction, chosen: Prediction, setting: Setting) -> str:
    ratio = way.step_s.value / chosen.step_s.value
    if abs(ratio - 1) <= setting.as_good:
        return f"within {setting.as_good:.0%} of the chosen one"
    return f"{1 - ratio:.0%} shorter" if ratio < 1 else f"{ratio - 1:.0%} longer"


def _too_large(way: Prediction, setting: Setting) -> str:
    machine, memory = setting.machine, way.memory
    if lacks_host_memory(memory, machine):
        host = gigabytes(host_bytes_of_node(memory, machine))
        return f"a node needs {host} of host memory, and {host_limit_in_words(machine)}"
    kept, has = max(MARGIN, memory.error), gib(machine.gpu_memory_bytes or 0)
    sizes = sorted(((getattr(memory, f"{part}_bytes"), part) for part in PARTS if part != "reserve"), reverse=True)
    largest = ", ".join(f"{PART_NAMES.get(part, part)} {gib(size)}" for size, part in sizes[:_NAMED_PARTS])
    return f"a GPU needs {gib(memory.total_bytes)} (up to {kept:.0%} more) and has {has}; largest parts: {largest}"


def _faster_network(chosen: Prediction, setting: Setting) -> Iterator[Change]:
    """Yield the bandwidth between nodes that would hide the communication, or as much of it as can be hidden."""
    if not any(each.crosses_nodes for each in chosen.exchanges):
        return
    now = setting.machine.rates["between_bytes_s"].value
    faster = {}
    for factor in _FASTER:
        machine = setting.machine.with_rate("between_bytes_s", now * factor)
        faster[factor] = replace(setting, machine=machine).predict(chosen.train)
    best_s = min(then.step_s.value for then in faster.values())
    factor, then = next(each for each in faster.items() if each[1].step_s.value <= best_s * (1 + _HIDDEN))
    rest = (
        ""
        if then.parts["exchange"] < 2 * _HIDDEN * then.step_s.value
        else "; the links within nodes would then be the limit"
    )
    yield Change(
        chosen.step_s.value / then.step_s.value,
        f"{gbit_per_s(now * factor)} between nodes",
        f"{gbit_per_s(now * factor)} between nodes instead of {gbit_per_s(now)} would hide the communication: "
        f"{brief(then.step_s.value)} a step{rest}",
    )


def _larger_batch(now: Prediction, setting: Setting, has_deepspeed: bool) -> Iterator[Change]:
    """Yield a larger batch, which communicates less for each token; it is a different training."""
    if setting.machine.nodes == 1:
        return
    larger = [replace(setting, batch_blocks=setting.batch_blocks * factor) for factor in _LARGER_BATCHES]
    found = [(where, then) for where in larger if (then := _best(now, where, has_deepspeed)) is not None]

    def gain_of(one: tuple[Setting, Prediction]) -> float:
        return one[0].batch_blocks / setting.batch_blocks * now.step_s.value / one[1].step_s.value

    for where, then in sorted(found, key=gain_of, reverse=True):
        alone = _best(now, _on_one_node(where), has_deepspeed)
        if alone is not None and alone.step_s.value < then.step_s.value:
            continue
        gain = gain_of((where, then))
        key = f"train.global_batch_tokens: {where.batch_blocks * setting.workload.block_tokens:,}"
        text = f"{key} ({describe(then)}) would give {gain:.2f} times the tokens/s"
        if alone is not None:
            text += f", {alone.step_s.value / then.step_s.value:.2f} times those of one node"
        yield Change(gain, key, f"{text}; a larger batch needs its learning rate tuned again")
        return


def _fewer_nodes(now: Prediction, setting: Setting, has_deepspeed: bool) -> Iterator[Change]:
    if setting.machine.nodes == 1:
        return
    alone = _best(now, _on_one_node(setting), has_deepspeed)
    if alone is not None:
        gain = now.step_s.value / alone.step_s.value
        text = f"one node ({describe(alone)}) would be {gain:.2f} times as fast as {setting.machine.nodes} nodes"
        yield Change(gain, "cluster.nodes: 1", text)


def _without_dropout(now: Prediction, setting: Setting) -> Iterator[Change]:
    """Yield the speed without dropout in the adapters, which then are one operator with their linear and compile."""
    lora = now.train.lora.model_copy(update={"dropout": 0.0})
    train = now.train.model_copy(update={"lora": lora})
    if has_fused_adapters(now.train) or not has_fused_adapters(train):
        return
    train = train.model_copy(update={"compile": can_compile(train, setting.ranks.has_triton)})
    then = setting.predict(train)
    if then.fits:
        took, instead = brief(then.step_s.value), brief(now.step_s.value)
        key = "train.lora.dropout: 0"
        text = f"{key} allows fused adapters and compiled layers: {took} a step instead of {instead}"
        yield Change(now.step_s.value / then.step_s.value, key, text)


def _on_one_node(setting: Setting) -> Setting:
    return replace(setting, machine=replace(setting.machine, nodes=1))


def _best(now: Prediction, setting: Setting, has_deepspeed: bool) -> Prediction | None:
    free = {"strategy": AUTO, "shard_ranks": None, "kept_attention_layers": AUTO}
    train = now.train.model_copy(update=free)
    return fastest(setting, train, (), has_deepspeed)


# plan.json: the plan stage makes it from sealed blocks, the command from whatever is known. Unknown values are None.

SCHEMA = 3  # keys may be added
_CLUSTER_KEYS = ("nodes", "ranks", "device", "launcher", "cpus_per_rank", "max_requeues")
_NAME_IT = "set cluster.gpu: the plan then also predicts the time, and whether the run fits"
_CALIBRATE = "python -m pipeline_lib calibrate, which measures the speeds and narrows the bands"
_TYPICAL = "typical"  # source of rates that are neither measured nor given
_NEXT = 2  # changes among what to do next; all of them stand under `what would help`


@dataclass(frozen=True)
class Question:
    """All that a plan is computed from. `blocks` is None while there are none; then `workload` is assumed.

    `held` are keys that `strategy: auto` keeps, `measured` is what a cluster.json says. `repetition` says what it
    costs that conversations become several samples; it is empty if that costs nothing or is not known yet.
    `estimated` are the steps by the first rows of the files, where there are no blocks. `data_bytes` is the size of the
    raw data, None if it is not known or read already; near duplicates in it are searched for if `has_near_duplicates`.
    """

    experiment: str
    geometry: Geometry
    train: Train
    cluster: Cluster
    tracking: Tracking
    workload: Workload
    blocks: Blocks | None
    held: Collection[str]
    measured: Measured | None
    has_deepspeed: bool
    repetition: str = ""
    estimated: Steps | None = None
    evaluate: Evaluate = Evaluate()
    data_bytes: int | None = None
    has_near_duplicates: bool = False

    @property
    def ranks(self) -> Ranks:
        """The ranks of the cluster."""
        return Ranks.of_cluster(self.cluster)

    @property
    def machine(self) -> Machine | None:
        """The cluster's machine, or None if its GPUs are not named. Raises ConfigError."""
        return machine_of(self.cluster, self.train.precision, self.measured, self.train.attention)

    def batch(self, train: Train) -> BatchPlan:
        """Return the batches for the micro-batch size of `train`. Raise DataError if there is no step."""
        training = self.blocks.training if self.blocks else None
        return plan_batches(train, self.cluster.ranks, training, self.workload)


@dataclass(frozen=True)
class Answer:
    """The content of plan.json, and the choice that it reports; `refusal` is the reason if the run cannot be started.

    `wanted` and `choice` are None if the GPU is not named.
    """

    content: dict[str, Any]
    wanted: Wanted | None
    choice: Choice | None
    refusal: str | None


def answer(question: Question, is_explained: bool = True) -> Answer:
    """Predict the run, and with `strategy: auto` choose how to train.

    Raise DataError if there is nothing to train on, no legal way to train, or if ranks would be idle with any number of
    them to a block, and ConfigError for a wrong machine.
    Most of the time goes into sentences; without `is_explained` they are left out.
    """
    machine, batch = question.machine, question.batch(question.train)
    train, ranks, sizes = question.train, question.ranks, (question.workload.block_tokens, batch.global_batch_blocks)
    counts = sharing_counts(question.geometry, train, question.held, ranks, *sizes)
    if not counts:
        raise DataError(not_shared(train, ranks.total, *sizes))
    if machine is None:
        question = replace(question, train=train.model_copy(update={"context_ranks": counts[0]}))
        set_there = f"{question.train.strategy}: set in the config"
        unnamed = {"chosen": set_there, "others": [], "advice": [], "verdicts": {}}
        return Answer(_content(question, None, None, unnamed, [_NAME_IT]), None, None, None)
    setting = Setting(question.geometry, machine, question.workload, batch.global_batch_blocks, batch.steps)
    wanted = Wanted(setting, question.train, question.held, question.has_deepspeed)
    choice, problem = _choice(wanted)
    if not is_explained:
        return Answer(_content(question, wanted, choice, {}, []), wanted, choice, in_lines(problem) or None)
    is_auto, changes = question.train.strategy == "auto", advice(choice, setting, question.has_deepspeed)
    words: dict[str, Any] = {
        "chosen": why_chosen(choice, setting, is_auto),
        "verdicts": verdicts(choice, setting, is_auto),
        "others": why_not_others(choice, setting),
        "advice": [change.sentence for change in changes],
    }
    if choice.near is not None:
        words["near_miss"] = _near_miss(choice, choice.near, machine)
    too_large = problem
    if problem and is_auto:
        words["chosen"] = f"{describe(choice.chosen)}: needs the least memory, and does not fit"
    elif not choice.chosen.fits:
        too_large = [lacking(choice.chosen.train, choice.chosen.memory, machine)]
        too_large += what_would_fit(wanted) if machine.is_gpu else []
        if is_hopeless(choice.chosen.memory, machine):
            problem = too_large
        else:
            words["advice"] = [*too_large, *words["advice"]]
    actions = _next(too_large[1:], changes, setting)
    return Answer(_content(question, wanted, choice, words, actions), wanted, choice, in_lines(problem) or None)


def _next(would_fit: list[str], changes: list[Change], setting: Setting) -> list[str]:
    """Return what to do next: make the run fit, or the largest gains; then measure, where speeds are only typical."""
    if would_fit:
        return [text.partition(": ")[2] for text in would_fit[:_NEXT]]
    actions = [change.briefly for change in changes[:_NEXT]]
    can_measure = _TYPICAL in _sources_of_rates(setting.machine) and setting.geometry.delta is None
    return [*actions, *([_CALIBRATE] if can_measure else [])]


def _choice(wanted: Wanted) -> tuple[Choice, list[str]]:
    """Return the choice; if nothing fits the one that needs least memory, with the problem and what would fit."""
    setting = wanted.setting
    try:
        return choose(setting, wanted.train, wanted.held, wanted.has_deepspeed), []
    except DataError as error:
        ways = leanest(wanted)
        choice = leanest_choice(setting, wanted.train, wanted.held, ways[0][0]) if ways else None
        if choice is None:
            raise
        least = lacking(*ways[0], setting.machine).removeprefix("train.strategy: ")
        return choice, [f"{error}: even {least}", *what_would_fit(wanted)]


def in_lines(sentences: list[str]) -> str:
    """Join a problem of a ConfigError and what to do about it, indented below it."""
    return "\n      ".join(sentences)


def is_hopeless(memory: Memory, machine: Machine) -> bool:
    """Return whether the way is predicted not to fit even without a margin; it is then refused, otherwise warned of.

    Without GPUs it is always a warning: cluster.memory_gb is what a job asks for, and a machine may have more.
    """
    limit = machine.gpu_memory_bytes
    return limit is not None and (lacks_host_memory(memory, machine) or memory.total_bytes > limit)


def lacking(train: Train, memory: Memory, machine: Machine) -> str:
    """Return by how much that memory is too small, in words."""
    needed, has = memory.total_bytes, machine.gpu_memory_bytes
    of_gpu = f"{gib(has or 0)} of each {machine.name}"
    too_large = f"train.strategy: {train.strategy} needs {gib(needed)}"
    if has is None or needed <= has:
        too_large += f" of the {of_gpu}, too close to the limit"
    else:
        too_large += f", {gib(needed - has)} more than the {of_gpu}"
    if lacks_host_memory(memory, machine):
        host, has_host = host_need_of_node(memory, machine), host_limit_in_words(machine)
        on_host = f"{gigabytes(host.total_bytes)} of host memory on each node ({host}), and {has_host}"
        if not fits_on_gpu(memory, machine):
            return f"{too_large}, and {on_host}"
        key = "strategy" if train.offload == "none" else "offload"
        copies = ", or leave out train.save_async: true" if train.save_async is True else ""
        return f"train.{key}: {getattr(train, key)} needs {on_host}; set {host_memory(host.total_bytes)}{copies}"
    return too_large


def _about_data(question: Question, train: Train, batch: BatchPlan) -> dict[str, Any]:
    """Return the texts of the plan about samples and steps, without those that have nothing to say."""
    steps = Steps.of(batch) or question.estimated
    found = {
        "repetition": question.repetition,
        "steps": question.estimated.in_words() if question.estimated else "",
        "warnings": list(step_warnings(train, batch, steps, question.cluster.ranks)) if steps else [],
    }
    return {name: text for name, text in found.items() if text}


def run_of(question: Question) -> Run:
    """Return what the stages of the run are sized by. Raises ConfigError."""
    cluster, train, evaluate = question.cluster, question.train, question.evaluate
    return Run(cluster, train, evaluate, question.geometry, question.workload, question.machine)


def _stages(question: Question, train: Train, memory: Memory, host_bytes: int) -> list[dict[str, Any]]:
    run = replace(run_of(question), train=train)
    of_data = question.data_bytes, question.has_near_duplicates
    return [asdict(need) for need in needs_of(run, host_bytes, memory.total_bytes, *of_data)]


def _steps(steps: Steps | None) -> dict[str, int] | None:
    return None if steps is None else dict(zip(("low", "value", "high"), steps.run, strict=True))


def _cost(way: Prediction | None, gpu_hour_price: float | None) -> dict[str, float] | None:
    if way is None or way.gpu_hours is None or gpu_hour_price is None:
        return None
    return {end: hours * gpu_hour_price for end, hours in asdict(way.gpu_hours).items()}


def _verdict(machine: Machine | None, way: Prediction | None) -> str:
    if machine is None or way is None or (machine.gpu_memory_bytes is None and machine.host_limit_bytes is None):
        return NOT_CHECKED
    if way.fits:
        return FITS
    lacks = missed(way, machine)
    return TIGHT if lacks.is_margin and not lacks.host_bytes else TOO_LARGE


def _assumed(workload: Workload, machine: Machine | None) -> Iterator[str]:
    """Yield what the plan takes for granted: what is neither given nor measured."""
    if workload.is_assumed:
        fractions = (
            f"{100 * workload.supervised_fraction:.0f} % supervised in blocks {100 * workload.real_fraction:.0f} % full"
        )
        told = workload.document_band is None  # as a what-if question may
        yield fractions if told else f"documents of {workload.document_tokens:,.0f} tokens, {fractions}"
    if machine is None:
        return
    if machine.is_host_assumed:
        yield f"{rounded((machine.host_limit_bytes or 0) / GIGA, 'GB')} of host memory"
    sources = _sources_of_rates(machine)
    if typical := sources.count(_TYPICAL):
        some = f"{typical} of {len(sources)} speeds are" if "measured" in sources else "speeds are"
        yield f"{some} typical of {machine.name if machine.is_gpu else 'CPUs, so times are rough'}"


def _sources_of_rates(machine: Machine) -> list[str]:
    """Return `measured`, the key of the config or _TYPICAL for each rate, without those of links that are not there."""
    absent = ("between_",) * (machine.nodes == 1) + ("in_node_",) * (machine.ranks_per_node == 1)
    sources = [rate.source for name, rate in machine.rates.items() if not name.startswith(absent)]
    return [source if source == "measured" or source.startswith("cluster.") else _TYPICAL for source in sources]


def _with_estimated_run(way: Prediction, setting: Setting, steps: Steps | None) -> Prediction:
    """Return `way` with the time of a run of as many steps as are estimated, where the run's length is not known."""
    if way.run_s is not None or steps is None:
        return way
    ends = [replace(setting, steps=number).predict(way.train) for number in steps.run]
    run_s, gpu_hours = _over([one.run_s for one in ends]), _over([one.gpu_hours for one in ends])
    return replace(way, run_s=run_s, gpu_hours=gpu_hours)


def _over(figures: list[Figure | None]) -> Figure | None:
    """Return the figure from the low end of the first of three to the high end of the last one."""
    low, value, high = figures
    return None if low is None or value is None or high is None else Figure(value.value, low.low, high.high)


def _content(
    question: Question, wanted: Wanted | None, choice: Choice | None, words: dict[str, Any], actions: list[str]
) -> dict[str, Any]:
    geometry, machine = question.geometry, wanted.setting.machine if wanted else None
    train = choice.chosen.train if choice else settled(question.train, question.ranks.has_triton)
    batch = question.batch(train)
    if choice is not None:
        best = {**choice.best, choice.chosen.train.strategy: choice.chosen}
        memories = {name: way.memory for name, way in best.items()}
    else:
        memories = predict_all(geometry, train, question.ranks, question.workload.block_tokens, batch.accumulation)
    described = None
    if machine is not None:
        own = sum(part.shape == shape_of(geometry) for part in machine.measured)
        described = {**machine.as_json(), "measured_parts": own, "other_parts": len(machine.measured) - own}
    way = _with_estimated_run(choice.chosen, wanted.setting, question.estimated) if choice and wanted else None
    memory = memories[train.strategy]
    held = memory.host_bytes, memory.copied_bytes, memory.cpu_rank_bytes
    host_bytes = host_need(*held, question.ranks, question.cluster.device == "cuda").total_bytes
    one_checkpoint = checkpoint_bytes(geometry, train)
    others = {name: way.as_json() for name, way in choice.best.items() if name != train.strategy} if choice else {}
    for each in others.values():
        del each["segments"]
    return {
        "schema": SCHEMA,
        "experiment": question.experiment,
        "model": {
            "parameters": geometry.parameters,
            "trainable_parameters": geometry.trained_parameters(train),
            "matmul_parameters": geometry.matmul_parameters,
            "layers": geometry.layers,
            "hidden_size": geometry.hidden,
            "vocab_tokens": geometry.vocab,
        },
        "cluster": {key: getattr(question.cluster, key) for key in _CLUSTER_KEYS},
        "machine": described,
        "workload": asdict(question.workload),
        "train": settings_of(train),
        "tracking": question.tracking.model_dump(mode="json"),
        "batch": asdict(batch),
        "memory": {name: memory.as_json() for name, memory in memories.items()},
        "chosen": {key: getattr(train, key) for key in sorted(PLACEMENT_KEYS)},
        "disk": {
            "checkpoint_bytes": one_checkpoint,
            "needed_bytes": one_checkpoint * train.checkpoints_on_disk,
        },
        "stages": _stages(question, train, memory, host_bytes),
        "prediction": way.as_json() if way else None,
        "others": others,
        "near_miss": choice.near.as_json() if choice and choice.near else None,
        "summary": {
            "verdict": _verdict(machine, way),
            "host_needed_bytes": host_bytes,
            "steps": _steps(Steps.of(batch) or question.estimated),
            "gpu_hour_price": question.cluster.gpu_hour_price,
            "cost": _cost(way, question.cluster.gpu_hour_price),
            "way": ", ".join(in_words(train, batch.accumulation)),
            "assumed": list(_assumed(question.workload, machine)),
            "next": actions,
        },
        "words": {**words, **_about_data(question, train, batch)},
    }
