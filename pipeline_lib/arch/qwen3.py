"""The Qwen2, Qwen2.5 and Qwen3 families, also with experts, and models with the same layers."""

from collections.abc import Iterator
from typing import Any

from pipeline_lib.arch.config_json import is_whole, short, wrong_heads, wrong_numbers
from pipeline_lib.arch.family import Config, Family
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.arch.rope import positions_in, scaling_type

# Geometry of published Qwen models, so that a plan can be made before the download.
# The values are from the config.json files on the Hugging Face hub.

_QWEN3_VOCAB = 151936

# For each size: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
# num_key_value_heads, vocab_size, tie_word_embeddings. Heads have 128 elements in Qwen3, and
# hidden_size / num_attention_heads in Qwen2.
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
# The models' cards (30B's also counts its parameters), and for 480B slime's
# scripts/models/qwen3-coder-480B-A35B.sh.
_QWEN3_CODER: dict[str, _Size] = {
    "30b-a3b": _QWEN3["30b-a3b"],
    "480b-a35b": (6144, 8192, 62, 96, 8, _QWEN3_VOCAB, False),
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
# num_experts and moe_intermediate_size; 8 experts compute each token.
_EXPERTS = {"30b-a3b": (128, 768), "235b-a22b": (128, 1536), "480b-a35b": (160, 2560)}

# For each series: its table of sizes, and for each variant the max_position_embeddings of each size
# that exists.
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
    "qwen3-coder": (_QWEN3_CODER, {"-instruct": dict.fromkeys(_QWEN3_CODER, 262144)}),
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


def _config(series: str, size: str, values: _Size, positions: int) -> dict[str, Any]:
    hidden, intermediate, layers, heads, kv_heads, vocab, tied = values
    is_qwen3 = series.startswith("qwen3")
    config: dict[str, Any] = {
        "model_type": "qwen3" if is_qwen3 else "qwen2",
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
    if is_qwen3:
        config |= {"head_dim": 128, "attention_bias": False}
    if size in _EXPERTS:
        experts, width = _EXPERTS[size]
        config |= {
            "model_type": "qwen3_moe",
            "num_experts": experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _published() -> dict[str, dict[str, Any]]:
    """Return the configs by name in lower case, without the owner: `qwen2.5-7b-instruct`."""
    published = {}
    for series, (sizes, variants) in _SERIES.items():
        for variant, by_size in variants.items():
            for size, positions in by_size.items():
                name = f"{series}-{size}{variant}"
                published[name] = _config(series, size, sizes[size], positions)
    return published


_PUBLISHED = _published()


_TYPES = ("qwen2", "qwen3", "qwen3_moe")
_LIKE_QWEN2 = ("llama", "mistral")  # have the layers of Qwen2 without biases
_SIZES = (
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
)
_EXPERT_SIZES = ("num_experts_per_tok", "moe_intermediate_size")


def _geometry(config: Config) -> Geometry:
    """Read the keys of transformers' Qwen2Config, Qwen3Config and Qwen3MoeConfig, and defaults."""
    kind = config.get("model_type", "qwen3")
    heads = config["num_attention_heads"]
    layers = config["num_hidden_layers"]
    has_experts = kind == "qwen3_moe"
    experts = 0
    if has_experts:
        experts = config["num_local_experts" if "num_local_experts" in config else "num_experts"]
    step = config.get("decoder_sparse_step", 1)
    plain = config.get("mlp_only_layers") or ()
    # By transformers' rule.
    expert_layers = []
    if experts:
        every = range(step - 1, layers, step)
        expert_layers = [layer for layer in every if layer not in plain]
    # Qwen2's q, k and v always have a bias; later models have one in all four of attention, or
    # none.
    biased: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    if kind != "qwen2":  # Mistral's config has no such key
        biased = (*biased, "o_proj") if config.get("attention_bias") else ()
    return Geometry(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim")
        or (128 if kind == "qwen3" else config["hidden_size"] // heads),
        tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=positions_in(config),
        biased=biased,
        normed_heads=kind in ("qwen3", "qwen3_moe"),
        expert_layers=frozenset(expert_layers),
        experts=int(experts),
        experts_per_token=config["num_experts_per_tok"] if has_experts else 0,
        expert_intermediate=config["moe_intermediate_size"] if has_experts else 0,
        scaling=scaling_type(config),
        is_trained=kind in _TYPES,
    )


def _problems(config: Config) -> Iterator[str]:
    """Yield a message for each invalid number of a config.json.

    Raises KeyError for a missing number.
    """
    has_experts = config["model_type"] == "qwen3_moe"
    values = {key: config[key] for key in (*_SIZES, *(_EXPERT_SIZES if has_experts else ()))}
    # For these keys null means the default, as in transformers.
    for key in ("num_key_value_heads", "head_dim"):
        if config.get(key) is not None:
            values[key] = config[key]
    values |= {key: config[key] for key in ("max_position_embeddings",) if key in config}
    if has_experts:
        experts = "num_local_experts" if "num_local_experts" in config else "num_experts"
        values[experts] = config[experts]
        values |= {key: config[key] for key in ("decoder_sparse_step",) if key in config}
        plain = config.get("mlp_only_layers") or ()
        if not isinstance(plain, list | tuple) or not all(is_whole(layer) for layer in plain):
            yield f"mlp_only_layers: {short(plain)} is no list of the numbers of layers"
    yield from wrong_numbers(values)
    yield from wrong_heads(config)
    heads = config["num_attention_heads"]
    if (
        config.get("head_dim") is None
        and config["model_type"] != "qwen3"
        and config["hidden_size"] % heads
    ):
        yield (
            f"num_attention_heads: {heads} does not divide hidden_size, {config['hidden_size']}; "
            "give head_dim"
        )


QWEN3 = Family(_TYPES, _geometry, _problems, _PUBLISHED)
LIKE_QWEN2 = Family(_LIKE_QWEN2, _geometry, _problems, {}, is_trained=False)
