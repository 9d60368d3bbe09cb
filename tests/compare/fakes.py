"""Experiments in a store as stages would leave them, made up but really sealed, to compare."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from pipeline_lib.compare.comparison import Comparison
from pipeline_lib.compare.subjects import select
from pipeline_lib.config.compile import Experiment, compile_config
from pipeline_lib.config.content import Content
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.schema import Config
from pipeline_lib.core.store import MANIFEST_NAME, Store
from tests.report.fakes import Files, World, realistic_files

DOCUMENTS = 287


@dataclass(frozen=True)
class Samples:
    """Held-out documents: how long each is, and how hard, in nats per token."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    hardness: np.ndarray[Any, np.dtype[np.float64]]
    names: list[str]

    @staticmethod
    def drawn(seed: int, count: int = DOCUMENTS, prefix: str = "document") -> "Samples":
        """Other documents for each seed and prefix."""
        random = np.random.default_rng(seed)
        tokens = random.integers(8, 120, count)
        hardness = 2.4 + 0.5 * random.normal(size=count)
        return Samples(tokens, hardness, [name_of(f"{prefix} {index}") for index in range(count)])

    def scores(self, shift: float, seed: int, noise: float = 0.05) -> list[dict[str, Any]]:
        """Those of a model that needs `shift` nats a token more, give or take `noise`.

        More than another model; the noise is by document.
        """
        own = noise * np.random.default_rng(seed).normal(size=len(self.tokens))
        tuned = (self.hardness + shift + own) * self.tokens
        base = 7.6 * self.tokens
        rows = zip(self.names, self.tokens.tolist(), base.tolist(), tuned.tolist(), strict=True)
        return [
            {"document": name, "tokens": count, "base": old, "tuned": new}
            for name, count, old, new in rows
        ]


def name_of(text: str) -> str:
    """A hash like those of documents."""
    return sha256(text.encode()).hexdigest()[:16]


def experiment(name: str, **changes: Mapping[str, Any]) -> Experiment:
    """One compiled, with no file behind it; `changes` by section."""
    config: dict[str, Any] = {
        "experiment": name,
        "model": {"source": "tiny"},
        "data": {"train": [{"source": "pydoc"}]},
        "tokenize": {"max_tokens": 256},
        "shard": {"block_tokens": 256},
        "cluster": {"cpu_ranks": 2},
        "train": {"global_batch_tokens": 8192, "epochs": 2, "lr": 3e-3, "precision": "fp32"},
    }
    for section, keys in changes.items():
        config[section] = {**config.get(section, {}), **keys}
    parsed = Config.model_validate_json(json.dumps(config))
    return compile_config(parsed, Content(model={}, data=({},) * len(parsed.data.sources)))


def evaluated(scores: list[dict[str, Any]], files: Files) -> None:
    """Put `scores` into `files`, with the metrics that follow from them, as evaluate does."""
    tokens = np.array([row["tokens"] for row in scores], np.int64)
    found = files["evaluate"]["metrics.json"]["eval"]
    for model in ("base", "tuned"):
        nats = np.array([row[model] for row in scores])
        mean = float(nats.sum() / tokens.sum())
        error = float(
            np.sqrt(((nats - mean * tokens) ** 2).sum() * len(nats) / (len(nats) - 1))
            / tokens.sum()
        )
        perplexity = float(np.exp(mean))
        found[model] |= {
            "loss": mean,
            "perplexity": perplexity,
            "standard_error": error,
            "documents": len(nats),
        }
    found |= {"samples": len(scores), "supervised_tokens": int(tokens.sum())}
    files["evaluate"]["scores.jsonl"] = scores


def curve(files: Files, seed: int, shift: float = 0.0) -> None:
    """Another course of the training, with losses on held-out blocks now and then."""
    random = np.random.default_rng(seed)
    for row in files["train"]["metrics.jsonl"]:
        row["loss"] += shift + 0.02 * float(random.normal())
        row["tokens_per_s"] *= 1 + 0.02 * seed
        if row["step"] % 20 == 0:
            row["validation_loss"] = row["loss"] + 0.08


def weights(files: Files, content: str) -> None:
    """An exported model with that content; a JSON file stands for weights."""
    files["merge"]["model.safetensors"] = {"weights": content}


def seal(store: Store, what: Experiment, files: Files, parts: Iterable[str] | None = None) -> World:
    """Freeze the experiment and seal its `parts`, by default all but the report.

    What is sealed already stays.
    """
    world = World(store, what, files)
    store.write_specs(spec for part, spec in what.specs.items() if part == "train")
    Dag((what,), store).freeze()
    for part in (part for part in what.specs if part != "report") if parts is None else parts:
        if not (world.folder(part) / MANIFEST_NAME).exists():
            world.seal(part)
    return world


def made(
    store: Store,
    name: str,
    shift: float = 0.0,
    seed: int = 0,
    samples: Samples | None = None,
    tokenizer: str | None = None,
    **changes: Any,
) -> World:
    """A finished experiment whose model needs `shift` nats a token more."""
    files = realistic_files()
    files["tokenize"]["ledger.json"]["sources"].pop()
    curve(files, seed, shift)
    evaluated((samples or Samples.drawn(0)).scores(shift, seed), files)
    weights(files, f"{name} {seed}")
    if tokenizer is not None:
        files["model"]["tokenizer.json"] = {"name": tokenizer}
    return seal(store, experiment(name, **changes), files)


def compared(store: Store, *names: str) -> Comparison:
    """What `compare` finds."""
    return Comparison.of(select(names, store))
