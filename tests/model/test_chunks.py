"""The second half of a layer in chunks: the whole's numbers, no more products, nothing left."""

import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.arch import layers
from pipeline_lib.arch.layers import tokens_at_once
from pipeline_lib.model import build, chunks, recompute
from pipeline_lib.model.batch import loss_sum, make_batch
from pipeline_lib.model.build import decoder_layers
from pipeline_lib.model.chunks import attended, fed_forward
from tests.model.graphs import compile_without_kernels
from tests.model.test_offload import spread_steps
from tests.model.test_recompute import LAYERS, calls, folder, model_of, step
from tests.model.test_streaming import MODELS, blocks
from tests.ranks import run_ranks
from tests.train.loading import SIZES, write_random

__all__ = ["calls", "folder"]

AT_ONCE = 7  # of 40 tokens: 8 chunks of 5
FULL: dict[str, Any] = {"recompute": "full"}
LORA: dict[str, Any] = {"method": "lora", "lora": {"rank": 2}}
WAYS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "lora": LORA,
    "dropout": {"method": "lora", "lora": {"rank": 2, "dropout": 0.2}},
    "dora": {"method": "lora", "lora": {"rank": 2, "dora": True}},
    "mlp": {
        "method": "lora",
        "lora": {"rank": 2, "targets": ("up_proj",)},
    },  # layer 0: its input needs no gradient
    "attention": {"method": "lora", "lora": {"rank": 2, "targets": ("q_proj",)}},
    "frozen": {"method": "full", "freeze": ("*layers.0.*", "*layers.1.mlp*", "*embed*")},
}


def chunked(patch: pytest.MonkeyPatch, tokens: int = AT_ONCE) -> None:
    patch.setattr(layers, "FED_AT_ONCE", tokens)


def in_parts(layer: nn.Module, hidden: Tensor, **kwargs: Any) -> Tensor:
    """A layer whose second half gets the chunks one after another, with plain autograd."""
    between = attended(layer, hidden, **kwargs)
    parts = torch.split(between.flatten(0, 1), tokens_at_once(between.shape[:-1].numel()))
    return torch.cat([fed_forward(layer, part) for part in parts]).view_as(between)


def seeded_step(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(3)
    return step(model)


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative to the norm of the expected."""
    return float(((found - expected).norm() / expected.norm().clamp_min(1e-6)).detach())


@pytest.mark.parametrize("kind", list(WAYS))
def test_loss_and_gradients_are_those_of_the_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Losses have the bits of products with plain autograd; gradients add up in another order.

    The products of all tokens at once may round differently, and draw other random numbers.
    """
    whole = seeded_step(model_of(folder, **WAYS[kind]))
    chunked(monkeypatch)
    plain = model_of(folder, **WAYS[kind])
    for layer in decoder_layers(plain):
        layer.forward = MethodType(in_parts, layer)
    model = model_of(folder, **WAYS[kind], **FULL)
    expected, found = seeded_step(plain), seeded_step(model)
    assert len(found) == len(expected) == len(whole) > 3
    assert all(map(torch.equal, found[:2], expected[:2]))
    assert max(map(distance, found, expected)) < 3e-6
    if kind != "dropout":
        assert max(map(distance, found, whole)) < 5e-6
    assert all(map(torch.equal, found, seeded_step(model)))
    assert all(
        map(
            torch.equal,
            found,
            seeded_step(model_of(folder, **WAYS[kind], **FULL, offload_activations=True)),
        )
    )


def test_qwen2_and_mixed_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast holds in the repetition as in the forward pass."""
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    folder = write_random(tmp_path / "model", Qwen2ForCausalLM(Qwen2Config(**sizes)), torch.float32)
    found = []
    for way in ({}, FULL):
        model = model_of(folder, method="full", precision="bf16", **way)
        if not way:
            for layer in decoder_layers(model):
                layer.forward = MethodType(in_parts, layer)
        chunked(monkeypatch)
        with torch.autocast("cpu", torch.bfloat16):
            losses = [loss_sum(model, make_batch([block])) for block in blocks(2, 40)]
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]
        found.append([*losses, *(one.grad for one in model.parameters() if one.grad is not None)])
    assert all(map(torch.equal, found[0][:2], found[1][:2]))
    assert len(found[0]) == len(found[1]) > 20
    assert all(one.dtype == torch.float32 for one in found[1])
    assert max(map(distance, found[1], found[0])) < 0.01


def test_layers_with_experts_run_in_one_piece_and_dense_ones_beside_them_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, fed = write_random(tmp_path / "model", MODELS["moe"](), torch.float32), Counter[str]()

    def noted(layer: Any, hidden: Tensor) -> Tensor:
        fed[type(layer.mlp).__name__] += 1
        return fed_forward(layer, hidden)

    monkeypatch.setattr(build, "fed_forward", noted)
    whole = step(model_of(folder, method="full", **FULL))
    chunked(monkeypatch)
    found = step(model_of(folder, method="full", **FULL))
    assert fed == {"Qwen3MoeMLP": 2 * 2 * 8}  # micro-batches, passes and chunks of one layer
    assert len(found) == len(whole) > 10
    assert max(map(distance, found, whole)) < 5e-6


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts multiplications of products; of a linear with an adapter, the frozen weight's."""

    def __init__(self) -> None:
        """None yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count, and run it."""
        if operator.name().partition(".")[0] in ("aten::mm", "qwen3_pipeline::adapted"):
            self.count += len(args[0]) * args[1].numel()
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_there_are_no_more_products(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """But for one: without chunks, checkpointing stops before a down_proj that is plain.

    It is a plain product, which is not repeated.
    """
    counts = []
    for at_once in (1000, AT_ONCE):
        chunked(monkeypatch, at_once)
        model = model_of(folder, **WAYS[method], **FULL)
        with Products() as products:
            step(model)
        counts.append(products.count)
    down = SIZES["hidden_size"] * SIZES["intermediate_size"]
    assert counts[1] - counts[0] == (LAYERS * 2 * 40 * down if method == "full" else 0)
    assert counts[0] > 2 * 3 * LAYERS * 2 * 40 * down


_reference: Any = StorageWeakRef


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", ["full", "lora", "dropout"])
def test_one_chunk_is_there_at_a_time_and_none_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, uncollected: None, kind: str
) -> None:
    """Without the garbage collector, which would come too late."""
    chunked(monkeypatch)
    made: list[Any] = []
    most = 0

    def noted(layer: Any, hidden: Tensor) -> Tensor:
        nonlocal most
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = fed_forward(layer, hidden)
        most = max(most, sum(not one.expired() for one in made))
        return result

    def note(tensor: Tensor) -> Tensor:
        if tensor.shape == (tokens_at_once(40), SIZES["intermediate_size"]):
            made.append(_reference(tensor.untyped_storage()))
        return tensor.detach()

    monkeypatch.setattr(build, "fed_forward", noted)
    model = model_of(folder, **WAYS[kind], **FULL)
    for _ in range(2):
        step(model)
    chunk = len(made) // (2 * 2 * LAYERS * 2 * 8)  # steps, micro-batches, passes and chunks
    assert 3 <= most <= chunk
    assert all(one.expired() for one in made)
    loss = loss_sum(model, make_batch(blocks(1, 40)))  # without a backward pass
    del loss
    assert all(one.expired() for one in made)


def test_a_second_backward_pass_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunked(monkeypatch)
    hidden = torch.randn(1, 40, SIZES["hidden_size"], requires_grad=True)
    layer = decoder_layers(model_of(folder, **WAYS["full"]))[0]

    def attend(_: nn.Module, given: Tensor) -> Tensor:
        return given

    result = chunks.in_chunks(type(layer).forward, attend, fed_forward, False)(layer, hidden)
    result.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="forward pass again"):
        result.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "has_kernels"), [("full", False), ("lora", True)])
