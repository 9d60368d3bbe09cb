"""Rates of one rank's device and host, each repeated a few times, at the shapes that the model's layers have."""

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline_lib.calibrate.model import batch_of_documents
from pipeline_lib.calibrate.task import Task
from pipeline_lib.doctor.exchange import timed
from pipeline_lib.plan.units import MIB
from pipeline_lib.train.attention import packed_attention
from pipeline_lib.train.dist import World
from pipeline_lib.train.model import DTYPES

REPETITIONS = 3
PATIENCE_S = {"cuda": 0.15, "cpu": 0.05}  # for each repetition; a GPU's clock falls while it works
STREAM_BYTES = {"cuda": 512 * MIB, "cpu": 64 * MIB}  # far beyond any cache
COPY_BYTES = 256 * MIB
_FP32_BYTES = 4


def device_rates(task: Task, tokens: int, device: torch.device) -> dict[str, list[float]]:
    """Repetitions of the rates of this rank's own device, by the names of plan/machine.py's Speeds."""
    found = {
        "matmul_flop_s": matmul_flop_s(task, tokens, device),
        "attention_flop_s": attention_flop_s(task, tokens, device),
        "memory_bytes_s": memory_bytes_s(device),
    }
    return found | ({"copy_bytes_s": copy_bytes_s(device)} if device.type == "cuda" else {})


def repeated(work: Callable[[], object], device: torch.device) -> list[float]:
    """Seconds of one call of `work`, REPETITIONS times: each the mean of as many as fit into PATIENCE_S."""
    work()
    one_s = timed(work, 1, device)
    times = max(1, min(100, int(PATIENCE_S[device.type] / max(one_s, 1e-6))))
    return [timed(work, times, device) / times for _ in range(REPETITIONS)]


def matmul_flop_s(task: Task, tokens: int, device: torch.device) -> list[float]:
    """FLOPs a second of all products of a layer, forward and backward: the mean weighted by the time they take."""
    flops, seconds = 0.0, [0.0] * REPETITIONS
    for (copies, rows, inputs, outputs), count in _products(task, tokens).items():
        done, took_s = _time_product(task, (copies, rows, inputs, outputs), device)
        flops += count * done
        seconds = [total + count * one for total, one in zip(seconds, took_s, strict=True)]
    return [flops / total for total in seconds]


def _products(task: Task, tokens: int) -> Counter[tuple[int, int, int, int]]:
    """Matrices, rows, inputs and outputs of a layer's products; experts get equally many tokens."""
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
    """FLOPs and seconds of a product, the gradient of its input, and that of its weight if that is trained."""
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
    """FLOPs a second of packed attention, forward and backward, counted causally as plan/flops.py does."""
    geometry, dtype = task.geometry, DTYPES[task.train.precision]
    batch = batch_of_documents(tokens, task.workload.document_tokens, 0.5, geometry.vocab)
    ends = batch.cu_seq_lens.to(device)
    query, key, value = (
        torch.randn(1, heads, tokens, geometry.head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads in (geometry.heads, geometry.kv_heads, geometry.kv_heads)
    )
    gradient = torch.randn(1, tokens, geometry.heads, geometry.head_dim, device=device, dtype=dtype)
    nothing = nn.Module()

    def work() -> tuple[Tensor, ...]:
        output, _ = packed_attention(
            nothing, query, key, value, None, cu_seq_lens_q=ends, max_length_q=batch.max_length
        )
        return torch.autograd.grad(output, (query, key, value), gradient)

    flops = 6.0 * geometry.heads * geometry.head_dim * batch.squared_lengths
    return [flops / seconds for seconds in repeated(work, device)]


def memory_bytes_s(device: torch.device) -> list[float]:
    """Bytes a second, read and written, of a sum of two long vectors: what the update of weights is bound by."""
    a, b, c = (torch.ones(STREAM_BYTES[device.type] // _FP32_BYTES, device=device) for _ in range(3))
    return [3 * STREAM_BYTES[device.type] / seconds for seconds in repeated(lambda: torch.add(a, b, out=c), device)]


def copy_bytes_s(device: torch.device) -> list[float]:
    """Bytes a second between pinned host memory and the GPU, in both directions, one after the other."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    seconds = repeated(lambda: there.copy_(host, non_blocking=True), device)
    seconds += repeated(lambda: host.copy_(there, non_blocking=True), device)
    return [COPY_BYTES / one for one in seconds]


def host_bytes_s(world: World, group: dist.ProcessGroup | None) -> list[float]:
    """Bytes a second, read and written, of the host's memory, while all ranks of the node copy at once: their sum."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    dist.barrier()
    seconds = repeated(lambda: target.copy_(source), torch.device("cpu"))
    mine = torch.tensor([2 * COPY_BYTES / one for one in seconds], dtype=torch.float64, device=world.device)
    dist.all_reduce(mine, group=group)
    return [float(one) for one in mine.tolist()]
