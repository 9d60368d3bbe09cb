"""The second half of a layer in chunks on a real GPU: nearly equal numbers, less GPU memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline_lib.arch import layers
from tests.gpu.test_offload_activations import TOKENS, Found, random_qwen3, two_steps
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 whose MLP decides the peak: deterministic flash backward takes 1.1 GB for these.

    These are the tokens of the test.

    It adds up the gradients of queries in 33 copies, for the multiprocessors of an H100 to one for
    each head.
    """
    return random_qwen3(tmp_path_factory.mktemp("wide"), 2, 12_288)


def in_chunks(
    environ: Mapping[str, str], at_once: int, folder: Path, settings: dict[str, Any]
) -> Found:
    layers.FED_AT_ONCE = at_once  # in a process of its own
    return two_steps(environ, folder, settings, "flash")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_chunks_have_the_gradients_of_whole_blocks_in_less_memory(
    folder: Path, strategy: str, method: str, compiled: bool
) -> None:
    """The MLP of four chunks; bf16 products of fewer rows may round differently."""
    settings = {
        **{"strategy": strategy, "method": method, "compile": compiled, "attention": "flash"},
        **{"recompute": "full", "offload_activations": True},
    }
    whole, whole_bytes, _ = run_ranks(in_chunks, 1, TOKENS, folder, settings, timeout_s=300.0)[0]
    found, found_bytes, _ = run_ranks(in_chunks, 1, TOKENS // 4, folder, settings, timeout_s=300.0)[
        0
    ]
    assert len(found) == len(whole)
    for one, other in zip(found, whole, strict=True):
        assert np.linalg.norm(one - other) <= 2e-2 * np.linalg.norm(other)
    assert found_bytes < whole_bytes
    print(
        f"{strategy}, {method}, compiled {compiled}: {whole_bytes / 2**20:.0f} MiB, "
        f"{found_bytes / 2**20:.0f} in chunks"
    )
