"""`python -m benchmarks.delta`: the two parts of a Gated DeltaNet layer, forward and backward, on one GPU.

At the widths of Qwen3.5-9B, 16 key heads and 32 value heads of 128, over documents of 512, 4,096 and 16,384 tokens that
fill a block: the delta rule as training calls it, fla-core's own function, and transformers' function document by
document; and the convolution of 8,192 channels, compiled, beside fla-core's. It takes up to 2 minutes, most of which
Triton needs to compile and choose kernels. `--tiny` tries it on CPUs.

The delta rule in chunks of C tokens multiplies, for each value head and chunk, 3 times [C, D] by [D, E] (reading the
state for the values and for the queries, and writing it), and 5 times by a triangle of C x C (keys by keys, queries by
keys, the inverse by keys and by values, and the scores by values). A triangle counts as half of its square, inverting
it counts as nothing, and so does what is computed twice or for padding: 2 (3 D E + C (3 D + 2 E) / 2) FLOPs for each
token and value head forward, and twice as many backward (`Delta.flops_per_token`, as the plan counts them).
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels.clock import Call, Clock
from benchmarks.kernels.documents import Documents
from benchmarks.kernels.report import gradients, random
from pipeline_lib.model import delta
from pipeline_lib.model.delta import convolved, delta_rule, positions_of
from pipeline_lib.model.geometry import Delta
from pipeline_lib.plan.machine import find_gpu

KERNEL = 4  # tokens that the convolution sees


def main() -> None:
    """Measure and print a line for each way and length of documents."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delta", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a block")
    parser.add_argument("--patience-s", type=float, default=0.3, help="for each line")
    parser.add_argument("--tiny", action="store_true", help="small and on the CPU")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.tiny else "cuda")
    key_heads, heads, width = (2, 4, 16) if arguments.tiny else (16, 32, 128)
    tokens = 256 if arguments.tiny else arguments.tokens
    clock = Clock(device, arguments.patience_s, time.monotonic())
    for length in (64, 256) if arguments.tiny else (512, 4096, 16_384):
        ends = Documents.drawn(str(length), tokens).batch().cu_seq_lens.to(device)
        ways = rules(key_heads, heads, width, tokens, ends)
        flops = 3.0 * Delta(key_heads, heads, width, width, KERNEL).flops_per_token * tokens
        for name, make in ways.items():
            show(f"delta rule, documents of {length:,}: {name}", clock, make, flops=flops)
        channels = (2 * key_heads + heads) * width
        for name, make in convolutions(channels, tokens, ends).items():
            # Forward reads the input and writes the output; backward reads the input and a gradient, and writes one.
            moved = 5.0 * 2 * channels * tokens
            show(f"convolution, documents of {length:,}: {name}", clock, make, moved_bytes=moved)
    if not arguments.tiny:
        show_chosen()


def show(name: str, clock: Clock, make: Callable[[], Call], flops: float = 0.0, moved_bytes: float = 0.0) -> None:
    """Print the time of one call of what `make` gives, and its rate; or why there is none."""
    try:
        seconds = clock.seconds([make()])
    except Exception as error:  # of kernels from several libraries, whose errors have no type in common
        print(f"{name:<72} failed: {(str(error).strip() or type(error).__name__).splitlines()[0][:150]}", flush=True)
        return
    gpu = find_gpu(torch.cuda.get_device_name()) if clock.device.type == "cuda" else None
    rate, unit, peak = flops / seconds / 1e12, "TFLOP/s", 0.0 if gpu is None else gpu.half_flop_s
    if moved_bytes:
        rate, unit, peak = moved_bytes / seconds / 1e12, "TB/s", 0.0 if gpu is None else gpu.memory_bytes_per_s
    share = f" {1e12 * rate / peak:6.1%}" if peak else ""
    print(f"{name:<72} {1000 * seconds:9.3f} ms {rate:8.2f} {unit}{share}", flush=True)


def rules(key_heads: int, heads: int, width: int, tokens: int, ends: Tensor) -> dict[str, Callable[[], Call]]:
    """Return the ways to compute the delta rule."""
    device = ends.device

    def inputs() -> list[Tensor]:
        """Query, key, value, log_decay and beta."""
        shapes = (key_heads, width), (key_heads, width), (heads, width)
        wide = [random(tokens, *shape, device=device, trained=True) for shape in shapes]
        decay = -0.1 * torch.rand(tokens, heads, device=device)
        return [*wide, decay.requires_grad_(), torch.rand(tokens, heads, device=device).requires_grad_()]

    def ours(*tensors: Tensor) -> Tensor:
        return delta_rule(*tensors, ends)[0]  # type: ignore[no-any-return]

    def one_by_one(*tensors: Tensor) -> Tensor:
        return torch.cat([delta._alone(*parts) for parts in delta._documents(ends, *tensors)])

    def of_fla(*tensors: Tensor) -> Tensor:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        batched = [tensor[None] for tensor in tensors]
        output: Tensor = chunk_gated_delta_rule(*batched, cu_seqlens=ends, use_qk_l2norm_in_kernel=True)[0]
        return output

    def forward(work: Callable[..., Tensor]) -> Call:
        tensors = [tensor.detach() for tensor in inputs()]
        return lambda: work(*tensors)

    ways: dict[str, Callable[[], Call]] = {
        "ours": lambda: gradients(ours, inputs()),
        "ours, forward alone": lambda: forward(ours),
        "transformers, one by one": lambda: gradients(one_by_one, inputs()),
    }
    if device.type == "cpu":
        return ways
    return {**ways, "fla-core": lambda: gradients(of_fla, inputs()), "fla-core, forward alone": lambda: forward(of_fla)}


def convolutions(channels: int, tokens: int, ends: Tensor) -> dict[str, Callable[[], Call]]:
    """Return the ways to compute the convolution."""
    device = ends.device

    def inputs() -> list[Tensor]:
        return [
            random(tokens, channels, device=device, trained=True),
            random(channels, KERNEL, device=device).requires_grad_(),
        ]

    def plain(mixed: Tensor, weight: Tensor) -> Tensor:
        return convolved(mixed, weight, positions_of(ends, tokens), "silu")

    def of_fla(mixed: Tensor, weight: Tensor) -> Tensor:
        from fla.modules.causal_conv1d import causal_conv1d

        output: Tensor = causal_conv1d(mixed[None], weight, activation="silu", cu_seqlens=ends)[0]
        return output

    if device.type == "cpu":
        return {"ours": lambda: gradients(plain, inputs())}
    return {
        "ours, compiled": lambda: gradients(torch.compile(plain), inputs()),
        "fla-core": lambda: gradients(of_fla, inputs()),
    }


def show_chosen() -> None:
    """Print which configuration Triton has chosen for each kernel of fla-core that ran."""
    from fla.modules.norm import l2norm
    from fla.ops.common import chunk_delta_h, chunk_o
    from fla.ops.gated_delta_rule import chunk_fwd, wy_fast
    from fla.ops.utils import cumsum

    for module in (l2norm, cumsum, chunk_fwd, wy_fast, chunk_delta_h, chunk_o):
        for name, kernel in vars(module).items():
            # A kernel is a function inside of heuristics or an autotuner.
            while kernel is not None and not hasattr(kernel, "best_config"):
                kernel = getattr(kernel, "fn", None)
            if kernel is not None:
                print(f"{name}: {kernel.best_config}")


if __name__ == "__main__":
    main()
