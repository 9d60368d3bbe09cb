"""`model.rope` through Snakemake: blocks beyond the model's positions are trained and merged.

They are also evaluated.
"""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline_lib.core.files import read_json
from pipeline_lib.evaluate.chat_model import load_base_of
from pipeline_lib.model.probe import load_probe
from tests.pipeline.conftest import Project

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_processes")]


def test_a_stretched_model_is_trained_merged_and_evaluated(project: Project) -> None:
    project.edit("block_tokens: 128", "block_tokens: 5120")
    project.edit("global_batch_tokens: 2048, micro_batch_blocks: 2", "global_batch_tokens: 10240")
    project.edit("epochs: 2", "epochs: 12")
    refused = project.run("snakemake", "-n", check=False)
    assert "5120 tokens are more than the model's 4096 positions" in refused.stdout
    assert "set model.rope: {type: yarn, factor: 2.0}" in refused.stdout
    plain = project.experiment()
    project.edit("layers: 2}", "layers: 2, rope: {type: yarn, factor: 2.0}}")
    stretched = project.experiment()
    changed = {part for part in stretched.specs if stretched.ref(part) != plain.ref(part)}
    assert changed == {"plan", "train", "merge", "baseline", "evaluate", "report"}

    project.snakemake(project.target("evaluate"))
    metrics = json.loads((project.sealed("evaluate") / "metrics.json").read_text())
    assert metrics["eval"]["tuned"]["loss"] < metrics["eval"]["base"]["loss"] - 0.1
    merged = project.sealed("merge")
    parity = json.loads((merged / "parity.json").read_text())
    assert parity["relative_difference"] <= parity["tolerance"] == 1e-4
    card = (merged / "README.md").read_text()
    assert "rotary embeddings stretched by yarn, factor 2" in card
    assert "model.rope" in card and "train.rope" not in card

    config = read_json(merged / "config.json")
    assert config["max_position_embeddings"] == 8192
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
    assert config["rope_parameters"] == {"rope_theta": 10000.0, **scaling}
    base = load_base_of(merged, project.store, lambda _: None)  # as `chat --base` asks it
    assert base.config.rope_parameters == config["rope_parameters"]
    block, expected = load_probe(project.sealed("train"))
    loaded = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).train(False)
    documents = [
        np.flatnonzero(block.documents == number)
        for number in np.unique(block.documents)
        if number >= 0
    ]
    with torch.no_grad():
        logits = torch.cat(
            [
                loaded(torch.from_numpy(block.tokens[each]).long()[None]).logits[0]
                for each in documents
            ]
        )
    places = torch.linspace(0, len(logits) - 1, len(expected), dtype=torch.float64).round().long()
    torch.testing.assert_close(logits[places], expected, rtol=1e-3, atol=1e-4)
