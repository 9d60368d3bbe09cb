"""Dropout of adapters on real GPUs: on CUDA, in compiled layers, on ranks that share a batch.

It is its masks that count.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline_lib.model.context import Part
from pipeline_lib.model.dropout import SEGMENT, Drawing, Draws, SeededDropout
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import digest_of, load_weights, losses, train, train_until_killed

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU"),
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")
P = 0.3
BLOCK = 4 * SEGMENT
LORA: dict[str, Any] = {
    "method": "lora",
    "lora": {"rank": 4, "alpha": 8, "dropout": P},
    "device": "cuda",
}


def masks(draws: Draws, blocks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What is dropped of `blocks` parts of blocks: bool[blocks, tokens, width]."""
    dropout = SeededDropout(P, 0, Drawing())
    dropout.drawing.draws = draws
    left: Tensor = dropout(torch.ones(blocks, draws.tokens, 64, device="cuda", dtype=dtype))
    return left == 0


def test_masks_depend_neither_on_the_grouping_of_blocks_nor_on_the_precision() -> None:
    together = masks(Draws((5, 6), BLOCK, 0, BLOCK), 2)
    assert together.float().mean().item() == pytest.approx(P, abs=0.01)
    for place, key in enumerate((5, 6)):
        alone = Draws((key,), BLOCK, 0, BLOCK)
        assert torch.equal(masks(alone, 1)[0], together[place])
        assert torch.equal(masks(alone, 1, torch.bfloat16)[0], together[place])
        halves = [masks(alone.of(Part(number, 2, "unused")), 1)[0] for number in range(2)]
        assert torch.equal(torch.cat(halves), together[place])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_killed_run_draws_the_same_masks_when_it_goes_on(
    arena: Arena, tmp_path: Path, compiled: bool
) -> None:
    settings = LORA | {
        "precision": "bf16",
        "deterministic": True,
        "compile": compiled,
        "save_every_steps": 2,
    }
    run_ranks(train, 1, arena.job(1, tmp_path / "whole", replica="whole", **settings))
    killed = arena.job(1, tmp_path / "killed", replica="killed", **settings)
    run_ranks(train_until_killed, 1, killed, 4)
    run_ranks(train, 1, arena.job(1, tmp_path / "resumed", replica="killed", **settings))
    assert digest_of(load_weights(tmp_path / "resumed")) == digest_of(
        load_weights(tmp_path / "whole")
    )


@two_gpus
@pytest.mark.parametrize(
    "placement", [{"strategy": "ddp"}, {"strategy": "fsdp"}, {"context_ranks": 2}]
)
def test_dropout_is_the_same_however_the_batch_is_spread(
    whole: Callable[..., Path], placement: dict[str, Any]
) -> None:
    assert losses(whole(2, **LORA, **placement)) == pytest.approx(
        losses(whole(1, **LORA)), rel=1e-4
    )
