"""A run that really runs out of GPU memory: one message, and what it offers is true."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline_lib.train.rank import RankJob
from tests.gpu.wide import WIDE_BLOCK_TOKENS, train_in_little_memory, wide_arena
from tests.ranks import run_ranks
from tests.train.conftest import Arena

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU"),
]


def job_of(arena: Arena, out: Path, **settings: Any) -> RankJob:
    common = {"precision": "bf16", "global_batch_tokens": 16 * WIDE_BLOCK_TOKENS, "until_step": 1}
    return arena.job(1, out, device="cuda", **{**common, **settings})


def test_the_message_offers_what_then_fits(tmp_path: Path) -> None:
    arena = wide_arena(tmp_path)
    said = run_ranks(
        train_in_little_memory, 1, job_of(arena, tmp_path / "full", micro_batch_blocks=16)
    )[0]
    print(said)
    first, predicted, advice, *offers = said.splitlines()
    assert re.match(
        r"GPU memory is full in the warm-up before the first step: .+ more were wanted with .+ in use",
        first,
    )
    assert "of 8.0 GiB in use" in first
    assert predicted.strip().startswith("predicted were ")
    assert advice.strip() == "what would fit, the cheapest first:"
    assert 1 <= len(offers) <= 3
    for number, offer in enumerate(offers):
        changes = dict(re.findall(r"train\.(\w+): (\w+)", offer))
        settings: dict[str, Any] = {"micro_batch_blocks": 16, **changes}
        settings["micro_batch_blocks"] = int(settings["micro_batch_blocks"])
        if settings.get("optimizer") == "adamw_8bit":  # an extra that may be missing
            continue
        job = job_of(arena, tmp_path / f"offer-{number}", replica=f"offer-{number}", **settings)
        assert run_ranks(train_in_little_memory, 1, job)[0] == "", offer
