"""Geometries that are raced: Qwen3's, as their config.json has them, whole or with fewer layers."""

from typing import Any

from benchmarks.strategies import HEADS, SIZES, VOCABULARY

_SMALL = {"vocab_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "dtype": "float32"}
_OWN: dict[str, dict[str, Any]] = {
    "demo": {
        **_SMALL,
        **{"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "tie_word_embeddings": True},
    },
    "demo-moe": {
        **_SMALL,
        **{"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "tie_word_embeddings": False},
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    },
    "32B": {
        **{"hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "tie_word_embeddings": False},
        **{"num_attention_heads": 64, "num_key_value_heads": 8},
    },
    "30B-A3B": {
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "tie_word_embeddings": False},
        **{"num_attention_heads": 32, "num_key_value_heads": 4},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    },
}


def model_config(size: str, layers: int | None = None) -> dict[str, Any]:
    """config.json of that size; `layers` is how many to leave of them, None for all."""
    heads, kv_heads = HEADS.get(size, (0, 0))
    known = _OWN.get(size) or {"num_attention_heads": heads, "num_key_value_heads": kv_heads, **SIZES[size]}
    has_experts = "num_experts" in known
    experts = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []} if has_experts else {}
    return {
        "model_type": "qwen3_moe" if has_experts else "qwen3",
        "architectures": ["Qwen3MoeForCausalLM" if has_experts else "Qwen3ForCausalLM"],
        **{"vocab_size": VOCABULARY, "head_dim": 128, "dtype": "bfloat16"},
        **{"max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0},
        **experts,
        **known,
        **({"num_hidden_layers": layers} if layers else {}),
    }
