"""Keys that are each right and impossible together: refused, at the key to change, with help.

All are refused, and what is legal is said.
"""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config import checks
from pipeline_lib.config.checks import cross_check
from pipeline_lib.config.schema import Config
from pipeline_lib.config.strategies import STRATEGIES
from pipeline_lib.config.strict_yaml import dotted

BASE = {"experiment": "demo", "model": {"source": "tiny"}, "data": {"train": [{"source": "pydoc"}]}}
FOUR = {"cpu_ranks": 4}
OF_EXPERTS = {"method": "lora", "lora": {"targets": ["experts.down_proj"]}}
NF4 = {"base": "nf4"}


def problems(train: dict[str, Any], cluster: dict[str, Any] | None = None) -> list[str]:
    config = Config.model_validate_json(
        json.dumps({**BASE, "train": train, "cluster": cluster or {}})
    )
    return [f"{dotted(keys)}: {text}" for keys, text in cross_check(config)]


# Keys of train, of cluster, the key of the one problem, and a pattern of its text, with the remedy.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (
        {"strategy": "zero3", "compile": True},
        {},
        "train.compile",
        "* may be ddp, fsdp, hsdp, zero1 or zero2",
    ),
    (
        {"strategy": "ddp", "reshard": False},
        {},
        "train.reshard_after_forward",
        "* may be fsdp or hsdp",
    ),
    (
        {"strategy": "hsdp"},
        {"cpu_ranks": 8},
        "train.strategy",
        "hsdp needs several * train.shard_ranks may be 2 or 4",
    ),
    (
        {"strategy": "hsdp", "shard_ranks": 1},
        FOUR,
        "train.shard_ranks",
        "hsdp needs * train.shard_ranks may be 2",
    ),
    (
        {"strategy": "hsdp", "shard_ranks": 4},
        FOUR,
        "train.shard_ranks",
        "hsdp needs * train.shard_ranks may be 2",
    ),
    (
        {"strategy": "hsdp", "shard_ranks": 5, "global_batch_tokens": 12288},
        {"gpus_per_node": 12},
        "train.shard_ranks",
        "* may be 2, 3, 4 or 6",
    ),
    (
        {"strategy": "hsdp", "shard_ranks": 2},
        {},
        "train.shard_ranks",
        "hsdp needs * set train.strategy: fsdp or ddp",
    ),
    (
        {"strategy": "auto", "shard_ranks": 3},
        FOUR,
        "train.shard_ranks",
        "hsdp needs * train.shard_ranks may be 2",
    ),
    (
        {"strategy": "auto", "shard_ranks": 2},
        {},
        "train.shard_ranks",
        "hsdp needs * replica of 2 and 2 ranks in all; remove it",
    ),
    (
        {"strategy": "fsdp", "shard_ranks": 2},
        {},
        "train.shard_ranks",
        "works only with * hsdp, * fsdp; remove it",
    ),
    (
        {"strategy": "ddp", "unit_layers": 2},
        {},
        "train.unit_layers",
        "has no effect * may be fsdp or hsdp",
    ),
    (
        {"offload": "optimizer"},
        {},
        "train.offload",
        "optimizer does not work with train.strategy: ddp; it may be none",
    ),
    (
        {"strategy": "fsdp", "offload": "optimizer"},
        {},
        "train.offload",
        "* may be none or optimizer+params",
    ),
    (
        {"strategy": "zero2", "offload": "optimizer+params"},
        {},
        "train.offload",
        "* may be none or optimizer",
    ),
    (
        {"offload_activations": True},
        {},
        "train.offload_activations",
        "has no effect without GPUs* remove it, or set *",
    ),
    (
        {"offload_activations": True, "recompute": "selective"},
        {"gpus_per_node": 1},
        "train.offload_activations",
        "works only with train.activation_checkpointing: full, but that is selective; set that, or "
        "remove one of them",
    ),
    (
        {"kept_attention_layers": 0, "recompute": "none"},
        {},
        "train.kept_attention_layers",
        "has no effect with train.activation_checkpointing: none; set that to full, or remove this "
        "key",
    ),
    (
        {"kept_attention_layers": 0},
        {},
        "train.kept_attention_layers",
        "has no effect, * up to 1,024 tokens * 16,384 *",
    ),
    (
        {"strategy": "zero1", "reshard": True},
        {},
        "train.reshard_after_forward",
        "has no effect * zero1; remove it",
    ),
    (
        {"lr_schedule": "constant", "min_lr_fraction": 0.1},
        {},
        "train.min_lr_fraction",
        "* 'constant'; remove it",
    ),
    (
        {"guards": {"max_skips": 10, "window_steps": 10}},
        {},
        "train.guards.max_skips",
        "10 steps cannot be exceeded within train.guards.window_steps (10), *; lower it",
    ),
    (
        {"context_ranks": 2, "gradient_compression": "powersgd"},
        FOUR,
        "train.context_ranks",
        "* remove one of them",
    ),
    (
        {"context_ranks": 3},
        FOUR,
        "train.context_ranks",
        "3 does not divide 4 ranks; it may be 1, 2 or 4",
    ),
    (
        {"context_ranks": 2, "strategy": "zero2"},
        FOUR,
        "train.context_ranks",
        "* zero2; * may be ddp, fsdp or hsdp",
    ),
    (
        {"context_ranks": 2, "local_sgd_steps": 4},
        FOUR,
        "train.context_ranks",
        "* makes updates alone; remove one *",
    ),
    (
        {"offload_activations": True, "strategy": "zero3"},
        {"gpus_per_node": 2},
        "train.offload_activations",
        "does not work with train.strategy: zero3; train.strategy may be ddp, fsdp or hsdp",
    ),
    (
        {"strategy": "fsdp", "deepspeed_json": "mine.json"},
        {},
        "train.deepspeed_json",
        "* may be zero1, zero2 or zero3",
    ),
    (
        {"strategy": "fsdp", "gradient_compression": "powersgd"},
        {},
        "train.gradient_compression",
        "* may be ddp, or this key bf16",
    ),
    (
        {"strategy": "zero1", "local_sgd_steps": 4},
        {},
        "train.local_sgd_steps",
        "does not work * may be ddp",
    ),
    (
        {"gradient_compression": "powersgd", "local_sgd_steps": 4},
        {},
        "train.gradient_compression",
        "* one of them",
    ),
    (
        {"gradient_compression": "powersgd", "precision": "fp16"},
        {},
        "train.gradient_compression",
        "* be bf16 or fp32",
    ),
    (
        {"local_sgd_steps": 4, "precision": "fp16"},
        {},
        "train.local_sgd_steps",
        "does not work * may be bf16 or fp32",
    ),
    (
        {"powersgd_rank": 8},
        {},
        "train.powersgd_rank",
        "has no effect, because * is not 'powersgd'; remove it",
    ),
    (
        {"local_sgd_steps": 8, "save_every_steps": 100, "guards": {"rollback_every_steps": 80}},
        {},
        "train.save_every_steps",
        "100 is not a multiple of train.local_sgd_steps * try 104",
    ),
    (
        {"local_sgd_steps": 8, "save_every_steps": 80},
        {},
        "train.guards.rollback_every_steps",
        "100 is not a multiple of train.local_sgd_steps * try 104",
    ),
    (
        {"local_sgd_steps": 4, "until_step": 50},
        {},
        "train.until_step",
        "50 is not a multiple of * try 52",
    ),
    (
        {"strategy": "zero2", "precision": "fp16"},
        {},
        "train.precision",
        "DeepSpeed has no * it may be bf16 or fp32",
    ),
    (
        {"method": "lora", "lora": NF4, "strategy": "zero2"},
        {},
        "train.lora.base",
        "nf4 does * may be ddp, fsdp or hsdp",
    ),
    (
        {"method": "lora", "lora": {**NF4, "dora": True}},
        {},
        "train.lora.dora",
        "does not work * train.lora.base: unquantized",
    ),
    (
        {"method": "lora", "lora": NF4, "strategy": "fsdp", "offload": "optimizer+params"},
        {},
        "train.offload",
        "optimizer+params does not work * set it to none, or train.lora.base to unquantized",
    ),
    (
        {"method": "lora", "lora": NF4, "precision": "fp8"},
        {"gpus_per_node": 8},
        "train.precision",
        "* may be bf16",
    ),
    (
        {"precision": "fp8"},
        {},
        "train.precision",
        "fp8 works only for full fine-tuning on GPUs, * may be bf16",
    ),
    (
        {"precision": "fp8", "method": "lora"},
        {"gpus_per_node": 8},
        "train.precision",
        "fp8 works only * it may be bf16",
    ),
    (
        {"strategy": "zero2", "optimizer": "adamw_8bit"},
        {},
        "train.optimizer",
        "adamw_8bit does not work with DeepSpeed: * may be adamw",
    ),
    (
        {"strategy": "fsdp", "optimizer": "adamw_8bit", "offload": "optimizer+params"},
        {},
        "train.optimizer",
        "* adamw",
    ),
    (
        {"optimizer": "muon", "method": "lora"},
        {},
        "train.optimizer",
        "muon does not work with train.method: lora: * may be adamw",
    ),
    (
        {"optimizer": "muon", "strategy": "zero1"},
        {},
        "train.optimizer",
        "muon does not work with DeepSpeed: * may be adamw",
    ),
    (
        {"optimizer": "muon", "strategy": "fsdp", "offload": "optimizer+params"},
        {},
        "train.optimizer",
        "muon does not work with train.offload: * may be adamw",
    ),
    (
        {"optimizer": "muon", "local_sgd_steps": 4},
        {},
        "train.optimizer",
        "muon does not work with train.local_sgd_steps: * may be adamw",
    ),
    (
        {"warmup_steps": 10, "warmup_fraction": 0.1},
        {},
        "train.warmup_steps",
        "cannot be combined * remove one of them",
    ),
    (
        {"decay_fraction": 0.2},
        {},
        "train.decay_fraction",
        "has no effect, because * is not 'wsd'; remove it",
    ),
    (
        {"lr_schedule": "wsd", "warmup_fraction": 0.5, "decay_fraction": 0.6},
        {},
        "train.decay_fraction",
        "* of them",
    ),
    (
        {"early_stop_validations": 3},
        {},
        "train.early_stop_validations",
        "needs validations; set train.validate_every_steps",
    ),
    (
        {"keep_best": True},
        {},
        "train.keep_best",
        "needs validations; set train.validate_every_steps",
    ),
    (
        {"strategy": "zero3", "method": "lora", "lora": {"dora": True}},
        {},
        "train.lora.dora",
        "* hsdp, zero1 or zero2",
    ),
    (
        {},
        {"nodes": 2},
        "cluster.internode_gbit_s",
        "* doctor --profile slurm CONFIG` or iperf3 measures, in Gbit/s",
    ),
    (
        {"strategy": "auto"},
        {"gpus_per_node": 2},
        "cluster.gpu",
        "* as `h200` or `a100 80gb`, or set cluster.measured",
    ),
    (
        {"strategy": "auto", "gradient_compression": "powersgd"},
        {},
        "train.gradient_compression",
        "* may be ddp, or *",
    ),
    (
        {"strategy": "auto", "local_sgd_steps": 4},
        {},
        "train.local_sgd_steps",
        "* the strategy (ddp) or remove it",
    ),
    (
        {"strategy": "auto", "unit_layers": 2},
        {},
        "train.unit_layers",
        "* the strategy (fsdp or hsdp) or remove it",
    ),
    (
        {**OF_EXPERTS, "lora": {"targets": ["experts.down_proj"], "dropout": 0.1}},
        {},
        "train.lora.dropout",
        "* to 0",
    ),
    (
        {**OF_EXPERTS, "lora": {"targets": ["experts.down_proj"], "dora": True}},
        {},
        "train.lora.dora",
        "* one of them",
    ),
    (
        {**OF_EXPERTS, "lora": {"targets": ["experts.down_proj"], "rank": 12}},
        {},
        "train.lora.rank",
        "12 * try 16",
    ),
    (
        {**OF_EXPERTS, "strategy": "zero3"},
        {},
        "train.strategy",
        "zero3 does not work with adapters of experts * zero2",
    ),
    (
        {"method": "lora", "freeze": ["model.norm.*"]},
        {},
        "train.freeze",
        "* it, or choose train.lora.targets",
    ),
]


