"""A held-out loss layer by layer on a real GPU: the whole model's, in the memory of two parts."""

from pathlib import Path

import pytest
import torch

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.evaluate.stage import score
from pipeline_lib.model.batch import make_batch, token_losses
from pipeline_lib.model.build import load_base
from pipeline_lib.plan.evaluation import scoring_bytes
from tests.model.test_streaming import blocks
from tests.train.loading import write_large

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA GPU"),
]


def test_it_is_the_whole_models_in_less_memory(tmp_path: Path) -> None:
    model_bytes = 2 * write_large(tmp_path, layers=40)
    held_out = blocks(16, 512)
    ones = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    assert (ones @ ones)[0, 0] == 64  # the first product allocates cuBLAS's workspace, which stays
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (losses,) = score(tmp_path, [held_out], print)
    peak = torch.cuda.max_memory_allocated() - before
    model = load_base(tmp_path, torch.bfloat16).to("cuda")  # type: ignore[arg-type]
    with torch.no_grad():
        batch = make_batch(held_out[:8])
        expected = token_losses(model, batch.to(torch.device("cuda"))).double().sum()
    found = losses.nats[: sum(int(block.documents.max()) + 1 for block in held_out[:8])].sum()
    assert found == pytest.approx(float(expected), rel=1e-3)
    assert peak < scoring_bytes(read_geometry(tmp_path), 512, 2)
    assert peak < model_bytes
