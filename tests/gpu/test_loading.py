"""Models are loaded to GPUs in parts, past the host's memory.

Skipped where there are none; run on the GPU machine.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline_lib.config.train import Lora, Train
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import losses, train
from tests.train.loading import grown_bytes, write_dense, write_large

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_first_loss_is_that_of_a_whole_model(
    arena: Arena, tmp_path: Path, method: str, precision: str
) -> None:
    settings: dict[str, Any] = {"method": method, "precision": precision, "until_step": 1}
    found = {}
    for strategy in ("ddp", "fsdp"):
        out = tmp_path / strategy
        run_ranks(
            train,
            2,
            arena.job(2, out, device="cuda", strategy=strategy, replica=strategy, **settings),
        )
        found[strategy] = losses(out)
    assert found["fsdp"] == pytest.approx(found["ddp"], rel=1e-5 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_host_holds_little_of_the_model(tmp_path: Path, strategy: str, method: str) -> None:
    settings = Train(method=method, precision="bf16", lora=Lora(rank=4, alpha=8))  # type: ignore[arg-type]
    write_dense(tmp_path / "small", tied=False)
    stored_bytes = 2 * write_large(tmp_path / "large", layers=100)
    for grown in run_ranks(grown_bytes, 2, tmp_path, settings, strategy, "cuda").values():
        print(
            f"{strategy}, {method}: {grown / 1e6:.0f} MB on the host, of {stored_bytes / 1e6:.0f} "
            "MB in the files"
        )
        assert grown < 0.15 * stored_bytes