@pytest.mark.parametrize(("train", "cluster", "key", "said"), REFUSED)
def test_what_is_impossible_together_is_refused(
    train: dict[str, Any], cluster: dict[str, Any], key: str, said: str
) -> None:
    [problem] = problems(train, cluster)
    assert fnmatchcase(problem, f"{key}: {said}"), problem


# The same keys where they are possible.
ALLOWED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "compile": ({"strategy": "zero2", "compile": True}, {}),
    "hsdp": (
        {"strategy": "hsdp", "shard_ranks": 2, "unit_layers": 4, "offload": "optimizer+params"},
        FOUR,
    ),
    "bf16 under zero3": ({"gradient_compression": "bf16", "strategy": "zero3"}, {}),
    "bf16 under auto": (
        {"gradient_compression": "bf16", "strategy": "auto"},
        {"gpus_per_node": 2, "gpu": "h200"},
    ),
    "powersgd": ({"gradient_compression": "powersgd", "powersgd_rank": 8}, {}),
    "local SGD": ({"local_sgd_steps": 4}, {}),
    "fp16 on CPUs": ({"strategy": "fsdp", "precision": "fp16"}, {}),
    "fp16 of zero on GPUs": ({"strategy": "zero3", "precision": "fp16"}, {"gpus_per_node": 2}),
    "8 bits": ({"strategy": "fsdp", "optimizer": "adamw_8bit"}, {}),
    "muon": ({"strategy": "hsdp", "shard_ranks": 2, "optimizer": "muon"}, FOUR),
    "wsd": ({"lr_schedule": "wsd", "warmup_steps": 10, "decay_fraction": 0.9}, {}),
    "the best": ({"keep_best": True, "early_stop_validations": 3, "validate_every_steps": 5}, {}),
    "DoRA": ({"method": "lora", "lora": {"dora": True}, "strategy": "zero2"}, {}),
    "freeze": ({"freeze": ["model.layers.[0-3].*"]}, {}),
    "auto": ({"strategy": "auto", "shard_ranks": 2}, {"gpus_per_node": 4, "gpu": "h200"}),
    "auto with an offload": (
        {"strategy": "auto", "offload": "optimizer"},
        {"gpus_per_node": 4, "gpu": "h200"},
    ),
    "auto on CPUs": ({"strategy": "auto"}, {}),
    "auto by measurements": (
        {"strategy": "auto"},
        {"gpus_per_node": 4, "measured": "cluster.json"},
    ),
    "several nodes": ({}, {"nodes": 2, "internode_gbit_s": 9.0}),
    "several nodes that were measured": ({}, {"nodes": 2, "measured": "cluster.json"}),
    "profile on CPUs": ({"profile_every_steps": 5}, {}),
}


