"""Model folders with all that made them, sealed by the harness around pretended stages."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline_lib.config.compile import Experiment, compile_config
from pipeline_lib.config.content import Content
from pipeline_lib.config.schema import Config
from pipeline_lib.config.section import read_settings
from pipeline_lib.config.train import Train
from pipeline_lib.core.files import sha256_text, write_json, write_jsonl, write_text
from pipeline_lib.core.stage import Job, run_stage
from pipeline_lib.core.store import Store
from pipeline_lib.export.card import model_card
from pipeline_lib.lineage.record import LINEAGE_NAME, lineage_of
from tests.complete import parity, training

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_MODEL = {"source": "modelscope", "name": "Qwen/Qwen3-8B", "revision": COMMIT}
PARTS = ("model", "data.0", "tokenize", "shard", "train", "merge")
ROWS = "a row\n"
LAUNCHED = {"event": "run.launched", "ranks": 2, "launcher": "srun"}
EVENTS: list[dict[str, Any]] = [
    {**LAUNCHED, "attempt": 1, "job": 7, "nodes": ["n1", "n2"]},
    {
        "event": "run.interrupted",
        "attempt": 1,
        "reason": "no room in /home/alice/runs/4711/checkpoints: stopped",
    },
    {**LAUNCHED, "attempt": 2, "job": 8, "nodes": ["n1", "n3"]},
    {"event": "run.resumed", "attempt": 2, "step": 50},
    {"event": "run.end", "attempt": 2, "step": 118},
]


def experiment_from(
    model: Mapping[str, Any],
    hashes: Mapping[str, str],
    data_file: str = "chats.jsonl",
    tokenize: Mapping[str, Any] = {},  # noqa: B006 - nobody changes it
) -> Experiment:
    """A compiled experiment that tunes `model`, whose files have `hashes`, on one file."""
    config = {
        "experiment": "made",
        "model": model,
        "data": {"train": [{"source": "file", "path": "/home/alice/secret-project/*.jsonl"}]},
        "tokenize": {"max_tokens": 256, **tokenize},
        "shard": {"block_tokens": 256},
        "cluster": {"cpu_ranks": 2},
        "train": {"global_batch_tokens": 8192, "lr": 3e-3},
    }
    content = Content(model=dict(hashes), data=({data_file: sha256_text(ROWS)},))
    return compile_config(Config.model_validate_json(json.dumps(config)), content)


def seal_model(
    store: Store,
    model: Mapping[str, Any] = HUB_MODEL,
    hashes: Mapping[str, str] | None = None,
    data_file: str = "chats.jsonl",
    events: list[dict[str, Any]] = EVENTS,
    prompts: Mapping[str, Any] = {},  # noqa: B006 - nobody changes it
    tokenize: Mapping[str, Any] = {},  # noqa: B006
    folders: Mapping[str, Path] = {},  # noqa: B006
) -> Path:
    """Seal every stage up to a merge; its folder. Base models of another content are other models.

    `folders` have the files of real models, for `model` and `merge`.
    """
    experiment = experiment_from(model, hashes or {}, data_file, tokenize)
    files = {
        "model": {"config.json": '{"model_type": "qwen3"}', "model.safetensors": f"base {model}"},
        "data.0": {data_file: ROWS},
        "tokenize": {"tokens.npy": "tokens"},
        "shard": {"train/shard-00000.safetensors": "blocks"},
        "train": {"weights/model.safetensors": "trained"},
        "merge": {
            "config.json": '{"model_type": "qwen3"}',
            "model.safetensors": f"tuned {experiment.ref('train')}",
        },
    }
    if model["source"] == "local":
        files["model"] = {name: (Path(model["path"]) / name).read_text() for name in hashes or {}}
    store.write_specs(experiment.specs.values())
    for part in PARTS:
        spec = experiment.specs[part]

        def write(job: Job, part: str = part) -> dict[str, Any]:
            if part in folders:
                shutil.copytree(folders[part], job.out, dirs_exist_ok=True)
            else:
                for name, text in files[part].items():
                    write_text(job.out / name, text)
            if part == "train":
                write_jsonl(job.out / "events.jsonl", events)
            if part == "merge":
                tell_origin(job)
            return dict(prompts) if part == "tokenize" else {}

        run_stage(write, spec, store, lambda _: None, lock_note={"slurm_job": "7"})
    return store.sealed(experiment.ref("merge"))


def tell_origin(job: Job) -> None:
    """What merge.py does, without torch."""
    record = lineage_of(job.inputs, job.store, job.say)
    write_json(job.out / LINEAGE_NAME, record.model_dump(mode="json"))
    train = read_settings(Train, job.inputs["train"].manifest.spec["settings"])
    write_text(
        job.out / "README.md",
        model_card(job.spec.ref, "qwen3", train, training(), parity(), record, None),
    )
