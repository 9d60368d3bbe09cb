"""Predict what a way to train needs and takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from pipeline_lib.arch.geometry import step_flops
from pipeline_lib.arch.layers import is_compiled
from pipeline_lib.config.train import AUTO, CHOSEN_KEYS, Train, interval_steps
from pipeline_lib.core.units import HOUR_S
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.host import HostNeed, host_need
from pipeline_lib.plan.machine import End, Machine, Ranks, figure_of
from pipeline_lib.plan.memory import MARGIN
from pipeline_lib.plan.passes import COMPILE_S
from pipeline_lib.plan.saving import auto_apart_s, save_cost_s
from pipeline_lib.plan.step_time import (
    PHASES,
    Exchanged,
    PhaseTime,
    StepTime,
    exchanged_in,
    step_time,
)
from pipeline_lib.plan.ways import Column, Ways
from pipeline_lib.plan.workload import in_words
from pipeline_lib.records.plan import (
    Bound,
    Figure,
    Memory,
    Placement,
    PlannedExchange,
    PlannedWay,
    Segment,
)

# Training: memory, time and network of one way to train, each figure with its band.

# Relative errors of predictions against measurements where the device decides
# (benchmarks/RESULTS.md), beyond the bands of the rates: most are within 6 %. With 8 %, the bands
# of data-centre boards are about 20 % and hold nine of ten rows of benchmarks/published.jsonl. The
# host's pace has a band of its own (plan/step_time.py).
_TIME_ERROR = 0.08
# Seconds of a save beside writing: hashing, sealing, and agreement between ranks.
_SAVE_S = {End.BAD: 2.0, End.EXPECTED: 0.4, End.GOOD: 0.05}
_COMPILING = (1.0, 0.3, 2.0)  # factors of COMPILE_S: expected, and at the ends of its band
_NOTABLE = 0.2  # fraction of a step: waiting above it determines `bound`


@dataclass(frozen=True, kw_only=True)
class Prediction(PlannedWay):
    """The prediction for one way to train, with what it was made from: settings and memory.

    `exchanged` has what `exchanges` says in words. `fits` is the result of `fits()` for its memory.
    """

    train: Train
    memory: Memory
    exchanged: tuple[Exchanged, ...]

    def planned(self) -> PlannedWay:
        """Return the prediction's entry in plan.json."""
        return PlannedWay(**{field.name: getattr(self, field.name) for field in fields(PlannedWay)})


def memory_of(case: Case) -> Memory:
    """Return the memory of one rank of a case."""
    return case.memory_of(Ways.one(case.train, case.geometry)).memory(0)


def predict_step(case: Case) -> Prediction:
    """Predict a case, whose strategy must be a concrete one."""
    train = case.train
    machine = case.machine
    workload = case.workload
    ranks = case.ranks
    way = Ways.one(train, case.geometry)
    times = {end: step_time(case, way, end) for end in End}
    exchanged = {end: exchanged_in(case, time, end) for end, time in times.items()}
    memory = case.memory_of(way).memory(0)
    step_s = _seconds({end: time.total_s for end, time in times.items()})
    tokens = case.batch_blocks * workload.block_tokens * workload.real_fraction
    size = memory.checkpoint_bytes
    save_s = {
        end: _SAVE_S[end] + size / machine.speeds(end).disk_bytes_s / machine.nodes for end in End
    }
    forward_s = _seconds({end: time.forward.total_s for end, time in times.items()})
    run_s = None
    if case.steps is not None:
        run_s = _run(case, case.steps, forward_s, step_s, size) + _saving(
            case, case.steps, step_s, save_s
        )
        if is_compiled(train):
            run_s += Figure(*(factor * COMPILE_S for factor in _COMPILING))
    expected = times[End.EXPECTED]
    exchanges = exchanged[End.EXPECTED]
    return Prediction(
        train=train,
        memory=memory,
        exchanged=tuple(exchanges),
        changes=Placement(
            strategy=train.strategy, **{key: getattr(train, key) for key in CHOSEN_KEYS}
        ),
        words=tuple(in_words(train, case.accumulation)),
        accumulation=case.accumulation,
        peak_memory_bytes=Figure.around(memory.allocated_bytes, memory.error),
        needed_memory_bytes=Figure.around(memory.total_bytes, memory.error),
        forward_s=forward_s,
        backward_s=_seconds({end: time.backward.total_s for end, time in times.items()}),
        update_s=_seconds({end: time.update.total_s for end, time in times.items()}),
        step_s=step_s,
        tokens_per_s_per_rank=step_s.inverse(tokens / ranks.total),
        mfu=_mfu(case, tokens, step_s),
        network_bytes=figure_of(
            {end: sum(one.sent_bytes for one in found) for end, found in exchanged.items()}
        ),
        run_s=run_s,
        gpu_hours=run_s.scaled(ranks.total / HOUR_S) if run_s and machine.is_gpu else None,
        checkpoint_bytes=size,
        checkpoint_s=figure_of(save_s),
        parts=_parts(expected),
        segments=tuple(_segments(expected, exchanges)),
        exchanges=tuple(_described(one) for one in exchanges),
        bound=_bound(expected),
        fits=fits(memory, machine),
    )


