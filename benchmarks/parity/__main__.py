"""`python -m benchmarks.parity blocks FILE` makes the text, `python -m benchmarks.parity run FILE` trains on it.

`blocks` needs ../shared and no GPU; its file of 1 MB is all that `run` needs. Three times the same steps in bf16, from
the same weights: a plain loop of transformers and torch, that loop with documents, blocks and micro-batches in another
order (which is the noise that bf16 makes), and ours, with `--train precision=fp8` also in fp8. Before that the plain
loop and ours, shorter and in fp32.
"""

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.grid import config_json
from benchmarks.measure import show
from benchmarks.parity import ours, reference
from benchmarks.parity.compare import apart, cells, exact_verdict, verdict
from benchmarks.parity.reference import Run
from benchmarks.parity.text import make_blocks, read_blocks, steps_of
from benchmarks.strategies import SIZES
from benchmarks.train.cases import parsed
from pipeline_lib.base.fsio import write_json
from pipeline_lib.config.schema import Train
from pipeline_lib.data.shard.blocks import Block

SHARED = Path(__file__).resolve().parents[3] / "shared"
SETTINGS: dict[str, Any] = {"strategy": "ddp", "lr": 3e-4, "warmup_fraction": 0.1}
COLUMNS = (
    "difference from the reference",
    "largest",
    "mean",
    "last step",
    "mean of the last tenth",
    "largest relative",
)
SHOWN = 5  # losses that are printed of each curve
Steps = list[list[Block]]
Loop = Callable[[Path, Run, Steps], Generator[float]]


def curve(name: str, loop: Loop, folder: Path, run: Run, steps: Steps, until_s: float) -> list[float]:
    """The losses of `steps`, or of as many as there is time for."""
    start_s, found = time.monotonic(), []
    every = max(1, len(steps) // SHOWN)
    iterator = loop(folder, run, steps)
    for number, loss in enumerate(iterator, start=1):
        found.append(loss)
        if number % every == 0 or number == 1:
            print(f"{name}, step {number}: loss {loss:.4f}, {time.monotonic() - start_s:.1f} s", flush=True)
        if time.monotonic() > until_s:
            print(f"{name}: no time for more than {number} steps", flush=True)
            break
    iterator.close()
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def in_bf16(folder: Path, run: Run, steps: Steps, limit_s: float) -> dict[str, list[float]]:
    """The three curves. The reference may take a third of the time, the others go as far as it came."""
    until_s = time.monotonic() + limit_s
    random = np.random.default_rng(0)
    mixed = [reference.reordered(blocks, random) for blocks in steps]
    plain = replace(run, train=run.train.model_copy(update={"precision": "bf16"}))
    other = replace(plain, micro_blocks=1 if plain.micro_blocks > 1 else 2)
    found = {"reference": curve("reference", reference.losses, folder, plain, steps, time.monotonic() + limit_s / 3)}
    done = len(found["reference"])
    found["ours"] = curve("ours", ours.losses, folder, plain, steps[:done], until_s)
    if run.train.precision == "fp8":
        found["ours, fp8"] = curve("ours, fp8", ours.losses, folder, run, steps[:done], until_s)
    found["reference, reordered"] = curve("reordered", reference.losses, folder, other, mixed[:done], until_s)
    return found


def in_fp32(folder: Path, run: Run, steps: Steps, until_s: float) -> dict[str, list[float]]:
    """The reference and ours."""
    exact = replace(run, train=run.train.model_copy(update={"precision": "fp32"}))
    found = {"reference": curve("reference, fp32", reference.losses, folder, exact, steps, until_s)}
    found["ours"] = curve("ours, fp32", ours.losses, folder, exact, steps[: len(found["reference"])], until_s)
    return found


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, print what came of it, and return all of it."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    train = Train.model_validate({**SETTINGS, **parsed(arguments.train), "micro_batch_blocks": arguments.micro})
    run = Run(train, arguments.steps, arguments.micro, device)
    steps = steps_of(read_blocks(arguments.file), arguments.blocks, arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        parameters = reference.make_model(Path(folder), config_json(arguments.size), device)
        until_s = time.monotonic() + arguments.limit_s
        exact = in_fp32(Path(folder), run, steps[: arguments.fp32_steps], until_s) if arguments.fp32_steps else {}
        rounded = in_bf16(Path(folder), run, steps, until_s - time.monotonic())
    found = report(rounded, exact)
    return {
        **{"size": arguments.size, "parameters": parameters, "device": _name(device), "blocks": arguments.blocks},
        **{"train": train.model_dump(mode="json", exclude_defaults=True), "bf16": rounded, "fp32": exact, **found},
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


def report(rounded: dict[str, list[float]], exact: dict[str, list[float]]) -> dict[str, Any]:
    """Print the table and the verdicts; the same for the JSON."""
    least = min(map(len, rounded.values()))
    curves = {name: losses[:least] for name, losses in rounded.items()}
    base = curves["reference"]
    away = {name: apart(losses, base) for name, losses in curves.items() if name != "reference"}
    if exact:
        fewest = min(map(len, exact.values()))
        away["ours, fp32"] = apart(exact["ours"][:fewest], exact["reference"][:fewest])
    ends = f"loss from {base[0]:.4f} to {base[-1]:.4f}"
    show(f"{least} steps, {ends}, in nats per token", COLUMNS, [cells(name, each) for name, each in away.items()])
    words = [verdict(away["ours"], away["reference, reordered"])]
    words += [exact_verdict(away["ours, fp32"])] if exact else []
    print("\n".join(words), flush=True)
    return {"apart": {name: vars(each) for name, each in away.items()}, "verdicts": words}


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"


def main() -> None:
    """Do what the command line asks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    blocks = commands.add_parser("blocks", help="make the text")
    blocks.add_argument("file", type=Path)
    blocks.add_argument("--block-tokens", type=int, default=2048)
    blocks.add_argument("--shared", type=Path, default=SHARED, help="folder with data and tokenizer")
    run = commands.add_parser("run", help="train on it, and compare")
    run.add_argument("file", type=Path)
    run.add_argument("--size", choices=SIZES, default="0.6B", help="`tiny` for a CPU")
    run.add_argument("--steps", type=int, default=200)
    run.add_argument("--fp32-steps", type=int, default=20)
    run.add_argument("--blocks", type=int, default=4, help="of a step")
    run.add_argument("--micro", type=int, default=2, help="blocks at a time")
    run.add_argument("--train", nargs="*", default=[], metavar="KEY=VALUE", help="of our side")
    run.add_argument("--limit-s", type=float, default=200.0)
    run.add_argument("--out", type=Path, help="write everything here, as JSON")
    arguments = parser.parse_args()
    if arguments.command == "blocks":
        print(make_blocks(arguments.shared, arguments.block_tokens, arguments.file))
        return
    found = compare(arguments)
    if arguments.out:
        write_json(arguments.out, found)


if __name__ == "__main__":
    main()
