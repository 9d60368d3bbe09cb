"""The plan in words: why this way to train, why not the others, and what single change would help most."""

from collections.abc import Iterator
from dataclasses import replace

from pipeline_lib.base.errors import DataError
from pipeline_lib.plan.choice import Choice, Setting, choose
from pipeline_lib.plan.memory import MARGIN, Memory
from pipeline_lib.plan.placement import is_compiled, stays_gathered
from pipeline_lib.plan.prediction import Prediction, host_bytes_of_node, lacks_host_memory
from pipeline_lib.plan.step_time import Exchanged
from pipeline_lib.plan.units import gbit_per_s, gib, gigabytes, seconds

AT_MOST = 3  # pieces of advice
_WORTH_SAYING = 1.05  # times as fast
_HIDDEN = 0.1  # of a step: what costs less counts as hidden
_LARGER_BATCHES = (2, 4, 8, 16)
_FASTER = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100)  # times the bandwidth between nodes
_NAMED_PARTS = 3


def why_chosen(choice: Choice, setting: Setting, is_auto: bool) -> str:
    """One sentence or two about the chosen way."""
    one = choice.chosen
    fit = f"of {choice.considered} ways {choice.fitting} fit, and none is more than {setting.as_good:.0%} faster"
    how = fit if is_auto else "as the config says"
    if not is_auto and choice.considered > 1:
        how += f", and of {choice.considered} ways that it leaves open {choice.fitting} fit"
    text = f"{describe(one)}: {how}. {_bound_by(one)}"
    if not one.fits:
        text += f" It does not fit: {_too_large(one, setting)}."
    return text


def why_not_others(choice: Choice, setting: Setting) -> list[str]:
    """A sentence for the best of every other strategy, the fastest first."""
    others = [one for name, one in choice.best.items() if name != choice.chosen.train.strategy]
    others.sort(key=lambda one: (not one.fits, one.step_s.value))
    said = [f"{describe(one)}: {_why_not(one, choice.chosen, setting)}" for one in others]
    return [*said, *(f"{name}: {reason}" for name, reason in choice.left_out.items())]


def advice(choice: Choice, setting: Setting, has_deepspeed: bool) -> list[str]:
    """What would help: first what `auto` would do with all that it may choose, then changes beside that.

    Those are counted from the best that can be had without them, so that no change gets another's gain.
    """
    chosen = choice.chosen
    best = _best(chosen, setting, has_deepspeed)
    said = []
    if best is not None and (not chosen.fits or chosen.step_s.value > _WORTH_SAYING * best.step_s.value):
        took = seconds(best.step_s.value)
        said.append(f"train.strategy: auto, with nothing beside it given, takes {describe(best)}: {took} a step")
    now = best or chosen
    found = [
        *_faster_network(now, setting),
        *_larger_batch(now, setting, has_deepspeed),
        *_fewer_nodes(now, setting, has_deepspeed),
        *_less_padding(setting),
    ]
    found.sort(key=lambda one: -one[0])
    return [*said, *(text for gain, text in found if gain >= _WORTH_SAYING)][:AT_MOST]


def describe(one: Prediction) -> str:
    """`fsdp, micro-batch 2 x accumulation 4, selective recompute, compiled`."""
    train = one.train
    words = [train.strategy + (f" over {train.shard_ranks} ranks" if train.shard_ranks else "")]
    words.append(f"micro-batch {train.micro_batch_blocks} x accumulation {one.accumulation}")
    if train.recompute != "none":
        words.append(f"{train.recompute} recompute")
    if stays_gathered(train):
        words.append("layers stay gathered")
    if train.offload != "none":
        words.append(f"{train.offload} offloaded")
    if is_compiled(train):
        words.append("compiled")
    return ", ".join(words)


def _bound_by(one: Prediction) -> str:
    """What a step waits for."""
    total, parts = one.step_s.value, one.parts
    if one.bound == "exchange":
        return f"A step of {seconds(total)} is bound by the exchange: {_traffic(one)}."
    if one.bound == "offload":
        took = seconds(parts["offload"])
        return f"A step of {seconds(total)} is bound by copies to host memory and the update there, {took} of it."
    if one.bound == "host":
        return f"A step of {seconds(total)} is bound by the host, which launches kernels more slowly than they run."
    return f"A step of {seconds(total)} is bound by computing, {1 - parts['exchange'] / total:.0%} of it."


def _traffic(one: Prediction) -> str:
    """`all-gather of weights 4 x 3.1 GB between nodes ..., 8.2 s of waiting against 1.0 s of computing`."""
    slowest = sorted(one.exchanges, key=lambda each: -each.exposed_s)[:_NAMED_PARTS]
    places = {each.crosses_nodes for each in slowest if each.seconds}
    moved = ", ".join(_moved(each, len(places) > 1) for each in slowest if each.seconds)
    where = f" {_place(places.pop())}" if len(places) == 1 else ""
    computing = one.step_s.value - one.parts["exchange"] - one.parts["offload"]
    waited = seconds(one.parts["exchange"])
    return f"{moved}{where}, {waited} of waiting against {seconds(computing)} of computing"


def _moved(each: Exchanged, with_place: bool) -> str:
    times = each.exchange.times
    count = f"{times:g} x " if times > 1 else f"every {1 / times:g} steps " if times < 1 else ""
    place = f" {_place(each.crosses_nodes)}" if with_place else ""
    return f"{each.exchange.kind} of {each.exchange.name} {count}{gigabytes(each.exchange.payload_bytes)}{place}"


