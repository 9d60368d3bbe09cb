"""Activations in host memory on a GPU: the same bits, less GPU memory, attention computed once."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.calibrate.random_model import batch_of_documents
from pipeline_lib.config.train import Train
from pipeline_lib.model import attention
from pipeline_lib.model.batch import Batch, loss_sum
from pipeline_lib.model.build import build_trainable
from pipeline_lib.model.gpu import make_deterministic
from pipeline_lib.model.offload import HostMemory
from pipeline_lib.model.weights import load_weights
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.strategies import make_strategy
from tests.ranks import run_ranks

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU"),
]
LAYERS, TOKENS, VOCAB = 12, 16_384, 512
AWAY: dict[str, Any] = {"recompute": "full", "offload_activations": True}
Found = tuple[list[NDArray[np.float32]], int, int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 whose layers keep 16 MiB of input and of attention, 64 MiB with two blocks."""
    return random_qwen3(tmp_path_factory.mktemp("long"), LAYERS, 1024)


def random_qwen3(folder: Path, layers: int, intermediate: int) -> Path:
    """Write a model with random weights to `folder`, and return that."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def batches(device: torch.device) -> list[Batch]:
    """One long document, and documents of 2,048 tokens."""
    return [batch_of_documents(TOKENS, length, 0.5, VOCAB).to(device) for length in (TOKENS, 2048)]


def two_steps(
    environ: Mapping[str, str], folder: Path, settings: dict[str, Any], kernel: str
) -> Found:
    """Losses and gradients after two micro-batches, twice; peak bytes; attention's runs.

    The peak is that of the second time; the runs are forward.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    make_deterministic()
    world, runs = World.from_env(environ, "cuda"), [0]
    name = f"_{kernel}_forward"
    forward = getattr(attention, name)

    def counted(*arguments: Any) -> Any:
        runs[0] += 1
        return forward(*arguments)

    setattr(attention, name, counted)
    train = Train.model_validate({"precision": "bf16", "lora": {"rank": 8}, **settings})
    with process_group(world, 120):
        strategy = make_strategy(world, train, 2)
        model = build_trainable(folder, train)
        wrapped = strategy.spread(model, lambda one: load_weights(one, folder, world.device, 0))
        wrapped.train()
        found: list[NDArray[np.float32]] = []
        for _ in range(2):
            runs[0] = 0
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            wrapped.zero_grad()
            for batch in batches(world.device):
                with strategy.autocast():
                    loss = loss_sum(wrapped, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                found.append(loss.detach().cpu().numpy())
            peak = torch.cuda.max_memory_allocated()
            gradients: list[Any] = [one.grad for one in model.parameters() if one.grad is not None]
            found += [getattr(one, "_local_tensor", one).float().cpu().numpy() for one in gradients]
        return found, peak, runs[0]


def steps_of(folder: Path, settings: dict[str, Any], kernel: str, ranks: int = 1) -> Found:
    found: Found = run_ranks(two_steps, ranks, folder, settings, kernel, timeout_s=400.0)[0]
    return found


KERNELS = [
    pytest.param(
        "cudnn",
        marks=pytest.mark.skipif(
            not attention._HAS_FRONT_END, reason="needs the extra cudnn and a Hopper GPU"
        ),
    ),
    "flash",
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "lora"},
        {"method": "lora", "compile": True},
        {"method": "full"},
        {"method": "lora", "strategy": "fsdp", "compile": True},
        {"method": "lora", "lora": {"rank": 8, "base": "nf4"}},
    ],
    ids=["lora", "compiled", "full", "fsdp", "nf4"],
)
def test_the_bits_are_the_same_and_the_peak_is_lower(
    folder: Path, settings: dict[str, Any], kernel: str
) -> None:
    settings = {**settings, "attention": "flash" if kernel == "flash" else "auto"}
    here, here_bytes, runs = steps_of(folder, {**settings, "recompute": "full"}, kernel)
    away, away_bytes, runs_away = steps_of(folder, {**settings, **AWAY}, kernel)
    # The long document's attention runs once for each layer, and that of the short ones twice.
    assert runs == runs_away == 3 * LAYERS
    assert len(here) == len(away) > 2 + LAYERS
    assert all(np.isfinite(one).all() for one in here)
    assert all(map(np.array_equal, here, away))
    of_a_layer = TOKENS * 2 * (512 + 512)
    assert away_bytes < here_bytes - (LAYERS - 5) * of_a_layer


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_is_the_same_on_two_gpus(folder: Path, strategy: str) -> None:
    settings = {"method": "lora", "strategy": strategy, "attention": "flash"}
    here, *_ = steps_of(folder, {**settings, "recompute": "full"}, "flash", ranks=2)
    away, *_ = steps_of(folder, {**settings, **AWAY}, "flash", ranks=2)
    assert all(map(np.array_equal, here, away))


def test_the_copies_run_beside_the_computation(folder: Path) -> None:
    """Bytes that were written on the host while the GPU was busy are the ones that were kept."""
    host = HostMemory()
    device = torch.device("cuda")
    made = []
    for number in range(8):
        call = host.call()
        kept = torch.full((4 << 20,), float(number), device=device)
        made.append((call, call.keep(kept)))
        del kept
        square = torch.randn(2048, 2048, device=device)
        for _ in range(20):  # whatever is allocated next must not lie where a copy still reads
            square = square @ square * 1e-3
        torch.full((4 << 20,), -1.0, device=device)
    for number, (call, away) in reversed(list(enumerate(made))):
        assert bool((call.get(away) == number).all())
    assert host.allocated_bytes == 8 * (16 << 20)
