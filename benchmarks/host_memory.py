"""The host memory of small trainings on CPUs beside the plan's prediction, also under a limit.

`python -m benchmarks.host_memory` trains random models through the real training stage, on ranks
that exchange over gloo, each training in a memory cgroup of its own, limited to what SLURM would be
asked for; it takes root. The table of the last measurements is in benchmarks/RESULTS.md.

What is compared is anonymous and shared memory, sampled. A cgroup's own peak counts the file cache
too, which fills whatever there is and is given up before anything is killed.
"""

import argparse
import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.measure import show
from benchmarks.strategies import Bench, bench_of
from benchmarks.strategies import Case as Way
from benchmarks.train.cases import LORA
from pipeline_lib.core.stage import Job, run_stage
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.core.units import GIGA
from pipeline_lib.plan.host import SNAKEMAKE_BYTES, HostNeed, host_need_of_plan
from pipeline_lib.plan.stage import run as make_plan
from pipeline_lib.slurm.sizing import sealed_plan

SAMPLE_S = 0.02
BLOCK_TOKENS, BATCH_BLOCKS = 256, 2
STEPS = 2  # there are blocks for one more


def _config(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int
) -> dict[str, Any]:
    """config.json of a small Qwen3."""
    return {
        **{"architectures": ["Qwen3ForCausalLM"], "head_dim": 64, "tie_word_embeddings": True},
        **{"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": intermediate},
        **{
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
        },
    }


MODELS = {  # by millions of parameters
    "19M": _config(16_384, 384, 1024, 8, 6, 2),
    "55M": _config(32_768, 512, 2048, 10, 8, 2),
    "206M": _config(65_536, 768, 3072, 18, 12, 4),
}
_WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "zero2": {"strategy": "zero2"},
    "zero2, offload": {"strategy": "zero2", "offload": "optimizer"},
    "lora": {"strategy": "ddp", "method": "lora", "lora": LORA},
}


@dataclass(frozen=True)
class Case:
    """A size and a way to train it. Each saves after the second of three steps and at the end."""

    size: str
    ranks: int
    way: str
    save_async: bool = False

    @property
    def name(self) -> str:
        """`55M, fsdp, 2 ranks, save_async`."""
        ranks = f"{self.ranks} ranks" if self.ranks > 1 else "1 rank"
        return ", ".join([self.size, self.way, ranks, *(["save_async"] if self.save_async else [])])

    @property
    def train(self) -> dict[str, Any]:
        """Keys of `train`."""
        usual = {
            "micro_batch_blocks": 1,
            "precision": "fp32",
            "save_every_steps": 2,
            "save_async": self.save_async,
        }
        return {**usual, **_WAYS[self.way]}


CASES = (
    Case("19M", 1, "ddp"),
    Case("55M", 1, "lora"),
    Case("55M", 1, "ddp", save_async=True),
    Case("55M", 2, "fsdp"),
    Case("55M", 2, "zero2"),
    Case("55M", 2, "zero2, offload"),
    Case("206M", 1, "ddp"),
    Case("206M", 2, "fsdp", save_async=True),
    Case("206M", 2, "zero2, offload"),
)


class NoMemoryGroup(RuntimeError):
    """A memory cgroup cannot be made here."""


