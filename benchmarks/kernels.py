"""The loss and the attention on a GPU: what bounding memory costs, and what shapes that are rounded up cost."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import show
from pipeline_lib.train import loss
from pipeline_lib.train.attention import packed_attention
from pipeline_lib.train.loss import cross_entropy

VOCABULARY = 151_669  # Qwen3's tokens
LOSS_TOKENS = 8192
ATTENTION_TOKENS = 16_384


def run() -> None:
    """Print two tables; one line where there is no GPU."""
    if not torch.cuda.is_available():
        print("kernels: needs a CUDA GPU")
        return
    torch.manual_seed(0)
    _loss()
    _attention()


def _loss() -> None:
    hidden = torch.randn(LOSS_TOKENS, 2048, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (0.02 * torch.randn(VOCABULARY, 2048, device="cuda")).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (LOSS_TOKENS,), device="cuda")

    def plain() -> Tensor:
        return F.cross_entropy((hidden @ weight.t()).float(), targets, reduction="sum")

    rows = [["all logits at once", *_measured(plain)]]
    usual = loss.LOGITS_AT_ONCE
    for at_once in (usual // 4, usual, usual * 2):
        loss.LOGITS_AT_ONCE = at_once
        name = f"{at_once / 2**20:.0f} Mi logits at once{', as usual' if at_once == usual else ''}"
        rows.append([name, *_measured(lambda: cross_entropy(hidden, weight, targets)[0])])
    loss.LOGITS_AT_ONCE = usual
    title = f"cross-entropy of {LOSS_TOKENS:,} tokens, vocabulary {VOCABULARY:,}, width 2048, bf16, with gradients"
    show(title, ["", "time", "peak memory"], rows)


def _attention() -> None:
    shapes = ((1, ATTENTION_TOKENS, count, 128) for count in (32, 8, 8))
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for shape in shapes]
    query, key, value = (tensor.requires_grad_() for tensor in tensors)

    def attend(ends: Tensor, longest: int) -> Tensor:
        return packed_attention(nn.Module(), query, key, value, None, cu_seq_lens_q=ends, max_length_q=longest)[0].sum()

    rows = []
    for length in (1024, 8192):
        ends = torch.arange(0, ATTENTION_TOKENS + 1, length, dtype=torch.int32, device="cuda")
        filled = torch.cat([ends, ends.new_full((len(ends),), ATTENTION_TOKENS)])
        rows.append([f"documents of {length:,}", *_measured(partial(attend, ends, length))])
        rows.append([f"documents of {length:,}, shapes rounded up", *_measured(partial(attend, filled, 2 * length))])
    show(f"attention: {ATTENTION_TOKENS:,} tokens, 32 and 8 heads of 128, bf16", ["", "time", "peak memory"], rows)


def _measured(loss_of: Callable[[], Tensor]) -> list[str]:
    """Forward and backward: the median of nine after two, and the memory beyond what was there."""
    taken = []
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(11):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        loss_of().backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start_s)
    peak = torch.cuda.max_memory_allocated() - before
    return [f"{1000 * statistics.median(taken[2:]):.1f} ms", f"{peak / 2**30:.2f} GiB"]
