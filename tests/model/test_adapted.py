"""Frozen linear modules with adapters as one operator, against peft's own modules."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from pipeline_lib.config.train import Lora, Train
from pipeline_lib.model.build import build_trainable, load_base
from pipeline_lib.model.lora import adapted, adapted_backward, add_adapters, fuse_adapters
from tests.train.loading import write_dense

LORA = Lora(rank=4, alpha=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dense model."""
    return write_dense(tmp_path_factory.mktemp("model"), tied=True)


def with_adapters(folder: Path, lora: Lora = LORA) -> PeftModel:
    """The model with adapters that do something."""
    model = add_adapters(load_base(folder, torch.float32), lora, 0)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0.0, 0.1)
    return model


def learn(model: PeftModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of all adapters for one fixed random direction."""
    torch.manual_seed(2)
    logits = model(input_ids=torch.randint(3, 60, (2, 16)), use_cache=False).logits
    (logits * torch.randn_like(logits)).sum().backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_values_and_gradients_are_those_of_peft(folder: Path) -> None:
    plain, fused = with_adapters(folder), with_adapters(folder)
    fuse_adapters(fused)
    expected, of_plain = learn(plain)
    found, of_fused = learn(fused)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert of_plain.keys() == of_fused.keys() != set()
    for name, gradient in of_plain.items():
        torch.testing.assert_close(
            of_fused[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())
        )


def test_the_operator_has_the_gradients_that_autograd_finds() -> None:
    torch.manual_seed(0)
    sizes = ((5, 6), (7, 6), (7,), (3, 6), (7, 3))
    hidden, weight, bias, a, b = (torch.randn(size, dtype=torch.float64) for size in sizes)
    for tensor in (hidden, a, b):
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, x, y: adapted(h, weight, bias, x, y)[0], (hidden, a, b)
    )
    torch.library.opcheck(adapted, (hidden, weight, bias, a, b))
    narrow = torch.randn(5, 3, dtype=torch.float64)
    gradient = torch.randn(5, 7, dtype=torch.float64)
    torch.library.opcheck(
        adapted_backward, (gradient, hidden.detach(), narrow, weight, a.detach(), b.detach())
    )


def test_under_autocast_no_more_is_rounded_than_by_peft(folder: Path) -> None:
    plain, fused = with_adapters(folder), with_adapters(folder)
    fuse_adapters(fused)
    exact, _ = learn(plain)
    with torch.autocast("cpu", torch.bfloat16):
        of_peft, ours = learn(plain)[0], learn(fused)[0]
    assert (ours - exact).norm() < 1.2 * (of_peft - exact).norm()


def test_disabled_adapters_change_nothing(folder: Path) -> None:
    model = with_adapters(folder)
    fuse_adapters(model)
    base, tokens = load_base(folder, torch.float32), torch.arange(3, 19)[None]
    with torch.no_grad(), model.disable_adapter():
        found = model(input_ids=tokens, use_cache=False).logits
    with torch.no_grad():
        assert torch.equal(found, base(input_ids=tokens, use_cache=False).logits)
        assert not torch.equal(found, model(input_ids=tokens, use_cache=False).logits)


@pytest.mark.parametrize(
    ("settings", "is_fused"),
    [
        ({"strategy": "fsdp"}, True),
        ({"strategy": "ddp", "lora": {"rslora": True}}, True),
        ({"strategy": "zero3"}, False),
        ({"strategy": "ddp", "lora": {"dropout": 0.1}}, False),
        ({"strategy": "ddp", "lora": {"dora": True}}, False),
    ],
)
def test_what_the_operator_does_not_do_stays_with_peft(
    folder: Path, settings: dict[str, Any], is_fused: bool
) -> None:
    """Among it what zero3 does: it gathers weights when a module itself is called."""
    model = build_trainable(folder, Train.model_validate({"method": "lora", **settings}))
    fused = [
        "forward" in vars(module)
        for name, module in model.named_modules()
        if name.endswith("q_proj")
    ]
    assert fused
    assert all(fused) == any(fused) == is_fused
