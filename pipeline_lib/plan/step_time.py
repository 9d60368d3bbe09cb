"""The time of one optimizer step, phase by phase, for one luck (plan/machine.py).

T = sum over micro-batches of [forward | gathering] + [backward | gathering and reducing], plus what nothing hides,
plus the update. What overlaps takes as long as the longest of it, and somewhat more where two are alike.
"""

import math
from dataclasses import dataclass, replace

from pipeline_lib.config.schema import Train
from pipeline_lib.plan.activations import FP32_BYTES, compute_bytes
from pipeline_lib.plan.compute import ends_passes, layer_passes, update_pass
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.machine import Luck, Machine, Pass, Ranks, Speeds
from pipeline_lib.plan.memory import sharded_over
from pipeline_lib.plan.placement import stays_gathered
from pipeline_lib.plan.traffic import Duration, Exchange, duration_of, exchanges_of
from pipeline_lib.plan.workload import Workload

# Overlapping times as a norm: of two that are equal, 1.12 times one; of 1 and 2, 2.005.
_SHARPNESS = 6.0
# What the host does more for each collective of FSDP among several ranks than on one, in launches: two H200 took 0.5 to
# 1 ms more for each layer and pass than one, and ranks wait for the slower of their hosts.
_SHARD_LAUNCHES = 25
_ADAM_BYTES = 28  # read and written by AdamW for each parameter


