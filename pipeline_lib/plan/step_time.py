"""The time of one optimizer step, phase by phase, for one `end` (plan/machine.py).

T = sum over micro-batches of [forward | gathering] + [backward | gathering and reducing], plus
exposed exchanges, plus the update. Overlapping work takes as long as the longest of it, and
somewhat more if two parts are similar.
"""

import math
from dataclasses import dataclass, replace

from pipeline_lib.arch.geometry import FP32_BYTES
from pipeline_lib.arch.layers import stays_gathered
from pipeline_lib.config.optimizers import ADAM_BYTES
from pipeline_lib.plan.activations import compute_bytes
from pipeline_lib.plan.machine import End, Speeds
from pipeline_lib.plan.moments import kept_on_host, sharded_over
from pipeline_lib.plan.passes import ends_passes, family_of, layer_passes
from pipeline_lib.plan.traffic import Duration, Exchange, duration_of, exchanges_of
from pipeline_lib.plan.trained import portions
from pipeline_lib.plan.workload import Case

# The exponent of the norm that combines overlapping times: two equal ones take 1.12 times one; 1
# and 2 take 2.005.
_SHARPNESS = 6.0
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
    """An exchange and its cost in a step: seconds, exposed ones, and the bytes a node sends."""

    exchange: Exchange
    seconds: float
    exposed_s: float
    sent_bytes: float
    crosses_nodes: bool


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase in a step: work of device and host, and what copies and exchanges add.

    AdamW in host memory counts as copying.
    """

    device_s: float
    host_s: float
    computing_s: float
    copying_s: float
    exchanging_s: float

    @property
    def total_s(self) -> float:
        """The duration of the phase."""
        return self.computing_s + self.copying_s + self.exchanging_s


@dataclass(frozen=True)
class StepTime:
    """The time of a step.

    `recomputed_s` is the part of the backward phase that recomputes activations.
    """

    forward: PhaseTime
    backward: PhaseTime
    update: PhaseTime
    recomputed_s: float
    exchanged: tuple[Exchanged, ...]

    @property
    def total_s(self) -> float:
        """The duration of the step."""
        return self.forward.total_s + self.backward.total_s + self.update.total_s


@dataclass(frozen=True)
class _Work:
    """One pass of a phase: seconds of the device, of the host, and of copies between them."""

    device_s: float
    host_s: float
    copy_s: float
    added_s: float = 0.0  # sums in host memory, which wait for the rest


def overlapped(*times_s: float) -> float:
    """Return the duration of work whose parts, of `times_s` seconds each, run concurrently."""
    longest = max(times_s)
    if longest <= 0:
        return 0.0
    return float(
        longest * math.fsum((each / longest) ** _SHARPNESS for each in times_s) ** (1 / _SHARPNESS)
    )


def step_time(case: Case, end: End) -> StepTime:
    """Return the time of a step."""
    speeds = case.machine.speeds(end)
    ranks = case.ranks
    accumulation = case.accumulation
    tokens = case.micro_batch_tokens
    layers = case.geometry.layers
    layer = layer_passes(case, end)
    ends = ends_passes(case, end)
    moved = _moved(case, speeds)
    work = {}
    for name in ("forward", "backward"):
        of_layer = getattr(layer, name)
        of_ends = getattr(ends, name)
        device_s = layers * of_layer.device_s(tokens) + of_ends.device_s(tokens)
        added_s = _added_s(case, speeds) if name == "backward" else 0.0
        work[name] = _Work(
            device_s, layers * of_layer.host_s + of_ends.host_s, moved[name], added_s
        )
    work["update"] = _update(case, speeds, moved["update"])
    costs = [
        (exchange, duration_of(exchange, case.train, ranks, speeds, end, case.machine.is_gpu))
        for exchange in exchanges_of(case.geometry, case.train, ranks, accumulation, tokens)
    ]
    late = _LATE_BY_DOUBLING[end] * math.log2(case.machine.nodes)
    phases = {}
    exchanged: list[Exchanged] = []
    for name, alone in work.items():
        mine = [(exchange, cost) for exchange, cost in costs if exchange.phase == name]
        passes = 1 if name == "update" else accumulation
        launched = sum(
            each.pieces * each.times / passes for each, _ in mine if each.group == "shard"
        )
        whole = replace(alone, host_s=alone.host_s + launched * _SHARD_LAUNCHES * speeds.launch_s)
        phases[name] = _phase(whole, passes, mine, late)
        exchanged += _shares(mine, phases[name].exchanging_s)
    again_s = accumulation * layers * layer.recomputed_per_token_s * tokens
    return StepTime(
        phases["forward"], phases["backward"], phases["update"], again_s, tuple(exchanged)
    )


def _phase(
    work: _Work, times: int, costs: list[tuple[Exchange, Duration]], late: float
) -> PhaseTime:
    """Combine `times` passes; an exchange that occurs less often overlaps with the last ones.

    Exchanges between nodes wait for the slowest of them, which is late by the part `late` of all
    passes.
    """
    every = [(exchange, cost) for exchange, cost in costs if exchange.times == times]
    last = [(exchange, cost) for exchange, cost in costs if exchange.times != times]
    computing_s = overlapped(work.device_s, work.host_s)
    with_copies_s = overlapped(work.device_s, work.host_s, work.copy_s)
    total_s = (times - 1) * _with_exchanges(work, every) + _with_exchanges(work, every + last)
    if any(cost.crosses_nodes for _, cost in costs):
        total_s += late * times * computing_s
    return PhaseTime(
        times * work.device_s,
        times * work.host_s,
        times * computing_s,
        times * (with_copies_s - computing_s + work.added_s),
        total_s - times * with_copies_s,
    )


def _with_exchanges(work: _Work, costs: list[tuple[Exchange, Duration]]) -> float:
    """Return the duration of one pass with the exchanges that overlap with it or follow it."""
    hidden_s = sum(cost.seconds - cost.tail_s for exchange, cost in costs if exchange.overlaps)
    waited_s = sum(cost.tail_s for exchange, cost in costs if exchange.overlaps)
    waited_s += sum(
        min(1.0, exchange.times) * cost.seconds for exchange, cost in costs if not exchange.overlaps
    )
    return overlapped(work.device_s, work.host_s, work.copy_s, hidden_s) + waited_s


def _shares(costs: list[tuple[Exchange, Duration]], exposed_s: float) -> list[Exchanged]:
    """Distribute a phase's exposed time over its exchanges, in proportion to their duration."""
    all_s = sum(cost.seconds * exchange.times for exchange, cost in costs) or 1.0
    return [
        Exchanged(
            exchange,
            cost.seconds * exchange.times,
            exposed_s * cost.seconds * exchange.times / all_s,
            cost.sent_bytes * exchange.times,
            cost.crosses_nodes,
        )
        for exchange, cost in costs
    ]


