"""The base in 4 bits: bitwise bitsandbytes' own for any number of ranks, with exact gradients."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitsandbytes import functional as bnb
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipeline_lib.config.train import Lora, Train
from pipeline_lib.core.errors import DataError
from pipeline_lib.model.build import build_trainable, load_base
from pipeline_lib.model.lora import adapted_nf4, adapted_nf4_backward, add_adapters, fuse_adapters
from pipeline_lib.model.nf4 import (
    Nf4Linear,
    frozen_linear,
    frozen_linear_backward,
    quantize_absmax,
    quantize_rows,
    rounded,
)
from pipeline_lib.model.weights import load_weights, quantized_linears
from pipeline_lib.train.dist import World, process_group
from tests.ranks import run_ranks
from tests.train.loading import SIZES, spread, write_random

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {**SIZES, "hidden_size": 192, "intermediate_size": 320, "head_dim": 48}
QLORA = Train(method="lora", precision="fp32", lora=Lora(rank=4, alpha=8, base="nf4"), seed=7)
NAMES = ("codes", "absmax", "statistics")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model whose inputs are multiples of 64, with normal weights."""
    model = Qwen3ForCausalLM(Qwen3Config(**WIDE, tie_word_embeddings=False))
    return write_random(tmp_path_factory.mktemp("model"), model, torch.bfloat16)


def loaded(folder: Path, train: Train = QLORA) -> nn.Module:
    model = build_trainable(folder, train)
    load_weights(model, folder, CPU, train.seed)
    return model


def theirs(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What bitsandbytes makes of a weight: codes, absmax, statistics, the weight it stands for.

    It is the whole weight.
    """
    codes, state = bnb.quantize_4bit(
        weight, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    statistics = torch.cat([state.offset.view(1), state.state2.absmax]).view(torch.uint8)
    return codes.flatten(), state.absmax, statistics, bnb.dequantize_4bit(codes, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 64), (96, 320), (512, 4096 + 64)])
def test_quantized_rows_are_bitwise_bitsandbytes_own(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """On one thread: the last bit of absmax's mean depends on their number, and ours is one."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    weight = torch.randn(shape).mul_(torch.rand(shape[0], 1)).to(dtype)
    weight[1, :64] = 0
    parts = [quantize_rows(rows, "w") for rows in (weight[:3], weight[3:4], weight[4:])]
    codes = torch.cat([codes for codes, _ in parts])
    absmax, statistics = quantize_absmax(torch.cat([absmax for _, absmax in parts]))
    assert torch.get_num_threads() == threads
    torch.set_num_threads(1)
    try:
        expected = theirs(weight)
    finally:
        torch.set_num_threads(threads)
    for found, wanted in zip(
        (codes.flatten(), absmax.flatten(), statistics), expected, strict=False
    ):
        assert torch.equal(found, wanted)
    assert torch.equal(rounded(weight, dtype, "w"), expected[-1])
    assert float((expected[-1].float() - weight.float()).norm() / weight.float().norm()) < 0.12


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(
    folder: Path, tmp_path: Path, value: float
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][5, 3] = value
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(DataError, match=f"{name} has values that are not finite"):
        loaded(tmp_path)


def load_spread(environ: Mapping[str, str], folder: Path, strategy: str) -> dict[str, Any]:
    """All parameters after loading, gathered from ranks, and this rank's bytes of the base."""
    world = World.from_env(environ, "cpu")
    torch.set_num_threads(2)  # not that of the test
    with process_group(world, 60):
        model, _ = spread(folder, world, QLORA, strategy)
        held = {
            name: (value.to_local() if isinstance(value, DTensor) else value).nbytes
            for name, value in model.named_parameters()
        }
        return {
            "held": held,
            **{name: whole(value).numpy() for name, value in model.named_parameters()},
        }


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 1), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3)])
def test_the_base_is_the_same_bits_for_any_number_of_ranks(
    folder: Path, strategy: str, ranks: int
) -> None:
    """Those that bitsandbytes makes of whole weights, and each rank holds its share of bytes."""
    stored = load_file(folder / "model.safetensors")
    results = run_ranks(load_spread, ranks, folder, strategy)
    for found in results.values():
        quantized = [name.removesuffix(".codes") for name in found if name.endswith(".codes")]
        assert len(quantized) == 2 * 7
        for name in quantized:
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            for part, wanted in zip(NAMES, theirs(stored[f"{plain}.weight"].float()), strict=False):
                assert np.array_equal(found[f"{name}.{part}"].flatten(), wanted.numpy()), (
                    f"{name}.{part}"
                )
    base = [
        name
        for name in results[0]["held"]
        if ".lora_" not in name and name.rpartition(".")[2] in NAMES
    ]
    values = sum(stored[name].numel() for name in stored if name.endswith("_proj.weight"))
    total = sum(found["held"][name] for found in results.values() for name in base)
    assert total == pytest.approx((0.5 + 1 / 64 + 4 / 16384) * values, rel=1e-3)
    assert (
        max(sum(found["held"][name] for name in base) for found in results.values())
        < 1.05 * total / ranks
    )