@dataclass(frozen=True)
class Exchanged:
    """An exchange and what it costs a step: all its seconds, those that are waited for, and what a node sends."""

    exchange: Exchange
    seconds: float
    exposed_s: float
    sent_bytes: float
    crosses_nodes: bool


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase in a step: what device and host work, and what copies and exchanges add to that.

    What AdamW takes in host memory counts as copying.
    """

    device_s: float
    host_s: float
    computing_s: float
    copying_s: float
    exchanging_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.computing_s + self.copying_s + self.exchanging_s


@dataclass(frozen=True)
class StepTime:
    """A step. `recomputed_s`, part of the backward phase, is for activations that are computed again."""

    forward: PhaseTime
    backward: PhaseTime
    update: PhaseTime
    recomputed_s: float
    exchanged: tuple[Exchanged, ...]

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.forward.total_s + self.backward.total_s + self.update.total_s


@dataclass(frozen=True)
class _Work:
    """One pass of a phase: seconds of the device, of the host, and of copies between them."""

    device_s: float
    host_s: float
    copy_s: float


def overlapped(*times_s: float) -> float:
    """How long work takes that goes on at the same time, each part for one of `times_s`."""
    longest = max(times_s)
    if longest <= 0:
        return 0.0
    return float(longest * math.fsum((each / longest) ** _SHARPNESS for each in times_s) ** (1 / _SHARPNESS))


def step_time(
    geometry: Geometry, train: Train, machine: Machine, workload: Workload, accumulation: int, luck: Luck
) -> StepTime:
    """The step of `accumulation` micro-batches on each rank."""
    speeds, ranks = machine.speeds(luck), Ranks.of(machine)
    tokens = train.micro_batch_blocks * workload.block_tokens
    layer = layer_passes(geometry, train, machine, workload, luck)
    ends = ends_passes(geometry, train, machine, workload, luck)
    moved = _moved(geometry, train, ranks, speeds)
    exchanges = exchanges_of(geometry, train, ranks, accumulation)
    work = {
        "forward": _through_all(geometry.layers, layer.forward, ends.forward, tokens, moved["forward"]),
        "backward": _through_all(geometry.layers, layer.backward, ends.backward, tokens, moved["backward"]),
        "update": _update(geometry, train, ranks, speeds, moved["update"]),
    }
    costs = [(exchange, duration_of(exchange, train, ranks, speeds, luck, machine.is_gpu)) for exchange in exchanges]
    phases = {}
    exchanged: list[Exchanged] = []
    for name, alone in work.items():
        launched = sum(
            exchange.pieces * exchange.times / accumulation
            for exchange in exchanges
            if exchange.phase == name and exchange.group == "shard"
        )
        one = replace(alone, host_s=alone.host_s + launched * _SHARD_LAUNCHES * speeds.launch_s)
        mine = [(exchange, cost) for exchange, cost in costs if exchange.phase == name]
        phases[name] = _phase(one, 1 if name == "update" else accumulation, mine)
        exchanged += _shares(mine, phases[name].exchanging_s)
    again_s = accumulation * geometry.layers * layer.recomputed_per_token_s * tokens
    return StepTime(phases["forward"], phases["backward"], phases["update"], again_s, tuple(exchanged))


def _through_all(layers: int, layer: Pass, ends: Pass, tokens: int, copy_s: float) -> _Work:
    device_s = layers * layer.device_s(tokens) + ends.device_s(tokens)
    return _Work(device_s, layers * layer.host_s + ends.host_s, copy_s)


def _phase(work: _Work, times: int, costs: list[tuple[Exchange, Duration]]) -> PhaseTime:
    """`times` passes: an exchange that comes less often than passes meets the last of them."""
    every = [(exchange, cost) for exchange, cost in costs if exchange.times == times]
    last = [(exchange, cost) for exchange, cost in costs if exchange.times != times]
    computing_s = overlapped(work.device_s, work.host_s)
    with_copies_s = overlapped(work.device_s, work.host_s, work.copy_s)
    total_s = (times - 1) * _with_exchanges(work, every) + _with_exchanges(work, every + last)
    return PhaseTime(
        times * work.device_s,
        times * work.host_s,
        times * computing_s,
        times * (with_copies_s - computing_s),
        total_s - times * with_copies_s,
    )


def _with_exchanges(work: _Work, costs: list[tuple[Exchange, Duration]]) -> float:
    """One pass with what is exchanged meanwhile, and then."""
    hidden_s = sum(cost.seconds - cost.tail_s for exchange, cost in costs if exchange.overlaps)
    waited_s = sum(cost.tail_s for exchange, cost in costs if exchange.overlaps)
    waited_s += sum(min(1.0, exchange.times) * cost.seconds for exchange, cost in costs if not exchange.overlaps)
    return overlapped(work.device_s, work.host_s, work.copy_s, hidden_s) + waited_s


def _shares(costs: list[tuple[Exchange, Duration]], exposed_s: float) -> list[Exchanged]:
    """What is waited for in a phase, laid on its exchanges by their length."""
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


def share_of_update(train: Train, ranks: Ranks) -> int:
    """Ranks that spread the optimizer."""
    return ranks.total if train.uses_deepspeed else sharded_over(train, ranks)


def _moved(geometry: Geometry, train: Train, ranks: Ranks, speeds: Speeds) -> dict[str, float]:
    """Seconds of copies between host and device for each pass, where something is offloaded.

    FSDP2 copies its part of the weights, in fp32, whenever it gathers, and the gradients back; DeepSpeed the gradients
    and the updated weights, and with its parameters offloaded those as they are computed with.
    """
    if train.offload == "none":
        return dict.fromkeys(("forward", "backward", "update"), 0.0)
    share = share_of_update(train, ranks)
    trained, number = geometry.trained_parameters(train) / share, compute_bytes(train)
    # FSDP2 keeps what is trained in fp32; frozen weights, and ZeRO's, are in the arithmetic's precision.
    base = geometry.parameters / share - (trained if train.method == "full" else 0.0)
    is_zero = train.uses_deepspeed
    weights = number * base + (number if is_zero else FP32_BYTES) * trained
    gathered = weights if train.offload == "optimizer+params" else 0.0
    updated = 0.0 if train.offload == "optimizer+params" else number * trained
    again = 0.0 if stays_gathered(train) else gathered
    moved = {"forward": gathered, "backward": again + FP32_BYTES * trained, "update": updated}
    return {name: size / speeds.copy_bytes_s for name, size in moved.items()}


def _update(geometry: Geometry, train: Train, ranks: Ranks, speeds: Speeds, copy_s: float) -> _Work:
    """Where the optimizer is offloaded, the ranks of a node share its memory for it."""
    share = share_of_update(train, ranks)
    one = update_pass(geometry, train, speeds, share)
    if train.offload == "none":
        return _Work(one.fixed_s, one.host_s, copy_s)
    moved = _ADAM_BYTES * geometry.trained_parameters(train) / share * ranks.per_node
    return _Work(0.0, one.host_s, copy_s + moved / speeds.host_bytes_s)