def _trained_by_rank(case: Case) -> tuple[float, int]:
    """Return the parameters that a rank updates and the ranks that share an optimizer state."""
    share = case.ranks.total if case.train.uses_deepspeed else sharded_over(case.train, case.ranks)
    return case.geometry.trained_parameters(case.train) / share, share


def _moved(case: Case, speeds: Speeds) -> dict[str, float]:
    """Return the seconds of copies between host and device per pass: offloaded state, activations.

    FSDP2 copies its shard of the weights, in fp32, whenever it gathers, copies gradients back (with
    hsdp once a step), and once more to the device for their norm. ZeRO-1 and 2 copy the sum of the
    gradients and the updated weights once a step; what they copy besides in fp32 is not counted.
    ZeRO-3 copies gradients in every pass, and offloaded parameters when they are used.
    """
    train = case.train
    number = compute_bytes(case.train)
    away_s = kept_on_host(case.geometry, train, case.micro_batch_tokens) / speeds.copy_bytes_s
    if train.offload == "none":
        return {"forward": away_s, "backward": away_s, "update": 0.0}
    trained, share = _trained_by_rank(case)
    # FSDP2 keeps trained weights in fp32; frozen weights, and ZeRO's, are in the arithmetic's
    # precision.
    base = case.geometry.parameters / share - (trained if train.method == "full" else 0.0)
    weights = number * base + (number if train.uses_deepspeed else FP32_BYTES) * trained
    gathered = weights if train.offload == "optimizer+params" else 0.0
    updated = 0.0 if train.offload == "optimizer+params" else number * trained
    again = 0.0 if stays_gathered(train) else gathered
    gradients = FP32_BYTES * trained
    in_passes, in_update = (
        (gradients, 0.0) if train.strategy in ("fsdp", "zero3") else (0.0, gradients)
    )
    in_update += 0.0 if train.uses_deepspeed else gradients
    moved = {"forward": gathered, "backward": again + in_passes, "update": updated + in_update}
    copied_s = {name: size / speeds.copy_bytes_s for name, size in moved.items()}
    return {
        **copied_s,
        "forward": copied_s["forward"] + away_s,
        "backward": copied_s["backward"] + away_s,
    }


def _added_s(case: Case, speeds: Speeds) -> float:
    """Return the mean seconds of a backward pass in which fsdp sums up offloaded gradients."""
    if case.train.strategy != "fsdp" or case.train.offload == "none":
        return 0.0
    trained, _ = _trained_by_rank(case)
    moved = _ADD_BYTES * trained * case.ranks.per_node * (case.accumulation - 1) / case.accumulation
    return moved / speeds.host_bytes_s


def _update(case: Case, speeds: Speeds, copy_s: float) -> _Work:
    """Return a rank's norm, clipping and update; offloaded, a node's ranks share its bandwidth.

    Orthogonal updates are divided over all ranks, or where matrices are sharded over the ranks of
    a copy.
    """
    trained, share = _trained_by_rank(case)
    found = portions(case.geometry, case.train)
    ranks = case.ranks.total if case.train.strategy == "ddp" else share
    launches = sum(each.tensors * each.rule.launches[family_of(case.train)] for each in found)
    iterations = sum(each.tensors * each.rule.newton_schulz_steps for each in found)
    launches += iterations / ranks * _ITERATION_LAUNCHES
    host_s = launches * speeds.launch_s
    if case.train.offload == "none":
        moved = sum(
            each.elements / share * (_GRADIENT_BYTES + each.rule.moved_bytes) for each in found
        )
        products_s = sum(each.flops for each in found) / ranks / speeds.matmul_flop_s
        return _Work(moved / speeds.memory_bytes_s + products_s, host_s, copy_s)
    of_a_number = ADAM_BYTES + _CLIP_BYTES
    if case.train.uses_deepspeed:
        # the weights that it copies to the device
        of_a_number += FP32_BYTES + compute_bytes(case.train)
    return _Work(
        0.0, host_s, copy_s + of_a_number * trained * case.ranks.per_node / speeds.host_bytes_s
    )
