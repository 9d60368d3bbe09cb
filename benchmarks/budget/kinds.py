"""What a kernel is for, and how a step divides among the kinds of them."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.budget.trace import Kernel
from pipeline_lib.train import gpu_activity
from pipeline_lib.train.gpu_activity import Interval, length

COMMUNICATION, COPIES, IDLE = "communication", "copies", "idle"
UPDATE, HEAD = "update", "head"  # marks
# A moment counts for the first of these that went on in it.
KINDS = (
    "GEMM",
    "attention",
    "head and loss",
    "optimizer",
    "pointwise and norms",
    "casts",
    "other",
    COMMUNICATION,
    COPIES,
)
_TOP = 15
_NAME = 100  # characters

_ATTENTION_OPERATORS = re.compile(
    r"^(torch_attn::|aten::_(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)"
    r"|flex_attention|qwen3_pipeline::(cudnn|flash)_attention)"
)
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|attn", re.IGNORECASE)
_GEMM = re.compile(r"gemm|cutlass|cublas|nvjet|xmma|splitk|triton_tem|gemv|low_rank", re.IGNORECASE)
_GEMM_OPERATORS = re.compile(r"^aten::(mm|addmm_?|bmm|baddbmm|_grouped_mm|_scaled_mm)$")
_INDUCTOR = re.compile(r"^triton_(poi|red|per)_")
_COPY = re.compile(r"split_with_sizes|chunk_cat|CatArrayBatched")
_COPY_OPERATORS = re.compile(
    r"^(fsdp::|aten::(cat|split_with_sizes_copy|_chunk_cat|_foreach_copy_)$)"
)
_CAST_OPERATORS = re.compile(r"^aten::(copy_|_to_copy|clone|contiguous)$")
_POINTWISE = re.compile(
    r"elementwise|reduce|triton|norm|softmax|rope|swiglu|silu|embedding|index|gather|scatter|fill",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Share:
    """A kind's part of a step.

    `exposed_s` add up to the step with idle time; `total_s` also ran beside others.
    """

    kind: str
    exposed_s: float
    total_s: float
    kernels: float


def kind_of(kernel: Kernel) -> str:
    """One of KINDS, by the marks and operators that it was given out in, and by its name."""
    name, operators = kernel.name, kernel.operators
    if gpu_activity.kind_of(name) == "communication":
        return COMMUNICATION
    if UPDATE in kernel.marks or any(one.startswith("Optimizer.") for one in operators):
        return "optimizer"
    if HEAD in kernel.marks or any("CrossEntropy" in one for one in operators):
        return "head and loss"
    if (
        gpu_activity.kind_of(name) == "copy"
        or _COPY.search(name)
        or any(map(_COPY_OPERATORS.search, operators))
    ):
        return COPIES
    if _INDUCTOR.search(name):
        return "pointwise and norms"
    if any(map(_ATTENTION_OPERATORS.search, operators)) or _ATTENTION.search(name):
        return "attention"
    innermost = operators[-1] if operators else ""
    if _GEMM.search(name) or _GEMM_OPERATORS.search(innermost):
        return "GEMM"
    if _CAST_OPERATORS.search(innermost):
        return "casts"
    return "pointwise and norms" if _POINTWISE.search(name) else "other"


def shares_of(kernels: Iterable[Kernel], span: Interval, steps: int) -> list[Share]:
    """How each of `steps` steps that took `span` together divides among KINDS, and idle.

    What is left is idle.
    """
    found: dict[str, list[Interval]] = defaultdict(list)
    for kernel in kernels:
        found[kind_of(kernel)].append(kernel.time)
    shares, used, busy_s = list[Share](), list[Interval](), 0.0
    for kind in KINDS:
        used += [
            (max(begin, span[0]), min(end, span[1])) for begin, end in found[kind] if end > span[0]
        ]
        exposed_s, busy_s = length(used) - busy_s, length(used)
        shares.append(
            Share(kind, exposed_s / steps, length(found[kind]) / steps, len(found[kind]) / steps)
        )
    idle_s = (span[1] - span[0] - busy_s) / steps
    return [*shares, Share(IDLE, idle_s, idle_s, 0.0)]


def most_expensive(
    kernels: Iterable[Kernel], steps: int, name_of: Callable[[Kernel], str]
) -> list[Share]:
    """The names that took most of a step, with their totals; `kind` holds kind and name."""
    taken: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        taken[f"{kind_of(kernel)}: {name_of(kernel)[:_NAME]}"].append(
            kernel.time[1] - kernel.time[0]
        )
    largest = sorted(taken.items(), key=lambda item: -sum(item[1]))[:_TOP]
    return [
        Share(name, sum(each) / steps, sum(each) / steps, len(each) / steps)
        for name, each in largest
    ]
