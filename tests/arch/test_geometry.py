"""Sizes from config.json against the models that transformers and peft really make."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pipeline_lib.arch.families import geometry_in, read_geometry
from pipeline_lib.arch.geometry import Geometry, frozen_names
from pipeline_lib.config.train import Lora, Train
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import write_json
from pipeline_lib.model.build import build_trainable
from pipeline_lib.model.lora import add_adapters

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
HEADS: dict[str, Any] = {"head_dim": 16}
DELTA: dict[str, Any] = {
    **{
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 10,
    },
    **{"linear_conv_kernel_dim": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
MOE: dict[str, Any] = {**EXPERTS, **HEADS, "model_type": "qwen3_moe"}
CONFIGS = {
    "qwen2": Qwen2Config(**SMALL),
    "qwen2-tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "qwen3-bias": Qwen3Config(**SMALL, attention_bias=True, tie_word_embeddings=True),
    "moe": Qwen3MoeConfig(**SMALL, **EXPERTS, **HEADS),
    "moe-every-second": Qwen3MoeConfig(
        **SMALL, **EXPERTS, decoder_sparse_step=2, mlp_only_layers=[3]
    ),
    "qwen3.5": Qwen3_5TextConfig(**SMALL, **HEADS, **DELTA, attention_bias=True),
    "qwen3.5-tied": Qwen3_5TextConfig(**SMALL, **HEADS, **DELTA, tie_word_embeddings=True),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(
        **SMALL, **EXPERTS, **HEADS, **DELTA, shared_expert_intermediate_size=20
    ),
    "llama": LlamaConfig(**SMALL, attention_bias=True),
    "mistral": MistralConfig(**SMALL, sliding_window=None, head_dim=16),
}


def on_meta(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_names_and_shapes_are_those_of_the_real_model(config: Any) -> None:
    found = geometry_in(config.to_dict()).shapes()
    assert found == {
        name: tuple(parameter.shape) for name, parameter in on_meta(config).named_parameters()
    }


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_matmul_parameters_are_the_matrices_without_embedding_and_idle_experts(config: Any) -> None:
    expected = 0.0
    for name, parameter in on_meta(config).named_parameters(remove_duplicate=False):
        if "experts" in name:
            expected += parameter.numel() * EXPERTS["num_experts_per_tok"] / EXPERTS["num_experts"]
        elif parameter.ndim == 2 and "embed" not in name:
            expected += parameter.numel()
    assert geometry_in(config.to_dict()).matmul_parameters == expected


@pytest.mark.parametrize(
    ("name", "dora", "targets"),
    [
        *((name, True, "all-linear") for name in CONFIGS),
        ("qwen3", False, "all-linear"),
        ("qwen2", False, ("o_proj", "up_proj")),
        ("moe", False, ("q_proj", "v_proj")),
    ],
)
def test_adapter_parameters_are_those_that_are_made(name: str, dora: bool, targets: Any) -> None:
    config: Any = CONFIGS[name]
    lora = Lora(rank=4, targets=targets, dora=dora)
    made = add_adapters(on_meta(config), lora, seed=0)
    counted = sum(parameter.numel() for parameter in made.parameters() if parameter.requires_grad)
    assert geometry_in(config.to_dict()).adapter_parameters(lora) == counted


@pytest.mark.parametrize(
    "globs", [(), ("model.embed_tokens.*",), ("lm_head.*", "model.layers.[0-1].*"), ("*norm*",)]
)
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "moe"])
def test_frozen_parameters_are_not_counted_and_not_trained(
    tmp_path: Path, name: str, globs: tuple[str, ...]
) -> None:
    CONFIGS[name].save_pretrained(tmp_path)
    train = Train(freeze=globs)
    made = build_trainable(tmp_path, train)
    counted = sum(parameter.numel() for parameter in made.parameters() if parameter.requires_grad)
    assert read_geometry(tmp_path).trained_parameters(train) == counted


def test_a_glob_that_freezes_nothing_or_all_is_refused() -> None:
    names = {
        name: (name,)
        for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    }
    with pytest.raises(
        DataError,
        match=r"'model.embed_token\.\*' matches no parameter .* model.embed_tokens.weight",
    ):
        frozen_names(names, ["model.embed_token.*"])
    with pytest.raises(DataError, match="every parameter"):
        frozen_names(names, ["model.*", "lm_head.*"])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not one of qwen2, qwen3, qwen3_moe"),
        ({**CONFIGS["qwen2"].to_dict(), "use_sliding_window": True}, "use_sliding_window is true"),
        ({"model_type": "qwen3", "num_attention_heads": 3}, "lacks 'num_hidden_layers'"),
        (
            {**SMALL, **MOE, "num_hidden_layers": 10**12},
            "num_hidden_layers: 10+ is not a whole number from 1 to",
        ),
        (
            {**SMALL, **MOE, "hidden_size": -32},
            "hidden_size: -32 is not a whole number from 1 to 2,147,483,648",
        ),
        ({**SMALL, **MOE, "vocab_size": "96"}, "vocab_size: '96' is not a whole number"),
        ({**SMALL, **MOE, "vocab_size": 10**400}, "vocab_size: 10+... is not a whole number"),
        (
            {**SMALL, **MOE, "num_attention_heads": True},
            "num_attention_heads: True is not a whole number",
        ),
        (
            {**SMALL, **MOE, "num_key_value_heads": 3},
            "num_key_value_heads: 3 does not divide num_attention_heads, 4",
        ),
        ({**SMALL, **MOE, "head_dim": 0}, "head_dim: 0 is not a whole number"),
        (
            {**SMALL, **MOE, "max_position_embeddings": None},
            "max_position_embeddings: None is not a whole number",
        ),
        (
            {**SMALL, **MOE, "decoder_sparse_step": 0},
            "decoder_sparse_step: 0 is not a whole number",
        ),
        ({**SMALL, **MOE, "num_experts": []}, r"num_experts: \[\] is not a whole number"),
        (
            {**SMALL, **MOE, "mlp_only_layers": 3},
            "mlp_only_layers: 3 is no list of the numbers of layers",
        ),
        (
            {**SMALL, "model_type": "qwen2", "hidden_size": 33},
            "num_attention_heads: 4 does not divide hidden_size, 33",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    write_json(tmp_path / "config.json", config)
    with pytest.raises(DataError, match=said):
        read_geometry(tmp_path)


@pytest.mark.parametrize(
    ("ranks", "legal"),
    [(1, True), (2, True), (4, True), (8, True), (16, True), (32, True), (3, False), (64, False)],
)
def test_ranks_share_heads_equally(ranks: int, legal: bool) -> None:
    """Qwen3-8B has 32 heads and 8 KV heads: with more ranks than these, several have the same."""
    geometry = Geometry(151936, 4096, 12288, 36, 32, 8, 128, False, 40960)
    found = list(geometry.problems(Train(context_ranks=ranks), 4096))
    assert found == (
        []
        if legal
        else [
            f"train.context_ranks: {ranks} ranks cannot share the model's 32 attention heads and 8 "
            "KV heads equally; it may be 1, 2, 4, 8, 16, 32"
        ]
    )