def test_adapters_begin_as_without_quantization_and_have_the_same_names(folder: Path) -> None:
    plain = loaded(folder, QLORA.model_copy(update={"lora": Lora(rank=4, alpha=8)}))
    expected = {name: value for name, value in plain.named_parameters() if value.requires_grad}
    found = {
        name: value for name, value in loaded(folder).named_parameters() if value.requires_grad
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def dense(folder: Path, lora: Lora) -> nn.Module:
    """The model with peft's own modules, whose base has the dequantized weights."""
    base = load_base(folder, torch.float32)
    with torch.no_grad():
        for name, module in base.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                module.weight.copy_(theirs(module.weight)[-1])
    return add_adapters(base, lora, QLORA.seed)


def learn(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of all adapters for one fixed random direction."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0.0, 0.1)
    logits = model(input_ids=torch.randint(3, 60, (2, 16)), use_cache=False).logits
    (logits * torch.randn_like(logits)).sum().backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_values_and_gradients_are_those_of_the_dequantized_weights(
    folder: Path, targets: Any
) -> None:
    """With adapters everywhere, and with most linears quantized but not adapted."""
    lora = Lora(rank=4, alpha=8, base="nf4", targets=targets)
    expected, of_plain = learn(dense(folder, lora))
    model = loaded(folder, QLORA.model_copy(update={"lora": lora}))
    assert len(quantized_linears(model)) == 2 * 7
    found, of_ours = learn(model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert of_plain.keys() == of_ours.keys() != set()
    for name, gradient in of_plain.items():
        torch.testing.assert_close(
            of_ours[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max())
        )


def test_adapters_with_dropout_use_the_quantized_base_too(folder: Path) -> None:
    lora = Lora(rank=4, alpha=8, base="nf4", dropout=0.5)
    model = loaded(folder, QLORA.model_copy(update={"lora": lora})).eval()
    expected = dense(folder, lora).eval()
    tokens = torch.arange(3, 19)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids=tokens).logits, expected(input_ids=tokens).logits, rtol=1e-4, atol=1e-4
        )
    with torch.no_grad():
        assert not torch.equal(
            model(input_ids=tokens).logits, load_base(folder, torch.float32)(tokens).logits
        )


def test_the_operators_have_the_gradients_and_shapes_that_they_tell() -> None:
    torch.manual_seed(0)
    hidden, bias, a, b = (torch.randn(size) for size in ((5, 64), (7,), (3, 64), (7, 3)))
    codes, absmax = quantize_rows(torch.randn(7, 64), "w")
    parts = (codes, *quantize_absmax(absmax))
    for tensor in (hidden, a, b):
        tensor.requires_grad_()
    torch.library.opcheck(adapted_nf4, (hidden, *parts, bias, a, b))
    torch.library.opcheck(frozen_linear, (hidden, *parts, bias))
    narrow, gradient = torch.randn(5, 3), torch.randn(5, 7)
    torch.library.opcheck(
        adapted_nf4_backward, (gradient, hidden.detach(), narrow, *parts, a.detach(), b.detach())
    )
    torch.library.opcheck(frozen_linear_backward, (gradient, *parts))


def test_no_dequantized_weight_is_kept_for_the_backward_pass(folder: Path) -> None:
    model = loaded(folder)
    assert isinstance(
        model.get_submodule("base_model.model.model.layers.0.mlp.up_proj.base_layer"), Nf4Linear
    )
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.arange(3, 19)[None], use_cache=False)
    large = {
        tuple(tensor.shape)
        for tensor in saved
        if tensor.is_floating_point() and tensor.numel() >= 192 * 192
    }
    assert large == {(67, 192)} or not large  # the head's


def test_biases_stay_as_they_are(tmp_path: Path) -> None:
    """Qwen2's projections have some."""
    sizes = {key: value for key, value in WIDE.items() if key != "head_dim"}
    folder = write_random(
        tmp_path, Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)), torch.float32
    )
    model = loaded(folder)
    stored = load_file(folder / "model.safetensors")["model.layers.0.self_attn.q_proj.bias"]
    found = dict(model.named_parameters())[
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias"
    ]
    assert torch.equal(found, stored)
    torch.testing.assert_close(
        learn(model)[0], learn(dense(folder, QLORA.lora))[0], rtol=1e-4, atol=1e-4
    )


def test_models_that_the_format_does_not_fit_are_refused(tmp_path: Path) -> None:
    odd = Qwen3ForCausalLM(Qwen3Config(**{**WIDE, "intermediate_size": 100}))
    with pytest.raises(DataError, match=r"mlp.down_proj has 100; set it to unquantized"):
        build_trainable(write_random(tmp_path / "odd", odd, torch.float32), QLORA)
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    }
    moe = Qwen3MoeForCausalLM(Qwen3MoeConfig(**WIDE, **experts))
    with pytest.raises(DataError, match="nf4 does not work for models with experts"):
        build_trainable(write_random(tmp_path / "moe", moe, torch.float32), QLORA)


def test_fused_adapters_can_be_switched_off(folder: Path) -> None:
    model: Any = loaded(folder)
    fuse_adapters(model)
    learn(model)
    tokens = torch.arange(3, 19)[None]
    with torch.no_grad(), model.disable_adapter():
        found = model(input_ids=tokens, use_cache=False).logits
    with torch.no_grad():
        expected = dense(folder, QLORA.lora)(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
