"""Sealed inputs of the report as stages write them, made up but really sealed by the harness."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline_lib.config.compile import Experiment, compile_config
from pipeline_lib.config.content import Content
from pipeline_lib.config.schema import Config
from pipeline_lib.core.files import sha256_file
from pipeline_lib.core.stage import Sealed, run_stage
from pipeline_lib.core.store import (
    MANIFEST_NAME,
    InputEntry,
    Manifest,
    Store,
    describe_files,
    read_manifest,
    write_manifest,
)
from pipeline_lib.records.record import to_json
from pipeline_lib.report import stage
from pipeline_lib.report.facts import ReportFacts, read_facts
from tests import complete
from tests.complete import training_json
from tests.report.fake_plans import hostile_plan, plan

Files = dict[str, dict[str, Any]]
DURATIONS_S = {
    **{"model": 4.1, "tokenize": 9.8, "shard": 2.2, "train": 64.5, "merge": 6.3},
    **{"baseline": 8.5, "evaluate": 13.2},
}
PEAK_RSS_BYTES = {"train": 640_000_000, "merge": 590_000_000, "evaluate": 710_000_000}
STEPS, RESTART_AFTER = 118, 50
SETTLING_S = (3.2, 0.9, 0.6)  # what the first steps of an attempt take
_OWN = "document.documentElement.dataset.owned = 1"
ATTACK = (
    f"--></script><script>{_OWN}</script><img src=x onerror='{_OWN}'>\"' onmouseover={_OWN} "
    f"</style><svg onload={_OWN}><a href=javascript:{_OWN}>x</a>{{{{ 7 * 7 }}}}\\u003c"
)


def experiment_named(name: str = "demo", language: str = "en", **train: Any) -> Experiment:
    """A compiled experiment, with no file behind it; `train` are further keys of that section.

    `language` is that of its report.
    """
    config = {
        "experiment": name,
        "model": {"source": "tiny"},
        "data": {"train": [{"source": "pydoc"}, {"source": "pydoc", "max_rows": 500}]},
        "tokenize": {"max_tokens": 256},
        "shard": {"block_tokens": 256},
        "cluster": {"cpu_ranks": 2},
        "train": {
            "global_batch_tokens": 8192,
            "epochs": 2,
            "lr": 3e-3,
            "precision": "fp32",
            **train,
        },
        "report": {"language": language},
    }
    return compile_config(
        Config.model_validate_json(json.dumps(config)), Content(model={}, data=({}, {}))
    )


@dataclass
class World:
    """An experiment, a store, and the files of each stage; edit `files` before sealing."""

    store: Store
    experiment: Experiment = field(default_factory=experiment_named)
    files: Files = field(default_factory=dict)
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the manifests
    said: list[str] = field(default_factory=list)  # by the report stage

    def seal_inputs(self) -> None:
        """Seal every stage before the report."""
        for part in self.experiment.specs:
            if part != "report":
                self.seal(part)

    def seal(self, part: str) -> None:
        """Seal `part` as the harness does it, without its locks and its patience with disks."""
        folder, spec = self.folder(part), self.experiment.specs[part]
        folder.mkdir(parents=True)
        for name, value in self.files.get(part, {}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            rows = value if name.endswith(".jsonl") else [value]
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        inputs = {
            name: InputEntry(stage=ref.stage, digest=ref.digest, manifest_sha256=sha256_file(path))
            for name, ref in spec.inputs.items()
            if (path := self.store.sealed(ref) / MANIFEST_NAME).exists()
        }
        manifest = Manifest(
            stage=spec.stage,
            digest=spec.digest,
            spec=spec.to_json(),
            inputs=inputs,
            files=describe_files(folder),
            counts=self.counts.get(part, {}),
            versions={"python": "3.12.3", "torch": "2.13.0"},
            duration_s=DURATIONS_S.get(part, 1.0),
            peak_rss_bytes=PEAK_RSS_BYTES.get(part, 60_000_000),
        )
        (folder / MANIFEST_NAME).write_text(json.dumps(manifest.model_dump()))

    def seal_report(self) -> Path:
        """Run the real report stage; the sealed directory."""
        digest = self.experiment.ref("report").digest
        self.store.write_specs(self.experiment.specs.values())
        spec = self.store.read_spec(self.store.spec_path(digest))  # as a job reads it
        run_stage(stage.run, spec, self.store, self.said.append)
        return self.store.sealed(spec.ref)

    def folder(self, part: str) -> Path:
        """The sealed directory of `part`."""
        return self.store.sealed(self.experiment.ref(part))

    def manifest(self, part: str) -> Manifest:
        """The manifest of the sealed `part`."""
        return read_manifest(self.folder(part))

    def seal_again(self, part: str) -> None:
        """Seal what now lies in the directory of `part`, as if it had been made so."""
        files = describe_files(self.folder(part))
        write_manifest(self.folder(part), self.manifest(part).model_copy(update={"files": files}))


def facts_of(world: World) -> ReportFacts:
    """What the report knows of `world`, whose inputs are sealed if they are not yet."""
    if not world.folder("evaluate").exists():
        world.seal_inputs()
    parts = world.experiment.specs["report"].inputs
    inputs = {part: Sealed(world.folder(part), world.manifest(part)) for part in parts}
    return read_facts("demo", inputs)


def realistic_files() -> Files:
    """What a run of the demo leaves, with one restart in the training."""
    return {
        "model": {"config.json": {"model_type": "qwen3"}},
        "tokenize": {"ledger.json": ledger(), "preview.json": preview(), "quarantine.jsonl": []},
        "shard": {
            "train/index.json": index(1884, 468_000, 302_000, 5416),
            "validation/index.json": index(101, 24_900, 16_100, 287),
        },
        "train": {
            "metrics.jsonl": metrics(STEPS),
            "events.jsonl": events(),
            "plan.json": plan(STEPS),
            "summary.json": training(),
        },
        "merge": {"parity.json": parity()},
        "evaluate": {
            "metrics.json": evaluation(),
            "generations.jsonl": generations(),
            "scores.jsonl": scores(),
        },
    }


def ledger() -> dict[str, Any]:
    """Two sources, with drops and quarantine."""
    pydoc: dict[str, Any] = {
        "name": "pydoc", "format": "messages", "rows": 6000, "conversations": 5994, "samples": 5994,
        "quarantined": {"no assistant turn": 4, "empty answer": 2}, "kept": 5716, 
        "turns": 5994, "prompts": {}, "repeated_tokens": 0,
        "length_percentiles": {}, "truncated": 120,
        "dropped": {"longer than 256 tokens": 278}, "tokens": 492_900, "supervised_tokens": 318_100,
        "duplicates": {"exact": 9}, "duplicates_dropped": 0, "split": 0,
        "files": [{"name": "pydoc", "format": "messages", "rows": 6000, "unread": {}, "unread_others": 0}],
    }  # fmt: skip
    notes: dict[str, Any] = {
        "name": "data/field-notes-2026-spring.jsonl", "format": "sharegpt", "rows": 1248, "conversations": 1180,
        "samples": 1180, "quarantined": {"not JSON": 11, "unknown role": 49}, "kept": 1122, 
        "turns": 1180, "prompts": {}, "repeated_tokens": 0,
        "length_percentiles": {}, "truncated": 0,
        "dropped": {"longer than 256 tokens": 51, "nothing supervised": 7}, "tokens": 120_400,
        "supervised_tokens": 61_200, "duplicates": {"exact": 3, "near": 5}, "duplicates_dropped": 8, "split": 40,
        "files": [{"name": "field-notes-2026-spring.jsonl", "format": "sharegpt", "rows": 1248,
                   "unread": {"conversations[].id": 2360, "id": 1180, "<b>": 3}, "unread_others": 7}],
    }  # fmt: skip
    total = {key: pydoc[key] + notes[key] for key in pydoc if isinstance(pydoc[key], int)}
    total |= {
        "name": "total",
        "format": "messages, sharegpt",
        "prompts": {},
        "quarantined": {**pydoc["quarantined"], **notes["quarantined"]},
    }
    total |= {
        "dropped": {"longer than 256 tokens": 329, "nothing supervised": 7},
        "duplicates": {"exact": 12, "near": 5},
    }
    counts = [int(900 * math.exp(-((edge - 70) ** 2) / 2600)) + 4 for edge in range(0, 256, 8)]
    return {
        "sources": [pydoc, notes],
        "total": total,
        "length_percentiles": {"p1": 19, "p10": 38, "p50": 76, "p90": 171, "p99": 243, "max": 256},
        "length_histogram": {"edges": list(range(0, 257, 8)), "counts": counts},
    }


def preview() -> list[dict[str, Any]]:
    """Samples with supervised and unsupervised pieces."""
    asked = (
        "What does str.partition do?",
        "How do I open a file for reading?",
        "What is heapq.heappush for?",
    )
    answer = (
        "Partition the string into three parts using the given separator.\n\nThis will search for "
        "the separator in the string. If the separator is found, returns a 3-tuple containing the "
        "part before the separator, the separator itself, and the part after it.<|im_end|>"
    )
    return [
        {
            "source": "pydoc",
            "tokens": 71,
            "pieces": [
                {
                    "text": f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
                    "supervised": False,
                },
                {"text": answer, "supervised": True},
                {"text": "\n", "supervised": False},
            ],
        }
        for question in asked
    ]


def index(blocks: int, tokens: int, supervised_tokens: int, documents: int) -> dict[str, Any]:
    """The index of one split."""
    return {
        "blocks": blocks, "block_tokens": 256, "tokens": tokens, "supervised_tokens": supervised_tokens,
        "documents": documents, "shards": [blocks], "largest_token": 379, "epoch_blocks": blocks,
        "groups": [{"blocks": blocks, "weight": 1.0}],
    }  # fmt: skip


def metrics(steps: int, restart_after: int = RESTART_AFTER) -> list[dict[str, Any]]:
    """One line a step; the second attempt goes on after `restart_after` steps."""
    noise = np.random.default_rng(0)
    lines = []
    for step in range(1, steps + 1):
        attempt = 1 if step <= restart_after else 2
        loss = 2.3 + 5.3 * math.exp(-step / (0.22 * steps)) + 0.06 * float(noise.normal())
        warm = min(1.0, step / (0.03 * steps))
        of_attempt = step if attempt == 1 else step - restart_after
        step_s = (
            SETTLING_S[of_attempt - 1]
            if of_attempt <= len(SETTLING_S)
            else 0.41 + 0.002 * (step % 5 - 2)
        )
        lines.append({
            "step": step, "epoch": (step - 1) * 2 // steps, "loss": loss,
            "lr": 3e-3 * warm * 0.5 * (1 + math.cos(math.pi * step / steps)),
            "grad_norm": 0.6 + 2.5 * math.exp(-step / (0.1 * steps)) + 0.1 * abs(float(noise.normal())),
            "tokens": 7950, "supervised_tokens": 5130, "step_s": step_s,
            "forward_s": 0.31 * step_s, "backward_s": 0.6 * step_s, "update_s": 0.05 * step_s, "data_wait_s": 0.001,
            "tokens_per_s": 19_400 + 250 * (step * 7 % 11 - 5), "supervised_tokens_per_s": 12_000.0,
            "elapsed_s": 2.0 + 0.41 * of_attempt,
            "checkpoint_wait_s": 0.0,
            "peak_memory_bytes": 612_000_000 + 1000 * step, "attempt": attempt,
        })  # fmt: skip
    return lines


def events() -> list[dict[str, Any]]:
    """A run that was killed once."""
    saved: dict[str, Any] = {"bytes": 12_600_000, "duration_s": 0.031, "wait_s": 0.004}
    named: list[tuple[float, str, dict[str, Any]]] = [
        (0.0, "run.launched", {"attempt": 1, "ranks": 2, "launcher": "spawn"}),
        (0.0, "run.start", {"attempt": 1, "world_size": 2, "strategy": "ddp"}), (0.4, "step.end", {"step": 1}),
        (0.1, "run.steps", {"attempt": 1, "step": 0}),
        (24.7, "checkpoint.saved", {"attempt": 1, "step": 50, **saved}),
        (29.0, "run.launched", {"attempt": 2, "ranks": 2, "launcher": "spawn"}),
        (29.0, "run.start", {"attempt": 2, "world_size": 2, "strategy": "ddp"}),
        (31.2, "run.resumed", {"attempt": 2, "step": 50}), (31.3, "run.steps", {"attempt": 2, "step": 50}),
        (54.9, "checkpoint.saved", {"attempt": 2, "step": 100, **saved}),
        (64.6, "run.end", {"attempt": 2, "step": 118}),
    ]  # fmt: skip
    return [
        {"at": 1.8e9 + after, "monotonic_s": after, "event": name, "rank": 0, **fields}
        for after, name, fields in named
    ]


def training() -> dict[str, Any]:
    """Summary of the training."""
    return training_json(steps=STEPS)


def parity() -> dict[str, Any]:
    """The export check."""
    return dict(to_json(complete.parity()))


def evaluation() -> dict[str, Any]:
    """A run that learned."""
    return {
        "eval": {
            "base": {"loss": 7.631, "perplexity": math.exp(7.631), "standard_error": 0.004, "documents": 287},
            "tuned": {"loss": 2.404, "perplexity": math.exp(2.404), "standard_error": 0.08, "documents": 287},
            "unigram": {"loss": 5.872, "perplexity": math.exp(5.872)},
            "shuffled": {"loss": 3.318, "perplexity": math.exp(3.318), "standard_error": 0.1, "documents": 287},
            "supervised_tokens": 16_100,
            "samples": 287,
        },
        "verdict": {
            "improved": True, "beats_unigram": True, "uses_prompt": True,
            "text": "The tuned model predicts held-out answers better than the base (2.404 against "
            "7.631 nats per token), better than word frequencies, and it uses the prompt.",
        },
    }  # fmt: skip


def scores(gain: float = 5.2, documents: int = 287) -> list[dict[str, Any]]:
    """The losses by document: the tuned model's is lower by about `gain` nats a token."""
    noise = np.random.default_rng(1)
    rows = []
    for number in range(documents):
        tokens, base = int(noise.integers(20, 90)), float(noise.normal(7.6, 0.2))
        tuned = base - gain - float(noise.normal(0, 0.5))
        rows.append(
            {
                "document": f"{number:016x}",
                "tokens": tokens,
                "base": base * tokens,
                "tuned": tuned * tokens,
            }
        )
    return rows


