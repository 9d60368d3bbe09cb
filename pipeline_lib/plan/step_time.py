"""The time of one optimizer step, phase by phase, for one `end` (plan/machine.py).

All times are columns in seconds, a number for each way to train (plan/ways.py).

T = sum over micro-batches of [forward | gathering] + [backward | gathering and reducing], plus
exposed exchanges, plus the update. Overlapping work takes as long as the longest of it, and
somewhat more if two parts are similar.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from pipeline_lib.arch.geometry import FP32_BYTES
from pipeline_lib.arch.layers import stays_gathered
from pipeline_lib.config.optimizers import ADAM_BYTES
from pipeline_lib.config.train import Train
from pipeline_lib.plan.activations import compute_bytes
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.machine import End, Speeds
from pipeline_lib.plan.memory import MemoryOfWays
from pipeline_lib.plan.moments import sharded_over
from pipeline_lib.plan.passes import Passes, ends_passes, family_of, layer_passes
from pipeline_lib.plan.traffic import (
    Duration,
    Exchange,
    Phase,
    duration_of,
    exchanges_of,
    exchanges_of_context,
)
from pipeline_lib.plan.trained import portions
from pipeline_lib.plan.ways import Column, Ways

PHASES: tuple[Phase, ...] = get_args(Phase)
# Extra host work for each collective of FSDP among several ranks, compared with one rank, in
# launches. Two H200 took 0.5 to 1 ms more than one for each layer and pass, and ranks wait for the
# slowest of their hosts.
_SHARD_LAUNCHES = 25
# The part of a pass that nodes lose by waiting for the slowest, for each doubling of their number.
# Fitted to public runs of 16 to 512 GPUs that differ in nothing but that
# (benchmarks/published.jsonl, the half for fitting).
_LATE_BY_DOUBLING = {End.BAD: 0.027, End.EXPECTED: 0.018, End.GOOD: 0.009}
# Kernels of a Newton-Schulz iteration: three matrix products
_ITERATION_LAUNCHES = 3
# Bytes that an update moves for each trained parameter of a rank beside the optimizer's: norm 4,
# clipping 8, zeroing gradients 4.
_GRADIENT_BYTES = 16
_CLIP_BYTES, _ADD_BYTES = 8, 12  # of a gradient in host memory: to clip it, and to add one to it


@dataclass(frozen=True)
class Exchanged:
    """An exchange and its cost in a step: how often, seconds, exposed ones, bytes a node sends."""

    exchange: Exchange
    times: float
    seconds: float
    exposed_s: float
    sent_bytes: float
    crosses_nodes: bool


@dataclass(frozen=True, eq=False)
class PhaseTime:
    """Seconds of a phase in a step: work of device and host, and what copies and exchanges add.

    AdamW in host memory counts as copying.
    """

    device_s: Column
    host_s: Column
    computing_s: Column
    copying_s: Column
    exchanging_s: Column

    @property
    def total_s(self) -> Column:
        """The duration of the phase."""
        return self.computing_s + self.copying_s + self.exchanging_s


@dataclass(frozen=True, eq=False)
class StepTime:
    """The time of a step by each way.

    `recomputed_s` is the part of the backward phase that recomputes activations.
    """

    forward: PhaseTime
    backward: PhaseTime
    update: PhaseTime
    recomputed_s: Column

    @property
    def total_s(self) -> Column:
        """The duration of the step."""
        return self.forward.total_s + self.backward.total_s + self.update.total_s


@dataclass(frozen=True, eq=False)
class _Work:
    """One pass of a phase: seconds of the device, of the host, and of copies between them.

    `added_s` are sums in host memory, which wait for the rest.
    """

    device_s: Column
    host_s: Column
    copy_s: Column
    added_s: Column | float = 0.0


@dataclass(frozen=True, eq=False)
class _Waits:
    """Seconds of a phase's exchanges: those that work may hide, those that it waits for.

    Of those of `each` pass, and of those of the `last` one only. Launches are of collectives of
    FSDP in a pass.
    """

    hidden_each_s: Column
    waited_each_s: Column
    hidden_last_s: Column
    waited_last_s: Column
    launches_each: Column
    launches_last: Column
    crosses_nodes: Column


def overlapped(*times_s: Column) -> Column:
    """Return the duration of work whose parts, of `times_s` seconds each, run concurrently.

    It is the norm by sixth powers: two equal ones take 1.12 times one; 1 and 2 take 2.005.
    """
    longest = np.maximum.reduce(times_s)
    scale = np.where(longest > 0, longest, 1.0)
    sum_of_powers = np.zeros_like(longest)
    for each_s in times_s:
        square = (each_s / scale) ** 2
        sum_of_powers += square * square * square
    return np.asarray(longest * np.cbrt(np.sqrt(sum_of_powers)))


def step_time(case: Case, ways: Ways, end: End) -> StepTime:
    """Return the time of a step by each of `ways`."""
    speeds = case.machine.speeds(end)
    accumulation = case.accumulation_of(ways)
    memory = case.memory_of(ways)
    tokens = memory.tokens
    layers = case.geometry.layers
    layer = _passes(case, ways, end)
    ends = _Passes(*ways.each(lambda train: _numbers_of(ends_passes(case.by(train), end)), *_WAY))
    in_forward, in_backward, in_update = _moved(case, memory, speeds)
    added_s = _added_s(case, ways, speeds) * (accumulation - 1) / accumulation
    forward = _Work(
        layers * layer.forward_s(tokens) + ends.forward_s(tokens),
        layers * layer.forward_host_s + ends.forward_host_s,
        in_forward,
    )
    backward = _Work(
        layers * layer.backward_s(tokens) + ends.backward_s(tokens),
        layers * layer.backward_host_s + ends.backward_host_s,
        in_backward,
        added_s,
    )
    update = _update(case, ways, speeds, in_update)
    waits = _waits(case, ways, speeds, end, tokens)
    late = _LATE_BY_DOUBLING[end] * math.log2(case.machine.nodes)
    launch_s = _SHARD_LAUNCHES * speeds.launch_s
    once = np.ones(len(ways))
    return StepTime(
        _phase(forward, accumulation, waits["forward"], late, launch_s),
        _phase(backward, accumulation, waits["backward"], late, launch_s),
        _phase(update, once, waits["update"], late, launch_s),
        accumulation * layers * layer.recomputed_per_token_s * tokens,
    )


# The keys of a way that the time of its layers depends on, and that of its exchanges.
_WAY = ("strategy", "recompute", "compile", "context_ranks", "reshard")
_SHARDING = ("strategy", "shard_ranks", "offload", "reshard")


@dataclass(frozen=True, eq=False)
class _Passes:
    """`Passes` by each way, as columns."""

    forward_fixed_s: Column
    forward_per_token_s: Column
    forward_host_s: Column
    backward_fixed_s: Column
    backward_per_token_s: Column
    backward_host_s: Column
    recomputed_per_token_s: Column

    def forward_s(self, tokens: Column) -> Column:
        """Return the seconds that the device is busy with `tokens` tokens."""
        return self.forward_fixed_s + self.forward_per_token_s * tokens

    def backward_s(self, tokens: Column) -> Column:
        """Return the same of the backward pass."""
        return self.backward_fixed_s + self.backward_per_token_s * tokens


def _numbers_of(passes: Passes) -> tuple[float, ...]:
    """Return the fields of _Passes for one way."""
    forward = passes.forward
    backward = passes.backward
    return (
        forward.fixed_s,
        forward.per_token_s,
        forward.host_s,
        backward.fixed_s,
        backward.per_token_s,
        backward.host_s,
        passes.recomputed_per_token_s,
    )


def _passes(case: Case, ways: Ways, end: End) -> _Passes:
    """Return the passes through an average layer, in proportion to the layers that keep attention.

    They are computed for all layers that keep it and for none, between which time is linear.
    """

    def keeping(kept: int, train: Train) -> tuple[float, ...]:
        changed = train.model_copy(update={"kept_attention_layers": kept})
        return _numbers_of(layer_passes(case.by(changed), end))

    most = ways.attention_layers
    every = ways.each(lambda train: keeping(most, train), *_WAY)
    if np.all(ways.kept_layers == most):
        return _Passes(*every)
    none = ways.each(lambda train: keeping(0, train), *_WAY)
    return _Passes(*(none + (every - none) * (ways.kept_layers / most)))


def _phase(work: _Work, passes: Column, waits: _Waits, late: float, launch_s: float) -> PhaseTime:
    """Combine `passes` passes; an exchange that occurs once a step overlaps with the last one.

    Exchanges between nodes wait for the slowest of them, which is late by the part `late` of all
    passes.
    """
    device_s = work.device_s
    copy_s = work.copy_s
    host_s = work.host_s + launch_s * (waits.launches_each + waits.launches_last / passes)
    computing_s = overlapped(device_s, host_s)
    with_copies_s = overlapped(device_s, host_s, copy_s)
    each_s = overlapped(device_s, host_s, copy_s, waits.hidden_each_s) + waits.waited_each_s
    hidden_s = waits.hidden_each_s + waits.hidden_last_s
    last_s = overlapped(device_s, host_s, copy_s, hidden_s)
    last_s = last_s + waits.waited_each_s + waits.waited_last_s
    total_s = (passes - 1) * each_s + last_s
    total_s = total_s + np.where(waits.crosses_nodes, late * passes * computing_s, 0.0)
    return PhaseTime(
        device_s=passes * device_s,
        host_s=passes * host_s,
        computing_s=passes * computing_s,
        copying_s=passes * (with_copies_s - computing_s + work.added_s),
        exchanging_s=total_s - passes * with_copies_s,
    )


def _waits(case: Case, ways: Ways, speeds: Speeds, end: End, tokens: Column) -> dict[Phase, _Waits]:
    """Return the seconds of all exchanges by phase.

    Those of ranks that share blocks are linear in a micro-batch's tokens.
    """

    def of_state(train: Train) -> Sequence[float]:
        return _sums(case, train, exchanges_of(case.geometry, train, case.ranks), speeds, end)

    def of_context(tokens: int, train: Train) -> Sequence[float]:
        found = exchanges_of_context(case.geometry, train, tokens)
        return _sums(case, train, found, speeds, end)

    found = ways.each(of_state, *_SHARDING)
    latency = ways.each(lambda train: of_context(0, train), "context_ranks", "recompute")
    of_token = ways.each(lambda train: of_context(1, train), "context_ranks", "recompute")
    found = found + latency + (of_token - latency) * tokens
    columns = found.reshape(len(PHASES), -1, len(ways))
    return {phase: _Waits(*own) for phase, own in zip(PHASES, columns, strict=True)}


def _sums(
    case: Case, train: Train, exchanges: Sequence[Exchange], speeds: Speeds, end: End
) -> list[float]:
    """Return the fields of _Waits for one way, of one phase after the other."""
    sums: list[float] = []
    for phase in PHASES:
        hidden_s = {True: 0.0, False: 0.0}  # of each pass, and of the last
        waited_s = {True: 0.0, False: 0.0}
        launches = {True: 0.0, False: 0.0}
        crosses = False
        for exchange in exchanges:
            if exchange.phase != phase:
                continue
            is_each = exchange.is_each_pass
            cost = _cost(case, train, exchange, speeds, end)
            if exchange.overlaps:
                hidden_s[is_each] += cost.seconds - cost.tail_s
                waited_s[is_each] += cost.tail_s
            else:
                waited_s[is_each] += cost.seconds / exchange.steps_apart
            launches[is_each] += exchange.pieces if exchange.group == "shard" else 0
            crosses |= cost.crosses_nodes
        for is_each in (True, False):
            sums += [hidden_s[is_each], waited_s[is_each]]
        sums += [launches[True], launches[False], float(crosses)]
    return sums


def _cost(case: Case, train: Train, exchange: Exchange, speeds: Speeds, end: End) -> Duration:
    return duration_of(exchange, train, case.ranks, speeds, end, case.machine.is_gpu)


def exchanged_in(case: Case, time: StepTime, end: End) -> list[Exchanged]:
    """Return the exchanges of the one way of `case`, whose step takes `time`.

    A phase's exposed time is distributed over its exchanges in proportion to their duration.
    """
    train = case.train
    speeds = case.machine.speeds(end)
    exchanges = exchanges_of(case.geometry, train, case.ranks)
    exchanges += exchanges_of_context(case.geometry, train, case.micro_batch_tokens)
    found = []
    for phase in PHASES:
        passes = 1 if phase == "update" else case.accumulation
        mine = [exchange for exchange in exchanges if exchange.phase == phase]
        costs = [_cost(case, train, exchange, speeds, end) for exchange in mine]
        times = [exchange.times(passes) for exchange in mine]
        took_s = [cost.seconds * often for cost, often in zip(costs, times, strict=True)]
        exposed_s = float(getattr(time, phase).exchanging_s[0]) / (sum(took_s) or 1.0)
        for exchange, cost, often, seconds in zip(mine, costs, times, took_s, strict=True):
            sent = cost.sent_bytes * often
            found.append(
                Exchanged(exchange, often, seconds, exposed_s * seconds, sent, cost.crosses_nodes)
            )
    return found


def _trained_by_rank(case: Case, train: Train) -> tuple[float, int]:
    """Return the parameters that a rank updates and the ranks that share an optimizer state."""
    share = case.ranks.total if train.uses_deepspeed else sharded_over(train, case.ranks)
    return case.geometry.trained_parameters(train) / share, share


def _moved(case: Case, memory: MemoryOfWays, speeds: Speeds) -> tuple[Column, Column, Column]:
    """Return the seconds of copies between host and device, by phase: state, and activations."""
    state = memory.ways.each(lambda train: _moved_state(case, train), *_SHARDING)
    in_forward, in_backward, in_update = state / speeds.copy_bytes_s
    away_s = memory.kept_on_host / speeds.copy_bytes_s
    return in_forward + away_s, in_backward + away_s, in_update


def _moved_state(case: Case, train: Train) -> tuple[float, float, float]:
    """Return the bytes of offloaded state that are copied in each phase.

    FSDP2 copies its shard of the weights, in fp32, whenever it gathers, copies gradients back (with
    hsdp once a step), and once more to the device for their norm. ZeRO-1 and 2 copy the sum of the
    gradients and the updated weights once a step; what they copy besides in fp32 is not counted.
    ZeRO-3 copies gradients in every pass, and offloaded parameters when they are used.
    """
    if train.offload == "none":
        return 0.0, 0.0, 0.0
    number = compute_bytes(train)
    trained, share = _trained_by_rank(case, train)
    # FSDP2 keeps trained weights in fp32; frozen weights, and ZeRO's, are in the arithmetic's
    # precision.
    base = case.geometry.parameters / share - (trained if train.method == "full" else 0.0)
    weights = number * base + (number if train.uses_deepspeed else FP32_BYTES) * trained
    gathered = weights if train.offload == "optimizer+params" else 0.0
    updated = 0.0 if train.offload == "optimizer+params" else number * trained
    again = 0.0 if stays_gathered(train) else gathered
    gradients = FP32_BYTES * trained
    is_each_pass = train.strategy in ("fsdp", "zero3")
    in_passes = gradients if is_each_pass else 0.0
    in_update = 0.0 if is_each_pass else gradients
    in_update += 0.0 if train.uses_deepspeed else gradients
    return gathered, again + in_passes, updated + in_update


def _added_s(case: Case, ways: Ways, speeds: Speeds) -> Column:
    """Return the seconds in which fsdp adds offloaded gradients to those of the pass before."""

    def of_kind(train: Train) -> float:
        if train.strategy != "fsdp" or train.offload == "none":
            return 0.0
        trained, _ = _trained_by_rank(case, train)
        return _ADD_BYTES * trained * case.ranks.per_node / speeds.host_bytes_s

    return ways.each(of_kind, *_SHARDING)


def _update(case: Case, ways: Ways, speeds: Speeds, copy_s: Column) -> _Work:
    """Return a rank's norm, clipping and update; offloaded, a node's ranks share its bandwidth."""
    device_s, host_s, added_s = ways.each(lambda train: _updated(case, train, speeds), *_SHARDING)
    return _Work(device_s, host_s, copy_s + added_s)


def _updated(case: Case, train: Train, speeds: Speeds) -> tuple[float, float, float]:
    """Return the seconds of an update on the device, of its launches, and in host memory.

    Orthogonal updates are divided over all ranks, or where matrices are sharded over the ranks of
    a copy.
    """
    trained, share = _trained_by_rank(case, train)
    found = portions(case.geometry, train)
    ranks = case.ranks.total if train.strategy == "ddp" else share
    launches = sum(each.tensors * each.rule.launches[family_of(train)] for each in found)
    iterations = sum(each.tensors * each.rule.newton_schulz_steps for each in found)
    launches += iterations / ranks * _ITERATION_LAUNCHES
    host_s = launches * speeds.launch_s
    if train.offload == "none":
        moved = sum(
            each.elements / share * (_GRADIENT_BYTES + each.rule.moved_bytes) for each in found
        )
        products_s = sum(each.flops for each in found) / ranks / speeds.matmul_flop_s
        return moved / speeds.memory_bytes_s + products_s, host_s, 0.0
    of_a_number = ADAM_BYTES + _CLIP_BYTES
    if train.uses_deepspeed:
        # the weights that it copies to the device
        of_a_number += FP32_BYTES + compute_bytes(train)
    return 0.0, host_s, of_a_number * trained * case.ranks.per_node / speeds.host_bytes_s
