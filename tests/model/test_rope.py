"""`model.rope` in config.json and in all ways to build a model, against transformers' YaRN."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.arch.rope import positions_in, stretched
from pipeline_lib.config.rope import Rope
from pipeline_lib.config.train import Lora, Train
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.model.batch import logits_at, make_batch
from pipeline_lib.model.build import build_trainable, load_base
from pipeline_lib.model.probe import probe_logits
from pipeline_lib.model.streaming import StreamedModel
from pipeline_lib.model.weights import load_weights
from tests.model.test_streaming import blocks
from tests.train.loading import SIZES, write_random

CPU = torch.device("cpu")
ROPE = Rope(type="yarn", factor=4.0)
ORIGINAL, LENGTH = 16, 60  # a document is longer than the original positions
# Qwen3-8B's keys
HUB = {"rope_theta": 1_000_000, "rope_scaling": None, "max_position_embeddings": 40960}
# as its model card has it
CARD = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = Qwen3Config(**{**SIZES, "max_position_embeddings": ORIGINAL}, tie_word_embeddings=True)
    return write_random(tmp_path / "model", Qwen3ForCausalLM(config), torch.float32)


def theirs(folder: Path, scaling: dict[str, Any]) -> Any:
    """Return transformers' model with its plainest attention and own reading of `scaling`."""
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = {**config.rope_parameters, **scaling}
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, attn_implementation="eager"
    ).train(False)


def logits_of(model: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        return logits_at(model.train(False), batch, torch.arange(batch.tokens.shape[1]))


@pytest.mark.parametrize("built", ["evaluated", "trained", "adapted"])
def test_packed_documents_are_those_of_transformers_with_the_same_parameters(
    folder: Path, built: str
) -> None:
    block = blocks(1, LENGTH)[0]
    batch = make_batch([block])
    train = Train(
        method="lora" if built == "adapted" else "full", precision="fp32", lora=Lora(rank=2)
    )
    model: Any = load_base(folder, torch.float32, ROPE)
    if built != "evaluated":
        model = build_trainable(folder, train, ROPE)
        load_weights(model, folder, CPU, 0)
    found, unstretched = logits_of(model, batch), logits_of(load_base(folder, torch.float32), batch)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    plain, compared = theirs(folder, scaling), 0
    for document in range(3):
        places = torch.from_numpy(block.documents == document).nonzero().flatten()
        with torch.no_grad():
            expected = plain(batch.tokens[:, places]).logits
        torch.testing.assert_close(found[:, places], expected, rtol=1e-5, atol=1e-5)
        compared = max(compared, len(places))
    assert compared > ORIGINAL
    assert not torch.allclose(found, unstretched, atol=1e-3)


def test_a_model_that_passes_layer_by_layer_is_stretched_too(folder: Path) -> None:
    block = blocks(1, LENGTH)[0]
    expected = probe_logits(load_base(folder, torch.float32, ROPE), block, CPU)
    assert torch.equal(
        StreamedModel(folder, torch.float32, CPU, ROPE).probe_logits(block)[0], expected
    )
    assert not torch.equal(
        StreamedModel(folder, torch.float32, CPU).probe_logits(block)[0], expected
    )


@pytest.mark.parametrize("form", ["before transformers 5", "since transformers 5"])
def test_the_exported_keys_are_those_that_transformers_takes(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Both formats of config.json give the same model as Qwen3's card, without a warning."""
    theta = {"rope_theta": 1_000_000}
    keys = (
        HUB
        if form.startswith("before")
        else {"rope_parameters": theta, "max_position_embeddings": 40960}
    )
    config = {"model_type": "qwen3", **SIZES, "max_position_embeddings": 40960, **keys}
    made = stretched(config, ROPE)
    assert made["max_position_embeddings"] == positions_in(made) == 131072
    assert (
        made["rope_scaling" if form.startswith("before") else "rope_parameters"].items()
        >= CARD.items()
    )
    write_json(tmp_path / "config.json", made)
    logging.getLogger("transformers").propagate = True
    read = AutoConfig.from_pretrained(tmp_path)
    assert caplog.text == ""
    assert read.rope_parameters == {**theta, **CARD}
    write_json(tmp_path / "config.json", stretched(config, None))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == {**theta, "rope_type": "default"}


@pytest.mark.parametrize(
    ("keys", "rope", "expected"),
    [
        (HUB, ROPE, 131072),
        (HUB, Rope(type="yarn", factor=1.0), 32768),
        (HUB, Rope(type="yarn", factor=2.5, original_max_position_embeddings=40000), 100_000),
        ({"max_position_embeddings": 262144}, ROPE, 1_048_576),
        ({}, ROPE, 131072),
    ],
)
def test_the_positions_are_the_original_ones_times_the_factor(
    keys: dict[str, Any], rope: Rope, expected: int
) -> None:
    config = {**(published("Qwen/Qwen3-8B") or {}), "max_position_embeddings": 32768, **keys}
    geometry = geometry_in(config).stretched(rope)
    assert geometry.max_positions == positions_in(stretched(config, rope)) == expected
    assert list(geometry.too_long(expected)) == []
    assert len(list(geometry.too_long(expected + 1))) == 1


def test_a_block_that_is_too_long_names_the_factor_that_would_do() -> None:
    geometry = geometry_in(published("Qwen/Qwen3-8B") or {})
    [problem] = geometry.too_long(65536)
    assert problem == (
        "shard.block_tokens: 65536 tokens are more than the model's 40960 positions; lower it, or "
        "set model.rope: "
        "{type: yarn, factor: 2.0}"
    )
    assert list(geometry.stretched(Rope(type="yarn", factor=2.0)).too_long(65536)) == []
    [problem] = geometry.stretched(Rope(type="yarn", factor=2.0)).too_long(65537)
    assert problem.endswith("; lower it, or raise it to model.rope: {type: yarn, factor: 3.0}")


@pytest.mark.parametrize(
    "keys",
    [
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            }
        },
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            }
        },
    ],
)
def test_a_model_with_a_scaling_of_its_own_keeps_it(
    tmp_path: Path, folder: Path, keys: dict[str, Any]
) -> None:
    """Its blocks may have the positions that this gives, and `model.rope` is refused."""
    geometry = geometry_in({**(published("Qwen/Qwen3-8B") or {}), **keys})
    assert geometry.max_positions == 131072
    [problem] = geometry.too_long(131073)
    assert problem.endswith("positions; lower it")
    with pytest.raises(DataError, match=r"rope_type 'yarn'\).*remove model\.rope"):
        geometry.stretched(ROPE)
    write_json(folder / "config.json", {**read_json(folder / "config.json"), **keys})
    with pytest.raises(DataError, match=r"rope_type 'yarn'\).*remove model\.rope"):
        load_base(folder, torch.float32, ROPE)
