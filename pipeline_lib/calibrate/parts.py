"""What a layer costs, and what is no layer: by training models of one and of three layers with the real strategies.

The difference of the two is the cost of two layers, and what is left that of the ends: embedding, last norm, head.
Two numbers of tokens tell the device's fixed time and that for each token apart (fit.py), and a few tokens the host's:
on GPUs in models of narrow layers, since a few wide ones would keep the device busy too. Compiled layers are made for
one number of tokens only, as in training, since every shape is compiled anew: their time is in proportion to it.
"""

import gc
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from pipeline_lib.base.errors import PipelineError
from pipeline_lib.base.fsio import write_json
from pipeline_lib.base.redact import shortened
from pipeline_lib.calibrate.fit import pass_of
from pipeline_lib.calibrate.model import batch_of_documents, random_stepper, take_step
from pipeline_lib.calibrate.task import Task, config_json, with_layers
from pipeline_lib.config.schema import Train
from pipeline_lib.plan.compute import shape_of, variant_of
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.machine import MeasuredPart, Ranks
from pipeline_lib.plan.memory import predict
from pipeline_lib.plan.placement import can_compile, is_compiled, settled
from pipeline_lib.plan.remedies import is_legal
from pipeline_lib.train.batch import Batch
from pipeline_lib.train.dist import World
from pipeline_lib.train.gpu import has_triton
from pipeline_lib.train.model import build_trainable
from pipeline_lib.train.parallel.zero_engine import import_deepspeed
from pipeline_lib.train.step import Stepper

FEW, MANY = 1, 3  # layers
# What the host does depends on no width: models of many narrow layers show it best.
NARROW_FEW, NARROW_MANY = 4, 16
_NARROW = {"hidden": 256, "intermediate": 512, "vocab": 4096, "expert_intermediate": 64}
TINY_TOKENS = 64
LEAST_TOKENS = 2 * TINY_TOKENS
PHASES = ("forward_s", "backward_s")
STEPS = (3, 9)  # of each number of tokens, at the least and at the most
PATIENCE_S = 0.3  # for them
SLOW_S = 2.0  # by then there may be fewer
USED_MEMORY = 0.85  # of what is free
_CPU_FLOPS = 1e10  # of a pass at the most, so that it takes part of a second
# By importance: strategy, recompute, and whether layers are compiled. First what `auto` would choose.
ON_GPUS = (
    *(("ddp", "none", True), ("fsdp", "none", True), ("fsdp", "full", True), ("ddp", "none", False)),
    *(("fsdp", "none", False), ("fsdp", "full", False), ("zero3", "none", False), ("zero1", "none", False)),
    *(("ddp", "full", False), ("fsdp", "selective", False), ("zero2", "none", False), ("ddp", "selective", False)),
)
ON_CPUS = (("ddp", "none", False), ("fsdp", "none", False), ("fsdp", "full", False), ("ddp", "full", False))


class LeftOut(PipelineError):
    """A variant was not measured; its text is the reason."""


@dataclass(frozen=True)
class Run:
    """Seconds of one micro-batch by phase: of TINY_TOKENS tokens, of half as many as fit, and of as many.

    Of compiled layers the last is measured, and the others made from it.

    `kernels` are those of a pass of few tokens, 0 where they were not counted.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    kernels: int


@dataclass
class Found:
    """What was measured: parts, and host seconds by operation if they were counted; what was left out, and why."""

    parts: list[MeasuredPart] = field(default_factory=list)
    launch_s: float | None = None
    left_out: list[str] = field(default_factory=list)


def most_tokens(geometry: Geometry, is_gpu: bool) -> int:
    """Tokens that keep the device busy; on CPUs as many as do not take long. A power of two."""
    if is_gpu:
        return max(8192, 1 << ((2**25 // geometry.hidden).bit_length() - 1))
    wanted = max(1, int(_CPU_FLOPS / (6 * with_layers(geometry, MANY).matmul_parameters)))
    return min(4096, max(LEAST_TOKENS, 1 << (wanted.bit_length() - 1)))


def variants(task: Task) -> list[Train]:
    """What is measured, the task's own way to train first. Nothing that a rank exchanges or offloads."""
    plain = {
        **{"micro_batch_blocks": 1, "unit_layers": 1, "offload": "none", "deepspeed_json": None, "reshard": True},
        **{"gradient_compression": "none", "local_sgd_steps": 1, "shard_ranks": None, "freeze": ()},
        **{"optimizer": "adamw", "deterministic": False},
    }
    is_gpu = task.device == "cuda"
    base = settled(task.train, is_gpu).model_copy(update=plain)
    ways = [
        base.model_copy(update={"strategy": strategy, "recompute": recompute, "compile": compiled})
        for strategy, recompute, compiled in (ON_GPUS if is_gpu else ON_CPUS)
    ]
    ways = [way for way in ways if not is_compiled(way) or can_compile(way, is_gpu)]
    ways = [way for way in ways if is_legal(way, Ranks(1, 1))]
    own = variant_of(base)
    if task.train.strategy != "auto" and own not in map(variant_of, ways):
        ways.insert(0, base.model_copy(update={"strategy": own.partition("/")[0]}))
    return sorted(ways, key=lambda way: variant_of(way) != own)


