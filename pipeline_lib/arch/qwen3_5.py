"""Qwen3.5 and successors with its model_types (Qwen3.6, Qwen3.8-27B): the text model.

They come with experts or without. Three of four layers have a recurrent state, the gated delta rule
(model/delta.py), in place of attention; the gate of the other layers' attention is a second half of
q_proj. Repositories hold a model of pictures, video and text, and a head that predicts several
tokens at once. Only the text model is trained; the others' tensors stay as they are.
"""

from collections.abc import Iterator
from typing import Any

from pipeline_lib.arch.config_json import short, wrong_heads, wrong_numbers
from pipeline_lib.arch.family import Config, Family
from pipeline_lib.arch.geometry import Delta, Geometry
from pipeline_lib.arch.rope import positions_in, scaling_type

# of whole models; that of the text model in one ends in `_text`
_TYPES = ("qwen3_5", "qwen3_5_moe")
_TEXT = "_text"
_RECURRENT, _ATTENDING = "linear_attention", "full_attention"  # values of layer_types
_INTERVAL = 4  # one of so many layers has attention, if layer_types is not given

# For each size: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
# num_key_value_heads, linear_num_value_heads, tie_word_embeddings. Sources: THUDM/slime,
# scripts/models/qwen3.5-*.sh; copies of the config.json of 0.8B, 4B and 27B in public repositories;
# for 9B, transformers' defaults, which are its config. The sums of 0.8B's and 2B's parameters are
# those that others counted (752,393,024 and 1,881,825,088).
_Size = tuple[int, int, int, int, int, int, bool]
_SIZES: dict[str, _Size] = {
    "qwen3.5-0.8b": (1024, 3584, 24, 8, 2, 16, True),
    "qwen3.5-2b": (2048, 6144, 24, 8, 2, 16, True),
    "qwen3.5-4b": (2560, 9216, 32, 16, 4, 32, True),
    "qwen3.5-9b": (4096, 12288, 32, 16, 4, 32, False),
    "qwen3.5-27b": (5120, 17408, 64, 24, 4, 48, False),
}
for _name in ("qwen3.5-0.8b", "qwen3.5-2b", "qwen3.5-4b", "qwen3.5-9b"):
    _SIZES[f"{_name}-base"] = _SIZES[_name]
for _name in ("qwen3.6-27b", "qwen3.8-27b"):
    _SIZES[_name] = _SIZES["qwen3.5-27b"]
# 35B-A3B: scripts/models/qwen3.5-35B-A3B.sh; these are transformers' defaults too.
_A3B: _Size = (2048, 512, 40, 16, 2, 32, False)
_EXPERTS = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def _config(values: _Size, experts: dict[str, int] | None = None) -> dict[str, Any]:
    hidden, intermediate, layers, heads, kv_heads, value_heads, tied = values
    return {
        "model_type": f"{_TYPES[experts is not None]}{_TEXT}",
        **(experts or {"intermediate_size": intermediate}),
        "vocab_size": 248320,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": tied,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }


def _text(config: Config) -> Config:
    """Return the text model's config from the whole model's, whose tied head counts too."""
    kind = str(config["model_type"])
    if kind.endswith(_TEXT):
        return config
    text: dict[str, Any] = {"model_type": f"{kind}{_TEXT}"}
    if "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    text.update(config["text_config"])
    return text


# The keys of transformers' Qwen3_5TextConfig and Qwen3_5MoeTextConfig that are sizes, with the
# first one's defaults for those that may be absent.
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def _has_experts(text: Config) -> bool:
    return str(text["model_type"]).endswith(f"moe{_TEXT}")


def _numbers(text: Config) -> dict[str, Any]:
    defaults = dict(_DEFAULTS)
    numbers = {key: text[key] for key in _NEEDED}
    if _has_experts(text):
        defaults["num_key_value_heads"] = 2
        numbers |= {key: text[key] for key in _EXPERTS}
    else:
        numbers["intermediate_size"] = text["intermediate_size"]
    for key, value in defaults.items():
        numbers[key] = text.get(key, value)
    return numbers


def _layer_types(config: Config) -> list[str]:
    given: list[str] = config.get("layer_types") or []
    if given:
        return given
    interval = config.get("full_attention_interval", _INTERVAL)
    types = [_RECURRENT] * config["num_hidden_layers"]
    for layer in range(interval - 1, len(types), interval):
        types[layer] = _ATTENDING
    return types


def _problems(config: Config) -> Iterator[str]:
    if not isinstance(config.get("text_config", {}), dict):
        yield f"text_config: {short(config['text_config'])} is no object"
        return
    text = _text(config)
    numbers = _numbers(text)
    for key in ("max_position_embeddings", "full_attention_interval"):
        if key in text:
            numbers[key] = text[key]
    wrong = list(wrong_numbers(numbers))
    if wrong:
        yield from wrong
        return
    yield from wrong_heads(numbers)
    keys = numbers["linear_num_key_heads"]
    values = numbers["linear_num_value_heads"]
    if values % keys:
        yield f"linear_num_key_heads: {keys} does not divide linear_num_value_heads, {values}"
    types = text.get("layer_types")
    layers = numbers["num_hidden_layers"]
    if types is not None and not _are_layer_types(types, layers):
        kinds = f"{_RECURRENT} and {_ATTENDING}"
        yield f"layer_types: {short(types)} is no list of {kinds} for {layers} layers"


def _are_layer_types(value: Any, layers: int) -> bool:
    if not isinstance(value, list) or len(value) != layers:
        return False
    return set(value) <= {_RECURRENT, _ATTENDING}


def _geometry(config: Config) -> Geometry:
    text = _text(config)
    numbers = _numbers(text)
    types = _layer_types(text)
    has_experts = _has_experts(text)
    layers = numbers["num_hidden_layers"]
    return Geometry(
        vocab=numbers["vocab_size"],
        hidden=numbers["hidden_size"],
        intermediate=numbers[
            "shared_expert_intermediate_size" if has_experts else "intermediate_size"
        ],
        layers=layers,
        heads=numbers["num_attention_heads"],
        kv_heads=numbers["num_key_value_heads"],
        head_dim=numbers["head_dim"],
        tied=bool(text.get("tie_word_embeddings", False)),
        max_positions=positions_in(text),
        biased=("q_proj", "k_proj", "v_proj", "o_proj") if text.get("attention_bias") else (),
        expert_layers=frozenset(range(layers) if has_experts else ()),
        experts=numbers.get("num_experts", 0),
        experts_per_token=numbers.get("num_experts_per_tok", 0),
        expert_intermediate=numbers.get("moe_intermediate_size", 0),
        shared_expert=has_experts,
        gated_attention=True,
        delta=Delta(
            key_heads=numbers["linear_num_key_heads"],
            value_heads=numbers["linear_num_value_heads"],
            key_dim=numbers["linear_key_head_dim"],
            value_dim=numbers["linear_value_head_dim"],
            width=numbers["linear_conv_kernel_dim"],
        ),
        delta_layers=frozenset(layer for layer, kind in enumerate(types) if kind == _RECURRENT),
        scaling=scaling_type(text),
    )


QWEN3_5 = Family(
    types=(*_TYPES, *(f"{kind}{_TEXT}" for kind in _TYPES)),
    geometry=_geometry,
    problems=_problems,
    published={
        **{name: _config(values) for name, values in _SIZES.items()},
        **dict.fromkeys(("qwen3.5-35b-a3b", "qwen3.6-35b-a3b"), _config(_A3B, _EXPERTS)),
    },
    text=_text,
    prefix="model.language_model.",
    beside=("model.visual.", "mtp."),
)