class MemoryGroup:
    """A memory cgroup below this process's, version 1 or 2; its processes die at the end.

    Version 2 is written from its documentation and was not tried. Raises NoMemoryGroup if it cannot
    be made.
    """

    def __init__(self) -> None:
        """Nothing is made yet."""
        try:
            lines = [
                line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()
            ]
        except OSError as error:
            raise NoMemoryGroup(f"/proc/self/cgroup: {error.strerror}") from error
        own = {name: path.lstrip("/") for _, names, path in lines for name in names.split(",")}
        self._is_v1 = "memory" in own
        root = Path("/sys/fs/cgroup/memory" if self._is_v1 else "/sys/fs/cgroup")
        self.folder = root / own.get("memory", own.get("", "")) / f"host-memory-{os.getpid()}"

    @property
    def _peak(self) -> Path:
        return self.folder / ("memory.max_usage_in_bytes" if self._is_v1 else "memory.peak")

    def __enter__(self) -> "MemoryGroup":
        """Make it."""
        try:
            self.folder.mkdir()
        except OSError as error:
            raise NoMemoryGroup(f"{self.folder}: {error.strerror}") from error
        if not self._peak.exists():  # in version 2 since Linux 5.19
            self.folder.rmdir()
            raise NoMemoryGroup(f"{self.folder.parent}: no memory controller for its children")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove it, which needs its processes gone."""
        for _ in range(100):
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            try:
                self.folder.rmdir()
                return
            except OSError as failure:
                if failure.errno != errno.EBUSY:
                    raise
                time.sleep(0.1)

    def limit(self, size_bytes: int) -> None:
        """Kill what takes more than that."""
        (self.folder / ("memory.limit_in_bytes" if self._is_v1 else "memory.max")).write_text(
            str(size_bytes)
        )

    @property
    def held_bytes(self) -> int:
        """Anonymous and shared memory now: what the kernel cannot take back without swap."""
        lines = (self.folder / "memory.stat").read_text().splitlines()
        stat = {name: int(value) for name, value in (line.split() for line in lines)}
        return sum(
            stat[name]
            for name in (("total_rss", "total_shmem") if self._is_v1 else ("anon", "shmem"))
        )

    @property
    def charged_peak_bytes(self) -> int:
        """The most that was counted, with file cache."""
        return int(self._peak.read_text())

    def run(self, command: Sequence[str], log: Path) -> tuple[int, int]:
        """Run `command` in it; return the exit code and the most memory that was held, in bytes."""
        into = 'echo $$ > "$0" && exec "$@"'
        most = 0
        with log.open("wb") as output:
            shell = ["sh", "-c", into, str(self.folder / "cgroup.procs"), *command]
            process = subprocess.Popen(shell, stdout=output, stderr=subprocess.STDOUT)
            while process.poll() is None:
                most = max(most, self.held_bytes)
                time.sleep(SAMPLE_S)
        return process.returncode, most


@dataclass(frozen=True)
class Measured:
    """A node's plan of a case, how its training ended, and the peak that it held and paid."""

    need: HostNeed
    code: int
    held_bytes: int
    charged_bytes: int

    @property
    def predicted_bytes(self) -> int:
        """The predicted peak of what was run, which has no Snakemake around it."""
        return self.need.peak_bytes - SNAKEMAKE_BYTES

    @property
    def error(self) -> float:
        """The prediction's, as a fraction of what was measured."""
        return self.predicted_bytes / self.held_bytes - 1


def bench_for(folder: Path, size: str) -> Bench:
    """Seal the model and the blocks of that size in `folder`, unless they are there."""
    store, model = Store(folder / "store"), Spec("download", 1, {"kind": "model", "size": size})
    run_stage(partial(_write_model, size=size), model, store, lambda _: None)
    return bench_of(store, model, BLOCK_TOKENS, BATCH_BLOCKS, STEPS, "cpu")


def _write_model(job: Job, size: str) -> dict[str, Any]:
    torch.manual_seed(0)
    config = Qwen3Config(**MODELS[size])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(job.out)  # type: ignore[no-untyped-call]
    return {}


def measure(folder: Path, case: Case) -> Measured:
    """Plan `case`, and train it in a cgroup that is limited to what is asked for.

    Raises NoMemoryGroup.
    """
    bench = bench_for(folder, case.size)
    plan, train = bench.specs(Way(case.name, case.ranks, case.train), case.name)
    bench.store.write_specs([plan, train])
    run_stage(make_plan, plan, bench.store, lambda _: None)
    need = host_need_of_plan(sealed_plan(bench.store.pointer(plan.ref)))
    command = [
        sys.executable,
        "-m",
        "pipeline_lib",
        "train",
        "--spec",
        str(bench.store.spec_path(train.digest)),
    ]
    command += ["--plan", str(bench.store.pointer(plan.ref))]
    with MemoryGroup() as group:
        group.limit(need.total_bytes - SNAKEMAKE_BYTES)
        code, held_bytes = group.run(command, folder / f"{case.name}.log")
        return Measured(need, code, held_bytes, group.charged_peak_bytes)


def main() -> None:
    """Measure the cases that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_memory", description=__doc__)
    parser.add_argument("--cases", nargs="*", default=[], help="names; all by default")
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        if arguments.cases and case.name not in arguments.cases:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), case)
        limit_bytes = found.need.total_bytes - SNAKEMAKE_BYTES
        sizes = (found.predicted_bytes, found.held_bytes, found.charged_bytes, limit_bytes)
        cells = [case.name, *(f"{size / GIGA:.2f}" for size in sizes)]
        cells.insert(3, f"{found.error:+.1%}")
        rows.append([*cells, "ran" if found.code == 0 else f"failed ({found.code})"])
        print(" | ".join(rows[-1]), flush=True)
    columns = [
        "case",
        "predicted GB",
        "measured GB",
        "error",
        "with file cache GB",
        "limit GB",
        "under the limit",
    ]
    show("Host memory of a node without Snakemake", columns, rows)


if __name__ == "__main__":
    main()