def test_a_vocabulary_beside_a_tokenizer_is_refused() -> None:
    model = {"source": "tiny", "tokenizer": "tokenizers/mine", "vocab_tokens": 512}
    [(keys, _)] = cross_check(Config.model_validate_json(json.dumps({**BASE, "model": model})))
    assert dotted(keys) == "model.vocab_tokens"


@pytest.mark.parametrize(("train", "cluster"), ALLOWED.values(), ids=ALLOWED)
def test_what_is_possible_is_not(train: dict[str, Any], cluster: dict[str, Any]) -> None:
    assert problems(train, cluster) == []


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_the_attention_of_long_documents_is_kept_with_every_strategy(strategy: str) -> None:
    train = {"strategy": strategy, "kept_attention_layers": 0, "global_batch_tokens": 65_536}
    for max_tokens, is_refused in ((16_384, False), (16_383, True)):
        config = {
            **BASE,
            "tokenize": {"max_tokens": max_tokens},
            "shard": {"block_tokens": 16_384},
            "train": train,
        }
        found = [
            dotted(keys) for keys, _ in cross_check(Config.model_validate_json(json.dumps(config)))
        ]
        assert ("train.kept_attention_layers" in found) == is_refused
        assert len(found) == is_refused


def test_a_deepspeed_json_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    settings = {"strategy": "zero1", "deepspeed_json": str(path)}
    [missing] = problems(settings)
    assert missing.startswith(f"train.deepspeed_json: {path}: cannot be read as JSON (")
    assert "No such file" in missing
    path.write_text('{"steps_per_print": 5}')
    assert problems(settings) == []
    [of_auto] = problems({**settings, "strategy": "auto"})
    assert of_auto.endswith(
        "does not work with train.strategy: auto; name the strategy (zero1, zero2 or zero3) or "
        "remove it"
    )


