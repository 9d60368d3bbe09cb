"""Measurements of one rank in a calibration: rates together with the other ranks, then parts of the model alone."""

import gc
import importlib.util
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from pipeline_lib.arch.geometry import FP32_BYTES, Geometry
from pipeline_lib.arch.layers import can_compile, is_compiled
from pipeline_lib.calibrate.run import Task, config_json, link_of, pass_of, rate_of, with_layers
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import PipelineError, TrainingError
from pipeline_lib.core.files import write_json
from pipeline_lib.core.memory import host_free_bytes
from pipeline_lib.core.text import shortened
from pipeline_lib.core.units import MIB
from pipeline_lib.data.blocks import Block
from pipeline_lib.doctor.exchange import Collective, collectives, timed
from pipeline_lib.launch.ranks import StopRequest
from pipeline_lib.model.attention import packed_attention
from pipeline_lib.model.batch import Batch, make_batch
from pipeline_lib.model.build import DTYPES, build_trainable
from pipeline_lib.model.gpu import has_triton
from pipeline_lib.model.weights import local_part, materialise, put, quantized_linears
from pipeline_lib.plan.machine import MeasuredPart, Ranks
from pipeline_lib.plan.memory import predict
from pipeline_lib.plan.search import is_legal
from pipeline_lib.plan.step_time import ADAM_BYTES, shape_of, variant_of
from pipeline_lib.plan.traffic import Kind, leaving_share
from pipeline_lib.plan.workload import settled
from pipeline_lib.train.deepspeed import import_deepspeed
from pipeline_lib.train.dist import LET_GO_S, World, process_group
from pipeline_lib.train.guards import Judgement, Verdict
from pipeline_lib.train.optimizer import make_optimizer
from pipeline_lib.train.step import Stepper, StepResult
from pipeline_lib.train.strategies import make_strategy

# A model with random weights, trained by the pipeline's own strategies, and synthetic batches for it.

_LR = 1e-5
_STD = 0.02


