"""Every strategy on one run, through the real training stage: equal curves, speed and memory.

`python -m benchmarks.strategies --size 0.6B --ranks 2 --steps 30` on a machine with GPUs; the
weights are random. The table of the last measurements is in benchmarks/RESULTS.md.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.measure import show
from benchmarks.sizes import SIZES, config_json
from benchmarks.train.cases import LORA
from pipeline_lib.config.compile import run_digest, version_of_training
from pipeline_lib.config.section import settings_of
from pipeline_lib.config.train import PLACEMENT_KEYS, Train
from pipeline_lib.core.files import read_jsonl, write_json
from pipeline_lib.core.stage import Job, run_stage
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.data.documents import Document
from pipeline_lib.data.shard import write_blocks
from pipeline_lib.plan.stage import run as make_plan

USED_TOKENS = 2_000  # drawn by Zipf's law, so that there is something to learn in a few steps
VALIDATION_BLOCKS = 2


@dataclass(frozen=True)
class Case:
    """One way to train: a name, ranks, and keys of `train`."""

    name: str
    ranks: int
    settings: dict[str, Any] = field(default_factory=dict)


def cases(ranks: int, names: Sequence[str]) -> list[Case]:
    """Those that make sense on `ranks` ranks; all of them, or those named."""
    lora = {"method": "lora", "lora": LORA}
    found = [
        Case(name, ranks, {"strategy": name}) for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")
    ]
    found += [
        Case("fsdp, recompute selective", ranks, {"strategy": "fsdp", "recompute": "selective"}),
        Case("fsdp, recompute full", ranks, {"strategy": "fsdp", "recompute": "full"}),
        Case("fsdp, compile", ranks, {"strategy": "fsdp", "compile": True}),
        Case("fsdp, offload", ranks, {"strategy": "fsdp", "offload": "optimizer+params"}),
        Case("zero3, offload", ranks, {"strategy": "zero3", "offload": "optimizer+params"}),
        Case("ddp, fp16", ranks, {"strategy": "ddp", "precision": "fp16"}),
        Case("ddp, lora", ranks, {"strategy": "ddp", **lora}),
        Case("fsdp, lora", ranks, {"strategy": "fsdp", **lora}),
        Case("zero3, lora", ranks, {"strategy": "zero3", **lora}),
    ]
    if ranks >= 4:
        found.append(Case("hsdp", ranks, {"strategy": "hsdp", "shard_ranks": ranks // 2}))
    return [case for case in found if not names or case.name in names]


@dataclass(frozen=True)
class Bench:
    """A store with a random model and blocks of random documents."""

    store: Store
    model: Spec
    tokenized: Spec  # empty: the plan reads its counts
    shard: Spec
    block_tokens: int
    batch_blocks: int
    steps: int
    device: str

    def specs(self, case: Case, replica: str) -> tuple[Spec, Spec]:
        """The specs of the plan and of the training."""
        defaults = {
            **{
                "global_batch_tokens": self.batch_blocks * self.block_tokens,
                "lr": 3e-4,
                "warmup_fraction": 0.1,
            },
            **{"save_every_steps": 10_000, "keep_last": 1, "replica": replica},
        }
        train = Train.model_validate({**defaults, **case.settings})
        gpus = case.ranks if self.device == "cuda" else 0
        cluster = {"gpus_per_node": gpus} if gpus else {"cpu_ranks": case.ranks}
        inputs = {"model": self.model.ref, "shard": self.shard.ref}
        settings = {
            "experiment": "bench",
            "cluster": cluster,
            "train": settings_of(train),
            "tracking": {},
        }
        planned = Spec("plan", 1, settings, {**inputs, "tokenize": self.tokenized.ref})
        return planned, Spec(
            "train", version_of_training(train), settings_of(train, PLACEMENT_KEYS), inputs
        )

    def start(self, case: Case, replica: str, log: Path) -> tuple[Spec, subprocess.Popen[bytes]]:
        """Begin the training stage as a user's rule does."""
        plan, train = self.specs(case, replica)
        self.store.write_specs([plan, train])
        run_stage(make_plan, plan, self.store, lambda _: None)
        command = [
            sys.executable,
            "-m",
            "pipeline_lib",
            "train",
            "--spec",
            str(self.store.spec_path(train.digest)),
        ]
        command += ["--plan", str(self.store.pointer(plan.ref))]
        with log.open("ab") as output:
            return train, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def train(self, case: Case, replica: str, log: Path) -> list[dict[str, Any]] | None:
        """The metrics of each step; None if the run failed.

        It is ended after the last, before it saves.
        """
        spec, process = self.start(case, replica, log)
        rows = self._rows_until(self.steps, spec, process)
        _kill(process)
        return rows

    def train_with_a_kill(
        self, case: Case, replica: str, log: Path, at_step: int
    ) -> list[dict[str, Any]] | None:
        """The same with a rank killed by SIGKILL after step `at_step`, and a second command.

        It is the same command again.
        """
        spec, process = self.start(case, replica, log)
        if self._rows_until(at_step, spec, process) is None:
            return None
        [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "rank" in child.cmdline()
        ][-1].kill()
        process.wait()
        rows = self.train(case, replica, log)
        return rows if rows and rows[-1]["attempt"] == 2 else None

    def _rows_until(
        self, step: int, spec: Spec, process: subprocess.Popen[bytes]
    ) -> list[dict[str, Any]] | None:
        """The newest row of each step up to `step`, once done; None if the run ends before."""
        metrics = self.store.run_dir(run_digest(spec)) / "metrics.jsonl"
        while True:
            has_ended = process.poll() is not None
            rows = {row["step"]: row for row in read_jsonl(metrics)} if metrics.exists() else {}
            if step in rows:
                return [rows[number] for number in range(1, step + 1)]
            if has_ended:
                return None
            time.sleep(0.1)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the stage; its ranks notice. They are gone when this returns, and the GPUs free."""
    ranks = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    process.wait()
    psutil.wait_procs(ranks, timeout=30)


def make_bench(folder: Path, size: str, block_tokens: int, batch_blocks: int, steps: int) -> Bench:
    """Write and seal the model and the blocks, unless they are there."""
    store = Store(folder / "store")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Spec("download", 1, {"kind": "model", "size": size})
    run_stage(
        partial(_write_model, config=config_json(size), device=device), model, store, lambda _: None
    )
    return bench_of(store, model, block_tokens, batch_blocks, steps, device)


def bench_of(
    store: Store, model: Spec, block_tokens: int, batch_blocks: int, steps: int, device: str
) -> Bench:
    """Seal blocks for more than `steps` steps, unless they are there, for the sealed `model`."""
    tokenized = Spec("tokenize", 1, {})
    blocks = batch_blocks * (steps + 1)
    shard = Spec("shard", 1, {"block_tokens": block_tokens, "blocks": blocks})
    run_stage(lambda _: {}, tokenized, store, lambda _: None)
    run_stage(
        partial(_write_blocks, blocks=blocks, tokens=block_tokens), shard, store, lambda _: None
    )
    return Bench(store, model, tokenized, shard, block_tokens, batch_blocks, steps, device)


def _write_model(job: Job, config: dict[str, Any], device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**config), dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(job.out)
    return {}


def _write_blocks(job: Job, blocks: int, tokens: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    for name, count in (("train", blocks), ("validation", VALIDATION_BLOCKS)):
        write_blocks(
            job.out / name, [chat_documents(random, tokens) for _ in range(count)], tokens, 4
        )
    return {}


def chat_documents(random: np.random.Generator, tokens: int) -> list[Document]:
    """A full block of documents as long as chats, the second half of each supervised."""
    documents, left = [], tokens
    while left > 0:
        length = min(left, max(16, int(random.lognormal(5.5, 0.8))))
        ids = np.minimum(random.zipf(1.3, length), USED_TOKENS).astype(np.int32)
        documents.append(Document(ids, np.arange(length) >= length // 2))
        left -= length
    return documents


def summarise(
    case: Case, rows: list[dict[str, Any]] | None, reference: list[float]
) -> tuple[list[str], list[float]]:
    """A row of the table, and the curve."""
    if rows is None:
        return [case.name, str(case.ranks), "failed", *[""] * 5], []
    curve = [row["loss"] for row in rows]
    away = max((abs(a - b) / b for a, b in zip(curve, reference, strict=False)), default=0.0)
    late = rows[len(rows) // 3 :]
    speed = statistics.median(row["tokens"] / row["step_s"] for row in late) / case.ranks
    mfu = [row["mfu"] for row in late if row.get("mfu") is not None]
    peak = max(row["peak_memory_bytes"] for row in rows) / 2**30
    cells = [f"{curve[0]:.4f}", f"{curve[-1]:.4f}", f"{away:.1e}", f"{speed:,.0f}"]
    return [
        case.name,
        str(case.ranks),
        *cells,
        f"{statistics.median(mfu):.1%}" if mfu else "-",
        f"{peak:.1f}",
    ], curve


def main() -> None:
    """Measure the cases that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strategies", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--block-tokens", type=int, default=4096)
    parser.add_argument("--batch-blocks", type=int, default=16)
    parser.add_argument("--micro", type=int, default=2, help="blocks that a rank takes at a time")
    parser.add_argument("--cases", nargs="*", default=[], help="names of cases; all by default")
    parser.add_argument(
        "--kill", nargs="*", default=[], help="cases to run once more with a rank killed on the way"
    )
    parser.add_argument(
        "--folder", type=Path, help="on the disk to use; a temporary one by default"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the files, and say where they are"
    )
    parser.add_argument("--json", type=Path, help="write the curves here")
    arguments = parser.parse_args()
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    arguments.folder = Path(tempfile.mkdtemp(prefix="strategies-", dir=arguments.folder))
    bench = make_bench(
        arguments.folder,
        arguments.size,
        arguments.block_tokens,
        arguments.batch_blocks,
        arguments.steps,
    )
    table: list[list[str]] = []
    curves: dict[str, list[float]] = {}
    for ranks in arguments.ranks:
        for case in cases(ranks, arguments.cases):
            _measure(bench, case, arguments, table, curves)
    title = (
        f"Qwen3-{arguments.size} geometry, {arguments.batch_blocks} blocks of "
        f"{arguments.block_tokens} tokens a step"
    )
    columns = [
        "case",
        "ranks",
        "loss 1",
        f"loss {arguments.steps}",
        "largest difference",
        "tokens/s/rank",
        "MFU",
        "GiB",
    ]
    show(title, columns, table)
    if arguments.json:
        write_json(arguments.json, curves)
    if arguments.keep:
        print(f"the files are in {arguments.folder}")
    else:
        shutil.rmtree(arguments.folder)


