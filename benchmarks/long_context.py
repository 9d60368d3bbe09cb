"""Qwen3-8B-wide LoRA on a long document: a step's time, memory and MFU, activations here or there.

`python -m benchmarks.long_context --lengths 32768,65536,131072 --layers 36` on one GPU takes up to
9 minutes; `--tiny` tries it on CPUs. Weights are random, in bf16, adapters have rank 16, layers are
compiled and checkpointed in full. Each case runs in a process of its own: for each length the
attention and the products of a step by themselves, then steps with `train.offload_activations:
true`, then `false`. What does not fit is reported as that.

The causal MFU of a step counts 4 FLOPs for each frozen weight and token (2 forward, 2 for the
gradient of the input), 6 for each weight of the adapters, half of each square of attention (2
forward, 4 backward, for each channel and pair of tokens), and the head for supervised tokens. What
is computed again does not count. Divided by the GPU's dense peak.
"""

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.alone import RESULT, started
from benchmarks.measure import show
from benchmarks.sizes import config_json
from pipeline_lib.arch.families import read_geometry
from pipeline_lib.arch.geometry import Geometry, step_flops
from pipeline_lib.arch.layers import LOGITS_AT_ONCE, kept_attention
from pipeline_lib.calibrate.random_model import batch_of_documents, random_stepper, take_step
from pipeline_lib.config.train import Train
from pipeline_lib.core.files import write_json
from pipeline_lib.core.processes import die_with_parent
from pipeline_lib.model.attention import packed_attention
from pipeline_lib.plan.gpus import peak_flops
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import predict
from pipeline_lib.train.dist import World, process_group

# of cases: a step's parts alone, activations on the host, and on the device
KINDS = ("parts", "away", "here")
SUPERVISED = 0.5  # of the document, at its end
FEW_TOKENS = 40_000  # up to which two steps are timed, and otherwise one


@dataclass(frozen=True)
class Case:
    """One measurement, of one document of `tokens` tokens."""

    kind: str
    size: str
    tokens: int
    layers: int
    kept: int | None = None  # layers with their attention's results; None: all

    def config(self) -> dict[str, Any]:
        """config.json; the positions of rotary embeddings do not change the time."""
        return config_json(
            self.size, {"num_hidden_layers": self.layers, "max_position_embeddings": self.tokens}
        )

    def train(self) -> Train:
        """The settings of the steps."""
        is_gpu = torch.cuda.is_available()
        settings: dict[str, Any] = {
            **{
                "method": "lora",
                "lora": {"rank": 16, "alpha": 32},
                "strategy": "ddp",
                "recompute": "full",
            },
            **{
                "offload_activations": self.kind == "away",
                "kept_attention_layers": "auto" if self.kept is None else self.kept,
                "compile": is_gpu,
                "precision": "bf16" if is_gpu else "fp32",
            },
        }
        return Train.model_validate(settings)


def cases(
    lengths: list[int], layers: int, is_tiny: bool, kinds: list[str], kept: int | None
) -> Iterator[Case]:
    """Every kind for every length."""
    for tokens in lengths:
        for kind in kinds:
            yield Case(kind, "demo" if is_tiny else "8B", tokens, layers, kept)