def load_random(model: nn.Module, device: torch.device) -> None:
    """Allocate `model` on `device` with random weights of realistic size, since matmuls with zeros run faster."""
    materialise(model, device)
    with torch.no_grad():
        for parameter in model.parameters():
            values = getattr(parameter, "ds_tensor", parameter)
            if values.is_floating_point():
                values.normal_(0.0, _STD)
            else:  # codes of a quantized base, under torch's own strategies
                local_part(parameter)[0].random_(0, 256)
        for linear, _ in quantized_linears(model):
            put(linear.statistics, torch.full((linear.statistics.numel() // 4,), 2 * _STD).view(torch.uint8))


def random_stepper(folder: Path, train: Train, accumulation: int, world: World) -> Stepper:
    """Build the model of config.json in `folder` with random weights, sharded as `train` says and ready to train."""
    strategy = make_strategy(world, train, accumulation)
    model = build_trainable(folder, train)
    wrapped = strategy.spread(model, partial(load_random, device=world.device))
    wrapped.train()
    return Stepper(wrapped, strategy, world, StopRequest())


def take_step(stepper: Stepper, batches: list[Batch]) -> StepResult:
    """Take one optimizer step; the update is skipped if the loss or the gradient norm is not finite."""

    def judge(loss: float, grad_norm: float, _: int) -> Judgement:
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        return Judgement(Verdict.APPLY if is_finite else Verdict.SKIP)

    return stepper.step(batches, _LR, judge, False)


def batch_of_documents(tokens: int, document_tokens: float, supervised_fraction: float, vocab: int) -> Batch:
    """Return a batch of one block of `tokens` random tokens, in documents of `document_tokens` tokens.

    The last `supervised_fraction` of each document is supervised.
    """
    length = max(2, min(tokens, round(document_tokens)))
    places = np.arange(tokens)
    unsupervised = length - round(length * supervised_fraction)
    random = np.random.default_rng(0)
    return make_batch(
        [
            Block(
                tokens=random.integers(0, vocab, tokens, dtype=np.int32),
                supervised=places % length >= unsupervised,
                documents=(places // length).astype(np.int32),
            )
        ]
    )


# Rates of one rank's device and host with the shapes of the model's layers, each measured several times.

REPETITIONS = 3
RATE_PATIENCE_S = {"cuda": 0.15, "cpu": 0.05}  # for each repetition; a GPU's clock falls under load
STREAM_BYTES = {"cuda": 512 * MIB, "cpu": 64 * MIB}  # much larger than any cache
COPY_BYTES = 256 * MIB
_FP32_BYTES = 4


def repeated(work: Callable[[], object], device: torch.device) -> list[float]:
    """Return REPETITIONS times the mean seconds of a call of `work`.

    Each mean is over as many calls as fit into RATE_PATIENCE_S, from 1 to 100.
    """
    work()
    one_s = timed(work, 1, device)
    times = max(1, min(100, int(RATE_PATIENCE_S[device.type] / max(one_s, 1e-6))))
    return [timed(work, times, device) / times for _ in range(REPETITIONS)]


def matmul_flop_s(task: Task, tokens: int, device: torch.device) -> list[float]:
    """Return the FLOP/s over all matmuls of a layer, forward and backward: total FLOPs by total time."""
    flops, seconds = 0.0, [0.0] * REPETITIONS
    for (copies, rows, inputs, outputs), count in _products(task, tokens).items():
        done, took_s = _time_product(task, (copies, rows, inputs, outputs), device)
        flops += count * done
        seconds = [total + count * one for total, one in zip(seconds, took_s, strict=True)]
    return [flops / total for total in seconds]


def _products(task: Task, tokens: int) -> Counter[tuple[int, int, int, int]]:
    """Count a layer's matmuls by (matrices, rows, inputs, outputs), with tokens spread evenly over experts."""
    geometry = task.geometry
    is_routed = bool(geometry.expert_layers)
    found: Counter[tuple[int, int, int, int]] = Counter()
    for name, (inputs, outputs) in geometry.linears.items():
        if not is_routed or name not in ("gate_proj", "up_proj", "down_proj"):
            found[1, tokens, inputs, outputs] += 1
    if is_routed:
        rows = max(1, tokens * geometry.experts_per_token // geometry.experts)
        found[geometry.experts, rows, geometry.hidden, 2 * geometry.expert_intermediate] += 1
        found[geometry.experts, rows, geometry.expert_intermediate, geometry.hidden] += 1
    return found


def _time_product(task: Task, shape: tuple[int, int, int, int], device: torch.device) -> tuple[float, list[float]]:
    """Return FLOPs and seconds of a matmul with the gradient of its input, and that of its weight if it is trained."""
    copies, rows, inputs, outputs = shape
    dtype = DTYPES[task.train.precision]
    x, w, g = (
        torch.randn(copies, *size, device=device, dtype=dtype).squeeze(0)
        for size in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )

    def work() -> None:
        x @ w.mT
        g @ w
        if task.train.method == "full":
            g.mT @ x

    products = 3 if task.train.method == "full" else 2
    return products * 2.0 * copies * rows * inputs * outputs, repeated(work, device)


def attention_flop_s(task: Task, tokens: int, device: torch.device) -> list[float]:
    """Return the FLOP/s of packed attention, forward and backward, by the causal count of `step_flops`."""
    geometry, dtype = task.geometry, DTYPES[task.train.precision]
    batch = batch_of_documents(tokens, task.workload.document_tokens, 0.5, geometry.vocab)
    ends = batch.cu_seq_lens.to(device)
    query, key, value = (
        torch.randn(1, heads, tokens, geometry.head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads in (geometry.heads, geometry.kv_heads, geometry.kv_heads)
    )
    gradient = torch.randn(1, tokens, geometry.heads, geometry.head_dim, device=device, dtype=dtype)
    nothing, takes_cudnn = nn.Module(), task.train.attention != "flash"

    def work() -> tuple[Tensor, ...]:
        output, _ = packed_attention(
            nothing, query, key, value, None, cu_seq_lens_q=ends, max_length_q=batch.max_length, takes_cudnn=takes_cudnn
        )
        return torch.autograd.grad(output, (query, key, value), gradient)

    flops = 6.0 * geometry.heads * geometry.head_dim * batch.squared_lengths
    return [flops / seconds for seconds in repeated(work, device)]


def memory_bytes_s(device: torch.device) -> list[float]:
    """Return the bytes/s read and written by a sum of two long vectors; this rate bounds the weight update."""
    a, b, c = (torch.ones(STREAM_BYTES[device.type] // _FP32_BYTES, device=device) for _ in range(3))
    return [3 * STREAM_BYTES[device.type] / seconds for seconds in repeated(lambda: torch.add(a, b, out=c), device)]


def copy_bytes_s(device: torch.device) -> list[float]:
    """Return the bytes/s between pinned host memory and the GPU, first to the GPU and then from it."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    seconds = repeated(lambda: there.copy_(host, non_blocking=True), device)
    seconds += repeated(lambda: host.copy_(there, non_blocking=True), device)
    return [COPY_BYTES / one for one in seconds]


def host_bytes_s(world: World, group: dist.ProcessGroup | None) -> list[float]:
    """Return the bytes/s that AdamW reads and writes in host memory, summed over the node's ranks, all at work."""
    weight = nn.Parameter(torch.ones(COPY_BYTES // FP32_BYTES))
    weight.grad = torch.ones_like(weight)
    optimizer = make_optimizer({"weight": weight}, Train())
    dist.barrier()
    seconds = repeated(optimizer.step, torch.device("cpu"))
    moved_bytes = ADAM_BYTES * weight.numel()
    mine = torch.tensor([moved_bytes / one for one in seconds], dtype=torch.float64, device=world.device)
    dist.all_reduce(mine, group=group)
    return [float(one) for one in mine.tolist()]


# Bandwidth and latency of collectives within a node and between nodes.

LINK_PATIENCE_S = 0.1  # for each size of each collective


def group_of_node(world: World) -> dist.ProcessGroup | None:
    """Return the process group of this rank's node; None if there is only one node.

    Raises TrainingError if the world size is not a multiple of the node's number of ranks.
    """
    if world.size == world.local_size:
        return None
    if world.size % world.local_size:
        raise TrainingError(
            f"rank {world.rank}: its node has {world.local_size} of {world.size} ranks, so nodes differ; start as many "
            "ranks on each"
        )
    starts = range(0, world.size, world.local_size)
    groups = [dist.new_group(list(range(start, start + world.local_size))) for start in starts]
    found: dist.ProcessGroup = groups[world.rank // world.local_size]
    return found


def link_rates(world: World, of_node: dist.ProcessGroup | None) -> dict[str, list[float]]:
    """Return repetitions of the `in_node_*` rates if nodes have several ranks, and of `between_*` if several nodes."""
    nodes = world.size // world.local_size
    links: list[tuple[str, dist.ProcessGroup | None, Callable[[Collective], float]]] = []
    if world.local_size > 1:
        links.append(("in_node", of_node, lambda one: one.bus_bytes))
    if nodes > 1:
        links.append(("between", None, lambda one: sent_by_node(one, nodes)))
    rates: dict[str, list[float]] = {}
    for name, group, sent_bytes in links:
        fits = []
        for _ in range(REPETITIONS):
            measured = collectives(world.device, group, LINK_PATIENCE_S, ("all_reduce", "all_gather"))
            fits.append(link_of([(sent_bytes(one), one.seconds) for one in measured]))
        rates[f"{name}_bytes_s"] = [bandwidth for bandwidth, _ in fits]
        rates[f"{name}_latency_s"] = [latency_s for _, latency_s in fits]
    return rates


def sent_by_node(one: Collective, nodes: int) -> float:
    """Return the bytes that a node sends to others, counted as in the plan, which uses the rate."""
    kind: Kind = "all-reduce" if one.kind == "all_reduce" else "all-gather"
    return one.rounds * one.size_bytes * leaving_share(kind, one.ranks, nodes)


# The cost of a layer and of the ends (embedding, last norm, head), by training models of one and of three layers. The
# difference is the cost of two layers. Two token counts separate the device's fixed time from that per token
# (`pass_of`). A few tokens give the host's time; on GPUs in narrow layers, since wide ones would keep the device busy.
# Compiled layers run at one token count only, since each shape is recompiled; their time counts as proportional.

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
    *(("ddp", "none", True), ("fsdp", "none", True), ("fsdp", "full", True), ("ddp", "none", False)),
    *(("fsdp", "none", False), ("fsdp", "full", False), ("zero3", "none", False), ("zero1", "none", False)),
    *(("ddp", "full", False), ("fsdp", "selective", False), ("zero2", "none", False), ("ddp", "selective", False)),
)
ON_CPUS = (("ddp", "none", False), ("fsdp", "none", False), ("fsdp", "full", False), ("ddp", "full", False))


class LeftOut(PipelineError):
    """A variant that was not measured; the message is the reason."""


@dataclass(frozen=True)
class Run:
    """Seconds of one micro-batch by phase: of TINY_TOKENS tokens, of half as many as fit, and of as many as fit.

    For compiled layers only the last is measured, and the others are derived from it. `kernels` is the number of
    kernels in a pass of TINY_TOKENS tokens; 0 if they were not counted.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    kernels: int


@dataclass
class Found:
    """The measured parts, the host's seconds per kernel launch if counted, and the variants left out with reasons."""

    parts: list[MeasuredPart] = field(default_factory=list)
    launch_s: float | None = None
    left_out: list[str] = field(default_factory=list)


def most_tokens(geometry: Geometry, is_gpu: bool) -> int:
    """Return a number of tokens, a power of two, that keeps a GPU busy; on CPUs few enough for a short pass."""
    if is_gpu:
        return max(8192, 1 << ((2**25 // geometry.hidden).bit_length() - 1))
    wanted = max(1, int(_CPU_FLOPS / (6 * with_layers(geometry, MANY).matmul_parameters)))
    return min(4096, max(LEAST_TOKENS, 1 << (wanted.bit_length() - 1)))


def variants(task: Task) -> list[Train]:
    """Return the variants to measure, the task's own first, without offloading and options for several ranks."""
    plain = {
        **{"micro_batch_blocks": 1, "unit_layers": 1, "offload": "none", "deepspeed_json": None, "reshard": True},
        **{"gradient_compression": "none", "local_sgd_steps": 1, "shard_ranks": None, "freeze": ()},
        **{"optimizer": "adamw", "deterministic": False, "kept_attention_layers": "auto"},
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
    """Measure variants until the time budget is used up; `world` has one rank, and `folder` is empty."""
    ways, found, last_s = variants(task), Found(), 0.0
    # The slow imports, done now so that their seconds count for no variant.
    build_trainable(_model_folder(task, FEW, folder), ways[0])
    if any(way.uses_deepspeed for way in ways) and importlib.util.find_spec("deepspeed"):
        import_deepspeed(world.device)
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


def _measure_variant(task: Task, train: Train, world: World, folder: Path, found: Found) -> None:
    """Add the layer's and the ends' cost for one variant to `found`. Raises LeftOut if it cannot be measured."""
    if train.uses_deepspeed and not importlib.util.find_spec("deepspeed"):
        raise LeftOut("DeepSpeed is not installed")
    torch.compiler.reset()  # compilations of other variants would count towards the recompile limit
    full = _tokens_that_fit(task, train, world)
    tokens = (full // 2, full)
    batches = [_batch(task, count) for count in ((full,) if is_compiled(train) else (TINY_TOKENS, *tokens))]
    # On CPUs the two models take turns, to even out the load of other processes; a GPU may not have memory for both.
    together = [(FEW, MANY)] if world.device.type == "cpu" else [(FEW,), (MANY,)]
    measured: tuple[Run, Run] | None = None
    for _ in range(ATTEMPTS):
        runs: dict[int, Run] = {}
        for layers in together:
            runs |= _runs(task, train, layers, batches, world, folder)
            _give_memory_back(world)
        of_layer, of_ends = _layer_and_ends(runs[FEW], runs[MANY])
        if any(seconds <= 0 for times in of_layer for seconds in times[1:]):
            continue
        measured = runs[FEW], runs[MANY]
        # Under LoRA the first layer saves the gradient of its input, which can be all that the ends take.
        if train.method == "lora" or all(times[-1] > 0 for times in of_ends):
            break
    if measured is None:
        raise LeftOut("three layers took no longer than one, so much was disturbed; let nothing else run beside it")
    few, many = measured
    of_layer, of_ends = _layer_and_ends(few, many)
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


def _layer_and_ends(few: Run, many: Run) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Return the seconds of one layer and of the ends, for forward and for backward, each by the number of tokens."""
    of_layer = [_per_layer(getattr(few, name), getattr(many, name), MANY - FEW) for name in PHASES]
    of_ends = [
        tuple(max(0.0, one - FEW * layer) for one, layer in zip(getattr(few, name), of_one, strict=True))
        for name, of_one in zip(PHASES, of_layer, strict=True)
    ]
    return of_layer, of_ends


def _per_layer(few: tuple[float, ...], many: tuple[float, ...], layers: int) -> tuple[float, ...]:
    return tuple(max(0.0, more - less) / layers for less, more in zip(few, many, strict=True))


def _host_seconds(task: Task, train: Train, world: World, folder: Path) -> list[tuple[float, float]]:
    """Return the host's seconds to launch a pass of few tokens: (layer, ends) for forward and for backward."""
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
    """Return `most_tokens`, halved until it fits into the free memory. Raises LeftOut below LEAST_TOKENS."""
    geometry, tokens = with_layers(task.geometry, MANY), most_tokens(task.geometry, world.device.type == "cuda")
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
    raise LeftOut(f"needs {needed_bytes / 1e9:.1f} GB of memory, and {free_bytes / 1e9:.1f} GB are free")


def _batch(task: Task, tokens: int) -> Batch:
    workload = task.workload
    return batch_of_documents(tokens, workload.document_tokens, workload.supervised_fraction, task.geometry.vocab)


def _runs(
    task: Task, train: Train, layers: tuple[int, ...], batches: list[Batch], world: World, folder: Path
) -> dict[int, Run]:
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
    return sum(event.device_type.name == "CUDA" and not event.is_user_annotation for event in events)


def _usual_steps(steppers: list[Stepper], batch: Batch) -> list[tuple[float, float]]:
    """Return the seconds of forward and backward for each stepper: the lower quartile of a few steps.

    The quartile excludes steps disturbed by other load. The first step is a warm-up and does not count.
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
        forward_s, backward_s = (sorted(row[name] for row in rows)[len(rows) // 4] for name in PHASES)
        found.append((forward_s, backward_s))
    return found


# The work of one rank: rates together with the other ranks, then parts of the model alone.

GROUP_TIMEOUT_S = 60
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
RATE_TOKENS = 8192  # rows of the measured matmuls; more do not make them faster


def measure_rank(task: Task, environ: MutableMapping[str, str]) -> dict[str, Any]:
    """Measure as the rank that `environ` names.

    Returns the measured content of cluster.json, and under `left_out` the reasons for what is missing. Raises
    TrainingError, or Interrupted if another rank is lost.
    """
    world = World.from_env(environ, task.device)
    with process_group(world, GROUP_TIMEOUT_S):
        of_node = group_of_node(world)
        rates = link_rates(world, of_node)
        rates["host_bytes_s"] = host_bytes_s(world, of_node)
        tokens = min(RATE_TOKENS, most_tokens(task.geometry, world.device.type == "cuda"))
        rates["matmul_flop_s"] = matmul_flop_s(task, tokens, world.device)
        rates["attention_flop_s"] = attention_flop_s(task, tokens, world.device)
        rates["memory_bytes_s"] = memory_bytes_s(world.device)
        if world.device.type == "cuda":
            rates["copy_bytes_s"] = copy_bytes_s(world.device)
        dist.barrier()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    environ.update(_ALONE)  # DeepSpeed compares these variables with the process group
    with _alone(world) as alone, tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        found = measure_parts(task, alone, Path(folder))
    if found.launch_s is not None:
        rates["launch_s"] = [found.launch_s]
    return {
        **_describe(world),
        "rates": {name: rate_of(values) for name, values in rates.items()},
        "parts": [asdict(part) for part in found.parts],
        "left_out": found.left_out,
    }


@contextmanager
def _alone(world: World) -> Iterator[World]:
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    store: Any = getattr(dist, "HashStore")()  # noqa: B009 - torch's stubs do not export it
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    yield World(0, world.local_rank, 1, world.device, world.local_size)
    time.sleep(LET_GO_S)
    dist.destroy_process_group()


def _describe(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {"ranks": world.size, "nodes": world.size // world.local_size, "torch": torch.__version__}
    if world.device.type == "cpu":
        ranks, threads = world.local_size, torch.get_num_threads()
        host = f"{ranks} CPU rank{'s' * (ranks != 1)} of {threads} thread{'s' * (threads != 1)}"
        found |= {"gpu": None, "gpu_memory_bytes": None}
    else:
        properties = torch.cuda.get_device_properties(world.device)
        host = f"{world.local_size} x {properties.name}"
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
    return found | {"host": host if found["nodes"] == 1 else f"{found['nodes']} nodes of {host}"}