def measure_parts(task: Task, world: World, folder: Path) -> Found:
    """Measure variant after variant, as long as the budget lasts; `world` is of one rank, `folder` is empty."""
    ways, found, last_s = variants(task), Found(), 0.0
    _import_all(task, ways, world, folder)
    begun_s = time.monotonic()
    for train in ways:
        name, start_s = variant_of(train), time.monotonic()
        if start_s - begun_s + last_s > task.parts_budget_s and found.parts:
            found.left_out.append(f"{name}: did not fit into {task.parts_budget_s:.0f} s")
            continue
        try:
            _measure_variant(task, train, world, folder, found)
        except (PipelineError, RuntimeError, ValueError, AssertionError, OSError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            found.left_out.append(f"{name}: {shortened(reason, 200)}")
        finally:
            _give_memory_back(world)
        last_s = time.monotonic() - start_s
    return found


def _import_all(task: Task, ways: list[Train], world: World, folder: Path) -> None:
    """What takes seconds, and is to be on no variant's account."""
    build_trainable(_model_folder(task, FEW, folder), ways[0])
    if any(way.uses_deepspeed for way in ways) and _has_deepspeed():
        import_deepspeed(world.device)


def _has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def _measure_variant(task: Task, train: Train, world: World, folder: Path, found: Found) -> None:
    """Add both parts of one variant to `found`."""
    if train.uses_deepspeed and not _has_deepspeed():
        raise LeftOut("DeepSpeed is not installed")
    torch.compiler.reset()  # what other variants had compiled counts against the limit of one
    full = _tokens_that_fit(task, train, world)
    tokens = (full // 2, full)
    batches = [_batch(task, count) for count in ((full,) if is_compiled(train) else (TINY_TOKENS, *tokens))]
    # On CPUs, whose time others share, in turns; a GPU's memory may not hold both.
    together = [(FEW, MANY)] if world.device.type == "cpu" else [(FEW,), (MANY,)]
    runs: dict[int, Run] = {}
    for layers in together:
        runs |= _runs(task, train, layers, batches, world, folder)
        _give_memory_back(world)
    few, many = runs[FEW], runs[MANY]
    of_layer = [_per_layer(getattr(few, name), getattr(many, name), MANY - FEW) for name in PHASES]
    of_ends = [
        tuple(max(0.0, one - layer) for one, layer in zip(getattr(few, name), of_one, strict=True))
        for name, of_one in zip(PHASES, of_layer, strict=True)
    ]
    if any(seconds <= 0 for times in of_layer for seconds in times[1:]):
        raise LeftOut("three layers took no longer than one, so much was disturbed; let nothing else run beside it")
    if world.device.type == "cuda":
        hosts = _host_seconds(task, train, world, folder)
        of_layer = [(host[0], *times[1:]) for host, times in zip(hosts, of_layer, strict=True)]
        of_ends = [(host[1], *times[1:]) for host, times in zip(hosts, of_ends, strict=True)]
    last = batches[-1]
    for part, (forward_s, backward_s) in (("layer", of_layer), ("ends", of_ends)):
        found.parts.append(
            MeasuredPart(
                part,
                shape_of(task.geometry),
                variant_of(train),
                last.squared_lengths / last.real_tokens,
                last.supervised_tokens / last.real_tokens,
                pass_of(tokens, *forward_s),
                pass_of(tokens, *backward_s),
            )
        )
    host_s = of_layer[0][0] + of_layer[1][0]
    if many.kernels > few.kernels and host_s > 0:
        found.launch_s = host_s / ((many.kernels - few.kernels) / (MANY - FEW))


def _per_layer(few: tuple[float, ...], many: tuple[float, ...], layers: int) -> tuple[float, ...]:
    return tuple(max(0.0, more - less) / layers for less, more in zip(few, many, strict=True))


def _host_seconds(task: Task, train: Train, world: World, folder: Path) -> list[tuple[float, float]]:
    """Of a layer and of the ends, forward and backward: what the host takes to give a few tokens' work out."""
    sizes = {name: min(most, getattr(task.geometry, name)) for name, most in _NARROW.items()}
    narrow = replace(task, geometry=replace(task.geometry, **sizes))
    batch, found = _batch(narrow, TINY_TOKENS), {}
    for layers in (NARROW_FEW, NARROW_MANY):
        stepper = random_stepper(_model_folder(narrow, layers, folder / "narrow"), train, 1, world)
        (found[layers],) = _usual_steps([stepper], batch)
        del stepper
        _give_memory_back(world)
    of_layer = _per_layer(found[NARROW_FEW], found[NARROW_MANY], NARROW_MANY - NARROW_FEW)
    return [
        (layer_s, max(0.0, few_s - NARROW_FEW * layer_s))
        for layer_s, few_s in zip(of_layer, found[NARROW_FEW], strict=True)
    ]


def _tokens_that_fit(task: Task, train: Train, world: World) -> int:
    """As many as are wanted, or what the free memory allows. Raises LeftOut if that is next to nothing."""
    geometry, tokens = with_layers(task.geometry, MANY), most_tokens(task.geometry, world.device.type == "cuda")
    if world.device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(world.device)[0]
    else:  # two models at once, on each rank
        free_bytes = psutil.virtual_memory().available // (2 * world.local_size)
    alone = Ranks(1, 1, has_triton(world.device))
    while tokens >= LEAST_TOKENS:
        needed_bytes = predict(geometry, train, alone, tokens, accumulation=1).allocated_bytes
        if needed_bytes <= USED_MEMORY * free_bytes:
            return tokens
        tokens //= 2
    raise LeftOut(f"needs {needed_bytes / 1e9:.1f} GB of memory, and {free_bytes / 1e9:.1f} GB are free")


def _batch(task: Task, tokens: int) -> Batch:
    workload = task.workload
    return batch_of_documents(tokens, workload.document_tokens, workload.supervised_fraction, task.geometry.vocab)


def _runs(
    task: Task, train: Train, layers: tuple[int, ...], batches: list[Batch], world: World, folder: Path
) -> dict[int, Run]:
    """A model for each number of layers, at each batch."""
    steppers = {number: random_stepper(_model_folder(task, number, folder), train, 1, world) for number in layers}
    largest_first = [_usual_steps(list(steppers.values()), batch) for batch in reversed(batches)]
    is_plain = train.strategy == "ddp" and train.recompute == "none" and not is_compiled(train)
    found = {}
    for place, number in enumerate(layers):
        forward, backward = zip(*(of_batch[place] for of_batch in reversed(largest_first)), strict=True)
        if is_compiled(train):
            forward, backward = ((0.0, seconds / 2, seconds) for (seconds,) in (forward, backward))
        counts = is_plain and world.device.type == "cuda"
        found[number] = Run(forward, backward, _count_kernels(steppers[number], batches[0]) if counts else 0)
    return found


def _model_folder(task: Task, layers: int, folder: Path) -> Path:
    """Where the config.json of the model with so many layers is."""
    model = folder / str(layers)
    write_json(model / "config.json", config_json(with_layers(task.geometry, layers)))
    return model


def _give_memory_back(world: World) -> None:
    """Let go of models, which hold themselves in circles."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _count_kernels(stepper: Stepper, batch: Batch) -> int:
    """What the host gives a GPU to do in a forward and a backward pass."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        stepper.accumulate([batch], lambda: (1.0, 1.0))
        torch.cuda.synchronize()
    stepper.strategy.discard()
    stepper.clock.drop()
    events: Any = profiler.events()
    return sum(event.device_type.name == "CUDA" and not event.is_user_annotation for event in events)


def _usual_steps(steppers: list[Stepper], batch: Batch) -> list[tuple[float, float]]:
    """Seconds of forward and backward of each: the lower quartile of a few steps, which leaves out what disturbs some.

    The first step, which warms up, does not count.
    """
    for stepper in steppers:
        take_step(stepper, [batch])
    rounds: list[list[dict[str, float]]] = []
    start_s = time.monotonic()
    while len(rounds) < STEPS[1]:
        took_s = time.monotonic() - start_s
        if took_s > len(steppers) * (PATIENCE_S if len(rounds) >= STEPS[0] else SLOW_S):
            break
        rounds.append([take_step(stepper, [batch]).phases for stepper in steppers])
    return [(_quartile(rows, "forward_s"), _quartile(rows, "backward_s")) for rows in zip(*rounds, strict=True)]


def _quartile(rows: Sequence[dict[str, float]], name: str) -> float:
    return sorted(row[name] for row in rows)[len(rows) // 4]
