"""A model of 100 million parameters, wide enough to measure its memory, and full blocks."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.core.errors import TrainingError
from pipeline_lib.core.store import Ref, Store
from pipeline_lib.data.documents import Document
from pipeline_lib.data.shard import write_blocks
from pipeline_lib.train.rank import RankJob, train_rank
from tests.train.conftest import Arena

WIDE_BLOCK_TOKENS = 2048
WIDE_VOCAB = 16384
LIMIT_BYTES = 8 * 2**30


def wide_arena(folder: Path, blocks: int = 32) -> Arena:
    """A store with a model of four wide layers, and blocks of two supervised documents each."""
    store = Store(folder / "store")
    model, shard = Ref("download", "model"), Ref("shard", "blocks")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=WIDE_VOCAB,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        max_position_embeddings=WIDE_BLOCK_TOKENS,
    )
    Qwen3ForCausalLM(config).save_pretrained(store.sealed(model))
    for part, count in (("train", blocks), ("validation", 2)):
        write_blocks(store.sealed(shard) / part, _documents(count), WIDE_BLOCK_TOKENS, 1)
    return Arena(store, model, shard, blocks)


def _documents(count: int) -> list[list[Document]]:
    random = np.random.default_rng(0)
    length = WIDE_BLOCK_TOKENS // 2
    return [
        [
            Document(random.integers(3, WIDE_VOCAB, length).astype(np.int32), np.ones(length, bool))
            for _ in range(2)
        ]
        for _ in range(count)
    ]


def train_in_little_memory(environ: Mapping[str, str], job: RankJob) -> str:
    """Train with LIMIT_BYTES of GPU memory; what the rank says if that is short, else nothing."""
    device = torch.device("cuda", int(environ["LOCAL_RANK"]))
    torch.cuda.set_per_process_memory_fraction(
        LIMIT_BYTES / torch.cuda.get_device_properties(device).total_memory, device
    )
    try:
        train_rank(job, environ, lambda _: None)
    except TrainingError as error:
        return str(error)
    return ""
