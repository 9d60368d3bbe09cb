"""A base in 4 bits on real GPUs: bitwise bitsandbytes' own, and adapters learn as on a CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.config.checks import shards_integers
from pipeline_lib.config.train import Train
from pipeline_lib.model.nf4 import quantize_absmax, quantize_rows, rounded
from tests.model.test_moe import losses_and_norms
from tests.model.test_nf4 import QLORA, WIDE, theirs
from tests.ranks import run_ranks

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")]
RANKS = min(2, GPUS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model whose inputs are multiples of 64, with weights as training begins with."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("dense")
    Qwen3ForCausalLM(Qwen3Config(**WIDE, tie_word_embeddings=False)).save_pretrained(folder)
    return folder


def steps_of(folder: Path, ranks: int, device: str, **settings: Any) -> np.ndarray:
    """Loss and norm of each step, the same on all ranks."""
    train = Train.model_validate({**QLORA.model_dump(), **settings})
    found = run_ranks(losses_and_norms, ranks, folder, train, device)
    assert all(each == found[0] for each in found.values())
    return np.array(found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_rows_are_bitwise_bitsandbytes_own(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(512, 4096).mul_(torch.rand(512, 1)).to("cuda", dtype)
    parts = [quantize_rows(rows, "w") for rows in (weight[:3], weight[3:])]
    codes = torch.cat([codes for codes, _ in parts])
    quantize_absmax(torch.cat([absmax for _, absmax in parts]))
    expected = theirs(weight)
    assert torch.equal(codes.flatten(), expected[0])
    assert float((rounded(weight, dtype, "w") - expected[-1]).abs().max()) <= 1e-3 * float(
        expected[-1].abs().max()
    )


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        pytest.param(
            "fsdp",
            marks=pytest.mark.skipif(
                not shards_integers(), reason="torch before 2.13 casts integers"
            ),
        ),
    ],
)
def test_adapters_learn_as_on_a_cpu(folder: Path, strategy: str) -> None:
    expected = steps_of(folder, 1, "cpu")
    assert steps_of(folder, RANKS, "cuda", strategy=strategy) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_layers_keep_the_curve(folder: Path, recompute: str) -> None:
    plain, compiled = (
        steps_of(folder, RANKS, "cuda", precision="bf16", compile=value, recompute=recompute)
        for value in (False, True)
    )
    assert compiled == pytest.approx(plain, rel=3e-2)
