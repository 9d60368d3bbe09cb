"""Geometries that are measured: Qwen3's and Qwen3.5's, whole or with fewer layers, small."""

from typing import Any

from pipeline_lib.arch.families import published

SIZES = ("tiny", "0.6B", "1.7B", "4B", "8B")  # that most benchmarks take
_DEMO = {
    **{
        "vocab_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "dtype": "float32",
    },
    **{"hidden_size": 128, "intermediate_size": 384},
}
# By name: the published size that a small one is like, and what differs.
_SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": (
        "0.6B",
        {
            **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 2},
        },
    ),
    "demo": ("0.6B", {**_DEMO, "num_hidden_layers": 4}),
    "demo-hybrid": (
        "qwen3.5-0.8b",
        {
            **{
                **_DEMO,
                "num_hidden_layers": 4,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
            },
            **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        },
    ),
    "demo-moe": (
        "30B-A3B",
        {
            **_DEMO,
            "num_hidden_layers": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ),
}


def config_json(size: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """config.json of that size, with changed values; `8B` is a Qwen3, `qwen3.5-9B` a Qwen3.5.

    Raises ValueError for an unknown size.
    """
    like, own = _SMALL.get(size, (size, {}))
    config = published(f"qwen3-{like}") or published(like)
    if config is None:
        raise ValueError(f"{size}: no published Qwen3 or Qwen3.5")
    architectures = {
        "qwen3": "Qwen3",
        "qwen3_moe": "Qwen3Moe",
        "qwen3_5_text": "Qwen3_5",
        "qwen3_5_moe_text": "Qwen3_5Moe",
    }
    architecture = f"{architectures[config['model_type']]}ForCausalLM"
    return {
        "architectures": [architecture],
        "rms_norm_eps": 1e-6,
        **config,
        **own,
        **(changes or {}),
    }


def model_config(size: str, layers: int | None = None) -> dict[str, Any]:
    """config.json of that size as raced; `layers` is how many to leave, None for all."""
    config = {"dtype": "bfloat16", "rope_theta": 1_000_000.0, **config_json(size)}
    if "num_experts" in config:
        config["norm_topk_prob"] = True
    return config | ({"num_hidden_layers": layers} if layers else {})
