"""Under full checkpointing long documents' attention is computed once, with bits as if twice.

The operators and the checkpointing are the real ones; only cuDNN's graphs, which need a GPU, are
plain torch here.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.config.train import Train
from pipeline_lib.model import recompute
from pipeline_lib.model.batch import loss_sum, make_batch
from pipeline_lib.model.build import build_trainable, prepare_layers
from pipeline_lib.model.weights import load_weights
from tests.model.graphs import compile_without_kernels, use_torch_for_graphs
from tests.model.test_streaming import blocks
from tests.train.loading import SIZES, write_random

LAYERS = 3
CPU = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return use_torch_for_graphs(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = Qwen3Config(**{**SIZES, "num_hidden_layers": LAYERS}, tie_word_embeddings=True)
    return write_random(tmp_path / "model", Qwen3ForCausalLM(config), torch.float32)


def model_of(folder: Path, **settings: Any) -> nn.Module:
    train = Train.model_validate({"precision": "fp32", "lora": {"rank": 2}, **settings})
    model = build_trainable(folder, train)
    prepare_layers(model, train)
    load_weights(model, folder, CPU, 0)
    return model.train()


def step(model: nn.Module) -> list[Tensor]:
    """Loss and gradients of two micro-batches of packed documents."""
    model.zero_grad()
    losses = []
    for block in blocks(2, 40):
        losses.append(loss_sum(model, make_batch([block])))
        losses[-1].backward()  # type: ignore[no-untyped-call]
    return [
        *losses,
        *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
    ]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_attention_of_long_documents_runs_once_for_each_layer(
    folder: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch, method: str, compiled: bool
) -> None:
    """The compiler's kernels overwrite no kept result: see the next test and test_chunks.py."""
    compile_without_kernels(monkeypatch)
    plain = step(model_of(folder, method=method, compile=compiled))
    assert calls == {"forward": 2 * LAYERS, "backward": 2 * LAYERS}
    model = model_of(folder, method=method, compile=compiled, recompute="full")
    for kept_from, forward in ((1000, 4 * LAYERS), (8, 2 * LAYERS)):
        monkeypatch.setattr(recompute, "KEPT_FROM", kept_from)
        for _ in range(2):
            calls.clear()
            found = step(model)
            assert calls == {"forward": forward, "backward": 2 * LAYERS}
            assert len(found) == len(plain) > 2 + LAYERS
            assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention_without_a_gradient_is_not_kept(
    folder: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """That of the first layer, with no adapter before it: compiled code may overwrite it."""
    torch.compiler.reset()
    monkeypatch.setattr(recompute, "KEPT_FROM", 8)
    settings: dict[str, Any] = {
        "method": "lora",
        "lora": {"rank": 2, "targets": ("o_proj",)},
        "compile": compiled,
    }
    plain = step(model_of(folder, **settings))
    calls.clear()
    found = step(model_of(folder, **settings, recompute="full"))
    assert calls == {"forward": 2 * (LAYERS + 1), "backward": 2 * (LAYERS - 1)}
    assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_layers_that_do_not_keep_their_attention_compute_it_again_with_the_same_bits(
    folder: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch, method: str, compiled: bool
) -> None:
    compile_without_kernels(monkeypatch)
    monkeypatch.setattr(recompute, "KEPT_FROM", 8)
    plain = step(model_of(folder, method=method, compile=compiled))
    for kept in range(LAYERS + 1):
        model = model_of(
            folder, method=method, compile=compiled, recompute="full", kept_attention_layers=kept
        )
        calls.clear()
        found = step(model)
        assert calls == {"forward": 2 * (LAYERS + LAYERS - kept), "backward": 2 * LAYERS}
        assert len(found) == len(plain) > 2 + LAYERS
        assert all(map(torch.equal, found, plain))


def test_the_last_layers_with_attention_keep_it() -> None:
    attending = [True, False, True, True, False]
    layers = [
        nn.ModuleDict({"self_attn" if one else "linear_attn": nn.Identity()}) for one in attending
    ]
    for count, expected in ((0, []), (2, [2, 3]), (3, [0, 2, 3])):
        recompute.keep_attention_of_last(layers, count)
        assert [
            place for place, layer in enumerate(layers) if getattr(layer, "keeps_attention", False)
        ] == expected


def test_selective_keeps_it_at_any_length(folder: Path, calls: Counter[str]) -> None:
    plain = step(model_of(folder))
    calls.clear()
    found = step(model_of(folder, recompute="selective"))
    assert calls == {"forward": 2 * LAYERS, "backward": 2 * LAYERS}
    assert all(map(torch.equal, found, plain))


def test_nothing_is_left_of_a_step(
    folder: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of a step are freed with its graph, also if there is no backward pass."""
    made: list[Any] = []
    reference: Any = StorageWeakRef
    keep = recompute.KeptResults.once

    def noted(self: Any, compute: Any) -> Any:
        found = keep(self, compute)
        made.extend(map(reference, (tensor.untyped_storage() for tensor in found)))
        return found

    monkeypatch.setattr(recompute, "KEPT_FROM", 8)
    monkeypatch.setattr(recompute.KeptResults, "once", noted)
    model = model_of(folder, recompute="full")
    step(model)
    batch = make_batch(blocks(1, 40))
    loss = loss_sum(model, batch)
    assert not all(one.expired() for one in made)
    del loss
    assert len(made) == (2 * 2 + 1) * 2 * LAYERS
    assert all(one.expired() for one in made)