def _place(crosses_nodes: bool) -> str:
    return "between nodes" if crosses_nodes else "within nodes"


def _why_not(one: Prediction, chosen: Prediction, setting: Setting) -> str:
    if not one.fits:
        return f"does not fit: {_too_large(one, setting)}"
    ratio, text = one.step_s.value / chosen.step_s.value, f"a step would take {seconds(one.step_s.value)}"
    if abs(ratio - 1) <= setting.as_good:
        return f"{text}, as long"
    text += f", {1 - ratio:.0%} less" if ratio < 1 else f", {ratio - 1:.0%} longer"
    return f"{text}; {_traffic(one)}" if one.bound == "exchange" else text


def _too_large(one: Prediction, setting: Setting) -> str:
    machine, memory = setting.machine, one.memory
    if lacks_host_memory(memory, machine):
        has, host = gigabytes(machine.host_memory_bytes or 0), host_bytes_of_node(memory, machine)
        return f"{gigabytes(host)} are to lie in a node's host memory, and cluster.memory_gb gives {has}"
    kept = max(MARGIN, memory.error)
    return (
        f"{gib(memory.total_bytes)} a GPU, up to {kept:.0%} more, of {gib(machine.gpu_memory_bytes or 0)} "
        f"({_largest_parts(memory)})"
    )


def _largest_parts(memory: Memory) -> str:
    parts = ("weights", "gradients", "optimizer", "gathered", "exchanged", "activations", "loss")
    sizes = sorted(((getattr(memory, f"{part}_bytes"), part) for part in parts), reverse=True)[:_NAMED_PARTS]
    return ", ".join(f"{part} {gib(size)}" for size, part in sizes)


def _faster_network(chosen: Prediction, setting: Setting) -> Iterator[tuple[float, str]]:
    """The bandwidth between nodes that would hide the exchange, or as much of it as can be hidden."""
    if not any(each.crosses_nodes for each in chosen.exchanges):
        return
    now = setting.machine.rates["between_bytes_s"].value
    faster = {factor: _at_bandwidth(chosen, setting, now * factor) for factor in _FASTER}
    best_s = min(then.step_s.value for then in faster.values())
    factor, then = next(each for each in faster.items() if each[1].step_s.value <= best_s * (1 + _HIDDEN))
    rest = "" if then.parts["exchange"] < 2 * _HIDDEN * then.step_s.value else "; then links within nodes are the limit"
    yield (
        chosen.step_s.value / then.step_s.value,
        f"{gbit_per_s(now * factor)} between nodes instead of {gbit_per_s(now)} would hide the exchange there: "
        f"{seconds(then.step_s.value)} a step{rest}",
    )


def _at_bandwidth(chosen: Prediction, setting: Setting, bytes_per_s: float) -> Prediction:
    machine = setting.machine.with_rate("between_bytes_s", bytes_per_s)
    return replace(setting, machine=machine).predict(chosen.train)


def _larger_batch(now: Prediction, setting: Setting, has_deepspeed: bool) -> Iterator[tuple[float, str]]:
    """More accumulation, so that there is less to exchange for each token; it trains something else."""
    if setting.machine.nodes == 1:
        return
    found = []
    for factor in _LARGER_BATCHES:
        larger = replace(setting, batch_blocks=setting.batch_blocks * factor)
        then, alone = (_best(now, where, has_deepspeed) for where in (larger, _on_one_node(larger)))
        if then is None or (alone is not None and alone.step_s.value < then.step_s.value):
            continue
        gain = factor * now.step_s.value / then.step_s.value
        text = f"train.global_batch_tokens: {larger.batch_blocks * setting.workload.block_tokens:,} ({describe(then)}) "
        text += f"trains {gain:.2f} times the tokens/s"
        if alone is not None:
            text += f", {alone.step_s.value / then.step_s.value:.2f} times those of one node"
        found.append((gain, f"{text}; it is another batch, so tune the learning rate"))
    yield from sorted(found, reverse=True)[:1]


def _fewer_nodes(now: Prediction, setting: Setting, has_deepspeed: bool) -> Iterator[tuple[float, str]]:
    """One node, where more of them are no gain."""
    if setting.machine.nodes == 1:
        return
    alone = _best(now, _on_one_node(setting), has_deepspeed)
    if alone is not None:
        gain = now.step_s.value / alone.step_s.value
        yield gain, f"one node alone ({describe(alone)}) is {gain:.2f} times as fast as these {setting.machine.nodes}"


def _on_one_node(setting: Setting) -> Setting:
    return replace(setting, machine=replace(setting.machine, nodes=1))


def _best(now: Prediction, setting: Setting, has_deepspeed: bool) -> Prediction | None:
    """The fastest way to train so there; None if nothing fits."""
    train = now.train.model_copy(update={"strategy": "auto", "shard_ranks": None})
    try:
        return choose(setting, train, (), has_deepspeed).chosen
    except DataError:
        return None


def _less_padding(setting: Setting) -> Iterator[tuple[float, str]]:
    real = setting.workload.real_fraction
    if not setting.workload.is_assumed:
        yield 1 / real, f"{1 - real:.0%} of the blocks is padding: longer blocks (shard.block_tokens) hold more of it"
