"""`python -m benchmarks.parity blocks FILE` and `python -m benchmarks.parity run FILE`.

The first makes the text, the second trains on it.

`blocks` needs ../shared and no GPU; its file of 1 MB is all that `run` needs. The same steps from
the same weights: a plain loop of transformers and torch in fp32, which is the truth; then in bf16
that loop, ours, and ours with the keys of each `--variant`. What bf16 makes of the plain loop,
against the truth, is the noise that ours is judged by. `--fp32-steps` of ours are made in fp32 too.
"""

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import show
from benchmarks.parity import ours, reference
from benchmarks.parity.compare import apart, cells, exact_verdict, verdict
from benchmarks.parity.reference import Run
from benchmarks.parity.text import make_blocks, read_blocks, steps_of
from benchmarks.sizes import SIZES, config_json
from benchmarks.train.cases import parsed
from pipeline_lib.config.train import Train
from pipeline_lib.core.files import write_json
from pipeline_lib.data.blocks import Block

SHARED = Path(__file__).resolve().parents[3] / "shared"
SETTINGS: dict[str, Any] = {"strategy": "ddp", "lr": 3e-4, "warmup_fraction": 0.1}
COLUMNS = (
    "difference from fp32",
    "largest",
    "mean",
    "last step",
    "mean of the last tenth",
    "largest relative",
)
SHOWN = 5  # losses that are printed of each curve
TRUTH, REFERENCE = "reference in fp32", "reference"
OURS, OURS_IN_FP32 = "ours", "ours in fp32"
Steps = list[list[Block]]
Curves = dict[str, list[float]]
Loop = Callable[[Path, Run, Steps], Generator[float]]


def curve(
    name: str, loop: Loop, folder: Path, run: Run, steps: Steps, until_s: float
) -> list[float]:
    """The losses of `steps`, or of as many as there is time for."""
    start_s, found = time.monotonic(), []
    every = max(1, len(steps) // SHOWN)
    iterator = loop(folder, run, steps)
    for number, loss in enumerate(iterator, start=1):
        found.append(loss)
        if number % every == 0 or number == 1:
            print(
                f"{name}, step {number}: loss {loss:.4f}, {time.monotonic() - start_s:.1f} s",
                flush=True,
            )
        if time.monotonic() > until_s:
            print(f"{name}: no time for more than {number} steps", flush=True)
            break
    iterator.close()
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def curves_of(
    folder: Path, run: Run, steps: Steps, fp32_steps: int, variants: Sequence[str], limit_s: float
) -> Curves:
    """The losses of all loops, by name.

    The truth may take half of the time; the others go as far as it came.
    """
    until_s = time.monotonic() + limit_s
    exact, plain = (with_keys(run, {"precision": precision}) for precision in ("fp32", "bf16"))
    found = {
        TRUTH: curve(TRUTH, reference.losses, folder, exact, steps, time.monotonic() + limit_s / 2)
    }
    done = steps[: len(found[TRUTH])]
    loops: list[tuple[str, Loop, Run, Steps]] = [
        (REFERENCE, reference.losses, plain, done),
        (OURS, ours.losses, run, done),
        *(
            (f"{OURS}: {keys}", ours.losses, with_keys(run, parsed(keys.split(","))), done)
            for keys in variants
        ),
        *([(OURS_IN_FP32, ours.losses, exact, done[:fp32_steps])] if fp32_steps else []),
    ]
    return found | {
        name: curve(name, loop, folder, of_loop, taken, until_s)
        for name, loop, of_loop, taken in loops
    }


def with_keys(run: Run, keys: dict[str, Any]) -> Run:
    """`run` with keys of the section train set otherwise.

    Raises pydantic's error for one that it does not have.
    """
    return replace(
        run, train=Train.model_validate({**run.train.model_dump(exclude_unset=True), **keys})
    )


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, print what came of it, and return all of it."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    train = Train.model_validate(
        {**SETTINGS, **parsed(arguments.train), "micro_batch_blocks": arguments.micro}
    )
    run = Run(train, arguments.steps, arguments.micro, device)
    steps = steps_of(read_blocks(arguments.file), arguments.blocks, arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        parameters = reference.make_model(Path(folder), config_json(arguments.size), device)
        curves = curves_of(
            Path(folder), run, steps, arguments.fp32_steps, arguments.variant, arguments.limit_s
        )
    return {
        **{
            "size": arguments.size,
            "parameters": parameters,
            "device": _name(device),
            "blocks": arguments.blocks,
        },
        **{
            "train": train.model_dump(mode="json", exclude_defaults=True),
            "losses": curves,
            **report(curves),
        },
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


def report(curves: Curves) -> dict[str, Any]:
    """Print the table and the verdicts; the same for the JSON."""
    least = min(len(losses) for name, losses in curves.items() if name != OURS_IN_FP32)
    truth = curves[TRUTH]
    away = {
        name: apart(losses[:least], truth[: min(least, len(losses))])
        for name, losses in curves.items()
        if name != TRUTH
    }
    ends = f"loss from {truth[0]:.4f} to {truth[least - 1]:.4f}"
    show(
        f"{least} steps, {ends}, in nats per token",
        COLUMNS,
        [cells(name, each) for name, each in away.items()],
    )
    judged = [name for name in away if name.startswith(OURS) and name != OURS_IN_FP32]
    words = [f"{name}: {verdict(away[name], away[REFERENCE])}" for name in judged]
    words += [exact_verdict(away[OURS_IN_FP32])] if OURS_IN_FP32 in away else []
    print("\n".join(words), flush=True)
    return {"apart": {name: vars(each) for name, each in away.items()}, "verdicts": words}


def _name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {os.cpu_count()} cores"
    )


def main() -> None:
    """Do what the command line asks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    blocks = commands.add_parser("blocks", help="make the text")
    blocks.add_argument("file", type=Path)
    blocks.add_argument("--block-tokens", type=int, default=2048)
    blocks.add_argument(
        "--shared", type=Path, default=SHARED, help="folder with data and tokenizer"
    )
    run = commands.add_parser("run", help="train on it, and compare")
    run.add_argument("file", type=Path)
    run.add_argument("--size", choices=SIZES, default="0.6B", help="`tiny` for a CPU")
    run.add_argument("--steps", type=int, default=200)
    run.add_argument(
        "--fp32-steps", type=int, default=20, help="of ours; the plain loop makes all of them"
    )
    run.add_argument("--blocks", type=int, default=4, help="of a step")
    run.add_argument("--micro", type=int, default=2, help="blocks at a time")
    run.add_argument("--train", nargs="*", default=[], metavar="KEY=VALUE", help="of our side")
    run.add_argument(
        "--variant",
        nargs="*",
        default=[],
        metavar="KEY=VALUE,...",
        help="ours once more, with these keys",
    )
    run.add_argument("--limit-s", type=float, default=300.0)
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
