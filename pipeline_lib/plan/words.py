"""The plan in words: why train this way, why not the others, and which change would help most."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline_lib.arch.layers import has_fused_adapters
from pipeline_lib.config.train import AUTO, Train, in_file
from pipeline_lib.core.units import brief, gbit_per_s, gib, gigabytes
from pipeline_lib.plan.choose import Choice, Wanted, fastest, host_limit_in_words
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.memory import MARGIN, PARTS
from pipeline_lib.plan.near import NearMiss, missed
from pipeline_lib.plan.predict import Prediction, host_bytes_of_node, lacks_host_memory
from pipeline_lib.plan.search import Setting
from pipeline_lib.records.plan import PART_NAMES, bound_in_words

AT_MOST = 4  # pieces of advice
_WORTH_SAYING = 1.05  # the least speedup worth a sentence
_HIDDEN = 0.1  # fraction of a step: communication that costs less counts as hidden
_LARGER_BATCHES = (2, 4, 8, 16)
# factors of the bandwidth between nodes
_FASTER = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100)
_NAMED_PARTS = 3
_NOTABLE = 0.005  # a difference that a whole percentage shows
# the plan chooses them only where they are `auto`
_ALSO_AUTO = ("offload_activations", "kept_attention_layers")
_LEFT_OPEN = {"strategy": AUTO, "shard_ranks": None, **dict.fromkeys(_ALSO_AUTO, AUTO)}


@dataclass(frozen=True)
class _Approximation:
    """A setting for slow networks, and what it does to the training."""

    key: str
    value: str | int
    effect: str
    is_for_ddp: bool = False


# The mildest first.
_APPROXIMATIONS = (
    _Approximation(
        "gradient_compression", "bf16", "ranks exchange gradients that are rounded to bf16"
    ),
    _Approximation(
        "gradient_compression",
        "powersgd",
        "ranks exchange low-rank factors of their gradients",
        True,
    ),
    _Approximation("local_sgd_steps", 10, "ranks average their models, and no gradients", True),
)
_AS_MUCH = 1.1


def why_chosen(choice: Choice, setting: Setting, is_auto: bool) -> str:
    """Return one or two sentences about the chosen way to train."""
    way = choice.chosen
    tried = f"{choice.fitting} of {choice.considered} ways to train"
    if is_auto:
        how = (
            f"{tried} fit, and this is the simplest one within {setting.as_good:.0%} of the fastest"
        )
    else:
        how = given(way.train) + (
            f"; {tried} with this strategy fit" if choice.considered > 1 else ""
        )
    text = f"{describe(way)}: {how}. {_bound_by(way)}"
    if way.fits and way.memory.host_bytes and setting.machine.is_host_assumed:
        needed = gigabytes(host_bytes_of_node(way.memory, setting.machine))
        text += f" Each node needs {needed} of host memory; {host_limit_in_words(setting.machine)}."
    if not way.fits:
        text += f" It does not fit: {_too_large(way, setting)}."
    return text


def near_miss_in_words(choice: Choice, near: NearMiss, machine: Machine) -> str:
    """Return the near miss: the way to train, its time and what it lacks."""
    in_words = near.in_words(machine, choice.chosen, host_limit_in_words(machine))
    return f"{describe(near.way)}: {in_words}"


def why_not_others(choice: Choice, setting: Setting) -> list[str]:
    """Return a sentence for each other strategy's best way, fastest first, and each left out."""
    others = [way for name, way in choice.best.items() if name != choice.chosen.train.strategy]
    others.sort(key=lambda way: (not way.fits, way.step_s.value))
    sentences = [f"{describe(way)}: {_why_not(way, choice.chosen, setting)}" for way in others]
    return [*sentences, *(f"{name}: {reason}" for name, reason in choice.left_out.items())]


def given(train: Train) -> str:
    """Return where the strategy of `train` comes from if the plan does not choose it."""
    return "the default" if train.strategy == Train().strategy else "set in the config"