def _described(one: Exchanged) -> PlannedExchange:
    return PlannedExchange(
        name=_name_of(one),
        phase=one.exchange.phase,
        payload_bytes=one.exchange.payload_bytes,
        times=one.times,
        link="between nodes" if one.crosses_nodes else "within nodes",
        seconds=one.seconds,
        exposed_s=one.exposed_s,
    )


def _name_of(one: Exchanged) -> str:
    return f"{one.exchange.kind} of {one.exchange.name}"


def fits(memory: Memory, machine: Machine) -> bool:
    """Return whether a GPU's memory suffices, with error and MARGIN, and its node's host's too."""
    return fits_on_gpu(memory, machine) and not lacks_host_memory(memory, machine)


def fits_on_gpu(memory: Memory, machine: Machine) -> bool:
    """Return whether GPU memory alone suffices; true on CPUs, where the host's counts."""
    limit = machine.gpu_memory_bytes
    return limit is None or memory.total_bytes <= limit * usable_fraction(memory)


def usable_fraction(memory: Memory) -> float:
    """Return the fraction of a GPU's memory that may be used: what the error and MARGIN leave."""
    return min(1 - MARGIN, 1 / (1 + memory.error))


def host_need_of_node(memory: Memory, machine: Machine) -> HostNeed:
    """Return the memory that a node's host needs, by purpose."""
    held = memory.host_bytes, memory.copied_bytes, memory.cpu_rank_bytes
    return host_need(*held, Ranks.of(machine), machine.is_gpu)


def host_bytes_of_node(memory: Memory, machine: Machine) -> int:
    """Return the memory that a node's host needs, in bytes."""
    return host_need_of_node(memory, machine).total_bytes


def lacks_host_memory(memory: Memory, machine: Machine) -> bool:
    """Return whether a node needs more than its host has.

    An assumed limit is only for what is offloaded: it refuses no run that merely has to start.
    """
    if machine.is_host_assumed and not memory.host_bytes:
        return False
    return not has_room_on_host(memory, machine)


def has_room_on_host(memory: Memory, machine: Machine) -> bool:
    """Return whether a node's host, of the given or the assumed size, has what is needed."""
    limit = machine.host_limit_bytes
    return limit is None or host_bytes_of_node(memory, machine) <= limit


def _seconds(values: Mapping[End, Column]) -> Figure:
    """Build a way's figure in seconds, its band widened by the error that rates do not explain."""
    plain = figure_of({end: float(value[0]) for end, value in values.items()})
    return Figure(plain.value, plain.low * (1 - _TIME_ERROR), plain.high * (1 + _TIME_ERROR))


def _mfu(case: Case, tokens: float, step_s: Figure) -> Figure | None:
    workload = case.workload
    peak_flop_s = case.machine.peak_flop_s
    if peak_flop_s is None:
        return None
    supervised = round(tokens * workload.supervised_fraction / workload.real_fraction)
    flops = step_flops(
        case.geometry,
        case.train,
        round(tokens),
        round(tokens * workload.document_tokens),
        supervised,
    )
    mfu = step_s.inverse(flops.causal / (peak_flop_s * case.machine.ranks))
    if case.train.precision == "fp8":  # the peak is that of half precision
        return mfu
    return Figure(min(1.0, mfu.value), min(1.0, mfu.low), min(1.0, mfu.high))


