"""Where a model is evaluated, on real GPUs. Skipped where there are none."""

from pathlib import Path

import pytest
import torch

from benchmarks.sizes import model_config
from pipeline_lib.core.files import write_json
from pipeline_lib.evaluate.loading import device_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA GPU"),
]
LEFT_BYTES = 3 * 2**30  # less than 0.6B is evaluated in


def test_memory_of_a_model_that_is_gone_is_room_for_the_next(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", model_config("0.6B"))
    free_bytes, _ = torch.cuda.mem_get_info()
    before = torch.empty(free_bytes - LEFT_BYTES, dtype=torch.uint8, device="cuda")
    assert device_for(tmp_path).type == "cpu"
    del before
    assert device_for(tmp_path).type == "cuda"
