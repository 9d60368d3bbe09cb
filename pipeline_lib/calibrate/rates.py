"""Rates of one rank's device and host with the model's layer shapes, measured repeatedly."""

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline_lib.arch.geometry import FP32_BYTES
from pipeline_lib.calibrate.random_model import batch_of_documents
from pipeline_lib.calibrate.task import Task
from pipeline_lib.config.optimizers import ADAM_BYTES
from pipeline_lib.config.train import Train
from pipeline_lib.core.units import MIB
from pipeline_lib.doctor.exchange import timed
from pipeline_lib.model.attention import packed_attention
from pipeline_lib.model.build import DTYPES
from pipeline_lib.train.dist import World
from pipeline_lib.train.optimizer import make_optimizer

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
    """Return the FLOP/s of a layer's matmuls, forward and backward: total FLOPs by total time."""
    flops = 0.0
    seconds = [0.0] * REPETITIONS
    for (copies, rows, inputs, outputs), count in _products(task, tokens).items():
        done, took_s = _time_product(task, (copies, rows, inputs, outputs), device)
        flops += count * done
        seconds = [total + count * one for total, one in zip(seconds, took_s, strict=True)]
    return [flops / total for total in seconds]


def _products(task: Task, tokens: int) -> Counter[tuple[int, int, int, int]]:
    """Count a layer's matmuls by (matrices, rows, inputs, outputs), with tokens spread evenly."""
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


def _time_product(
    task: Task, shape: tuple[int, int, int, int], device: torch.device
) -> tuple[float, list[float]]:
    """Return a matmul's FLOPs and seconds with its input's gradient, and a trained weight's."""
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
    """Return packed attention's FLOP/s, forward and backward, by causal count of `step_flops`."""
    geometry = task.geometry
    dtype = DTYPES[task.train.precision]
    batch = batch_of_documents(tokens, task.workload.document_tokens, 0.5, geometry.vocab)
    ends = batch.cu_seq_lens.to(device)
    query, key, value = (
        torch.randn(
            1, heads, tokens, geometry.head_dim, device=device, dtype=dtype, requires_grad=True
        )
        for heads in (geometry.heads, geometry.kv_heads, geometry.kv_heads)
    )
    gradient = torch.randn(1, tokens, geometry.heads, geometry.head_dim, device=device, dtype=dtype)
    nothing = nn.Module()
    takes_cudnn = task.train.attention != "flash"

    def work() -> tuple[Tensor, ...]:
        output, _ = packed_attention(
            nothing,
            query,
            key,
            value,
            None,
            cu_seq_lens_q=ends,
            max_length_q=batch.max_length,
            takes_cudnn=takes_cudnn,
        )
        return torch.autograd.grad(output, (query, key, value), gradient)

    flops = 6.0 * geometry.heads * geometry.head_dim * batch.squared_lengths
    return [flops / seconds for seconds in repeated(work, device)]


def memory_bytes_s(device: torch.device) -> list[float]:
    """Return the bytes/s of adding two long vectors; this rate bounds the weight update."""
    a, b, c = (
        torch.ones(STREAM_BYTES[device.type] // _FP32_BYTES, device=device) for _ in range(3)
    )
    return [
        3 * STREAM_BYTES[device.type] / seconds
        for seconds in repeated(lambda: torch.add(a, b, out=c), device)
    ]


def copy_bytes_s(device: torch.device) -> list[float]:
    """Return the bytes/s between pinned host memory and the GPU, to it first and then back."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    seconds = repeated(lambda: there.copy_(host, non_blocking=True), device)
    seconds += repeated(lambda: host.copy_(there, non_blocking=True), device)
    return [COPY_BYTES / one for one in seconds]


def host_bytes_s(world: World, group: dist.ProcessGroup | None) -> list[float]:
    """Return the bytes/s of AdamW in host memory, summed over the node's ranks, all at work."""
    weight = nn.Parameter(torch.ones(COPY_BYTES // FP32_BYTES))
    weight.grad = torch.ones_like(weight)
    optimizer = make_optimizer({"weight": weight}, Train())
    dist.barrier()
    seconds = repeated(optimizer.step, torch.device("cpu"))
    moved_bytes = ADAM_BYTES * weight.numel()
    mine = torch.tensor(
        [moved_bytes / one for one in seconds], dtype=torch.float64, device=world.device
    )
    dist.all_reduce(mine, group=group)
    return [float(one) for one in mine.tolist()]
