"""The cost of a layer and of the ends, by training models of one and of three layers.

The ends are the embedding, the last norm and the head. The difference is the cost of two layers.
Two token counts separate the device's fixed time from that per token (`pass_of`). A few tokens give
the host's time; on GPUs in narrow layers, since wide ones would keep the device busy. Compiled
layers run at one token count only, since each shape is recompiled; their time counts as
proportional.
"""

import gc
import importlib.util
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.arch.layers import can_compile, is_compiled
from pipeline_lib.calibrate.fits import pass_of
from pipeline_lib.calibrate.random_model import batch_of_documents, random_stepper, take_step
from pipeline_lib.calibrate.task import Task, config_json, with_layers
from pipeline_lib.config.optimizers import DEFAULT
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.files import write_json
from pipeline_lib.core.memory import host_free_bytes
from pipeline_lib.core.text import shortened
from pipeline_lib.model.batch import Batch
from pipeline_lib.model.build import build_trainable
from pipeline_lib.model.gpu import has_triton
from pipeline_lib.plan.legal import is_legal
from pipeline_lib.plan.machine import MeasuredPart, Ranks
from pipeline_lib.plan.memory import predict
from pipeline_lib.plan.passes import shape_of, variant_of
from pipeline_lib.plan.workload import settled
from pipeline_lib.train.deepspeed_state import import_deepspeed
from pipeline_lib.train.dist import World
from pipeline_lib.train.step import Stepper

FEW, MANY = 1, 3  # layers
# The host's work does not depend on widths: models of many narrow layers show it best.
NARROW_FEW, NARROW_MANY = 4, 16
_NARROW = {"hidden": 256, "intermediate": 512, "vocab": 4096, "expert_intermediate": 64}
TINY_TOKENS = 64
LEAST_TOKENS = 2 * TINY_TOKENS
PHASES = ("forward_s", "backward_s")
STEPS = (3, 9)  # minimum and maximum number of steps for each token count
PARTS_PATIENCE_S = 0.3  # per model; after this time the minimum of steps is enough
SLOW_S = 2.0  # per model; after this time even fewer steps are enough
ATTEMPTS = 2  # for a variant, while other load hides a layer or the ends
USED_MEMORY = 0.85  # of the free memory
_CPU_FLOPS = 1e10  # upper bound per pass, so that it takes less than a second
# (strategy, recompute, compile) in order of importance, beginning with the choices of `auto`.
ON_GPUS = (
    ("ddp", "none", True),
    ("fsdp", "none", True),
    ("fsdp", "full", True),
    ("ddp", "none", False),
    ("fsdp", "none", False),
    ("fsdp", "full", False),
    ("zero3", "none", False),
    ("zero1", "none", False),
    ("ddp", "full", False),
    ("fsdp", "selective", False),
    ("zero2", "none", False),
    ("ddp", "selective", False),
)
ON_CPUS = (
    ("ddp", "none", False),
    ("fsdp", "none", False),
    ("fsdp", "full", False),
    ("ddp", "full", False),
)


class LeftOut(PipelineError):
    """A variant that was not measured; the message is the reason."""


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of a micro-batch by phase: of TINY_TOKENS tokens, half of what fits, and all of it.

    For compiled layers only the last is measured, and the others are derived from it. `kernels` is
    the number of kernels in a pass of TINY_TOKENS tokens; 0 if they were not counted.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    kernels: int


@dataclass
class Found:
    """The measured parts, the host's seconds a launch, and variants left out with reasons."""

    parts: list[MeasuredPart] = field(default_factory=list)
    launch_s: float | None = None
    left_out: list[str] = field(default_factory=list)