def test_thinking_that_is_not_trained_on_leaves_the_default_prompt_alone() -> None:
    both = {"thinking": "mask", "prompt_thinking": "on"}
    [(keys, text)] = cross_check(Config.model_validate_json(json.dumps({**BASE, "tokenize": both})))
    assert keys == ("tokenize", "prompt_thinking")
    assert text.endswith("set it to off, or tokenize.thinking to keep or strip")
    for key in both:
        alone = {**BASE, "tokenize": {key: both[key]}}
        assert cross_check(Config.model_validate_json(json.dumps(alone))) == []


def test_blocks_that_ranks_share_have_equal_parts_and_a_batch_of_enough_of_them() -> None:
    given: dict[str, Any] = {
        "train": {"context_ranks": 4, "global_batch_tokens": 6000},
        "cluster": {"gpus_per_node": 4},
    }
    for tokens, said in (
        (1000, None),
        (1500, None),
        (750, "750 is not a multiple of 4, as train.context_ranks: 4 *"),
    ):
        sizes = {"tokenize": {"max_tokens": 512}, "shard": {"block_tokens": tokens}}
        found = cross_check(Config.model_validate_json(json.dumps({**BASE, **given, **sizes})))
        assert [keys for keys, _ in found] == ([] if said is None else [("shard", "block_tokens")])
        assert said is None or fnmatchcase(found[0][1], said)
    given["cluster"]["gpus_per_node"] = 8
    sizes = {"tokenize": {"max_tokens": 512}, "shard": {"block_tokens": 2000}}
    [(keys, text)] = cross_check(Config.model_validate_json(json.dumps({**BASE, **given, **sizes})))
    assert keys == ("train", "global_batch_tokens")
    assert (
        text == "it has 3 blocks of 2000 tokens, and that is no multiple of 2 groups of ranks x 1 "
        "block; try 8000"
    )


