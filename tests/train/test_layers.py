"""What recomputation and compilation change: what is kept, and not what comes out."""

import functools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from pipeline_lib.config.train import Train
from pipeline_lib.data.blocks import BlockReader
from pipeline_lib.model.batch import loss_sum, loss_sums, read_batch
from pipeline_lib.model.build import build_trainable, decoder_layers, prepare_layers
from pipeline_lib.model.experts import take_router_logits
from pipeline_lib.model.weights import load_weights
from tests.train.conftest import Arena
from tests.train.loading import write_random

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS["norm_topk_prob"] = True  # as the published models have it: transformers divides in place
DROPOUT: dict[str, Any] = {"method": "lora", "lora": {"rank": 4, "alpha": 8, "dropout": 0.3}}


def prepared(arena: Arena, model_folder: Path | None = None, **settings: Any) -> nn.Module:
    train = Train.model_validate({"precision": "fp32", **settings})
    folder = model_folder or arena.store.sealed(arena.model)
    model = build_trainable(folder, train)
    prepare_layers(model, train)
    load_weights(model, folder, torch.device("cpu"), train.seed)
    torch.manual_seed(1)
    return model.train()


def reader_of(arena: Arena) -> BlockReader:
    return BlockReader(arena.store.sealed(arena.shard) / "train")


def loss_of(model: nn.Module, arena: Arena) -> Tensor:
    return loss_sum(model, read_batch(reader_of(arena), [0, 1, 2, 3]))


def gradients(model: nn.Module, arena: Arena) -> dict[str, Tensor]:
    loss_of(model, arena).backward()  # type: ignore[no-untyped-call]
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def kept_bytes(model: nn.Module, arena: Arena) -> int:
    """By how much allocations grow in a forward pass: all that the backward pass keeps."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        loss = loss_of(model, arena)
    del loss
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products of matrices, and attention."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name().startswith(
            ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product")
        )
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Products]:
    with Products() as products:  # type: ignore[no-untyped-call]
        yield products


@pytest.mark.parametrize("settings", [{}, DROPOUT], ids=["full", "lora with dropout"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_layers_give_the_same_bits(
    arena: Arena, recompute: str, settings: dict[str, Any]
) -> None:
    plain = gradients(prepared(arena, **settings), arena)
    found = gradients(prepared(arena, recompute=recompute, **settings), arena)
    assert found.keys() == plain.keys()
    assert [name for name in plain if not torch.equal(found[name], plain[name])] == []


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_experts_give_the_same_bits(
    arena: Arena, tmp_path: Path, recompute: str
) -> None:
    """The routers' loss hangs on values from within the layers."""
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, num_hidden_layers=2, tie_word_embeddings=False)
    folder = write_random(tmp_path, Qwen3MoeForCausalLM(config), torch.float32)
    found = []
    for how in ("none", recompute):
        model = prepared(arena, folder, recompute=how, router_aux_loss=0.1)
        of_tokens, of_routers = loss_sums(model, read_batch(reader_of(arena), [0, 1]))
        (of_tokens + of_routers).backward()  # type: ignore[no-untyped-call]
        found.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*found, strict=True):
        assert plain is not None and again is not None
        assert torch.equal(plain, again)


def test_the_more_is_recomputed_the_less_is_kept(arena: Arena) -> None:
    kept = {
        how: kept_bytes(prepared(arena, recompute=how), arena)
        for how in ("none", "selective", "full")
    }
    print(kept)
    assert kept["full"] < 0.75 * kept["selective"]
    assert kept["selective"] < 0.75 * kept["none"]


def test_selective_computes_no_product_again(arena: Arena) -> None:
    counts = {}
    for how in ("none", "selective", "full"):
        loss = loss_of(prepared(arena, recompute=how), arena)
        with counted() as products:
            loss.backward()  # type: ignore[no-untyped-call]
        counts[how] = products.count
    assert counts["selective"] == counts["none"] < counts["full"]


@pytest.mark.parametrize(
    "settings", [{"recompute": "full"}, {"recompute": "selective"}, {"compile": True}]
)
def test_names_stay(arena: Arena, settings: dict[str, Any]) -> None:
    plain, found = prepared(arena), prepared(arena, **settings)
    assert list(found.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in found.named_modules()] == [
        name for name, _ in plain.named_modules()
    ]


def test_layers_are_found_beneath_adapters(arena: Arena) -> None:
    assert (
        len(decoder_layers(prepared(arena))) == len(decoder_layers(prepared(arena, **DROPOUT))) == 2
    )
    assert decoder_layers(nn.Linear(2, 2)) == []


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU"
)
def test_compiled_layers_give_the_same_up_to_rounding(arena: Arena) -> None:
    """Fused sums are rounded in another order: a few times 2**-24 of the largest part."""
    plain = gradients(prepared(arena), arena)
    found = gradients(prepared(arena, compile=True), arena)
    assert [name for name in plain if not torch.equal(found[name], plain[name])] != []
    for name in plain:
        assert float((found[name] - plain[name]).abs().max()) <= 1e-5 * float(
            plain[name].abs().max()
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_experts", "recompute"),
    [(False, "none"), (False, "full"), (True, "none"), (True, "selective"), (True, "full")],
)
def test_all_layers_share_one_compiled_graph(
    monkeypatch: pytest.MonkeyPatch, has_experts: bool, recompute: str
) -> None:
    """A graph for each would end after the first eight; routers' logits pass without a break."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model: nn.Module
    if has_experts:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, num_hidden_layers=9))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=9))
    prepare_layers(model, Train.model_validate({"compile": True, "recompute": recompute}))
    model(input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False).logits.sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len(take_router_logits(model)) == 9 * has_experts