def test_compiled(
    folder: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch, kind: str, has_kernels: bool
) -> None:
    """The halves are compiled, each as one graph; attention of long documents still runs once."""
    monkeypatch.setattr(recompute, "KEPT_FROM", 8)
    torch.compiler.reset()
    if not has_kernels:
        compile_without_kernels(monkeypatch)
    whole = step(model_of(folder, **WAYS[kind]))
    chunked(monkeypatch)
    calls.clear()
    torch._dynamo.utils.counters.clear()
    model = model_of(folder, **WAYS[kind], **FULL, compile=True)
    found = step(model)
    assert calls == {"forward": 2 * LAYERS, "backward": 2 * LAYERS}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2
    assert not torch._dynamo.utils.counters["graph_break"]
    assert max(map(distance, found, whole)) < 5e-6
    assert all(map(torch.equal, found, step(model)))


def spread_in_chunks(
    environ: Mapping[str, str], folder: Path, strategy: str, way: dict[str, Any]
) -> list[Any]:
    """What a rank finds in one piece, and in chunks."""

    def ways() -> Iterator[dict[str, Any]]:
        for at_once in (1000, AT_ONCE):
            layers.FED_AT_ONCE = at_once
            yield way

    return [found for found, _ in spread_steps(environ, folder, strategy, ways())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        ("ddp", {"method": "full"}),
        ("fsdp", {"method": "full"}),
        ("fsdp", {"method": "full", "precision": "bf16"}),
        ("fsdp", LORA),
        ("ddp", {"lora": {"rank": 2, "base": "nf4"}}),
        ("fsdp", {"lora": {"rank": 2, "base": "nf4"}}),
    ],
    ids=["ddp-full", "fsdp-full", "fsdp-bf16", "fsdp-lora", "ddp-nf4", "fsdp-nf4"],
)
def test_it_is_the_same_on_two_ranks(tmp_path: Path, strategy: str, way: dict[str, Any]) -> None:
    wide = {
        **SIZES,
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 16,
        "num_hidden_layers": LAYERS,
    }
    folder = write_random(tmp_path / "model", Qwen3ForCausalLM(Qwen3Config(**wide)), torch.float32)
    settings = {"precision": "fp32", **FULL, **way}
    near: float = 1e-5 if settings["precision"] == "fp32" else 0.02
    for one, other in run_ranks(spread_in_chunks, 2, folder, strategy, settings).values():
        assert len(one) == len(other) > 2 + LAYERS
        for expected, given in zip(one, other, strict=True):
            assert np.linalg.norm(given - expected) <= near * max(
                1e-6, float(np.linalg.norm(expected))
            )
