"""What an fp8 step computes: products of tensors rounded to 8 bits with one scale each."""

import copy
import importlib.util

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.config.train import Train
from pipeline_lib.model.build import prepare_layers, use_fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the extra `fp8`"),
]
GPU = torch.device("cuda")
WEIGHTS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
BF16_ERROR = 2**-8  # of a rounded number
E4M3_ERROR = 2**-4
STEPS = 10


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in fp32, as 8 bits with one scale for all of it hold it."""
    scale = torch.finfo(dtype).max / tensor.float().abs().max()
    return (tensor.float() * scale).to(dtype).float() / scale


def relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().float(), expected.detach().float()
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(128, 64, bias=False, device=GPU, dtype=torch.bfloat16)


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(
        96, 128, device=GPU, dtype=torch.bfloat16, generator=torch.Generator(GPU).manual_seed(1)
    )


def in_fp8(linear: nn.Linear) -> nn.Module:
    layer = nn.ModuleDict({"q_proj": copy.deepcopy(linear)})
    use_fp8(layer)
    return layer["q_proj"]


def test_a_product_and_its_gradients_are_those_of_rounded_factors(
    linear: nn.Linear, hidden: Tensor
) -> None:
    made, leaf = in_fp8(linear), hidden.clone().requires_grad_()
    output = made(leaf)
    direction = torch.randn(
        output.shape, device=GPU, generator=torch.Generator(GPU).manual_seed(2)
    ).to(output)
    (output * direction).sum().backward()

    factor, weight = rounded(hidden, WEIGHTS), rounded(linear.weight.detach(), WEIGHTS)
    upstream = rounded(direction, GRADIENTS)
    assert relative_error(output, factor @ weight.T) < BF16_ERROR
    assert leaf.grad is not None
    assert relative_error(leaf.grad, upstream @ weight) < BF16_ERROR
    gradient = made.weight.grad
    assert isinstance(gradient, Tensor)
    assert relative_error(gradient, upstream.T @ factor) < BF16_ERROR
    assert (
        BF16_ERROR
        < relative_error(output, hidden.float() @ linear.weight.detach().float().T)
        < E4M3_ERROR
    )


def test_without_gradients_it_is_the_product_in_bf16(linear: nn.Linear, hidden: Tensor) -> None:
    made = in_fp8(linear)
    with torch.no_grad():
        assert torch.equal(made(hidden), linear(hidden))


def losses(precision: str) -> list[float]:
    """Of steps of a small model on the same tokens."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model: nn.Module = Qwen3ForCausalLM(config)
    model.to(GPU, torch.bfloat16)
    prepare_layers(model, Train.model_validate({"precision": precision, "compile": False}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(256, (1, 64), device=GPU, generator=torch.Generator(GPU).manual_seed(3))
    found = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_steps_learn_as_those_in_bf16() -> None:
    eight_bits, sixteen_bits = losses("fp8"), losses("bf16")
    assert eight_bits != sixteen_bits
    assert eight_bits == pytest.approx(sixteen_bits, rel=0.05)
    assert eight_bits[-1] < 0.8 * eight_bits[0]