def verdicts(choice: Choice, setting: Setting, is_auto: bool) -> dict[str, str]:
    """Return for each strategy, in a few words, that it is chosen, or why not."""
    chosen = choice.chosen
    found = dict(choice.left_out)
    for name, way in {**choice.best, chosen.train.strategy: chosen}.items():
        if way is chosen:
            auto = "chosen" if way.fits else "needs the least memory"
            words = [auto if is_auto else given(way.train)]
        else:
            words = [_longer(way, chosen)] if way.fits else []
        if not way.fits:
            words.append(missed(way, setting.machine).briefly(setting.machine))
        elif way.bound != chosen.bound:
            words.append(f"bound by {bound_in_words(way.bound)}")
        found[name] = ", ".join(words)
    return found


@dataclass(frozen=True)
class Change:
    """A change that helps: how many times as fast it trains, what to change, and a sentence more.

    `is_most` if the gain depends on how much is changed, and that is the most.
    """

    gain: float
    what: str
    sentence: str
    is_most: bool = False

    @property
    def briefly(self) -> str:
        """What to change, and its gain."""
        up_to = "up to " if self.is_most else ""
        return f"{self.what} ({up_to}{self.gain:.2f} times as fast)"


def advice(choice: Choice, wanted: Wanted) -> list[Change]:
    """Return up to AT_MOST changes: what `auto` would choose without other keys, then further ones.

    Each is predicted alone, with all else as the config says. If the run does not fit, only the
    first is of use.
    """
    chosen = choice.chosen
    first = list(_freed(chosen, wanted))
    if not chosen.fits:
        return first
    found = [
        *_faster_network(chosen, wanted),
        *_larger_batch(chosen, wanted),
        *_fewer_nodes(chosen, wanted),
        *_approximations(chosen, wanted),
        *_without_dropout(chosen, wanted),
    ]
    if not wanted.setting.workload.is_assumed:
        real = wanted.setting.workload.real_fraction
        text = (
            f"{1 - real:.0%} of the tokens are padding: longer blocks (shard.block_tokens) need "
            "less of it"
        )
        found.append(Change(1 / real, "a larger shard.block_tokens", text, is_most=True))
    found.sort(key=lambda change: -change.gain)
    return [*first, *(change for change in found if change.gain >= _WORTH_SAYING)][:AT_MOST]


def describe(way: Prediction) -> str:
    """Return a summary of the strategy, micro-batch, accumulation and options.

    An example is `fsdp, micro-batch 2 x accumulation 4, selective activation checkpointing,
    compiled`.
    """
    return ", ".join(way.words)


def _bound_by(way: Prediction) -> str:
    total = way.step_s.value
    parts = way.parts
    takes = f"A step is predicted to take {brief(total)}"
    if way.bound == "exchange":
        return f"{takes}, bound by communication: {_traffic(way)}."
    if way.bound == "offload":
        return (
            f"{takes}, bound by copies to host memory and the update there "
            f"({brief(parts['offload'])})."
        )
    if way.bound == "host":
        return f"{takes}, bound by the host, which launches kernels more slowly than they run."
    return f"{takes}, bound by computing ({1 - parts['exchange'] / total:.0%} of the time)."


def _traffic(way: Prediction) -> str:
    """Return the largest collectives with their bytes and the seconds of waiting.

    An example is `all-gather of weights 4 x 3.1 GB between nodes; 8.2 s of waiting, ...`.
    """
    slowest = sorted(way.exchanged, key=lambda each: -each.exposed_s)[:_NAMED_PARTS]
    places = set()
    moved = []
    for exchange, crosses_nodes in (
        (each.exchange, each.crosses_nodes) for each in slowest if each.seconds
    ):
        times = exchange.times
        count = f"{times:g} x " if times > 1 else ""
        if times < 1:
            count = f"every {1 / times:g} steps "
        place = " between nodes" if crosses_nodes else " within nodes"
        places.add(place)
        moved.append(
            (
                f"{exchange.kind} of {exchange.name} {count}{gigabytes(exchange.payload_bytes)}",
                place,
            )
        )
    if len(places) == 1:
        text = ", ".join(what for what, _ in moved) + places.pop()
    else:
        text = ", ".join(what + place for what, place in moved)
    computing = way.step_s.value - way.parts["exchange"] - way.parts["offload"]
    return f"{text}; {brief(way.parts['exchange'])} of waiting, {brief(computing)} of computing"


def _why_not(way: Prediction, chosen: Prediction, setting: Setting) -> str:
    if not way.fits:
        return f"does not fit: {_too_large(way, setting)}"
    text = f"{brief(way.step_s.value)} a step, {_longer(way, chosen)}"
    is_as_good = abs(way.step_s.value / chosen.step_s.value - 1) <= setting.as_good
    return f"{text}; {_traffic(way)}" if way.bound == "exchange" and not is_as_good else text


