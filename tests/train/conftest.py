"""A small real Qwen3 and packed blocks of synthetic documents, sealed as the data stages would."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.config.compile import run_digest, version_of_training
from pipeline_lib.config.section import settings_of
from pipeline_lib.config.train import PLACEMENT_KEYS, Train
from pipeline_lib.core.run_folder import CHECKPOINTS, newest_valid
from pipeline_lib.core.store import Ref, Spec, Store
from pipeline_lib.data.documents import Document
from pipeline_lib.data.shard import write_blocks
from pipeline_lib.train.rank import RankJob
from tests.complete import plan_document
from tests.locks import hold
from tests.ranks import run_ranks
from tests.train.helpers import train

BLOCK_TOKENS = 32
VOCAB = 64


def write_model(folder: Path) -> None:
    """A two-layer Qwen3 with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_documents(count: int, seed: int) -> list[list[Document]]:
    """`count` blocks, each of a few documents whose second half is supervised."""
    random = np.random.default_rng(seed)
    bins = []
    for _ in range(count):
        left, documents = BLOCK_TOKENS, []
        while left >= 8:
            length = int(random.integers(6, min(left, 16) + 1))
            tokens = random.integers(3, VOCAB, length).astype(np.int32)
            supervised = np.arange(length) >= length // 2
            documents.append(Document(tokens, supervised))
            left -= length
        bins.append(documents)
    return bins


@dataclass(frozen=True)
class Arena:
    """A store with a model and shards, ready for ranks."""

    store: Store
    model: Ref
    shard: Ref
    blocks: int

    def job(self, ranks: int, out: Path, device: str = "cpu", **settings: Any) -> RankJob:
        """A rank job over `ranks` ranks with the given keys of `train`."""
        defaults = {"precision": "fp32", "global_batch_tokens": 4 * BLOCK_TOKENS, "lr": 3e-3}
        # Ranks on GPUs begin anew (tests/ranks.py), each at its own pace.
        defaults |= {"timeout_s": 30, "start_timeout_s": 60 if device == "cpu" else 180}
        train = Train.model_validate({**defaults, **settings})
        inputs = {"model": self.model, "shard": self.shard}
        spec = Spec("train", version_of_training(train), settings_of(train, PLACEMENT_KEYS), inputs)
        chosen = {key: getattr(train, key) for key in PLACEMENT_KEYS}
        chosen["context_ranks"] = train.ranks_per_block
        cluster = {"ranks": ranks, "device": device, "cpus_per_rank": 1}
        out.mkdir(parents=True, exist_ok=True)
        checkpoints = self.store.run_dir(run_digest(spec)) / CHECKPOINTS
        last_step = train.until_step or sys.maxsize
        resume_from = newest_valid(checkpoints, last_step, lambda path, reason: None)
        lock = hold(self.store.root.parent / "lock")
        return RankJob(
            spec,
            self.store,
            plan_document(cluster=cluster, chosen=chosen),
            out,
            attempt=1,
            lock=lock,
            resume_from=resume_from,
        )


def make_arena(root: Path) -> Arena:
    store = Store(root / "store")
    model, shard = Ref("download", "model"), Ref("shard", "blocks")
    write_model(store.sealed(model))
    blocks = 22  # the last step of an epoch is short: 22 = 5 x 4 + 2
    write_blocks(store.sealed(shard) / "train", make_documents(blocks, 1), BLOCK_TOKENS, 3)
    write_blocks(store.sealed(shard) / "validation", make_documents(3, 2), BLOCK_TOKENS, 1)
    return Arena(store, model, shard, blocks)


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return make_arena(tmp_path)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """What an undisturbed training leaves; each number of ranks and settings trains once."""
    results: dict[str, Path] = {}

    def train_once(ranks: int, **settings: Any) -> Path:
        key = json.dumps([ranks, settings], sort_keys=True)
        if key not in results:
            root = tmp_path_factory.mktemp("whole")
            run_ranks(train, ranks, make_arena(root).job(ranks, root / "out", **settings))
            results[key] = root / "out"
        return results[key]

    return train_once


@contextmanager
def small_disk(path: Path, options: str) -> Iterator[Path]:
    """A file system in memory at `path`."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