@pytest.mark.parametrize(
    ("train", "blocks", "is_refused"),
    [
        ({}, 4, False),
        ({}, 6, False),
        ({}, 12, True),  # each rank can have a block of its own
        ({"micro_batch_blocks": 2}, 4, False),
        ({"micro_batch_blocks": 2}, 3, True),
        (
            {"micro_batch_blocks": 2},
            8,
            False,
        ),  # 2 ranks to a block, which take 8 blocks at a time instead of 16
        ({"micro_batch_blocks": 2}, 12, False),
        ({"micro_batch_blocks": 2}, 24, True),
        ({"context_ranks": 1}, 4, True),
        ({"strategy": "zero2"}, 4, True),
        ({"local_sgd_steps": 2}, 4, True),
    ],
)
def test_a_batch_of_fewer_blocks_than_ranks_take_at_a_time_is_left_to_ranks_that_share_them(
    train: dict[str, Any], blocks: int, is_refused: bool
) -> None:
    sizes = {
        "tokenize": {"max_tokens": 512},
        "shard": {"block_tokens": 1024},
        "cluster": {"gpus_per_node": 8},
    }
    given = {**BASE, **sizes, "train": {"global_batch_tokens": blocks * 1024, **train}}
    found = cross_check(Config.model_validate_json(json.dumps(given)))
    assert [keys for keys, _ in found] == [("train", "global_batch_tokens")] * is_refused