def most_tokens(geometry: Geometry, is_gpu: bool) -> int:
    """Return a power of two of tokens that keeps a GPU busy; on CPUs few, for a short pass."""
    if is_gpu:
        return max(8192, 1 << ((2**25 // geometry.hidden).bit_length() - 1))
    wanted = max(1, int(_CPU_FLOPS / (6 * with_layers(geometry, MANY).matmul_parameters)))
    return min(4096, max(LEAST_TOKENS, 1 << (wanted.bit_length() - 1)))


def variants(task: Task) -> list[Train]:
    """Return the variants to measure, the task's own first, for one rank without offloading."""
    plain = {
        "micro_batch_blocks": 1,
        "unit_layers": 1,
        "offload": "none",
        "deepspeed_json": None,
        "reshard": True,
        "gradient_compression": "none",
        "local_sgd_steps": 1,
        "shard_ranks": None,
        "freeze": (),
        "optimizer": DEFAULT,
        "deterministic": False,
        "kept_attention_layers": "auto",
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
    """Measure variants until the time budget ends; `world` has one rank, `folder` is empty."""
    ways = variants(task)
    found = Found()
    last_s = 0.0
    # The slow imports, done now so that their seconds count for no variant.
    build_trainable(_model_folder(task, FEW, folder), ways[0])
    if any(way.uses_deepspeed for way in ways) and importlib.util.find_spec("deepspeed"):
        import_deepspeed(world.device)
    begun_s = time.monotonic()
    for train in ways:
        name = variant_of(train)
        start_s = time.monotonic()
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


def _measure_variant(task: Task, train: Train, world: World, folder: Path, found: Found) -> None:
    """Add the layer's and the ends' cost for one variant to `found`.

    Raises LeftOut if it cannot be measured.
    """
    if train.uses_deepspeed and not importlib.util.find_spec("deepspeed"):
        raise LeftOut("DeepSpeed is not installed")
    torch.compiler.reset()  # compilations of other variants would count towards the recompile limit
    full = _tokens_that_fit(task, train, world)
    counts = [full] if is_compiled(train) else [TINY_TOKENS, full // 2, full]
    batches = [_batch(task, count) for count in counts]
    few, many = _few_and_many(task, train, batches, world, folder)
    of_layer, of_ends = _layer_and_ends(few, many)
    if world.device.type == "cuda":
        hosts = _host_seconds(task, train, world, folder)
        for place, (layer_s, ends_s) in enumerate(hosts):
            of_layer[place] = (layer_s, *of_layer[place][1:])
            of_ends[place] = (ends_s, *of_ends[place][1:])
    last = batches[-1]
    for part, (forward_s, backward_s) in (("layer", of_layer), ("ends", of_ends)):
        measured = MeasuredPart(
            part=part,
            shape=shape_of(task.geometry),
            variant=variant_of(train),
            document_tokens=last.squared_lengths / last.real_tokens,
            supervised_fraction=last.supervised_tokens / last.real_tokens,
            forward=pass_of((full // 2, full), *forward_s),
            backward=pass_of((full // 2, full), *backward_s),
        )
        found.parts.append(measured)
    host_s = of_layer[0][0] + of_layer[1][0]
    if many.kernels > few.kernels and host_s > 0:
        kernels_of_layer = (many.kernels - few.kernels) / (MANY - FEW)
        found.launch_s = host_s / kernels_of_layer


def _few_and_many(
    task: Task, train: Train, batches: list[Batch], world: World, folder: Path
) -> tuple[PassSeconds, PassSeconds]:
    """Return the seconds of models of FEW and of MANY layers, of the last try that shows a layer.

    Raises LeftOut if none does.
    """
    # On CPUs the two models take turns, to even out the load of other processes; a GPU may not have
    # memory for both.
    together = [(FEW, MANY)] if world.device.type == "cpu" else [(FEW,), (MANY,)]
    measured: tuple[PassSeconds, PassSeconds] | None = None
    for _ in range(ATTEMPTS):
        runs: dict[int, PassSeconds] = {}
        for layers in together:
            runs |= _runs(task, train, layers, batches, world, folder)
            _give_memory_back(world)
        of_layer, of_ends = _layer_and_ends(runs[FEW], runs[MANY])
        if any(seconds <= 0 for times in of_layer for seconds in times[1:]):
            continue
        measured = runs[FEW], runs[MANY]
        # Under LoRA the first layer saves the gradient of its input, which can be all that the ends
        # take.
        if train.method == "lora" or all(times[-1] > 0 for times in of_ends):
            break
    if measured is None:
        raise LeftOut(
            "three layers took no longer than one, so much was disturbed; let nothing else run "
            "beside it"
        )
    return measured


def _layer_and_ends(
    few: PassSeconds, many: PassSeconds
) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Return the seconds of a layer and of the ends, forward and backward, by token count."""
    of_layer = [_per_layer(getattr(few, name), getattr(many, name), MANY - FEW) for name in PHASES]
    of_ends = [
        tuple(
            max(0.0, one - FEW * layer)
            for one, layer in zip(getattr(few, name), of_one, strict=True)
        )
        for name, of_one in zip(PHASES, of_layer, strict=True)
    ]
    return of_layer, of_ends


def _per_layer(few: tuple[float, ...], many: tuple[float, ...], layers: int) -> tuple[float, ...]:
    return tuple(max(0.0, more - less) / layers for less, more in zip(few, many, strict=True))


def _host_seconds(
    task: Task, train: Train, world: World, folder: Path
) -> list[tuple[float, float]]:
    """Return the host's seconds to launch a short pass: (layer, ends), forward and backward."""
    sizes = {name: min(most, getattr(task.geometry, name)) for name, most in _NARROW.items()}
    narrow = replace(task, geometry=replace(task.geometry, **sizes))
    batch = _batch(narrow, TINY_TOKENS)
    found = {}
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
    """Return `most_tokens`, halved until it fits into the free memory.

    Raises LeftOut below LEAST_TOKENS.
    """
    geometry = with_layers(task.geometry, MANY)
    tokens = most_tokens(task.geometry, world.device.type == "cuda")
    if world.device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(world.device)[0]
    else:  # each rank has two models at a time
        free_bytes = host_free_bytes() // (2 * world.local_size)
    alone = Ranks(1, 1, has_triton(world.device))
    while tokens >= LEAST_TOKENS:
        needed_bytes = predict(geometry, train, alone, tokens, accumulation=1).allocated_bytes
        if needed_bytes <= USED_MEMORY * free_bytes:
            return tokens
        tokens //= 2
    raise LeftOut(
        f"needs {needed_bytes / 1e9:.1f} GB of memory, and {free_bytes / 1e9:.1f} GB are free"
    )


def _batch(task: Task, tokens: int) -> Batch:
    workload = task.workload
    return batch_of_documents(
        tokens, workload.document_tokens, workload.supervised_fraction, task.geometry.vocab
    )


def _runs(
    task: Task,
    train: Train,
    layers: tuple[int, ...],
    batches: list[Batch],
    world: World,
    folder: Path,
) -> dict[int, PassSeconds]:
    steppers = {
        number: random_stepper(_model_folder(task, number, folder), train, 1, world)
        for number in layers
    }
    largest_first = [_usual_steps(list(steppers.values()), batch) for batch in reversed(batches)]
    is_plain = train.strategy == "ddp" and train.recompute == "none" and not is_compiled(train)
    found = {}
    for place, number in enumerate(layers):
        forward, backward = zip(
            *(of_batch[place] for of_batch in reversed(largest_first)), strict=True
        )
        if is_compiled(train):
            forward, backward = ((0.0, seconds / 2, seconds) for (seconds,) in (forward, backward))
        counts = is_plain and world.device.type == "cuda"
        found[number] = PassSeconds(
            forward, backward, _count_kernels(steppers[number], batches[0]) if counts else 0
        )
    return found


def _model_folder(task: Task, layers: int, folder: Path) -> Path:
    model = folder / str(layers)
    write_json(model / "config.json", config_json(with_layers(task.geometry, layers)))
    return model


def _give_memory_back(world: World) -> None:
    """Free the memory of models, which are in reference cycles."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _count_kernels(stepper: Stepper, batch: Batch) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        stepper.accumulate([batch], lambda: (1.0, 1.0))
        torch.cuda.synchronize()
    stepper.strategy.discard()
    stepper.clock.drop()
    events: Any = profiler.events()
    return sum(
        event.device_type.name == "CUDA" and not event.is_user_annotation for event in events
    )


def _usual_steps(steppers: list[Stepper], batch: Batch) -> list[tuple[float, float]]:
    """Return each stepper's forward and backward seconds: the lower quartile of a few steps.

    The quartile excludes steps disturbed by other load. The first step is a warm-up and does not
    count.
    """
    for stepper in steppers:
        take_step(stepper, [batch])
    rounds: list[list[dict[str, float]]] = []
    start_s = time.monotonic()
    while len(rounds) < STEPS[1]:
        took_s = time.monotonic() - start_s
        if took_s > len(steppers) * (PARTS_PATIENCE_S if len(rounds) >= STEPS[0] else SLOW_S):
            break
        rounds.append([take_step(stepper, [batch]).phases for stepper in steppers])
    found = []
    for rows in zip(*rounds, strict=True):
        forward_s, backward_s = (
            sorted(row[name] for row in rows)[len(rows) // 4] for name in PHASES
        )
        found.append((forward_s, backward_s))
    return found
