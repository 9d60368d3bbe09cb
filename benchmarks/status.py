"""`qwen3 status` over 100 experiments: process start, and one look, apart."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from benchmarks.measure import seconds, show, spread
from pipeline_lib.config.compile import Experiment, run_digest
from pipeline_lib.config.dag import Dag
from pipeline_lib.core.events import EventLog
from pipeline_lib.core.files import write_json
from pipeline_lib.core.lock import locked
from pipeline_lib.core.store import MANIFEST_NAME, Manifest, Store, write_manifest
from pipeline_lib.slurm.queue import queued_jobs
from pipeline_lib.status.survey import Survey

CONFIG = """\
experiment: sweep-{number}
model: {{source: tiny}}
data: {{train: [{{source: pydoc}}]}}
train: {{precision: fp32, lr: {number}.0e-6, global_batch_tokens: 8192}}
"""
STEPS = 10_000
EVENTS = 2_000
TRAINED_EVERY = 4  # every fourth experiment is done
RUNNING_EVERY = 4  # and another fourth runs; the others were left where they were


def run(experiments: int = 100) -> None:
    """Print the cost of a look, cold and warm, and of the process."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as held:
        store = Store(Path(name) / "store")
        for number in range(1, experiments + 1):
            lock = _make(store, number)
            if number % RUNNING_EVERY == 1:
                held.enter_context(locked(lock, print))
        _stub_squeue(Path(name), experiments)
        survey = Survey(store, Path(name))
        first = seconds(survey.statuses, 1)
        again = seconds(survey.statuses, 10)
        begun_s = time.process_time()
        seconds(survey.statuses, 10)
        computing_s = (time.process_time() - begun_s) / 10
        squeue = seconds(queued_jobs, 5)
        command = [sys.executable, "-m", "pipeline_lib", "status"]
        whole = seconds(lambda: _run([*command, "--json"], store))
        table = seconds(lambda: _run(command, store))
        started = seconds(lambda: _run([*command, "--help"], store))
        counts = Counter(status.state for status in survey.statuses())
    rows = [
        ["the process until it looks (--help)", spread([1000 * each for each in started], "ms")],
        ["first look", f"{1000 * first[0]:.0f} ms"],
        ["a refresh", spread([1000 * each for each in again], "ms")],
        ["of it: this process computing", f"{1000 * computing_s:.0f} ms"],
        ["of it: squeue", spread([1000 * each for each in squeue], "ms")],
        ["whole command, table", spread([1000 * each for each in table], "ms")],
        ["whole command, --json", spread([1000 * each for each in whole], "ms")],
    ]
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    title = f"status: {experiments} experiments of {STEPS:,} steps: {states}"
    show(title, ["what", "time"], rows)


def _stub_squeue(folder: Path, jobs: int) -> None:
    """One that answers at once, with others' jobs: a busy control daemon's time is not ours."""
    (folder / "lines").write_text(
        "".join(f"{job}|PENDING|Priority|N/A|/w|rule_x_wildcards_{job}\n" for job in range(jobs))
    )
    (folder / "squeue").write_text(f"#!/bin/sh\nexec cat {folder}/lines\n")
    (folder / "squeue").chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def _run(command: list[str], store: Store) -> None:
    root = Path(__file__).parents[1]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(root),
        "PIPELINE_STORE": str(store.root),
    }
    subprocess.run(command, cwd=store.root.parent, env=environment, check=True, capture_output=True)


def _make(store: Store, number: int) -> Path:
    """A frozen experiment with a run that was left, or that is done; the path of its lock."""
    path = store.root.parent / "config.yaml"
    path.write_text(CONFIG.format(number=number))
    dag = Dag.compile([str(path)], {}, store)
    dag.freeze()
    experiment = dag.experiment
    is_done = number % TRAINED_EVERY == 0
    for part in experiment.specs if is_done else ("model", "data.0", "tokenize", "shard", "plan"):
        _seal(store, experiment, part)
    run = run_digest(experiment.specs["train"])
    _train(store.run_dir(run), STEPS - number)
    return store.lock_path(run)


def _seal(store: Store, experiment: Experiment, part: str) -> None:
    folder = store.sealed(experiment.ref(part))
    if (folder / MANIFEST_NAME).exists():
        return
    folder.mkdir(parents=True)
    write_json(folder / "plan.json", {"batch": {"steps": STEPS}})
    write_json(
        folder / "summary.json",
        {"steps": STEPS, "final_loss": 2.1, "tokens": 8e7, "train_s": 9e3, "attempts": 1},
    )
    spec = experiment.specs[part]
    write_manifest(
        folder, Manifest(stage=spec.stage, digest=spec.digest, spec=spec.to_json(), files={})
    )


def _train(run_dir: Path, steps: int) -> None:
    """What `steps` steps leave, a saving every five of them."""
    run_dir.mkdir(parents=True)
    log = EventLog(run_dir / "events.jsonl", attempt=1)
    log.emit("run.launched", ranks=8, launcher="srun")
    log.emit("run.start", world_size=8, last_step=STEPS)
    saved = {
        "at": time.time(),
        "monotonic_s": 1.0,
        "event": "checkpoint.saved",
        "attempt": 1,
        "bytes": 12_600_000,
    }
    with (run_dir / "events.jsonl").open("a") as file:
        file.writelines(
            json.dumps({**saved, "step": 5 * number, "wait_s": 0.1}) + "\n"
            for number in range(EVENTS)
        )
    with (run_dir / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(_row(step)) + "\n" for step in range(1, steps + 1))
    for step in (steps - 10, steps - 5):
        folder = run_dir / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / MANIFEST_NAME).write_text("{}")


def _row(step: int) -> dict[str, object]:
    return {
        "step": step, "epoch": 0, "loss": 2.34567891234, "lr": 1.2345e-5, "grad_norm": 0.4567891234, "tokens": 7950,
        "supervised_tokens": 5130, "step_s": 0.412345, "forward_s": 0.123456, "backward_s": 0.234567,
        "exchange_s": 0.012345, "update_s": 0.012345, "checkpoint_wait_s": 0.0, "elapsed_s": round(0.43 * step, 3),
        "attempt": 1, "tokens_per_s": 19400.1, "supervised_tokens_per_s": 12345.6, "data_wait_s": 0.000123,
        "peak_memory_bytes": 61_200_000_000, "reserved_memory_bytes": 65_000_000_000, "mfu": 0.4321,
        "mfu_full_attention": 0.4567, "sent_bytes": 123_456_789, "gpu_power_w": 650.1, "gpu_utilization": 0.98,
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.status", description=__doc__)
    parser.add_argument("--experiments", type=int, default=100)
    run(parser.parse_args().experiments)