def _measure(
    bench: Bench,
    case: Case,
    arguments: argparse.Namespace,
    table: list[list[str]],
    curves: dict[str, list[float]],
) -> None:
    """Add the rows of `case`, also the one with a kill if it is asked for.

    A curve is compared with the first alike.
    """
    placed = Case(case.name, case.ranks, {"micro_batch_blocks": arguments.micro, **case.settings})
    log = arguments.folder / "log.txt"
    family = "lora" if "lora" in case.name else "full"
    runs = [(placed, partial(bench.train, placed, f"{case.name} {case.ranks}", log))]
    if case.name in arguments.kill:
        killed = Case(
            f"{case.name}, killed", case.ranks, {**placed.settings, "save_every_steps": 10}
        )
        runs.append(
            (
                killed,
                partial(bench.train_with_a_kill, killed, f"{killed.name} {case.ranks}", log, 15),
            ),
        )
    for one, train in runs:
        start_s = time.monotonic()
        cells, curve = summarise(one, train(), curves.get(family, []))
        curves.setdefault(family, curve)
        curves[f"{one.name}, {one.ranks}"] = curve
        table.append(cells)
        print(json.dumps([*cells, f"{time.monotonic() - start_s:.0f} s"]), flush=True)
        if not curve:
            print("\n".join(log.read_text(errors="replace").splitlines()[-15:]), flush=True)


if __name__ == "__main__":
    main()
