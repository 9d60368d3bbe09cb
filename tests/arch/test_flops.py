"""The FLOPs of a step: against published throughputs, against torch's own counter, and by hand."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.arch.geometry import Geometry, flops_per_token, step_flops
from pipeline_lib.config.train import Train

QWEN3_8B = Geometry(151936, 4096, 12288, 36, 32, 8, 128, False, 40960)
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


@pytest.mark.parametrize(("length", "gigaflops"), [(512, 45.9), (4096, 49.0), (8192, 52.7)])
def test_the_published_work_of_a_token_of_qwen3_8b(length: int, gigaflops: float) -> None:
    flops = step_flops(QWEN3_8B, Train(), length, length**2)
    assert flops.causal / length == pytest.approx(gigaflops * 1e9, rel=2e-3)


def test_it_reproduces_the_figures_that_nvidia_publishes() -> None:
    """Llama3-8B: 14,451 tokens/s a GPU are 744 TFLOP/s, in causal convention, at 8192 tokens."""
    llama = Geometry(128256, 4096, 14336, 32, 32, 8, 128, False, 8192)
    flops = step_flops(llama, Train(), 8192, 8192**2)
    assert flops.causal / 8192 * 14_451 == pytest.approx(744e12, rel=5e-3)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_it_is_what_torch_counts_in_a_real_step(method: Any) -> None:
    """Torch counts whole squares for SDPA, so this is the convention `full_attention`."""
    from peft import LoraConfig, get_peft_model

    config = Qwen3Config(**SMALL)
    config._attn_implementation = "eager"
    model: Any = Qwen3ForCausalLM(config)
    train = Train(method=method)
    if method == "lora":
        adapters = LoraConfig(r=train.lora.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    embedded = torch.randn(1, 64, 32, requires_grad=True)  # as if a layer came before
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    geometry = geometry_in(config.to_dict())
    expected = step_flops(geometry, train, 64, 64**2).full_attention
    # the angles are a product in some versions
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-4)


def test_short_documents_pay_for_their_own_squares_only() -> None:
    one, eight = (
        step_flops(QWEN3_8B, Train(), 8192, squares) for squares in (8192**2, 8 * 1024**2)
    )
    assert (one.causal - 8192 * flops_per_token(QWEN3_8B, Train())) == pytest.approx(
        8 * (eight.causal - 8192 * flops_per_token(QWEN3_8B, Train()))
    )
    assert one.full_attention > one.causal


def test_frozen_weights_get_no_gradients() -> None:
    base = QWEN3_8B.matmul_parameters
    assert flops_per_token(QWEN3_8B, Train()) == 6 * base
    assert flops_per_token(QWEN3_8B, Train(freeze=("model.embed_tokens.*",))) == 6 * base
    assert flops_per_token(QWEN3_8B, Train(freeze=("lm_head.*",))) == 6 * base - 2 * 151936 * 4096
    adapters = QWEN3_8B.adapter_parameters(Train().lora)
    assert flops_per_token(QWEN3_8B, Train(method="lora")) == 4 * base + 6 * adapters


def test_of_experts_those_count_that_a_token_uses() -> None:
    """Qwen3-30B-A3B: 3.3 B active, of which 0.31 B are looked up; 23.1 GFLOP a token at 4096.

    The embedding is included; it is what is looked up.
    """
    config = published("qwen3-30b-a3b")
    assert config is not None
    geometry = geometry_in(config)
    assert geometry.matmul_parameters == pytest.approx(3.04e9, rel=5e-3)
    assert step_flops(geometry, Train(), 4096, 4096**2).causal / 4096 == pytest.approx(
        23.1e9, rel=5e-3
    )


@pytest.mark.parametrize(
    ("train", "factor"),
    [(Train(), 6), (Train(method="lora"), 4), (Train(freeze=("lm_head.*",)), 4)],
)
def test_the_head_counts_only_where_something_is_supervised(train: Train, factor: int) -> None:
    every, some = (
        step_flops(QWEN3_8B, train, 1000, 10_000, supervised) for supervised in (1000, 300)
    )
    assert every == step_flops(QWEN3_8B, train, 1000, 10_000)
    assert every.causal - some.causal == pytest.approx(factor * 700 * 151936 * 4096)
