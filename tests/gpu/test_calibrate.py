"""A calibration on real GPUs. Skipped where there are none; run on the GPU machine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline_lib.core.files import write_json, write_text
from pipeline_lib.plan.gpus import find_gpu
from pipeline_lib.plan.measured import Measured, read_measured

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU"),
]
# Qwen3-0.6B's config.json.
MODEL = {
    **{
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
    },
    **{
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    **{"max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
}
CONFIG = """\
experiment: calibration
model: {{source: local, path: {model}}}
data: {{train: [{{source: pydoc}}]}}
tokenize: {{max_tokens: 4096}}
shard: {{block_tokens: 4096}}
cluster: {{gpus_per_node: {gpus}}}
train: {{strategy: fsdp, precision: bf16, global_batch_tokens: 65536}}
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("calibrate")
    write_json(folder / "model" / "config.json", MODEL)
    write_text(folder / "config.yaml", CONFIG.format(model=folder / "model", gpus=min(GPUS, 2)))
    start_s = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pipeline_lib",
            "calibrate",
            str(folder / "config.yaml"),
            "--out",
            str(folder / "c"),
        ],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PIPELINE_STORE": str(folder / "store")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    print(done.stdout, f"{time.monotonic() - start_s:.0f} s")
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    return dict(json.loads((folder / "c").read_text()))


@pytest.fixture(scope="module")
def measured(found: dict[str, Any]) -> Measured:
    return read_measured(found)


def test_rates_are_those_of_a_gpu(measured: Measured) -> None:
    rates = {name: rate.value for name, rate in measured.rates.items()}
    assert measured.gpu == torch.cuda.get_device_name()
    assert measured.gpu_memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert {
        "matmul_flop_s",
        "attention_flop_s",
        "memory_bytes_s",
        "copy_bytes_s",
        "launch_s",
    } <= set(rates)
    known = find_gpu(measured.gpu)
    if known is not None:
        assert 0.3 < rates["matmul_flop_s"] / known.half_flop_s < 1.05
        assert 0.03 < rates["attention_flop_s"] / known.half_flop_s < 1.05
        assert 0.5 < rates["memory_bytes_s"] / known.memory_bytes_per_s < 1.05
    assert 1e9 < rates["copy_bytes_s"] < 1e12
    assert 1e-6 < rates["launch_s"] < 2e-4


def test_layers_cost_what_their_products_do_and_more(measured: Measured) -> None:
    layers = {part.variant: part for part in measured.parts if part.part == "layer"}
    assert next(iter(layers)) == "fsdp/full/none/compiled"
    assert "ddp/full/none/compiled" in layers
    flops = 6 * (1024 * (2048 + 1024 + 1024) + 2048 * 1024 + 3 * 1024 * 3072)
    for layer in layers.values():
        per_token_s = layer.forward.per_token_s + layer.backward.per_token_s
        least_s = flops / measured.rates["matmul_flop_s"].high
        assert least_s < per_token_s < 20 * least_s, layer.variant
        forward_s, backward_s = (
            one.fixed_s + 4096 * one.per_token_s for one in (layer.forward, layer.backward)
        )
        # Of eager layers this small the host decides: with selective checkpointing it takes longer
        # forward.
        if layer.variant.endswith("compiled"):
            assert backward_s > forward_s, layer.variant
        assert layer.forward.host_s > 5e-5, layer.variant


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")
def test_the_gpus_exchange(measured: Measured) -> None:
    assert measured.ranks == 2
    assert measured.rates["in_node_bytes_s"].value > 1e9
    assert 1e-7 < measured.rates["in_node_latency_s"].value < 5e-3
