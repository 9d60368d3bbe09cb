"""What would help: changes of the config or the machine, each asked as the same question again.

A counterfactual is data: what is changed, the case with it, and what it does to the training. All
are answered by one rule, so each gain is that of the change alone, as `--what-if` predicts it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline_lib.arch.layers import has_fused_adapters
from pipeline_lib.config.train import AUTO, in_file
from pipeline_lib.core.units import brief, gbit_per_s
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.choose import Choice, fastest
from pipeline_lib.plan.machine import End
from pipeline_lib.plan.predict import Prediction
from pipeline_lib.plan.step_time import step_time
from pipeline_lib.plan.ways import Ways

AT_MOST = 4  # pieces of advice
WORTH_SAYING = 1.05  # the least speedup worth a sentence
_HIDDEN = 0.1  # fraction of a step: communication that costs less counts as hidden
_LARGER_BATCHES = (2, 4, 8)
# factors of the bandwidth between nodes
_FASTER = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100)
_AS_MUCH = 1.1  # of a group, the mildest that gains about as much as any is taken
# the plan chooses them only where they are `auto`
_ALSO_AUTO = ("offload_activations", "kept_attention_layers")
_LEFT_OPEN = {"strategy": AUTO, "shard_ranks": None, **dict.fromkeys(_ALSO_AUTO, AUTO)}
# For slow networks, the mildest first: what ranks exchange then.
_APPROXIMATIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"gradient_compression": "bf16"}, "ranks exchange gradients that are rounded to bf16"),
    (
        {"gradient_compression": "powersgd", "strategy": "ddp"},
        "ranks exchange low-rank factors of their gradients",
    ),
    ({"local_sgd_steps": 10, "strategy": "ddp"}, "ranks average their models, and no gradients"),
)
_OTHER_BATCH = "a larger batch needs its learning rate tuned again"


@dataclass(frozen=True)
class Counterfactual:
    """A change as it is written, and the case with it.

    `effect` says what it does to the training; it is empty if the result stays the same. Of those
    of a `group` only one is told.
    """

    what: str
    case: Case
    effect: str = ""
    group: str = ""


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


def advice(choice: Choice, case: Case) -> list[Change]:
    """Return up to AT_MOST changes that help, the largest gain first.

    There are none for a run that does not fit: plan/fitting.py says what would.
    """
    chosen = choice.chosen
    if not chosen.fits:
        return []
    asked = [*_freed(case), *_others(chosen, case)]
    found: dict[str, list[Change]] = {}
    for number, one in enumerate(asked):
        then = fastest(one.case)
        if then is None:
            continue
        change = _answered(one, then, chosen, case)
        if change.gain >= WORTH_SAYING:
            found.setdefault(one.group or str(number), []).append(change)
    told = [_mildest(changes) for changes in found.values()]
    if not case.workload.is_assumed:
        told += _longer_blocks(case)
    return sorted(told, key=lambda change: -change.gain)[:AT_MOST]


def _mildest(changes: list[Change]) -> Change:
    most = max(change.gain for change in changes)
    return next(change for change in changes if change.gain * _AS_MUCH >= most)


def _answered(one: Counterfactual, then: Prediction, now: Prediction, case: Case) -> Change:
    """Return the change with its gain: of tokens a second, where the batch is another."""
    gain = one.case.batch_blocks / case.batch_blocks * now.step_s.value / then.step_s.value
    took = f"{brief(then.step_s.value)} a step instead of {brief(now.step_s.value)}"
    if one.case.batch_blocks != case.batch_blocks:
        took = f"{gain:.2f} times the tokens/s"
    effect = f"; {one.effect}" if one.effect else ""
    return Change(gain, one.what, f"{one.what} ({', '.join(then.words)}): {took}{effect}")


def _freed(case: Case) -> Iterator[Counterfactual]:
    """Yield the training without the keys that the plan may choose."""
    train = case.train
    given = [*case.fixed, *(key for key in _ALSO_AUTO if getattr(train, key) != AUTO)]
    what = "train.strategy: auto, with no other placement key set"
    if train.strategy == AUTO:
        what = f"{' and '.join(in_file(key) for key in given)} left out"
    if train.strategy != AUTO or given:
        yield Counterfactual(what, replace(case, train=_changed(case, _LEFT_OPEN).train, fixed=()))


def _others(chosen: Prediction, case: Case) -> Iterator[Counterfactual]:
    """Yield all other changes that may help a run that fits."""
    yield from _batch_that_divides(chosen, case)
    yield from _no_dropout(chosen, case)
    if case.machine.nodes == 1:
        return
    yield from _faster_network(chosen, case)
    yield Counterfactual("cluster.nodes: 1", _on_one_node(case))
    for factor in _LARGER_BATCHES:
        yield _with_batch(case, factor * case.batch_blocks)
    is_exact = case.train.gradient_compression == "none" and case.train.local_sgd_steps == 1
    if chosen.bound == "exchange" and is_exact:
        yield from _approximations(case)


def _changed(case: Case, changes: dict[str, Any]) -> Case:
    return case.by(case.train.model_copy(update=changes))


def _batch_that_divides(chosen: Prediction, case: Case) -> Iterator[Counterfactual]:
    """Yield the next larger batch with which no rank idles, if some do."""
    train = chosen.train
    at_once = train.blocks_at_once(case.machine.ranks)
    places = chosen.accumulation * at_once
    if places != case.batch_blocks and train.global_batch_samples is None:
        yield _with_batch(case, places, "now ranks idle in part of a step")


def _with_batch(case: Case, batch_blocks: int, effect: str = _OTHER_BATCH) -> Counterfactual:
    """Return the same training with another batch; an epoch then has another number of steps."""
    tokens = batch_blocks * case.workload.block_tokens
    steps = case.steps
    if steps is not None and case.train.max_steps is None:
        steps = max(1, steps * case.batch_blocks // batch_blocks)
    larger = replace(
        _changed(case, {"global_batch_tokens": tokens}), batch_blocks=batch_blocks, steps=steps
    )
    return Counterfactual(f"train.global_batch_tokens: {tokens:,}", larger, effect, "batch")


def _no_dropout(chosen: Prediction, case: Case) -> Iterator[Counterfactual]:
    """Yield adapters without dropout: they then join their linear, and layers compile."""
    changes = {"lora": chosen.train.lora.model_copy(update={"dropout": 0.0})}
    then = chosen.train.model_copy(update=changes)
    if has_fused_adapters(then) and not has_fused_adapters(chosen.train):
        effect = "it allows fused adapters and compiled layers"
        yield Counterfactual("train.lora.dropout: 0", _changed(case, changes), effect)


def _faster_network(chosen: Prediction, case: Case) -> Iterator[Counterfactual]:
    """Yield the bandwidth between nodes that would hide as much communication as possible."""
    if not any(each.crosses_nodes for each in chosen.exchanged):
        return
    now = case.machine.rates["between_bytes_s"].value
    way = Ways.one(chosen.train, case.geometry)
    faster = [
        replace(case, machine=case.machine.with_rate("between_bytes_s", now * factor))
        for factor in _FASTER
    ]
    took_s = np.array([float(step_time(one, way, End.EXPECTED).total_s[0]) for one in faster])
    place = int(np.argmax(took_s <= took_s.min() * (1 + _HIDDEN)))
    enough = gbit_per_s(now * _FASTER[place])
    effect = f"instead of {gbit_per_s(now)}, that would hide the communication"
    yield Counterfactual(f"{enough} between nodes", faster[place], effect)


def _on_one_node(case: Case) -> Case:
    return replace(case, machine=replace(case.machine, nodes=1))


def _approximations(case: Case) -> Iterator[Counterfactual]:
    """Yield the approximations for a slow network that the config allows."""
    for changes, effect in _APPROXIMATIONS:
        written = [f"train.{key}: {value}" for key, value in changes.items()]
        if case.train.strategy in (AUTO, changes.get("strategy")):
            written = written[:1]
        own = dict(changes)
        if case.train.strategy == AUTO:
            own.pop("strategy", None)
        what = " with ".join(written)
        yield Counterfactual(
            what, _changed(case, own), f"another training: {effect}", "approximation"
        )


def _longer_blocks(case: Case) -> list[Change]:
    """Return how much longer blocks gain at most; it depends on the data, which is not packed so."""
    real = case.workload.real_fraction
    text = (
        f"{1 - real:.0%} of the tokens are padding: longer blocks (shard.block_tokens) need less of "
        "it"
    )
    change = Change(1 / real, "a larger shard.block_tokens", text, is_most=True)
    return [change] if change.gain >= WORTH_SAYING else []
