"""What is measured: a model's geometry, documents of certain lengths, how many in a step, and who trains on them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.strategies import HEADS, SIZES, USED_TOKENS, VOCABULARY
from pipeline_lib.data.document import Document

LORA = {"rank": 16, "alpha": 32}
# Of documents in tokens: the parameters of a log-normal draw, and its bounds. Alpaca's answers have about 200 tokens,
# the turns of one character of a play tens.
LENGTHS: dict[str, tuple[float, float, int, int]] = {
    "8192": (9.01, 0.0, 8192, 8192),
    "1000": (6.8, 0.5, 64, 4096),
    "alpaca": (5.1, 0.6, 24, 1024),
    "huanhuan": (4.0, 0.4, 24, 160),
    "demo": (4.6, 0.6, 24, 256),
}


@dataclass(frozen=True)
class Peer:
    """A recipe for Hugging Face's Trainer. `padding` is to `max_length`, to the `longest` of a batch, or `packed`."""

    name: str
    padding: str
    documents: int  # of a rank at a time
    zero: int | None = None
    is_liger: bool = False
    is_checkpointed: bool = False


@dataclass(frozen=True)
class Case:
    """One race. `max_tokens` is what peers pad to, and the longest document; `train` holds our keys of that section."""

    name: str
    size: str
    lengths: str
    max_tokens: int
    block_tokens: int
    rank_documents: int  # of a rank in a step
    method: str
    peers: tuple[Peer, ...]
    precision: str = "bf16"
    train: dict[str, Any] = field(default_factory=dict)


TUTORIAL = Peer("tutorial: ZeRO-2, padded to max_length", "max_length", 4, zero=2)
CASES = {
    case.name: case
    for case in (
        Case(
            "demo",
            "demo",
            "demo",
            max_tokens=256,
            block_tokens=256,
            rank_documents=64,
            method="full",
            precision="fp32",
            peers=(
                Peer("padded to max_length", "max_length", 8),
                Peer("padded to the longest", "longest", 8),
                Peer("packed by DataCollatorWithFlattening", "packed", 8),
            ),
            train={"strategy": "ddp", "micro_batch_blocks": 4},
        ),
        Case(
            "lora-8B-alpaca",
            "8B",
            "alpaca",
            max_tokens=1024,
            block_tokens=16384,
            rank_documents=160,
            method="lora",
            peers=(TUTORIAL,),
            train={"strategy": "ddp", "micro_batch_blocks": 1},
        ),
        Case(
            "full-8B-8192",
            "8B",
            "8192",
            max_tokens=8192,
            block_tokens=16384,
            rank_documents=4,
            method="full",
            peers=(
                Peer("ZeRO-3 + Liger", "longest", 2, zero=3, is_liger=True),
                Peer("ZeRO-3", "longest", 1, zero=3, is_checkpointed=True),
            ),
            train={"strategy": "fsdp", "micro_batch_blocks": 1},
        ),
    )
}
TINY = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "tie_word_embeddings": True}


def model_config(size: str) -> dict[str, Any]:
    """config.json of that size; `demo` is the model of the demo."""
    is_demo = size == "demo"
    heads, kv_heads = (4, 2) if is_demo else HEADS[size]
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 2048 if is_demo else VOCABULARY,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 32 if is_demo else 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "dtype": "float32" if is_demo else "bfloat16",
        **(TINY if is_demo else SIZES[size]),
    }


def documents_of(case: Case, rank: int, steps: int) -> list[list[Document]]:
    """What `rank` takes in each step: the same for every side. The second half of each document is supervised."""
    random = np.random.default_rng(rank)
    mean, deviation, least, most = LENGTHS[case.lengths]

    def document() -> Document:
        length = int(np.clip(random.lognormal(mean, deviation), least, min(most, case.max_tokens)))
        tokens = np.minimum(random.zipf(1.3, length), USED_TOKENS).astype(np.int32)
        return Document(tokens, np.arange(length) >= length // 2)

    return [[document() for _ in range(case.rank_documents)] for _ in range(steps)]
