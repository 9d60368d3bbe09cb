"""The chat's model on real GPUs: on one, or spread over two and the host's memory."""

from pathlib import Path

import pytest
import torch

from pipeline_lib.evaluate.answers import GREEDY, generate
from pipeline_lib.evaluate.chat_model import load_to_chat, place_for
from tests.train.loading import write_large

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
PROMPT = [5, 17, 400, 23, 1999]


def test_a_model_spread_over_gpus_answers_as_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_bytes = 2 * write_large(tmp_path / "model", layers=16)
    place = place_for(tmp_path / "model")
    assert place.device_map == torch.device("cuda")
    model = load_to_chat(tmp_path / "model", place)
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cuda:0")}
    expected = generate(model, [PROMPT], 12, **GREEDY)

    # As if other programs had left so little: what is free decides for us, and for accelerate.
    def free(device: int | None = None) -> tuple[int, int]:
        return int(0.4 * model_bytes), 80 * 2**30

    monkeypatch.setattr("torch.cuda.mem_get_info", free)
    place = place_for(tmp_path / "model")
    assert place.device_map == "auto"
    spread = load_to_chat(tmp_path / "model", place)
    devices = {parameter.device.type for parameter in spread.parameters()}
    indices = {
        parameter.device.index
        for parameter in spread.parameters()
        if parameter.device.type == "cuda"
    }
    assert indices == {0, 1}
    assert "meta" in devices  # in the host's memory, from where accelerate takes it layer by layer
    assert generate(spread, [PROMPT], 12, **GREEDY) == expected
