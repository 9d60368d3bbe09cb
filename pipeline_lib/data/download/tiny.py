"""Builds a real Qwen3 folder with random weights, of any size: what the demo and the tests train.

The weights are a pure function of the seed and the shapes, in integers until the last multiplication, so
that every machine builds the same file.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.fsio import require_space, write_json
from pipeline_lib.base.stage import Say
from pipeline_lib.config.sources import TinyModel
from pipeline_lib.data.chat.encoder import TOKENIZER_NAME, load_tokenizer
from pipeline_lib.data.chat.template import read_tokenizer_config, special_tokens
from pipeline_lib.data.download.pydoc_rows import conversations
from pipeline_lib.data.download.tiny_tokenizer import write_tokenizer
from pipeline_lib.data.random64 import bits, key_of

WEIGHT_STD = 0.02
VOCAB_MULTIPLE = 128
FEED_FORWARD_MULTIPLE = 64
MAX_POSITIONS = 4096
_CHUNK = 1 << 20


def build_tiny(settings: TinyModel, out: Path, say: Say) -> None:
    """Write a model folder into `out`, around the tokenizer that lies there, or else one trained here.

    Raises DataError if the tokenizer lacks what a chat needs.
    """
    if not (out / TOKENIZER_NAME).exists():
        write_tokenizer(_documentation(), settings.vocab_tokens, out)
    ids = _token_ids(out)
    vocab_tokens = load_tokenizer(out).get_vocab_size()
    config = _config(settings, _round_up(vocab_tokens, VOCAB_MULTIPLE), ids)
    shapes = weight_shapes(config)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    require_space(out, 4 * parameters, "the tiny model")
    weights = {name: _weight(shape, key_of(settings.seed, n)) for n, (name, shape) in enumerate(shapes.items())}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {"eos_token_id": ids["eos"], "pad_token_id": ids["pad"]})
    say(f"download: built a Qwen3 of {parameters:,} parameters, vocabulary of {vocab_tokens:,} tokens")


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Qwen3 with tied embeddings."""
    hidden, head = config["hidden_size"], config["head_dim"]
    query, key_value = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    feed_forward = config["intermediate_size"]
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (feed_forward, hidden),
        "mlp.up_proj": (feed_forward, hidden),
        "mlp.down_proj": (hidden, feed_forward),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return {**shapes, "model.norm.weight": (hidden,)}


def _config(settings: TinyModel, vocab_size: int, ids: Mapping[str, Any]) -> dict[str, Any]:
    """config.json in the form of transformers 5."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": ids["eos"][0],
        "head_dim": settings.hidden_size // settings.heads,
        "hidden_act": "silu",
        "hidden_size": settings.hidden_size,
        "initializer_range": WEIGHT_STD,
        "intermediate_size": _round_up(3 * settings.hidden_size, FEED_FORWARD_MULTIPLE),
        "layer_types": ["full_attention"] * settings.layers,
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": settings.layers,
        "model_type": "qwen3",
        "num_attention_heads": settings.heads,
        "num_hidden_layers": settings.layers,
        "num_key_value_heads": settings.heads // 2,
        "pad_token_id": ids["pad"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }


def _token_ids(folder: Path) -> dict[str, Any]:
    """The ids that end a text (the end of a turn first) and that pad one."""
    tokenizer: Tokenizer = load_tokenizer(folder)
    named = special_tokens(read_tokenizer_config(folder))
    ids = {role: tokenizer.token_to_id(named[role]) for role in ("eos_token", "pad_token") if role in named}
    for role in ("eos_token", "pad_token"):
        if ids.get(role) is None:
            raise DataError(f"{folder}: tokenizer_config.json names no {role} that the tokenizer has; add it")
    return {"eos": list(dict.fromkeys([ids["eos_token"], ids["pad_token"]])), "pad": ids["pad_token"]}


def _documentation() -> list[str]:
    return [message["content"] for messages in conversations() for message in messages]


def _weight(shape: tuple[int, ...], key: int) -> NDArray[np.float32]:
    """Ones for a norm (a vector), else a draw with standard deviation `WEIGHT_STD`."""
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float32)
    count = math.prod(shape)
    chunks = [_bell(key, min(_CHUNK, count - start), start) for start in range(0, count, _CHUNK)]
    weight: NDArray[np.float32] = np.concatenate(chunks) * np.float32(WEIGHT_STD)
    return weight.reshape(shape)


def _bell(key: int, count: int, start: int) -> NDArray[np.float32]:
    """Draws that are normal as near as weights need: sums of twelve uniforms, which have a variance of one."""
    words = bits(key, 3 * count, 3 * start).view("<u2").reshape(count, 12)
    total = words.sum(axis=1, dtype=np.int64)
    draws: NDArray[np.float32] = ((total - 6 * 0xFFFF) / 0x10000).astype(np.float32)
    return draws


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