def _longer(way: Prediction, chosen: Prediction) -> str:
    ratio = way.step_s.value / chosen.step_s.value
    if abs(ratio - 1) < _NOTABLE:
        return "as long"
    return f"{1 - ratio:.0%} shorter" if ratio < 1 else f"{ratio - 1:.0%} longer"


def _too_large(way: Prediction, setting: Setting) -> str:
    machine = setting.machine
    memory = way.memory
    if lacks_host_memory(memory, machine):
        host = gigabytes(host_bytes_of_node(memory, machine))
        return f"a node needs {host} of host memory, and {host_limit_in_words(machine)}"
    kept = max(MARGIN, memory.error)
    has = gib(machine.gpu_memory_bytes or 0)
    sizes = sorted(
        ((getattr(memory, f"{part}_bytes"), part) for part in PARTS if part != "reserve"),
        reverse=True,
    )
    largest = ", ".join(
        f"{PART_NAMES.get(part, part)} {gib(size)}" for size, part in sizes[:_NAMED_PARTS]
    )
    return (
        f"a GPU needs {gib(memory.total_bytes)} (up to {kept:.0%} more) and has {has}; largest "
        f"parts: {largest}"
    )


def _freed(chosen: Prediction, wanted: Wanted) -> Iterator[Change]:
    """Yield what `strategy: auto` would choose if the config gave no key that it may choose."""
    train = wanted.train
    free = replace(wanted, train=train.model_copy(update=_LEFT_OPEN), held=())
    given = [*wanted.held, *(key for key in _ALSO_AUTO if getattr(train, key) != AUTO)]
    is_auto = train.strategy == AUTO
    if is_auto and not given:
        return
    best = fastest(free)
    if best is None or (chosen.fits and chosen.step_s.value <= _WORTH_SAYING * best.step_s.value):
        return
    keys = " and ".join(in_file(key) for key in given)
    what = (
        f"{keys} left out" if is_auto else "train.strategy: auto, with no other placement key set"
    )
    subject = f"without {keys} the plan" if is_auto else f"{what},"
    text = f"{subject} would choose {describe(best)}: {brief(best.step_s.value)} a step"
    yield Change(chosen.step_s.value / best.step_s.value, what, text)


def _faster_network(chosen: Prediction, wanted: Wanted) -> Iterator[Change]:
    """Yield the bandwidth between nodes that would hide as much communication as possible."""
    setting = wanted.setting
    if not any(each.crosses_nodes for each in chosen.exchanged):
        return
    now = setting.machine.rates["between_bytes_s"].value

    def on_network(factor: float) -> Setting:
        return replace(setting, machine=setting.machine.with_rate("between_bytes_s", now * factor))

    took_s = {factor: on_network(factor).estimate(chosen.train).step_s for factor in _FASTER}
    best_s = min(took_s.values())
    factor = next(each for each, seconds in took_s.items() if seconds <= best_s * (1 + _HIDDEN))
    # another way may be the fastest there
    then = fastest(replace(wanted, setting=on_network(factor)))
    if then is None:
        return
    rest = (
        ""
        if then.parts["exchange"] < 2 * _HIDDEN * then.step_s.value
        else "; the links within nodes would then be the limit"
    )
    yield Change(
        chosen.step_s.value / then.step_s.value,
        f"{gbit_per_s(now * factor)} between nodes",
        f"{gbit_per_s(now * factor)} between nodes instead of {gbit_per_s(now)} would hide the "
        f"communication: {brief(then.step_s.value)} a step{rest}",
    )


