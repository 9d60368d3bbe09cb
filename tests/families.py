"""A tiny model of each family with each published template, and all stages of its training."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipeline_lib.config.compile import open_experiment, run_digest
from pipeline_lib.core.files import read_json
from pipeline_lib.core.run_folder import EVENTS_NAME, PLAN_NAME, SUMMARY_NAME
from pipeline_lib.core.stage import Job, StageFunction, run_stage
from pipeline_lib.core.store import Store
from pipeline_lib.data import download, shard, tokenize
from pipeline_lib.evaluate import stage as evaluate
from pipeline_lib.export import merge
from pipeline_lib.plan import stage as plan
from pipeline_lib.records.plan import read_plan
from pipeline_lib.report import stage as report
from pipeline_lib.train.rank import RankJob, train_rank
from tests.data.chats import TEMPLATES, TEXT_ONLY, set_template
from tests.tiny import tiny_model
from tests.train.loading import multimodal

VOCAB = 576  # that of the tokenizer, and room for the tokens of further templates
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
}
_EXPERTS: dict[str, Any] = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
FAMILIES: Mapping[str, Callable[[], PreTrainedModel]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen2.5": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **_EXPERTS)),
    "qwen3.5": lambda: multimodal({**SIZES, "head_dim": 8}),
    "qwen3.5-moe": lambda: multimodal({**SIZES, "head_dim": 8}, has_experts=True),
}
TRAINING = {"precision": "fp32", "global_batch_tokens": 512, "max_steps": 3, "strategy": "ddp"}
PROMPTS = ["What is number 3?"]
METHODS = {
    "full": {"method": "full", "lr": 1.0e-2},
    "lora": {"method": "lora", "lr": 2.0e-2, "lora": {"rank": 4, "alpha": 16}},
    "muon": {"method": "full", "lr": 1.0e-2, "optimizer": "muon"},
}
STAGES: Mapping[str, StageFunction] = {
    **{"download": download.run, "tokenize": tokenize.run, "shard": shard.run, "plan": plan.run},
    **{"merge": merge.run, "evaluate": evaluate.run, "report": report.run},
}
ROWS = 40


def write_family(folder: Path, family: str, template: str) -> Path:
    """Write a tiny model of `family` to `folder`, with the demo's tokenizer and `template`."""
    shutil.copytree(tiny_model(), folder)
    torch.manual_seed(0)
    (folder / "config.json").unlink()
    FAMILIES[family]().save_pretrained(folder)
    set_template(folder, TEMPLATES[template])
    return folder


def write_rows(path: Path, template: str) -> Path:
    """Write rows a model with `template` can learn: thinking if it opens a block, else not."""
    rows: list[dict[str, Any]] = []
    for number in range(ROWS):
        answer: dict[str, Any] = {"role": "assistant", "content": f"It is {number}."}
        if template == "thinking-2507":
            answer["reasoning_content"] = f"Count to {number}."
        if template in TEXT_ONLY:
            rows.append({"text": f"Number {number} follows number {number - 1}."})
        else:
            rows.append(
                {"messages": [{"role": "user", "content": f"What is number {number}?"}, answer]}
            )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_family(
    environ: Mapping[str, str], root: Path, base: Path, template: str, method: str
) -> Path:
    """Run all stages for the model in `base`; return the folder of the merged model.

    This process is the one rank.
    """
    rows = write_rows(root / "rows.jsonl", template)
    config = {
        "experiment": "family",
        "model": {"source": "local", "path": str(base)},
        "data": {"train": [{"source": "file", "path": str(rows)}], "validation_fraction": 0.2},
        "tokenize": {"max_tokens": 128},
        "shard": {"block_tokens": 128, "shards": 1},
        "cluster": {"gpus_per_node": 0, "cpu_ranks": 1},
        "train": {**TRAINING, **METHODS[method]},
        "evaluate": {"generations": 1, "max_new_tokens": 4, "prompts": PROMPTS},
    }
    path = root / "config.yaml"
    path.write_text(json.dumps(config))
    store = Store(root / "store")
    experiment = open_experiment(path, store)
    store.write_specs(experiment.specs.values())
    functions: dict[str, StageFunction] = {
        **STAGES,
        "train": partial(_train, store.sealed(experiment.ref("plan")), environ),
    }
    for spec in experiment.specs.values():
        lock = run_digest(spec) if spec.stage == "train" else None
        run_stage(functions[spec.stage], spec, store, print, lock_digest=lock)
    return store.sealed(experiment.ref("merge"))


def _train(plan_dir: Path, environ: Mapping[str, str], job: Job) -> dict[str, Any]:
    """Be the rank that the launcher would start, and keep what it keeps."""
    found = read_plan(plan_dir / PLAN_NAME)
    rank = RankJob(job.spec, job.store, found, job.out, attempt=1, lock=job.lock, resume_from=None)
    train_rank(rank, environ, job.say)
    shutil.copyfile(plan_dir / PLAN_NAME, job.out / PLAN_NAME)
    shutil.copyfile(rank.run_dir / EVENTS_NAME, job.out / EVENTS_NAME)
    return dict(read_json(job.out / SUMMARY_NAME))
