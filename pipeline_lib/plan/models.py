"""The geometry of published Qwen models, so that a plan can be made before one is downloaded.

Values are those of the config.json files on the Hugging Face hub.
"""

from typing import Any

_QWEN3_VOCAB = 151936

# For each size: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
# vocab_size, tie_word_embeddings. Heads have 128 elements in Qwen3, and hidden_size / num_attention_heads in Qwen2.
_Size = tuple[int, int, int, int, int, int, bool]
_QWEN3: dict[str, _Size] = {
    "0.6b": (1024, 3072, 28, 16, 8, _QWEN3_VOCAB, True),
    "1.7b": (2048, 6144, 28, 16, 8, _QWEN3_VOCAB, True),
    "4b": (2560, 9728, 36, 32, 8, _QWEN3_VOCAB, True),
    "8b": (4096, 12288, 36, 32, 8, _QWEN3_VOCAB, False),
    "14b": (5120, 17408, 40, 40, 8, _QWEN3_VOCAB, False),
    "32b": (5120, 25600, 64, 64, 8, _QWEN3_VOCAB, False),
    "30b-a3b": (2048, 6144, 48, 32, 4, _QWEN3_VOCAB, False),
    "235b-a22b": (4096, 12288, 94, 64, 4, _QWEN3_VOCAB, False),
}
_QWEN2: dict[str, _Size] = {
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "14b": (5120, 13824, 48, 40, 8, 152064, False),
    "32b": (5120, 27648, 64, 40, 8, 152064, False),
    "72b": (8192, 29568, 80, 64, 8, 152064, False),
}
_EXPERT_WIDTHS = {"30b-a3b": 768, "235b-a22b": 1536}  # moe_intermediate_size, of 128 experts, 8 for each token

# For each series: the sizes by their table, and of every variant the sizes that it exists in and its
# max_position_embeddings.
_2507 = {"4b": 262144, "30b-a3b": 262144, "235b-a22b": 262144}
_CODER_SIZES = ("0.5b", "1.5b", "3b", "7b", "14b", "32b")
_QWEN2_SIZES = ("0.5b", "1.5b", "7b", "72b")
_SERIES: dict[str, tuple[dict[str, _Size], dict[str, dict[str, int]]]] = {
    "qwen3": (
        _QWEN3,
        {
            "": dict.fromkeys(_QWEN3, 40960),
            "-base": dict.fromkeys(("0.6b", "1.7b", "4b", "8b", "14b", "30b-a3b"), 32768),
            "-instruct-2507": _2507,
            "-thinking-2507": _2507,
        },
    ),
    "qwen2.5": (
        _QWEN2,
        {
            "": {**dict.fromkeys(_QWEN2, 131072), "0.5b": 32768, "3b": 32768},
            "-instruct": dict.fromkeys(_QWEN2, 32768),
        },
    ),
    "qwen2.5-coder": (
        _QWEN2,
        {variant: dict.fromkeys(_CODER_SIZES, 32768) for variant in ("", "-instruct")},
    ),
    "qwen2": (
        _QWEN2,
        {"": dict.fromkeys(_QWEN2_SIZES, 131072), "-instruct": dict.fromkeys(_QWEN2_SIZES, 32768)},
    ),
}


def published(name: str) -> dict[str, Any] | None:
    """The config.json that Geometry.from_config reads, of a model by its name on the hub; None for an unknown one.

    `Qwen/Qwen3-8B`, in any case, also without its owner.
    """
    found = PUBLISHED.get(name.lower().removeprefix("qwen/"))
    return None if found is None else dict(found)


def _config(series: str, size: str, values: _Size, positions: int) -> dict[str, Any]:
    hidden, intermediate, layers, heads, kv_heads, vocab, tied = values
    config: dict[str, Any] = {
        "model_type": "qwen3" if series == "qwen3" else "qwen2",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
    }
    if series == "qwen3":
        config |= {"head_dim": 128, "attention_bias": False}
    if size in _EXPERT_WIDTHS:
        config |= {
            "model_type": "qwen3_moe",
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": _EXPERT_WIDTHS[size],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


# By their names in lower case, without the owner.
PUBLISHED = {
    f"{series}-{size}{variant}": _config(series, size, sizes[size], positions)
    for series, (sizes, variants) in _SERIES.items()
    for variant, by_size in variants.items()
    for size, positions in by_size.items()
}