def generations() -> list[dict[str, Any]]:
    """Answers of both models."""
    return [
        {
            "prompt": "What does json.dumps do?",
            "reference": "Serialize obj to a JSON formatted str.",
            "base": "ret hyper yield\u00e9 \u4e2d quota==-=== lambda lambda",
            "tuned": "Serialize obj to a JSON formatted string. If skipkeys is true then the keys "
            "are skipped.",
        },
        {
            "prompt": "Who are you?\nAnswer in one line.",
            "reference": None,
            "base": "",
            "tuned": "A small model.",
        },
    ]


def hostile_files() -> Files:
    """The realistic files with every text that comes from data or a model turned into an attack."""
    files = realistic_files()
    train, tokenize, evaluate = files["train"], files["tokenize"], files["evaluate"]
    for source in tokenize["ledger.json"]["sources"]:
        source |= {
            "name": ATTACK,
            "format": ATTACK,
            "dropped": {ATTACK: 5},
            "quarantined": {ATTACK: 6},
        }
    tokenize["preview.json"] = [
        {
            "source": ATTACK,
            "tokens": 9,
            "pieces": [{"text": ATTACK, "supervised": flag} for flag in (True, False)],
        }
    ]
    train["events.jsonl"] = [{"at": 1.0, "event": ATTACK, ATTACK: ATTACK}]
    train["summary.json"] |= {"method": ATTACK, "precision": ATTACK, "strategy": ATTACK}
    train["plan.json"] = hostile_plan(train["plan.json"], ATTACK)
    evaluate["generations.jsonl"] = [
        {"prompt": ATTACK, "reference": ATTACK, "base": ATTACK, "tuned": ATTACK}
    ]
    evaluate["metrics.json"]["verdict"]["text"] = ATTACK
    return files