def _run(case: Case, steps: int, forward_s: Figure, step_s: Figure, checkpoint_size: int) -> Figure:
    """Return the time of all steps, of copies at saves, and of validations, without compiling."""
    train = case.train
    machine = case.machine
    epoch_steps = case.epoch_steps or steps
    saves = train.saves(steps, epoch_steps)
    copied = {
        end: saves * checkpoint_size / machine.ranks / machine.speeds(end).copy_bytes_s
        for end in End
    }
    every = train.validate_every_steps
    validations = steps / interval_steps(every, epoch_steps) if every else 0.0
    blocks = case.workload.validation_blocks
    passes = validations * blocks / train.blocks_at_once(machine.ranks) / case.accumulation
    return step_s.scaled(steps) + forward_s.scaled(passes) + figure_of(copied)


def _saving(case: Case, steps: int, step_s: Figure, save_s: Mapping[End, float]) -> Figure:
    """Return the time that saves cost: what the loop waits for disks, and what it loses meanwhile.

    At the end of the run it waits for all of the last save.
    """
    train = case.train
    epoch_steps = case.epoch_steps or steps
    saves = train.saves(steps, epoch_steps)
    apart = min(train.save_intervals(epoch_steps).values())
    meanwhile_s = {End.BAD: step_s.high, End.EXPECTED: step_s.value, End.GOOD: step_s.low}
    costs = {end: save_cost_s(train, save_s[end], apart * meanwhile_s[end], end) for end in End}
    cost = figure_of({end: (saves - 1) * costs[end] + save_s[end] for end in End})
    if train.save_every_steps != AUTO:
        return cost
    apart_s = {end: auto_apart_s(train, save_s[end]) for end in End}
    auto_saves = {end: steps * meanwhile_s[end] // apart_s[end] for end in End}
    auto_costs = {end: save_cost_s(train, save_s[end], apart_s[end], end) for end in End}
    return cost + figure_of({end: auto_saves[end] * auto_costs[end] for end in End})


def _parts(time: StepTime) -> dict[str, float]:
    """Return the seconds of a step by purpose; data is read ahead and costs none."""
    phases = (time.forward, time.backward, time.update)
    recomputed = np.minimum(time.recomputed_s, time.backward.computing_s)
    parts = {
        "forward": time.forward.computing_s,
        "recompute": recomputed,
        "backward": time.backward.computing_s - recomputed,
        "exchange": np.sum([phase.exchanging_s for phase in phases], axis=0),
        "update": time.update.computing_s,
        "offload": np.sum([phase.copying_s for phase in phases], axis=0),
    }
    return {**{name: float(seconds[0]) for name, seconds in parts.items()}, "data": 0.0}


def _bound(time: StepTime) -> Bound:
    parts = _parts(time)
    total_s = float(time.total_s[0])
    if parts["exchange"] > _NOTABLE * total_s and parts["exchange"] >= parts["offload"]:
        return "exchange"
    if parts["offload"] > _NOTABLE * total_s:
        return "offload"
    phases = (time.forward, time.backward, time.update)
    host_s = sum(float(phase.host_s[0]) for phase in phases)
    device_s = sum(float(phase.device_s[0]) for phase in phases)
    return "host" if host_s > device_s else "device"


def _segments(time: StepTime, exchanges: Sequence[Exchanged]) -> list[Segment]:
    """Return the phases in sequence, with each one's host work and exchanges starting with it."""
    found = []
    start_s = 0.0
    for name in PHASES:
        phase: PhaseTime = getattr(time, name)
        found.append(Segment("compute", name, start_s, float(phase.computing_s[0])))
        found.append(Segment("host", name, start_s, float(phase.host_s[0])))
        at_s = start_s
        for one in exchanges:
            if one.exchange.phase == name and one.seconds:
                found.append(Segment("exchange", _name_of(one), at_s, one.seconds))
                at_s += one.seconds
        start_s += float(phase.total_s[0])
    return [segment for segment in found if segment.duration_s > 0]
