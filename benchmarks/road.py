"""`python -m benchmarks.road 8B lora --root DIR`: one training by `snakemake`.

From the command to the report. The base has random weights and is made first. What is printed: each
line of output with its second, and when each stage was sealed. DIR keeps the store: with another
`--lr` the base, the data and what was compiled are there already.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.conversations import rows
from benchmarks.measure import show
from benchmarks.sizes import model_config
from benchmarks.train.weights import fill, put_whole_or_zero_3
from pipeline_lib.config.schema import TinyModel
from pipeline_lib.core.files import read_json, read_jsonl, write_json, write_jsonl
from pipeline_lib.core.spans import COUNT
from pipeline_lib.core.units import GIGA
from pipeline_lib.data.tiny_model import build_tiny
from pipeline_lib.model.weights import materialise

ROOT = Path(__file__).resolve().parents[1]
TOKENS_OF_ROW = 500  # of the tokenizer that the base gets; more are made than are needed
STAGES = ("download", "tokenize", "shard", "plan", "train", "merge", "evaluate", "report")


def write_base(folder: Path, size: str, layers: int | None) -> None:
    """Write a model of that size with random weights in bf16."""
    folder.mkdir(parents=True)
    build_tiny(
        TinyModel(source="tiny", vocab_tokens=512, hidden_size=32, layers=1), folder, lambda _: None
    )
    (folder / "model.safetensors").unlink()
    ids = {
        key: value
        for key, value in read_json(folder / "config.json").items()
        if key.endswith("_token_id")
    }
    write_json(folder / "config.json", {**model_config(size, layers), **ids})
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    materialise(model, device)
    fill(model, device, put_whole_or_zero_3)
    model.save_pretrained(folder, max_shard_size="4GB")  # as the published ones


def write_config(root: Path, given: argparse.Namespace) -> Path:
    """Write the rows and the config of the training, and return the config's path."""
    data = root / "rows.jsonl"
    if not data.exists():
        write_jsonl(
            data, list(rows("essay", 64 + 2 * given.steps * given.batch_tokens // TOKENS_OF_ROW))
        )
    train: dict[str, Any] = {
        "method": given.method,
        "precision": "bf16",
        "global_batch_tokens": given.batch_tokens,
        "max_steps": given.steps,
        "lr": given.lr,
    }
    for setting in given.set:
        key, value = setting.split("=", maxsplit=1)
        train[key] = number_or_text(value)
    config = {
        "experiment": f"road-{given.size}-{given.method}",
        "model": {"source": "local", "path": str(root / "base")},
        "data": {"train": [{"source": "file", "path": str(data)}], "validation_fraction": 0.02},
        "tokenize": {"max_tokens": given.block_tokens},
        "shard": {"block_tokens": given.block_tokens},
        "cluster": cluster_here(),
        "train": train,
        "evaluate": {"generations": 6, "max_new_tokens": 96},
    }
    path = root / "road.yaml"
    write_json(path, config)  # which is YAML too
    return path


def cluster_here() -> dict[str, Any]:
    """Return the cluster section for this machine."""
    count = torch.cuda.device_count()
    if not count:
        return {"gpus_per_node": 0}
    return {
        "gpus_per_node": count,
        "gpu": torch.cuda.get_device_name(0).removeprefix("NVIDIA ").lower(),
    }


def number_or_text(value: str) -> Any:
    """Return what JSON makes of `value`, or the text itself."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def travel(config: Path, root: Path) -> tuple[int, list[tuple[float, str]]]:
    """Run `snakemake` on the config, return its exit code and its output lines with times."""
    where = {
        "snakefile": ROOT / "workflow" / "Snakefile",
        "directory": root / "work",
        "configfile": config,
    }
    where["workflow-profile"] = ROOT / "profiles" / "default"
    command = [
        sys.executable,
        "-m",
        "snakemake",
        *(f"--{option}={path}" for option, path in where.items()),
    ]
    begun_s = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    for line in process.stdout or ():
        lines.append((time.monotonic() - begun_s, line.rstrip()))
        print(f"{lines[-1][0]:7.1f} {lines[-1][1]}", flush=True)
    return process.wait(), lines


def marks(work: Path) -> Iterator[tuple[float, str]]:
    """Yield what has an end of its own, with the time of the clock at which it was reached."""
    for stage in STAGES:
        for pointer in work.glob(f"store/{stage}/*.ok"):
            manifest = read_json(pointer.with_suffix("") / "manifest.json")
            sealed = pointer.stat().st_mtime
            yield sealed - manifest["duration_s"], f"{stage}: process started"
            yield sealed, f"{stage}: sealed"
    for events in work.glob("runs/*/events.jsonl"):
        for event in read_jsonl(events):
            if event["event"] != "checkpoint.saved":
                yield event["at"], f"train: {event['event']}"


def spans(work: Path, since: float) -> Iterator[list[str]]:
    """Yield a row for each span of the stages that were sealed from `since` on."""
    for stage in STAGES:
        for pointer in work.glob(f"store/{stage}/*.ok"):
            if pointer.stat().st_mtime < since:
                continue
            counts = read_json(pointer.with_suffix("") / "manifest.json")["counts"]
            for span in counts.get(COUNT, ()):
                duration_s, size_bytes = span["duration_s"], span["bytes"]
                rate = f"{size_bytes / duration_s / GIGA:.1f}" if size_bytes and duration_s else ""
                yield [f"{stage} {pointer.stem[:6]}", span["name"], f"{duration_s:.1f}", rate]


def main() -> None:
    """Make what is missing, run, and print where the time went."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.road", description=__doc__)
    parser.add_argument("size", help="of a published Qwen3: 0.6B, 4B, 8B")
    parser.add_argument("method", choices=("full", "lora"))
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="how many of them; all by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--block-tokens", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of train"
    )
    given = parser.parse_args()
    root = given.root.resolve()
    (root / "work").mkdir(parents=True, exist_ok=True)
    if not (root / "base").exists():
        write_base(root / "base", given.size, given.layers)
    config = write_config(root, given)
    since = time.time()
    code, lines = travel(config, root)
    ended = time.time()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = [(at, what) for at, what in marks(root / "work") if since <= at <= ended]
    found += [(since + at, "train: first step") for at, line in lines if line.startswith("step 1/")]
    reached = [(since, "command"), *sorted(found), (ended, "end")]
    table = [
        [what, f"{at - since:.1f}", f"{at - before:.1f}"]
        for (before, _), (at, what) in pairwise(reached)
    ]
    show(
        f"the road of {given.size} {given.method}, exit code {code}",
        ["reached", "at s", "took s"],
        table,
    )
    headings = ["stage", "span", "took s", "GB/s"]
    show("what the stages did meanwhile", headings, list(spans(root / "work", since)))
    print(f"CPU seconds {used.ru_utime + used.ru_stime:.0f}, of {os.cpu_count()} cores")
    sys.exit(code)


if __name__ == "__main__":
    main()