def main() -> None:
    """Run the cases within the limit, print a table, and write results.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths", default="32768,65536,131072", help="tokens of the document, divided by commas"
    )
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument(
        "--kept", type=int, help="layers that keep their attention's results; default: all"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--out", type=Path, default=Path("results/long_context"))
    parser.add_argument("--tiny", action="store_true", help="small widths")
    parser.add_argument(
        "--limit-s", type=float, default=530.0, help="the most seconds that all may take"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        die_with_parent()
        print(
            RESULT + json.dumps(run(Case(**json.loads(arguments.case)), arguments.out)), flush=True
        )
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    end_s, results = time.monotonic() + arguments.limit_s, []
    lengths = [int(tokens) for tokens in arguments.lengths.split(",")]
    for case in cases(lengths, arguments.layers, arguments.tiny, arguments.kinds, arguments.kept):
        found = started("benchmarks.long_context", case, arguments.out, end_s - time.monotonic())
        results.append({**asdict(case), **found})
        print(f"{case.kind} {case.tokens:,}: {found}", flush=True)
        write_json(arguments.out / "results.json", {"results": results})
    table(results)


def run(case: Case, out: Path) -> dict[str, Any]:
    """What the case finds, in this process."""
    folder = out / "work" / f"{case.kind}-{case.tokens}"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", case.config())
    torch.manual_seed(0)
    world = World.from_env(os.environ, "cuda" if torch.cuda.is_available() else "cpu")
    try:
        if case.kind == "parts":
            return parts(case, read_geometry(folder), world.device)
        with process_group(world, 240):
            return timed_steps(case, folder, world)
    except torch.OutOfMemoryError as error:
        return {
            "error": "out of memory",
            "text": str(error).splitlines()[0],
            "peak_bytes": _peak_bytes(),
        }


def timed_steps(case: Case, folder: Path, world: World) -> dict[str, Any]:
    """Seconds, memory and MFU of steps of one micro-batch, after a discarded compiling pass."""
    train, geometry = case.train(), read_geometry(folder)
    stepper = random_stepper(folder, train, 1, world)
    batch = batch_of_documents(case.tokens, case.tokens, SUPERVISED, geometry.vocab)
    begun_s = time.perf_counter()
    stepper.warm_up(batch)
    warm_up_s = time.perf_counter() - begun_s
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken = [
        _seconds(lambda: take_step(stepper, [batch]))
        for _ in range(2 if case.tokens <= FEW_TOKENS else 1)
    ]
    step_s = statistics.median(taken)
    planned = predict(geometry, train, Ranks(1, 1, torch.cuda.is_available()), case.tokens, 1)
    flops = step_flops(
        geometry, train, batch.real_tokens, batch.squared_lengths, batch.supervised_tokens
    ).causal
    found: dict[str, Any] = {
        **{
            "step_s": step_s,
            "warm_up_s": round(warm_up_s, 1),
            "tokens_per_s": round(case.tokens / step_s, 1),
        },
        **{
            "peak_bytes": _peak_bytes(),
            "planned_bytes": planned.allocated_bytes,
            "host_bytes": planned.host_bytes,
        },
        # What the process held in host memory at most; the kernel counts KiB.
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "flops": flops,
    }
    possible = (
        peak_flops(torch.cuda.get_device_name(), train.precision)
        if torch.cuda.is_available()
        else None
    )
    return found if possible is None else {**found, "mfu": flops / step_s / possible}


# The parts of a step alone: what the layers' attention and products, and the head's, take at these
# shapes.


def parts(case: Case, geometry: Geometry, device: torch.device) -> dict[str, Any]:
    """Seconds of all attention and all products of a step under full checkpointing.

    Of products: forward twice, and the gradient of the input; of the head once each. Adapters'
    products do not count. Attention: forward once in layers that keep its results, else twice, and
    backward.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    forwards = 2 - kept_attention(geometry, case.train(), case.tokens) / max(
        1, geometry.attention_layers
    )
    forward_s, backward_s = attention_s(case, geometry, device, dtype)
    of_layer = sum(
        2 * product_s(case.tokens, inputs, outputs, device, dtype)
        + product_s(case.tokens, outputs, inputs, device, dtype)
        for inputs, outputs in geometry.linears.values()
    )
    at_once = max(1, min(case.tokens, LOGITS_AT_ONCE // geometry.vocab))
    chunks = SUPERVISED * case.tokens / at_once
    head_s = chunks * sum(
        product_s(at_once, *widths, device, dtype)
        for widths in ((geometry.hidden, geometry.vocab), (geometry.vocab, geometry.hidden))
    )
    attention = geometry.layers * (forwards * forward_s + backward_s)
    products = geometry.layers * of_layer + head_s
    return {
        **{
            "attention_forward_s": forward_s,
            "attention_backward_s": backward_s,
            "attention_forwards": forwards,
        },
        **{"attention_s": attention, "products_s": products, "parts_s": attention + products},
    }


def attention_s(
    case: Case, geometry: Geometry, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Seconds of the attention of one layer, forward and backward."""
    batch = batch_of_documents(case.tokens, case.tokens, SUPERVISED, geometry.vocab)
    nothing = nn.Module()
    ends = batch.cu_seq_lens.to(device)
    query, key, value = (
        torch.randn(1, case.tokens, heads, geometry.head_dim, device=device, dtype=dtype)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (geometry.heads, geometry.kv_heads, geometry.kv_heads)
    )

    def forward() -> Tensor:
        return packed_attention(
            nothing, query, key, value, None, cu_seq_lens_q=ends, max_length_q=batch.max_length
        )[0]

    output = forward()
    gradient = torch.randn_like(output)

    def backward() -> None:
        torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)

    return _median_s(forward), _median_s(backward)


def product_s(
    rows: int, inputs: int, outputs: int, device: torch.device, dtype: torch.dtype
) -> float:
    """Seconds of one product [rows, inputs] x [inputs, outputs]."""
    left = torch.randn(rows, inputs, device=device, dtype=dtype)
    right = torch.randn(outputs, inputs, device=device, dtype=dtype).t()
    out = torch.empty(rows, outputs, device=device, dtype=dtype)
    return _median_s(lambda: torch.mm(left, right, out=out))


def _median_s(call: Callable[[], object]) -> float:
    """The median of a few calls, after one that does not count."""
    call()
    return statistics.median(_seconds(call) for _ in range(3))


def _seconds(call: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def _peak_bytes() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def table(results: list[dict[str, Any]]) -> None:
    """Print what was found: a line for each length and place of the activations."""
    alone = {found["tokens"]: found["parts_s"] for found in results if "parts_s" in found}
    rows = []
    for found in results:
        if found["kind"] == "parts":
            continue
        name = (
            f"{found['tokens']:,}, activations "
            f"{'on the host' if found['kind'] == 'away' else 'on the GPU'}"
        )
        if "error" in found:
            rows.append([name, found["error"][-60:], *["-"] * 6])
            continue
        parts_s = alone.get(found["tokens"])
        rows.append(
            [
                *(name, f"{found['step_s']:.3f}", f"{found['tokens_per_s']:,.0f}"),
                f"{found['mfu']:.1%}" if "mfu" in found else "-",
                *(f"{found[key] / 2**30:.2f}" for key in ("peak_bytes", "planned_bytes")),
                f"{parts_s:.3f}" if parts_s else "-",
                f"{parts_s / found['step_s']:.3f}" if parts_s else "-",
            ]
        )
    columns = (
        "document",
        "step s",
        "tokens/s",
        "MFU",
        "peak GiB",
        "planned",
        "parts s",
        "parts / step",
    )
    show("LoRA of Qwen3-8B's widths, one document", columns, rows)


if __name__ == "__main__":
    main()
