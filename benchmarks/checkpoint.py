"""A save's cost to training and disk: `python -m benchmarks.checkpoint --size 4B --ranks 4`.

In full: `python -m benchmarks.checkpoint --size 4B --ranks 4 [--layers 18]`. Trains a model of
random weights by the pipeline's own step, and saves through its Saver: seconds that the loop is
blocked, the rate of the writing beside it and that of the disk by itself in the same run, and the
step beside a save. Each checkpoint is deleted when it is measured; the disk has to hold one.
"""

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.groups import NO_MULTICAST, Group, GroupFailed, Row
from benchmarks.sizes import SIZES, model_config
from benchmarks.train.cases import LORA, parsed
from pipeline_lib.config.section import read_settings
from pipeline_lib.config.train import Train
from pipeline_lib.core.files import write_json

SILENCE_S = 150.0
START_S = 60.0  # until the first step, of which the limit knows nothing


def settings_of(given: argparse.Namespace, is_gpu: bool) -> dict[str, Any]:
    """The section `train`, checked. Raises ConfigError."""
    found: dict[str, Any] = {"method": given.method, "strategy": given.strategy, "keep_last": 1}
    found["precision"] = "bf16" if is_gpu else "fp32"
    if given.method == "lora":
        found["lora"] = LORA
    found |= parsed(given.train)
    read_settings(Train, found)
    return found


def line_of(row: Row) -> str:
    """What a report says, in a line."""
    name = row["name"]
    if name == "model":
        state_gb = 12 * row["trained_parameters"] / 1e9
        return (
            f"{row['trained_parameters'] / 1e9:.2f}e9 trained parameters on {row['ranks']} "
            f"ranks: {state_gb:.1f} GB"
        )
    if name == "steps":
        made = f"; buffers made in {row['buffers_s']:.1f} s" if row["buffers_s"] is not None else ""
        beside = row["step_beside_buffers_s"]
        if beside is not None:
            made += (
                f", a step meanwhile {_ms(beside)}, "
                f"{_ms(row['slowest_step_beside_buffers_s'])} at most"
            )
        return f"a step with nothing beside it {_ms(row['quiet_s'])}{made}"
    if name == "save":
        beside = (
            f"{_ms(row['step_beside_s'])}, {_ms(row['slowest_step_beside_s'])} at most"
            if row[_BESIDE]
            else "none"
        )
        return (
            f"save {row['number']}: blocked {row['blocked_s']:.3f} s; {row['bytes'] / 1e9:.2f} GB "
            f"written in {row['write_s']:.1f} s, {row['write_bytes_s'] / 1e9:.2f} GB/s; "
            f"{row[_BESIDE]} steps beside it: {beside}; {row['host_bytes'] / 1e9:.2f} GB of host "
            "memory at the peak of the save"
        )
    if name == "disk":
        size_gb, rate = row["bytes"] / 1e9, row["bytes_s"] / 1e9
        return f"the disk by itself: {size_gb:.1f} GB in {row['seconds']:.1f} s, {rate:.2f} GB/s"
    if name == "new memory":
        return f"copies to new memory, as before: blocked {row['copy_s']:.3f} s"
    return json.dumps(row)


_BESIDE = "steps_beside"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def measure(given: argparse.Namespace, folder: Path) -> bool:
    """Run the ranks; print what they report, and write it down as it comes.

    Whether all went well.
    """
    is_gpu = torch.cuda.is_available()
    os.environ.update({key: os.environ.get(key, value) for key, value in NO_MULTICAST.items()})
    os.environ["BENCHMARK_FOLDER"] = str(folder)
    write_json(folder / "config.json", model_config(given.size, given.layers))
    until_s = time.monotonic() + given.limit_s
    settings = {"train": settings_of(given, is_gpu), "tokens": given.tokens, "saves": given.saves}
    write_json(folder / "settings.json", {**settings, "compare": given.compare, "until_s": until_s})
    about = {
        "size": given.size,
        "layers": given.layers,
        "strategy": given.strategy,
        "method": given.method,
    }
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    rows: list[Row] = []
    group = Group("benchmarks.checkpoint_rank", given.ranks, folder, is_gpu, SILENCE_S)
    try:
        for row in group.rows([], until_s + START_S):
            print(line_of(row), flush=True)
            rows.append(row)
            if given.out is not None:
                write_json(given.out, {**about, "versions": versions, "rows": rows})
    except GroupFailed as error:
        print(error, flush=True)
        return False
    return True


def arguments(texts: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--size", choices=[*SIZES, "demo"], default="4B")
    parser.add_argument("--layers", type=int, help="so many layers instead of all")
    parser.add_argument("--ranks", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--method", choices=["full", "lora"], default="full")
    parser.add_argument(
        "--tokens",
        type=int,
        default=8192 if torch.cuda.is_available() else 256,
        help="of a micro-batch",
    )
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also copy to new memory, as before; the host needs it",
    )
    parser.add_argument(
        "--limit-s", type=float, default=90.0, help="no save begins that would end later"
    )
    parser.add_argument(
        "--train", nargs="*", default=[], help="other keys of the section train: key=value"
    )
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; a temporary one by default"
    )
    parser.add_argument("--out", type=Path, help="write JSON here")
    return parser.parse_args(texts)


def main() -> None:
    """Measure what the command line names."""
    given = arguments()
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=given.folder))
    try:
        is_whole = measure(given, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not is_whole:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
