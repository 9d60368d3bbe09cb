"""A merge holds a few tensors in memory, not the model."""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.config.train import Lora, Train
from pipeline_lib.data.blocks import Block
from pipeline_lib.export.fold import plan_fold
from pipeline_lib.export.merge import export
from pipeline_lib.export.proof import Reference, compare_tensors
from pipeline_lib.model.build import build_trainable
from pipeline_lib.model.streaming import StreamedModel
from pipeline_lib.train.optimizer import trainable
from pipeline_lib.train.saved_tensors import save_tensors
from tests.ranks import run_ranks
from tests.train.loading import SIZES, grown_during, write_random

pytestmark = pytest.mark.slow

SHARD_BYTES = 40_000_000
METHODS = {
    "full": Train(precision="fp32"),
    "lora": Train(method="lora", precision="fp32", lora=Lora(rank=8)),
}


def write_run(folder: Path, tiny: Path, layers: int) -> int:
    """A base in bf16, in shards, and what training both ways left of it; the bytes of the base."""
    sizes = {
        **SIZES,
        "vocab_size": 2000,
        "hidden_size": 640,
        "intermediate_size": 2560,
        "num_hidden_layers": layers,
    }
    shutil.copytree(tiny, folder / "base")
    (folder / "base" / "model.safetensors").unlink()
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=False))
    write_random(folder / "base", model, torch.bfloat16, max_shard_size=SHARD_BYTES)
    count = sum(parameter.numel() for parameter in model.parameters())
    for name, train in METHODS.items():
        shapes = {
            name: parameter.shape
            for name, parameter in trainable(build_trainable(folder / "base", train)).items()
        }
        save_tensors(
            folder / name / "weights",
            {name: torch.randn(shape) * 0.1 for name, shape in shapes.items()},
        )
    return 2 * count


def merge_and_replay(folder: Path, method: str) -> None:
    """What the merge stage does with the weights."""
    out = folder / f"out-{method}"
    out.mkdir()
    base = folder / "base"
    export(plan_fold(base, folder / method, METHODS[method]), base, {}, out, None)
    length = 32
    block = Block(
        np.full(length, 5, np.int32), np.ones(length, np.bool_), np.zeros(length, np.int32)
    )
    reference = Reference(out, base, folder / method, METHODS[method])
    compare_tensors(reference, torch.device("cpu"))
    reference.streamed(torch.float32, torch.device("cpu")).probe_logits(block)
    StreamedModel(out, torch.bfloat16, torch.device("cpu")).probe_logits(block)


def grown_bytes(environ: Mapping[str, str], folder: Path, method: str) -> int:
    """By how much the peak memory of this process grew while it merged `folder`/large."""
    merge = partial(merge_and_replay, method=method)
    return grown_during(partial(merge, folder / "small"), partial(merge, folder / "large"))


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)
def test_a_merge_stays_below_two_shards(tmp_path: Path, tiny: Path) -> None:
    write_run(tmp_path / "small", tiny, layers=1)
    base_bytes = write_run(tmp_path / "large", tiny, layers=20)
    assert base_bytes > 5 * SHARD_BYTES
    for method in METHODS:
        grown = run_ranks(grown_bytes, 1, tmp_path, method)[0]
        print(f"{method}: {grown / 1e6:.0f} MB for a model of {base_bytes / 1e6:.0f} MB in bf16")
        assert grown < 2 * SHARD_BYTES
