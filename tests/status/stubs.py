"""Stores with real frozen experiments, and their surroundings: a squeue, a process with a lock."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.compile import Experiment, run_digest
from pipeline_lib.config.dag import Dag
from pipeline_lib.core.events import EventLog
from pipeline_lib.core.files import write_json, write_jsonl
from pipeline_lib.core.stage import Job, run_stage
from pipeline_lib.core.store import MANIFEST_NAME, Store
from pipeline_lib.records.record import to_json
from pipeline_lib.status.survey import Status, Survey
from tests.complete import plan_document

ROOT = Path(__file__).parents[2]
CONFIG = """\
experiment: {name}
model: {{source: tiny, vocab_tokens: 512, hidden_size: 32, layers: 2}}
data: {{train: [{{source: pydoc, max_rows: 400}}], validation_fraction: 0.1}}
tokenize: {{max_tokens: 128, max_dropped_fraction: 0.2}}
shard: {{block_tokens: 128, shards: 2}}
train: {{precision: fp32, global_batch_tokens: 2048, micro_batch_blocks: 2, epochs: 2, lr: {lr}, save_every_steps: 3}}
"""
SWEEP = "{train.lr: [1.0e-3, 2.0e-3], halving: {first_step: 10}}"
HOLD = """\
import sys, time
from pathlib import Path
from pipeline_lib.core.lock import locked
with locked(Path(sys.argv[1]), print, note={"slurm_job": sys.argv[2] or None, "attempt": 1}):
    print("held", flush=True)
    time.sleep(120)
"""


def stub_squeue(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str, exit_code: int = 0
) -> None:
    """Put a squeue first on PATH that says `lines`, however it is asked."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lines").write_text(lines)
    script = folder / "squeue"
    script.write_text(
        f"#!/bin/sh\necho called >> {folder}/calls\ncat {folder}/lines\nexit {exit_code}\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@dataclass
class Desk:
    """A store in `folder`, where snakemake would run."""

    folder: Path

    @property
    def store(self) -> Store:
        return Store(self.folder / "store")

    def freeze(self, name: str = "demo", lr: str = "4.0e-3") -> Experiment:
        """Compile a config and freeze it, as snakemake does when it starts."""
        config = self.folder / f"{name}.yaml"
        config.write_text(CONFIG.format(name=name, lr=lr))
        dag = Dag.compile([str(config)], {}, self.store)
        dag.freeze()
        return dag.experiment

    def sweep(self, name: str = "swept", sweep: str = SWEEP) -> Dag:
        """Compile and freeze a sweep with halving."""
        config = self.folder / f"{name}.yaml"
        text = CONFIG.format(name=name, lr="1.0e-3").replace(
            "save_every", "validate_every_steps: 5, save_every"
        )
        config.write_text(f"{text}sweep: {sweep}\n")
        dag = Dag.compile([str(config)], {}, self.store)
        dag.freeze()
        return dag

    def seal(self, experiment: Experiment, *parts: str, **files: Any) -> None:
        """Let stand-ins make these parts; each leaves `files`, by the name before `.json`."""

        def write(job: Job) -> dict[str, Any]:
            for name, value in files.items():
                write_json(job.out / f"{name}.json", value)
            return {}

        for part in parts:
            run_stage(write, experiment.specs[part], self.store, lambda _: None)

    def seal_before_train(self, experiment: Experiment) -> None:
        """All that the training needs, with a plan of 40 steps."""
        self.seal(experiment, "model", "data.0", "tokenize", "shard")
        self.seal(experiment, "plan", plan=to_json(plan_document(40)))

    def ready_to_train(self, launched: bool = False) -> Experiment:
        """Freeze an experiment whose training comes next, or was `launched`."""
        experiment = self.freeze()
        self.seal_before_train(experiment)
        if launched:
            self.event(experiment, "run.launched", attempt=1)
        return experiment

    def run_dir(self, experiment: Experiment) -> Path:
        path = self.store.run_dir(run_digest(experiment.specs["train"]))
        path.mkdir(parents=True, exist_ok=True)
        return path

    def lock(self, experiment: Experiment, part: str = "train") -> Path:
        spec = experiment.specs[part]
        return self.store.lock_path(run_digest(spec) if part == "train" else spec.digest)

    def log(self, experiment: Experiment, part: str, text: str) -> Path:
        """What a stage leaves in its log."""
        spec = experiment.specs[part]
        path = self.folder / "logs" / spec.stage / f"{spec.digest}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def event(self, experiment: Experiment, name: str, **fields: Any) -> None:
        EventLog(self.run_dir(experiment) / "events.jsonl").emit(name, **fields)

    def save(self, experiment: Experiment, step: int) -> None:
        """A sealed checkpoint."""
        folder = self.run_dir(experiment) / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / MANIFEST_NAME).write_text("{}")

    def train(self, experiment: Experiment, steps: range, attempt: int = 1, **fields: Any) -> None:
        """Rows of an attempt, 0.5 s a step, behind those that are there."""
        path = self.run_dir(experiment) / "metrics.jsonl"
        old = path.read_bytes() if path.exists() else b""
        write_jsonl(
            path, [row(step, attempt, 0.5 * (step - steps.start + 1), **fields) for step in steps]
        )
        path.write_bytes(old + path.read_bytes())

    def survey(self, *names: str, all_of_them: bool = False) -> Survey:
        return Survey(self.store, self.folder, names, all_of_them)

    def status(self, *names: str) -> Status:
        """The status of the only experiment."""
        [status] = self.survey(*names).statuses()
        return status

    def hold(
        self, experiment: Experiment, part: str = "train", job: str = ""
    ) -> "subprocess.Popen[str]":
        """A process that holds the lock of a stage."""
        command = [sys.executable, "-c", HOLD, str(self.lock(experiment, part)), job]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if process.stdout is None or process.stdout.readline() != "held\n":
            raise RuntimeError("the lock was not taken")
        return process


def row(step: int, attempt: int = 1, elapsed_s: float = 1.0, **fields: Any) -> dict[str, Any]:
    """A row of metrics.jsonl as the loop writes it."""
    return {
        "step": step, "epoch": 0, "loss": 5.0 - 0.01 * step, "lr": 1e-3, "grad_norm": 0.5, "tokens": 2000,
        "supervised_tokens": 1000, "step_s": 0.5, "forward_s": 0.2, "backward_s": 0.2, "update_s": 0.05,
        "checkpoint_wait_s": 0.0, "elapsed_s": elapsed_s, "attempt": attempt, "tokens_per_s": 4000.0,
        "supervised_tokens_per_s": 2000.0, "data_wait_s": 0.0, "peak_memory_bytes": 600_000_000 + step, **fields,
    }  # fmt: skip
