"""Stores of many finished experiments that share data, made at once: not computed, all sealed."""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.config.compile import Experiment, compile_config, run_digest
from pipeline_lib.config.content import Content
from pipeline_lib.config.load import load_config
from pipeline_lib.core.events import EventLog
from pipeline_lib.core.files import canonical_json, sha256_file
from pipeline_lib.core.store import (
    MANIFEST_NAME,
    InputEntry,
    Manifest,
    Ref,
    Spec,
    Store,
    describe_files,
)
from tests.complete import training_json

CONFIG = """\
experiment: {name}
model: {{source: tiny, vocab_tokens: 512, hidden_size: 32, layers: 2}}
data: {{train: [{{source: pydoc, max_rows: 400}}, {{source: pydoc, max_rows: 200}}], validation_fraction: 0.1}}
tokenize: {{max_tokens: 128, max_dropped_fraction: 0.2}}
shard: {{block_tokens: 128, shards: 2}}
train: {{precision: fp32, global_batch_tokens: 2048, micro_batch_blocks: 2, epochs: 2, lr: {lr}, save_every_steps: 3}}
"""
LONG_AGO_S = 86400.0
STEPS = 40


@dataclass(frozen=True)
class Shop:
    """A store in `folder`, all of it a day old, so that nothing looks as if in work."""

    folder: Path
    name: str = "store"

    @property
    def store(self) -> Store:
        return Store(self.folder / self.name)

    def experiment(self, name: str, lr: float = 1e-3, content: Content | None = None) -> Experiment:
        """Compiled, and nothing written but its config."""
        path = self.folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CONFIG.format(name=name, lr=lr))
        return compile_config(load_config(path), content or Content({}, ({}, {})))

    def variants(self, names: Iterable[str]) -> list[Experiment]:
        """Experiments that differ in name and learning rate, from a config file read once."""
        first = self.experiment("first").config
        made = []
        for number, name in enumerate(names):
            train = first.train.model_copy(update={"lr": 1e-6 * (number + 1)})
            config = first.model_copy(update={"experiment": name, "train": train})
            made.append(compile_config(config, Content({}, ({}, {}))))
        return made

    def finished(self, *names: str) -> list[Experiment]:
        """The same, all frozen, sealed and trained."""
        made = self.variants(names)
        for experiment in made:
            self.add(experiment)
            self.train(experiment)
        return made

    def add(self, experiment: Experiment, *parts: str, age_s: float = LONG_AGO_S) -> Path:
        """Freeze it, and seal `parts` of it, all without any; returns the frozen file."""
        for part in parts or experiment.specs:
            self.seal(experiment.specs[part], age_s)
        for spec in experiment.specs.values():
            self.write(self.store.spec_path(spec.digest), canonical_json(spec.to_json()), age_s)
        frozen = {
            "config": experiment.config.model_dump(mode="json"),
            "parts": {part: spec.digest for part, spec in experiment.specs.items()},
        }
        name = f"{experiment.specs['report'].digest[:8]}{experiment.specs['train'].digest[:8]}.json"
        return self.write(self.store.root / "experiments" / name, json.dumps(frozen), age_s)

    def seal(self, spec: Spec, age_s: float = LONG_AGO_S) -> Path:
        """The sealed directory of `spec` with two small files, and its pointer."""
        folder = self.store.sealed(spec.ref)
        if folder.exists():
            return folder
        folder.mkdir(parents=True)
        name = "report.html" if spec.stage == "report" else "content.txt"
        (folder / name).write_text(f"what {spec.stage} {spec.digest} made\n" * 20)
        summary = training_json(steps=STEPS, final_loss=2.5)
        (folder / "summary.json").write_text(json.dumps(summary))
        manifest = Manifest(
            stage=spec.stage,
            digest=spec.digest,
            spec={**spec.to_json(), "where": {}},
            inputs={name: self.entry(ref) for name, ref in spec.inputs.items()},
            files=describe_files(folder),
            started_at="2026-01-01T00:00:00+00:00",
        )
        path = self.write(folder / MANIFEST_NAME, manifest.model_dump_json(indent=2), age_s)
        self.write(self.store.pointer(spec.ref), sha256_file(path) + "\n", age_s)
        self.age(folder, age_s)
        return folder

    def entry(self, ref: Ref) -> InputEntry:
        """What is recorded of an input; one that was never made has a hash that nothing has."""
        path = self.store.sealed(ref) / MANIFEST_NAME
        return InputEntry(
            stage=ref.stage,
            digest=ref.digest,
            manifest_sha256=sha256_file(path) if path.exists() else "0" * 64,
        )

    def train(self, experiment: Experiment, rows: int = 10, age_s: float = LONG_AGO_S) -> Path:
        """A run folder with events, metrics and a sealed checkpoint."""
        spec = experiment.specs["train"]
        folder = self.store.run_dir(run_digest(spec))
        step = folder / "checkpoints" / f"step-{rows:08d}"
        step.mkdir(parents=True)
        (step / "state.json").write_text(json.dumps({"step": rows}))
        manifest = Manifest(
            stage="checkpoint", digest=folder.name, spec=spec.to_json(), files=describe_files(step)
        )
        (step / MANIFEST_NAME).write_text(manifest.model_dump_json())
        EventLog(folder / "events.jsonl").emit("run.launched", attempt=1)
        metrics = (
            json.dumps({"step": row, "loss": 3.0, "attempt": 1}) for row in range(1, rows + 1)
        )
        (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in metrics))
        for path in folder.rglob("*"):
            self.age(path, age_s)
        self.age(folder, age_s)
        return folder

    def write(self, path: Path, text: str, age_s: float) -> Path:
        """A file of that age, written plainly: nobody reads it yet and it may be lost."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self.age(path, age_s)
        return path

    def age(self, path: Path, age_s: float) -> None:
        """Let the file or folder at `path` be `age_s` old."""
        at = time.time() - age_s
        os.utime(path, (at, at))


def large_store(folder: Path, experiments: int) -> Shop:
    """That many finished experiments, `run-0` and so on: ten directories each, five shared."""
    shop = Shop(folder)
    shop.finished(*(f"run-{number}" for number in range(experiments)))
    return shop
