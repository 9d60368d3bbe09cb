"""`python -m benchmarks.delta`: both parts of a Gated DeltaNet layer, with gradients, on a GPU.

At the widths of Qwen3.5-9B, 16 key heads and 32 value heads of 128, over documents of 512, 4,096
and 16,384 tokens that fill a block: the delta rule as training calls it, fla-core's own function,
and transformers' function document by document; and the convolution of 8,192 channels, compiled,
beside fla-core's. `--choose` instead times all configurations of fla-core's kernels for 3 minutes,
and prints those that `delta_kernels.ON_HOPPER` should hold. `--tiny` tries it on CPUs.

The delta rule in chunks of C tokens multiplies, for each value head and chunk, 3 times [C, D] by
[D, E] (reading the state for the values and for the queries, and writing it), and 5 times by a
triangle of C x C (keys by keys, queries by keys, the inverse by keys and by values, and the scores
by values). A triangle counts as half of its square, inverting it counts as nothing, and so does
what is computed twice or for padding: 2 (3 D E + C (3 D + 2 E) / 2) FLOPs for each token and value
head forward, and twice as many backward (`Delta.flops_per_token`, as the plan counts them).
"""

import argparse
import json
import time
from collections.abc import Callable
from operator import itemgetter

import torch
from torch import Tensor

from benchmarks.kernels.clock import Call, Clock
from benchmarks.kernels.documents import Documents
from benchmarks.kernels.report import gradients, random
from pipeline_lib.arch.geometry import Delta
from pipeline_lib.model import delta
from pipeline_lib.model.delta import convolved, delta_rule, positions_of
from pipeline_lib.plan.gpus import find_gpu

KERNEL = 4  # tokens that the convolution sees
REPETITIONS = 3


def main() -> None:
    """Measure and print a line for each way and length of documents."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delta", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a block")
    parser.add_argument("--patience-s", type=float, default=0.3, help="for each line")
    parser.add_argument("--choose", action="store_true", help="the configurations of kernels")
    parser.add_argument("--tiny", action="store_true", help="small and on the CPU")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.tiny else "cuda")
    key_heads, heads, width = (2, 4, 16) if arguments.tiny else (16, 32, 128)
    tokens = 256 if arguments.tiny else arguments.tokens
    clock = Clock(device, arguments.patience_s, time.monotonic())
    lengths = (64, 256) if arguments.tiny else (512, 4096, 16_384)
    ends_of = {
        length: Documents.drawn(str(length), tokens).batch().cu_seq_lens.to(device)
        for length in lengths
    }
    if arguments.choose:
        choose(
            [rules(key_heads, heads, width, tokens, ends)["ours"]() for ends in ends_of.values()]
        )
        return
    for length, ends in ends_of.items():
        ways = rules(key_heads, heads, width, tokens, ends)
        flops = 3.0 * Delta(key_heads, heads, width, width, KERNEL).flops_per_token * tokens
        for name, make in ways.items():
            show(f"delta rule, documents of {length:,}: {name}", clock, make, flops=flops)
        channels = (2 * key_heads + heads) * width
        for name, make in convolutions(channels, tokens, ends).items():
            # Forward reads the input and writes the output; backward reads the input and a
            # gradient, and writes one.
            moved = 5.0 * 2 * channels * tokens
            show(f"convolution, documents of {length:,}: {name}", clock, make, moved_bytes=moved)


def show(
    name: str, clock: Clock, make: Callable[[], Call], flops: float = 0.0, moved_bytes: float = 0.0
) -> None:
    """Print the time of one call of what `make` gives, and its rate; or why there is none."""
    try:
        seconds = clock.seconds([make()])
    except (
        Exception
    ) as error:  # of kernels from several libraries, whose errors have no type in common
        print(
            f"{name:<72} failed: "
            f"{(str(error).strip() or type(error).__name__).splitlines()[0][:150]}",
            flush=True,
        )
        return
    gpu = find_gpu(torch.cuda.get_device_name()) if clock.device.type == "cuda" else None
    rate, unit, peak = flops / seconds / 1e12, "TFLOP/s", 0.0 if gpu is None else gpu.half_flop_s
    if moved_bytes:
        rate = moved_bytes / seconds / 1e12
        unit = "TB/s"
        peak = 0.0 if gpu is None else gpu.memory_bytes_per_s
    share = f" {1e12 * rate / peak:6.1%}" if peak else ""
    print(f"{name:<72} {1000 * seconds:9.3f} ms {rate:8.2f} {unit}{share}", flush=True)


def rules(
    key_heads: int, heads: int, width: int, tokens: int, ends: Tensor
) -> dict[str, Callable[[], Call]]:
    """Return the ways to compute the delta rule."""
    device = ends.device

    def inputs() -> list[Tensor]:
        """Query, key, value, log_decay and beta."""
        shapes = (key_heads, width), (key_heads, width), (heads, width)
        wide = [random(tokens, *shape, device=device, trained=True) for shape in shapes]
        decay = -0.1 * torch.rand(tokens, heads, device=device)
        return [
            *wide,
            decay.requires_grad_(),
            torch.rand(tokens, heads, device=device).requires_grad_(),
        ]

    def ours(*tensors: Tensor) -> Tensor:
        return delta_rule(*tensors, ends)[0]  # type: ignore[no-any-return]

    def one_by_one(*tensors: Tensor) -> Tensor:
        return torch.cat([delta._alone(*parts) for parts in delta._documents(ends, *tensors)])

    def of_fla(*tensors: Tensor) -> Tensor:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        batched = [tensor[None] for tensor in tensors]
        output: Tensor = chunk_gated_delta_rule(
            *batched, cu_seqlens=ends, use_qk_l2norm_in_kernel=True
        )[0]
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
    return {
        **ways,
        "fla-core": lambda: gradients(of_fla, inputs()),
        "fla-core, forward alone": lambda: forward(of_fla),
    }


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


def choose(calls: list[Call]) -> None:
    """Print each kernel's four fastest configurations over all `calls`; then the fastest kernel."""
    from triton import Config

    from pipeline_lib.model.delta_kernels import OFFERED, tuners

    for call in calls:
        call()
    chosen = {}
    for name, tuner in tuners().items():
        if not hasattr(tuner, "best_config"):  # it has not run
            continue
        found: list[tuple[float, list[float], Config]] = []
        for configuration in OFFERED[name]:
            tuner.configs = [configuration]
            try:
                times_ms = [milliseconds(call, name) for call in calls]
                found.append((sum(times_ms), times_ms, configuration))
            except Exception as error:  # such as for too little shared memory; of several libraries
                print(f"{name} {configuration}: {error}"[:150], flush=True)
        found.sort(key=itemgetter(0))
        for _, times_ms, configuration in found[:4]:
            print(
                f"{name}: {', '.join(f'{one_ms:.3f}' for one_ms in times_ms)} ms by "
                f"{configuration}",
                flush=True,
            )
        best = found[0][2]
        tuner.configs = [best]
        chosen[name] = best.kwargs, best.num_warps, best.num_stages
    for name, (tiles, warps, stages) in chosen.items():
        print(f'    "{name}": ({json.dumps(tiles)}, {warps}, {stages}),')


def milliseconds(call: Call, kernel: str) -> float:
    """Return how long the kernels take whose names begin with `kernel`, in a call."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(REPETITIONS):
            call()
        torch.cuda.synchronize()
    durations_us = [
        event.device_time for event in seen.events() or () if event.name.startswith(kernel)
    ]
    return float(sum(durations_us)) / REPETITIONS / 1000


if __name__ == "__main__":
    main()