def _larger_batch(chosen: Prediction, wanted: Wanted) -> Iterator[Change]:
    """Yield a larger batch, which communicates less for each token; it is a different training."""
    setting = wanted.setting
    if setting.machine.nodes == 1:
        return
    larger = [_with_batch(wanted, setting.batch_blocks * factor) for factor in _LARGER_BATCHES]
    found = [(where, then) for where in larger if (then := fastest(where)) is not None]

    def gain_of(one: tuple[Wanted, Prediction]) -> float:
        return (
            one[0].setting.batch_blocks
            / setting.batch_blocks
            * chosen.step_s.value
            / one[1].step_s.value
        )

    for where, then in sorted(found, key=gain_of, reverse=True):
        gain = gain_of((where, then))
        if gain < _WORTH_SAYING:
            return
        alone = fastest(_on_one_node(where))
        if alone is not None and alone.step_s.value < then.step_s.value:
            continue
        key = (
            "train.global_batch_tokens: "
            f"{where.setting.batch_blocks * setting.workload.block_tokens:,}"
        )
        text = f"{key} ({describe(then)}) would give {gain:.2f} times the tokens/s"
        if alone is not None:
            text += f", {alone.step_s.value / then.step_s.value:.2f} times those of one node"
        yield Change(gain, key, f"{text}; a larger batch needs its learning rate tuned again")
        return


def _fewer_nodes(chosen: Prediction, wanted: Wanted) -> Iterator[Change]:
    nodes = wanted.setting.machine.nodes
    if nodes == 1:
        return
    alone = fastest(_on_one_node(wanted))
    if alone is not None:
        gain = chosen.step_s.value / alone.step_s.value
        text = f"one node ({describe(alone)}) would be {gain:.2f} times as fast as {nodes} nodes"
        yield Change(gain, "cluster.nodes: 1", text)


def _approximations(chosen: Prediction, wanted: Wanted) -> Iterator[Change]:
    """Yield an approximation for a slow network: the mildest that gains about as much as any."""
    train = wanted.train
    is_exact = train.gradient_compression == "none" and train.local_sgd_steps == 1
    if wanted.setting.machine.nodes == 1 or chosen.bound != "exchange" or not is_exact:
        return
    found = [
        change
        for one in _APPROXIMATIONS
        if (change := _approximated(one, chosen, wanted)) is not None
    ]
    most = max((change.gain for change in found), default=0.0)
    yield from [change for change in found if change.gain * _AS_MUCH >= most][:1]


def _approximated(one: _Approximation, chosen: Prediction, wanted: Wanted) -> Change | None:
    """Return the change by that approximation; None if it may not be configured or does not fit."""
    what = f"train.{one.key}: {one.value}"
    update = {one.key: one.value}
    if one.is_for_ddp and wanted.train.strategy not in (AUTO, "ddp"):
        what = f"{what} with train.strategy: ddp"
        update = {**update, "strategy": "ddp"}
    then = fastest(replace(wanted, train=wanted.train.model_copy(update=update)))
    if then is None:
        return None
    took = brief(then.step_s.value)
    instead = brief(chosen.step_s.value)
    text = (
        f"{what} ({describe(then)}) would take {took} a step instead of {instead}; another "
        f"training: {one.effect}"
    )
    return Change(chosen.step_s.value / then.step_s.value, what, text)


def _without_dropout(chosen: Prediction, wanted: Wanted) -> Iterator[Change]:
    """Yield the speed without adapter dropout: adapters then join their linear and compile."""
    no_dropout = {"lora": chosen.train.lora.model_copy(update={"dropout": 0.0})}
    if has_fused_adapters(chosen.train) or not has_fused_adapters(
        chosen.train.model_copy(update=no_dropout)
    ):
        return
    then = fastest(replace(wanted, train=wanted.train.model_copy(update=no_dropout)))
    if then is not None:
        took = brief(then.step_s.value)
        instead = brief(chosen.step_s.value)
        key = "train.lora.dropout: 0"
        text = (
            f"{key} allows fused adapters and compiled layers: {took} a step instead of {instead}"
        )
        yield Change(chosen.step_s.value / then.step_s.value, key, text)


def _with_batch(wanted: Wanted, batch_blocks: int) -> Wanted:
    """Return the same training with a larger batch; an epoch then has fewer steps."""
    setting = wanted.setting
    train = wanted.train
    steps = setting.steps
    if steps is not None and train.max_steps is None:
        steps = max(1, steps * setting.batch_blocks // batch_blocks)
    return replace(
        wanted,
        setting=replace(setting, batch_blocks=batch_blocks, steps=steps),
        train=train.model_copy(
            update={"global_batch_tokens": batch_blocks * setting.workload.block_tokens}
        ),
    )


def _on_one_node(wanted: Wanted) -> Wanted:
    setting = wanted.setting
    return replace(wanted, setting=replace(setting, machine=replace(setting.machine, nodes=1)))
