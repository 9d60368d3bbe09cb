"""A forward pass layer by layer gives the bits of the whole model's, and holds two parts of it."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)
from transformers import Qwen3MoeForCausalLM as Moe

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.data.blocks import Block
from pipeline_lib.model.batch import Batch, make_batch, token_losses
from pipeline_lib.model.build import load_base
from pipeline_lib.model.streaming import StreamedModel
from pipeline_lib.plan.evaluation import largest_part_parameters
from tests.ranks import run_ranks
from tests.train.loading import SIZES, grown_during, write_large, write_random

CPU = torch.device("cpu")
LENGTH = 24
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PLAIN = {key: value for key, value in SIZES.items() if key != "head_dim"}
MODELS: dict[str, Callable[[], Any]] = {
    "tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**PLAIN, tie_word_embeddings=False)),
    "moe": lambda: Moe(
        Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[0], tie_word_embeddings=False)
    ),
}


def blocks(count: int, length: int) -> list[Block]:
    """Blocks of three documents and padding, of lengths that differ."""
    random = np.random.default_rng(7)
    made = []
    for _ in range(count):
        cuts = np.sort(random.choice(np.arange(2, length), 3, replace=False))
        documents = np.searchsorted(cuts, np.arange(length), side="right").astype(np.int32)
        documents[documents == 3] = -1
        tokens = random.integers(3, 60, length).astype(np.int32)
        made.append(Block(tokens, random.random(length) < 0.7, documents))
    return made


def batches(groups: int, each: int, length: int = LENGTH) -> list[Batch]:
    made = blocks(groups * each, length)
    return [make_batch(made[start : start + each]) for start in range(0, len(made), each)]


def streamed(folder: Path, dtype: torch.dtype, groups: list[Batch]) -> list[Tensor]:
    model = StreamedModel(folder, dtype, CPU)
    return model.token_losses(
        groups, model.waiting_room(sum(batch.tokens.numel() for batch in groups))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(MODELS))
def test_losses_are_those_of_the_whole_model_bit_by_bit(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    write_random(tmp_path, MODELS[kind](), torch.bfloat16, max_shard_size=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    groups = [*batches(2, 3), *batches(1, 1, 2 * LENGTH)]
    whole = load_base(tmp_path, dtype)
    with torch.no_grad():
        expected = [token_losses(whole, batch) for batch in groups]
    assert all(float(losses.sum()) > 0 for losses in expected)
    assert all(map(torch.equal, streamed(tmp_path, dtype, groups), expected))


def test_a_model_can_pass_again_and_lets_go_of_its_weights(tmp_path: Path) -> None:
    write_random(tmp_path, MODELS["tied"](), torch.float32)
    model, groups = StreamedModel(tmp_path, torch.float32, CPU), batches(1, 2)
    room = model.waiting_room(2 * LENGTH)
    first, again = (model.token_losses(groups, room) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert all(parameter.is_meta for parameter in model._model.parameters())


def test_files_of_another_model_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    write_random(tmp_path, MODELS["tied"](), torch.float32)
    more = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    write_json(tmp_path / "config.json", {**read_json(tmp_path / "config.json"), **more})
    with pytest.raises(DataError, match=r"layers\.2"):
        StreamedModel(tmp_path, torch.float32, CPU)


def grown_bytes(environ: Mapping[str, str], folder: Path) -> int:
    """By how much the peak memory of this process grew while it passed `folder`/large."""
    passed = partial(streamed, dtype=torch.bfloat16, groups=batches(2, 1))
    return grown_during(partial(passed, folder / "small"), partial(passed, folder / "large"))


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)
def test_no_more_than_two_parts_are_held_however_many_there_are(tmp_path: Path) -> None:
    write_large(tmp_path / "small", layers=1)
    model_bytes = 2 * write_large(tmp_path / "large", layers=40)
    two_parts = 2 * 2 * largest_part_parameters(read_geometry(tmp_path / "large"))
    grown = run_ranks(grown_bytes, 1, tmp_path)[0]
    print(
        f"{grown / 1e6:.0f} MB for a model of {model_bytes / 1e6:.0f} MB, two parts of "
        f"{two_parts / 1e6:.0f} MB"
    )
    assert grown < two_parts + 20e6 < model_bytes / 6
