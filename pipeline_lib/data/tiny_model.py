"""Builds a Qwen3 model folder with random weights of any size, for the demo and the tests.

The weights are a pure function of the seed and the shapes, computed in integers until the last
multiplication, so that every machine builds the same file.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from pipeline_lib.config.schema import TinyModel
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import require_space, write_json
from pipeline_lib.core.stage import Say
from pipeline_lib.data.chat_template import read_tokenizer_config, special_tokens
from pipeline_lib.data.demo import conversations
from pipeline_lib.data.documents import bits, key_of
from pipeline_lib.data.encode import TOKENIZER_NAME, load_tokenizer
from pipeline_lib.data.tiny_tokenizer import write_tokenizer

WEIGHT_STD = 0.02
VOCAB_MULTIPLE = 128
FEED_FORWARD_MULTIPLE = 64
MAX_POSITIONS = 4096
_CHUNK = 1 << 20


def build_tiny(settings: TinyModel, out: Path, say: Say) -> None:
    """Write a model to `out` for the tokenizer in that folder, or else for one trained here.

    Raises DataError if the tokenizer lacks an end-of-turn or padding token.
    """
    if not (out / TOKENIZER_NAME).exists():
        texts = [message["content"] for messages in conversations() for message in messages]
        write_tokenizer(texts, settings.vocab_tokens, out)
    ids = _token_ids(out)
    vocab_tokens = load_tokenizer(out).get_vocab_size()
    config = _config(settings, _round_up(vocab_tokens, VOCAB_MULTIPLE), ids)
    shapes = weight_shapes(config)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    require_space(out, 4 * parameters, "the tiny model")
    weights = {
        name: _weight(shape, key_of(settings.seed, n))
        for n, (name, shape) in enumerate(shapes.items())
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", config)
    write_json(
        out / "generation_config.json", {"eos_token_id": ids["eos"], "pad_token_id": ids["pad"]}
    )
    say(
        f"download: built a Qwen3 of {parameters:,} parameters, vocabulary of {vocab_tokens:,} "
        "tokens"
    )


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a Qwen3 with tied embeddings."""
    hidden = config["hidden_size"]
    head = config["head_dim"]
    query = config["num_attention_heads"] * head
    key_value = config["num_key_value_heads"] * head
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
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return {**shapes, "model.norm.weight": (hidden,)}


def _config(settings: TinyModel, vocab_size: int, ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json in the format of transformers 5."""
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
    """Return the ids of the tokens that end a text (the turn's end first), and of padding."""
    tokenizer: Tokenizer = load_tokenizer(folder)
    named = special_tokens(read_tokenizer_config(folder))
    ids = {
        role: tokenizer.token_to_id(named[role])
        for role in ("eos_token", "pad_token")
        if role in named
    }
    for role in ("eos_token", "pad_token"):
        if ids.get(role) is None:
            raise DataError(
                f"{folder}: tokenizer_config.json names no {role} that the tokenizer has; add it"
            )
    return {
        "eos": list(dict.fromkeys([ids["eos_token"], ids["pad_token"]])),
        "pad": ids["pad_token"],
    }


def _weight(shape: tuple[int, ...], key: int) -> NDArray[np.float32]:
    """Return ones for a vector (a norm's weight), else random values of deviation `WEIGHT_STD`."""
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float32)
    count = math.prod(shape)
    chunks = []
    for start in range(0, count, _CHUNK):
        # Approximately normal draws: centered sums of twelve uniforms, which have a variance of
        # one.
        size = min(_CHUNK, count - start)
        total = (
            bits(key, 3 * size, 3 * start).view("<u2").reshape(size, 12).sum(axis=1, dtype=np.int64)
        )
        chunks.append(((total - 6 * 0xFFFF) / 0x10000).astype(np.float32))
    weight: NDArray[np.float32] = np.concatenate(chunks) * np.float32(WEIGHT_STD)
    return weight.reshape(shape)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
