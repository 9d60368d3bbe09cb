"""Keys that are each right and impossible together: all are refused, at the key to change, with what is legal."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.checks import OFFLOADS, cross_check
from pipeline_lib.config.schema import Config
from pipeline_lib.config.strict_yaml import dotted

BASE = {"experiment": "demo", "model": {"source": "tiny"}, "data": {"train": [{"source": "pydoc"}]}}
FOUR = {"cpu_ranks": 4}
OTHERS = "train.strategy may be ddp, fsdp, hsdp, zero1 or zero2"
FEW = "it takes several replicas of several ranks"


def problems(train: dict[str, Any], cluster: dict[str, Any] | None = None) -> list[str]:
    config = Config.model_validate_json(json.dumps({**BASE, "train": train, "cluster": cluster or {}}))
    return [f"{dotted(keys)}: {text}" for keys, text in cross_check(config)]


# Keys of train, of cluster, and the one problem.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "zero3 and compile": (
        {"strategy": "zero3", "compile": True},
        {},
        f"train.compile: not with train.strategy zero3, which changes weights within layers; {OTHERS}",
    ),
    "ddp and layers that stay gathered": (
        {"strategy": "ddp", "reshard": False},
        {},
        "train.reshard_after_forward: nothing is gathered by train.strategy ddp; train.strategy may be fsdp or hsdp",
    ),
    "hsdp on one machine": (
        {"strategy": "hsdp"},
        {"cpu_ranks": 8},
        f"train.strategy: hsdp with replicas of 8 of the 8 ranks; {FEW}; train.shard_ranks may be 2 or 4",
    ),
    "hsdp that shards nothing": (
        {"strategy": "hsdp", "shard_ranks": 1},
        FOUR,
        f"train.shard_ranks: hsdp with replicas of 1 of the 4 ranks; {FEW}; train.shard_ranks may be 2",
    ),
    "hsdp that replicates nothing": (
        {"strategy": "hsdp", "shard_ranks": 4},
        FOUR,
        f"train.shard_ranks: hsdp with replicas of 4 of the 4 ranks; {FEW}; train.shard_ranks may be 2",
    ),
    "hsdp that does not divide": (
        {"strategy": "hsdp", "shard_ranks": 5, "global_batch_tokens": 12 * 1024},
        {"gpus_per_node": 12},
        f"train.shard_ranks: hsdp with replicas of 5 of the 12 ranks; {FEW}; train.shard_ranks may be 2, 3, 4 or 6",
    ),
    "hsdp on too few ranks": (
        {"strategy": "hsdp", "shard_ranks": 2},
        {},
        f"train.shard_ranks: hsdp with replicas of 2 of the 2 ranks; {FEW}; set train.strategy: fsdp or ddp",
    ),
    "auto with replicas that do not divide": (
        {"strategy": "auto", "shard_ranks": 3},
        {"cpu_ranks": 4},
        f"train.shard_ranks: hsdp with replicas of 3 of the 4 ranks; {FEW}; train.shard_ranks may be 2",
    ),
    "auto with replicas on too few ranks": (
        {"strategy": "auto", "shard_ranks": 2},
        {},
        f"train.shard_ranks: hsdp with replicas of 2 of the 2 ranks; {FEW}; remove it",
    ),
    "shard_ranks": (
        {"strategy": "fsdp", "shard_ranks": 2},
        {},
        "train.shard_ranks: belongs to train.strategy hsdp, and it is fsdp; remove it",
    ),
    "unit_layers": (
        {"strategy": "ddp", "unit_layers": 2},
        {},
        "train.unit_layers: nothing is gathered by train.strategy ddp; train.strategy may be fsdp or hsdp",
    ),
    "offload of ddp": (
        {"offload": "optimizer"},
        {},
        "train.offload: optimizer is not what train.strategy ddp can keep in host memory; it may be none",
    ),
    "offload of fsdp": (
        {"strategy": "fsdp", "offload": "optimizer"},
        {},
        "train.offload: optimizer is not what train.strategy fsdp can keep in host memory; "
        "it may be none or optimizer+params",
    ),
    "offload of zero2": (
        {"strategy": "zero2", "offload": "optimizer+params"},
        {},
        "train.offload: optimizer+params is not what train.strategy zero2 can keep in host memory; "
        "it may be none or optimizer",
    ),
    "deepspeed_json": (
        {"strategy": "fsdp", "deepspeed_json": "mine.json"},
        {},
        "train.deepspeed_json: train.strategy fsdp is not DeepSpeed's; train.strategy may be zero1, zero2 or zero3",
    ),
    "compression of fsdp": (
        {"strategy": "fsdp", "gradient_compression": "bf16"},
        {},
        "train.gradient_compression: not with train.strategy fsdp; train.strategy may be ddp",
    ),
    "local SGD of zero1": (
        {"strategy": "zero1", "local_sgd_steps": 4},
        {},
        "train.local_sgd_steps: not with train.strategy zero1; train.strategy may be ddp",
    ),
    "compression and local SGD": (
        {"gradient_compression": "powersgd", "local_sgd_steps": 4},
        {},
        "train.gradient_compression: ranks exchange no gradients with train.local_sgd_steps 4; keep one of them",
    ),
    "compression of fp16": (
        {"gradient_compression": "powersgd", "precision": "fp16"},
        {},
        "train.gradient_compression: not with train.precision fp16, whose overflows it would keep; "
        "it may be bf16 or fp32",
    ),
    "local SGD of fp16": (
        {"local_sgd_steps": 4, "precision": "fp16"},
        {},
        "train.local_sgd_steps: not with train.precision fp16, whose overflows it would keep; it may be bf16 or fp32",
    ),
    "powersgd_rank": (
        {"powersgd_rank": 8},
        {},
        "train.powersgd_rank: has a value, and train.gradient_compression is not 'powersgd'; remove it",
    ),
    "saves between averages": (
        {"local_sgd_steps": 8},
        {},
        "train.save_every_steps: 100 is not a multiple of train.local_sgd_steps (8); try 104",
    ),
    "an end between averages": (
        {"local_sgd_steps": 4, "until_step": 50},
        {},
        "train.until_step: 50 is not a multiple of train.local_sgd_steps (4), and would change the result; try 52",
    ),
    "fp16 of zero on CPUs": (
        {"strategy": "zero2", "precision": "fp16"},
        {},
        "train.precision: DeepSpeed has no fp16 on CPUs, and train.strategy is zero2; it may be bf16 or fp32",
    ),
    "fp8 on CPUs": (
        {"precision": "fp8"},
        {},
        "train.precision: fp8 is for full fine-tuning on GPUs, and not for DeepSpeed; it may be bf16",
    ),
    "fp8 of adapters": (
        {"precision": "fp8", "method": "lora"},
        {"gpus_per_node": 8},
        "train.precision: fp8 is for full fine-tuning on GPUs, and not for DeepSpeed; it may be bf16",
    ),
    "8 bits of zero": (
        {"strategy": "zero2", "optimizer": "adamw_8bit"},
        {},
        "train.optimizer: adamw_8bit is not for DeepSpeed, nor for train.offload; it may be adamw",
    ),
    "8 bits on the host": (
        {"strategy": "fsdp", "optimizer": "adamw_8bit", "offload": "optimizer+params"},
        {},
        "train.optimizer: adamw_8bit is not for DeepSpeed, nor for train.offload; it may be adamw",
    ),
    "two warm-ups": (
        {"warmup_steps": 10, "warmup_fraction": 0.1},
        {},
        "train.warmup_steps: given beside train.warmup_fraction; keep one of them",
    ),
    "decay without wsd": (
        {"decay_fraction": 0.2},
        {},
        "train.decay_fraction: has a value, and train.lr_schedule is not 'wsd'; remove it",
    ),
    "warm-up and decay of more than all": (
        {"lr_schedule": "wsd", "warmup_fraction": 0.5, "decay_fraction": 0.6},
        {},
        "train.decay_fraction: with train.warmup_fraction (0.5) that is more than all steps; lower one of them",
    ),
    "early stop without validation": (
        {"early_stop_validations": 3},
        {},
        "train.early_stop_validations: goes by validations, and there are none; set train.validate_every_steps",
    ),
    "best without validation": (
        {"keep_best": True},
        {},
        "train.keep_best: goes by validations, and there are none; set train.validate_every_steps",
    ),
    "DoRA under zero3": (
        {"strategy": "zero3", "method": "lora", "lora": {"dora": True}},
        {},
        f"train.lora.dora: not with train.strategy zero3, which hides the matrix; {OTHERS}",
    ),
    "several nodes without a network": (
        {},
        {"nodes": 2},
        "cluster.internode_gbit_s: missing, and cluster.nodes is 2: what a node sends to another decides the plan; "
        "give what `python -m pipeline_lib doctor --profile slurm CONFIG` or iperf3 measures, in Gbit/s",
    ),
    "auto without a GPU's name": (
        {"strategy": "auto"},
        {"gpus_per_node": 2},
        "cluster.gpu: missing, and train.strategy is auto, which goes by the GPU's memory and speed; "
        "name the GPU as `h200` or `a100 80gb`, or set cluster.measured",
    ),
    "compression under auto": (
        {"strategy": "auto", "gradient_compression": "bf16"},
        {},
        "train.gradient_compression: train.strategy auto does not choose with it given; name the strategy (ddp) or "
        "remove it",
    ),
    "local SGD under auto": (
        {"strategy": "auto", "local_sgd_steps": 4},
        {},
        "train.local_sgd_steps: train.strategy auto does not choose with it given; name the strategy (ddp) or remove "
        "it",
    ),
    "units of layers under auto": (
        {"strategy": "auto", "unit_layers": 2},
        {},
        "train.unit_layers: train.strategy auto does not choose with it given; name the strategy (fsdp or hsdp) or "
        "remove it",
    ),
    "freeze beside lora": (
        {"method": "lora", "freeze": ["model.norm.*"]},
        {},
        "train.freeze: train.method is 'lora', which freezes every weight of the model; "
        "remove it, or choose train.lora.targets",
    ),
}


@pytest.mark.parametrize(("train", "cluster", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_impossible_together_is_refused(train: dict[str, Any], cluster: dict[str, Any], said: str) -> None:
    assert problems(train, cluster) == [said]


# The same keys where they are possible.
ALLOWED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "compile": ({"strategy": "zero2", "compile": True}, {}),
    "hsdp": ({"strategy": "hsdp", "shard_ranks": 2, "unit_layers": 4, "offload": "optimizer+params"}, FOUR),
    "powersgd": ({"gradient_compression": "powersgd", "powersgd_rank": 8}, {}),
    "local SGD": ({"local_sgd_steps": 4}, {}),
    "fp16 on CPUs": ({"strategy": "fsdp", "precision": "fp16"}, {}),
    "fp16 of zero on GPUs": ({"strategy": "zero3", "precision": "fp16"}, {"gpus_per_node": 2}),
    "8 bits": ({"strategy": "fsdp", "optimizer": "adamw_8bit"}, {}),
    "wsd": ({"lr_schedule": "wsd", "warmup_steps": 10, "decay_fraction": 0.9}, {}),
    "the best": ({"keep_best": True, "early_stop_validations": 3, "validate_every_steps": 5}, {}),
    "DoRA": ({"method": "lora", "lora": {"dora": True}, "strategy": "zero2"}, {}),
    "freeze": ({"freeze": ["model.layers.[0-3].*"]}, {}),
    "auto": ({"strategy": "auto", "shard_ranks": 2}, {"gpus_per_node": 4, "gpu": "h200"}),
    "auto with an offload": ({"strategy": "auto", "offload": "optimizer"}, {"gpus_per_node": 4, "gpu": "h200"}),
    "auto on CPUs": ({"strategy": "auto"}, {}),
    "auto by measurements": ({"strategy": "auto"}, {"gpus_per_node": 4, "measured": "cluster.json"}),
    "several nodes": ({}, {"nodes": 2, "internode_gbit_s": 9.0}),
    "several nodes that were measured": ({}, {"nodes": 2, "measured": "cluster.json"}),
    "profile on CPUs": ({"profile_every_steps": 5}, {}),
}


@pytest.mark.parametrize(("train", "cluster"), ALLOWED.values(), ids=ALLOWED)
def test_what_is_possible_is_not(train: dict[str, Any], cluster: dict[str, Any]) -> None:
    assert problems(train, cluster) == []


def test_a_deepspeed_json_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    settings = {"strategy": "zero1", "deepspeed_json": str(path)}
    [missing] = problems(settings)
    assert missing.startswith(f"train.deepspeed_json: {path}: cannot be read as JSON (")
    assert "No such file" in missing
    path.write_text('{"steps_per_print": 5}')
    assert problems(settings) == []
    [of_auto] = problems({**settings, "strategy": "auto"})
    assert of_auto.endswith("does not choose with it given; name the strategy (zero1, zero2 or zero3) or remove it")


def test_thinking_that_is_not_trained_on_leaves_the_default_prompt_alone() -> None:
    both = {"thinking": "mask", "prompt_thinking": "on"}
    [(keys, text)] = cross_check(Config.model_validate_json(json.dumps({**BASE, "tokenize": both})))
    assert keys == ("tokenize", "prompt_thinking")
    assert text.endswith("set it to off, or tokenize.thinking to keep or strip")
    for key in both:
        alone = {**BASE, "tokenize": {key: both[key]}}
        assert cross_check(Config.model_validate_json(json.dumps(alone))) == []


def test_products_in_fp8_take_blocks_of_whole_tiles() -> None:
    given = {"train": {"precision": "fp8", "global_batch_tokens": 64_000}, "cluster": {"gpus_per_node": 1}}
    for tokens, said in (
        (1000, "products in fp8 come in tiles of 16 tokens, and blocks have 1000; try 1008"),
        (640, ""),
    ):
        sizes = {"shard": {"block_tokens": tokens}, "tokenize": {"max_tokens": 512}}
        config = Config.model_validate_json(json.dumps({**BASE, **given, **sizes}))
        expected = [f"shard.block_tokens: {said}"] if said else []
        assert [f"{dotted(keys)}: {text}" for keys, text in cross_check(config)] == expected


@pytest.mark.parametrize("strategy", OFFLOADS)
def test_every_offload_that_is_named_as_legal_is(strategy: str) -> None:
    cluster, shard_ranks = (FOUR, 2) if strategy == "hsdp" else ({}, None)
    for offload in OFFLOADS[strategy]:
        assert problems({"strategy": strategy, "offload": offload, "shard_ranks": shard_ranks}, cluster) == []


def test_all_are_told_at_once() -> None:
    found = problems({"strategy": "zero3", "compile": True, "keep_best": True, "unit_layers": 2, "local_sgd_steps": 4})
    assert [text.partition(":")[0] for text in found] == [
        "train.unit_layers",
        "train.compile",
        "train.local_sgd_steps",
        "train.keep_best",
    ]