def test_products_in_fp8_take_blocks_of_whole_tiles() -> None:
    given = {
        "train": {"precision": "fp8", "global_batch_tokens": 64_000},
        "cluster": {"gpus_per_node": 1},
    }
    for tokens, said in (
        (1000, "1000 is not a multiple of 16, as train.precision: fp8 requires; try 1008"),
        (640, ""),
    ):
        sizes = {"shard": {"block_tokens": tokens}, "tokenize": {"max_tokens": 512}}
        config = Config.model_validate_json(json.dumps({**BASE, **given, **sizes}))
        expected = [f"shard.block_tokens: {said}"] if said else []
        assert [f"{dotted(keys)}: {text}" for keys, text in cross_check(config)] == expected


@pytest.mark.parametrize(("installed", "is_refused"), [("2.12.1", True), ("2.13.0+cpu", False)])
def test_a_torch_that_casts_integers_shards_no_base_in_4_bits(
    installed: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "version", lambda package: installed)
    checks.shards_integers.cache_clear()
    try:
        found = {
            name: problems({"strategy": name, "method": "lora", "lora": NF4})
            for name in ("ddp", "fsdp")
        }
    finally:
        checks.shards_integers.cache_clear()
    assert not found["ddp"]
    assert ["needs torch 2.13 or later" in text for text in found["fsdp"]] == [True] * is_refused


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_offload_that_is_named_as_legal_is(strategy: str) -> None:
    cluster, shard_ranks = (FOUR, 2) if strategy == "hsdp" else ({}, None)
    for offload in STRATEGIES[strategy].offloads:
        assert (
            problems(
                {"strategy": strategy, "offload": offload, "shard_ranks": shard_ranks}, cluster
            )
            == []
        )


def test_all_are_told_at_once() -> None:
    found = problems(
        {
            "strategy": "zero3",
            "compile": True,
            "keep_best": True,
            "unit_layers": 2,
            "local_sgd_steps": 4,
        }
    )
    assert [text.partition(":")[0] for text in found] == [
        "train.unit_layers",
        "train.compile",
        "train.local_sgd_steps",
        "train.keep_best",
    ]


@pytest.mark.parametrize(
    ("train", "named"),
    [
        ({"save_every_steps": 10, "keep_last": 4}, ""),
        ({"save_every_steps": 10, "keep_last": 3}, "set that to 4"),
        ({"save_every_steps": 3, "keep_last": 4}, "set that to 5"),
        ({"keep_last": 4}, "train.save_every_steps is auto"),
        ({"save_every_steps": "epoch", "keep_last": 4}, "train.save_every_steps is epoch"),
        (
            {"save_every_steps": 10, "keep_last": 4, "keep_best": True, "validate_every_steps": 5},
            "train.keep_best asks for the best one",
        ),
    ],
)
def test_checkpoints_of_a_mean_have_to_be_kept(train: dict[str, Any], named: str) -> None:
    config = Config.model_validate_json(
        json.dumps({**BASE, "train": train, "merge": {"average": {"last": 3}}})
    )
    found = [f"{dotted(keys)}: {text}" for keys, text in cross_check(config)]
    assert len(found) == bool(named)
    assert all(text.startswith("merge.average.last: ") and named in text for text in found)


def test_the_original_base_is_merged_only_where_another_was_trained() -> None:
    def found(train: dict[str, Any]) -> list[str]:
        config = Config.model_validate_json(
            json.dumps({**BASE, "train": train, "merge": {"base": "original"}})
        )
        return [f"{dotted(keys)}: {text}" for keys, text in cross_check(config)]

    for train in ({}, {"method": "lora"}):
        [problem] = found(train)
        assert problem.startswith("merge.base: original has no effect") and problem.endswith(
            "remove it"
        )
    assert found({"method": "lora", "lora": NF4}) == []
