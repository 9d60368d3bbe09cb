"""Configs whose specs are pinned: a code change that changes one makes users train anew."""

from pathlib import Path
from typing import Any

from pipeline_lib.config.dag import Dag
from pipeline_lib.core.store import Store

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LOCAL = """\
experiment: pinned
model: {source: local, path: model}
data: {train: [{source: file, path: rows.jsonl, weight: 2.0}], validation_fraction: 0.1}
tokenize: {max_tokens: 256, train_on: last_assistant}
"""
_ONE_NODE = "cluster: {gpus_per_node: 8, gpu: h200, memory_gb: 1500}\n"
_TWO_NODES = "cluster: {nodes: 2, gpus_per_node: 4, gpu: a100 80gb, internode_gbit_s: 100}\n"
_HUB = f"""\
experiment: pinned-hub
model: {{source: modelscope, name: Qwen/Qwen3-8B, revision: {_COMMIT}}}
data:
  train: [{{source: huggingface, name: owner/rows, revision: {_COMMIT}, subset: zh, columns: {{output: answer}}}}]
"""
CONFIGS = {
    "ddp": f"{_LOCAL}train: {{strategy: ddp, precision: fp32, epochs: 2}}\n",
    "fsdp": f"{_LOCAL}{_ONE_NODE}train: {{strategy: fsdp, activation_checkpointing: full, "
    "reshard_after_forward: true}\n",
    "hsdp": f"{_LOCAL}{_TWO_NODES}train: {{strategy: hsdp, seed: 3}}\n",
    "zero1": f"{_LOCAL}{_ONE_NODE}train: {{strategy: zero1, weight_decay: 0.1}}\n",
    "zero2": f"{_LOCAL}{_ONE_NODE}train: {{strategy: zero2, offload: optimizer}}\n",
    "zero3": f"{_LOCAL}{_TWO_NODES}train: {{strategy: zero3, warmup_steps: 5}}\n",
    "lora": f"{_LOCAL}train: {{method: lora, lora: {{rank: 16, alpha: 32}}, lr: 1.0e-4}}\n",
    "hub": f"{_HUB}{_ONE_NODE}train: {{strategy: auto, lr: 2.0e-5}}\nevaluate: {{generations: "
    f"4}}\n",
    "sweep": f"{_LOCAL}sweep: {{train.lr: [1.0e-4, 2.0e-4], train.seed: [1, 2]}}\n",
    "halving": f"{_LOCAL}train: {{validate_every_steps: 4}}\n"
    "sweep: {train.lr: [1.0e-4, 2.0e-4], halving: {first_step: 4, keep: 0.5}}\n",
}


def write_inputs(folder: Path) -> None:
    """The local model and rows that the configs name; only their bytes count, nothing is loaded."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "qwen3"}\n')
    (folder / "model" / "generation_config.json").write_text('{"do_sample": false}\n')
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    (folder / "model" / "tokenizer.json").write_text("{}\n")
    (folder / "rows.jsonl").write_text('{"instruction": "q", "output": "a"}\n')


def specs_of(name: str, folder: Path) -> dict[str, Any]:
    """All that the config compiles to, in JSON: every experiment's specs by part, rungs' digests.

    The working directory must be `folder`, which is left out of what is told.
    """
    path = folder / f"{name}.yaml"
    path.write_text(CONFIGS[name])
    dag = Dag.open(path, Store(folder / "store"))
    return {
        "experiments": {
            one.name: {
                part: {"digest": spec.digest, **_without(str(folder), spec.to_json())}
                for part, spec in one.specs.items()
            }
            for one in dag.experiments
        },
        "rungs": [
            {
                "step": rung.step,
                "digest": rung.digest,
                "trainings": {whole: spec.digest for whole, spec in rung.trainings.items()},
            }
            for rung in dag.rungs
        ],
    }


def _without(folder: str, value: dict[str, Any]) -> dict[str, Any]:
    return {
        **value,
        "where": {key: place.replace(folder, "FOLDER") for key, place in value["where"].items()},
    }
