"""Gated DeltaNet on a real GPU: fla-core's kernels against the reference on the CPU.

Skipped where there is none.
"""

import importlib.util
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from pipeline_lib.config.train import Train
from pipeline_lib.data.blocks import Block
from pipeline_lib.model.attention import has_kernel
from pipeline_lib.model.batch import Batch, logits_at, loss_sum, make_batch
from pipeline_lib.model.build import build_trainable, load_base, prepare_layers
from pipeline_lib.model.delta import convolved, delta_rule, positions_of
from pipeline_lib.model.weights import load_weights
from tests.gpu.test_kernels import BF16_ERROR, documents_and_batch, load_on_gpu, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs the extra `delta`"),
]
GPU = torch.device("cuda")
KEY_HEADS, HEADS = 2, 4
LENGTHS = [1, 64, 63, 65, 200, 3, 128, 4, 129, 2]
NAMES = ("output", "query", "key", "value", "log_decay", "beta")
# Gradients go through more products than the output, with states in bf16 between chunks.
BOUNDS = (BF16_ERROR, *(3 * BF16_ERROR for _ in NAMES[1:]))


def ends_of(lengths: list[int], filled: int = 0) -> Tensor:
    """cu_seq_lens, with so many more ends than documents."""
    total = sum(lengths)
    return torch.tensor([0, *accumulate(lengths), *[total] * filled], dtype=torch.int32, device=GPU)


def inputs_of(tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Query, key, value, log_decay and beta of a layer; decays from none to a short memory.

    They go from almost none to the memory of a few tokens.
    """
    torch.manual_seed(0)
    query, key = torch.randn(2, tokens, KEY_HEADS, width, device=GPU).to(dtype)
    value = torch.randn(tokens, HEADS, width, device=GPU).to(dtype)
    decay = torch.tensor([0.01, 0.1, 0.5, 2.0], device=GPU) * torch.rand(tokens, HEADS, device=GPU)
    return [query, key, value, -decay, torch.rand(tokens, HEADS, device=GPU)]


def compute(tensors: list[Tensor], ends: Tensor) -> list[Tensor]:
    """The output and the gradients of all tensors, for one fixed random direction."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = delta_rule(*leaves, ends)[0]
    torch.manual_seed(1)
    direction = torch.randn(output.shape).to(output)
    return [output.detach(), *torch.autograd.grad(output, leaves, direction)]


# The delta rule


@pytest.mark.parametrize("width", [128, 64])
def test_the_kernels_agree_with_the_reference(width: int) -> None:
    """Tiles of 64 would show the wrong code that Triton 3.4 to 3.7.0 makes for Hopper."""
    tensors = inputs_of(sum(LENGTHS), width)
    assert has_kernel(tensors[2])
    found = compute(tensors, ends_of(LENGTHS))
    expected = compute([tensor.float().cpu() for tensor in tensors], ends_of(LENGTHS).cpu())
    errors = {
        name: relative_error(*pair) for name, *pair in zip(NAMES, found, expected, strict=True)
    }
    print(f"width {width}: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    assert all(errors[name] < bound for name, bound in zip(NAMES, BOUNDS, strict=True)), errors


def test_a_document_is_computed_as_if_it_were_alone() -> None:
    tensors = inputs_of(sum(LENGTHS), 128)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = delta_rule(*leaves, ends_of(LENGTHS))[0]
    direction = torch.randn_like(output)
    packed = [output.detach(), *torch.autograd.grad(output, leaves, direction)]
    has_its_bits = True
    for begin, end in pairwise([0, *accumulate(LENGTHS)]):
        own = [tensor[begin:end].clone().requires_grad_() for tensor in tensors]
        result = delta_rule(*own, ends_of([end - begin]))[0]
        alone = [result.detach(), *torch.autograd.grad(result, own, direction[begin:end])]
        for name, one, other in zip(NAMES, packed, alone, strict=True):
            has_its_bits &= torch.equal(one[begin:end], other)
            # Of a document of one token the decay has no effect, and its gradient is rounding.
            assert (one[begin:end] - other).abs().max() < BF16_ERROR * one.abs().max(), (
                name,
                begin,
            )
    print(f"a packed document has the bits that it has alone: {has_its_bits}")


def test_other_documents_change_no_bit() -> None:
    tensors = inputs_of(sum(LENGTHS), 128)
    begin, end = sum(LENGTHS[:4]), sum(LENGTHS[:5])
    changed = [tensor.clone() for tensor in tensors]
    for tensor in changed[:3]:
        tensor[:begin] += 1.0
        tensor[end:] += 1.0
    before, after = compute(tensors, ends_of(LENGTHS)), compute(changed, ends_of(LENGTHS))
    assert all(
        torch.equal(one[begin:end], other[begin:end])
        for one, other in zip(before, after, strict=True)
    )
    assert not torch.equal(before[0][end:], after[0][end:])


def test_ends_may_be_repeated() -> None:
    tensors = inputs_of(sum(LENGTHS), 128)
    plain, filled = compute(tensors, ends_of(LENGTHS)), compute(tensors, ends_of(LENGTHS, filled=9))
    assert all(map(torch.equal, plain, filled))


def test_fp32_takes_the_exact_way() -> None:
    tensors = inputs_of(300, 64, torch.float32)
    assert not has_kernel(tensors[2])
    found, expected = (
        compute([tensor.to(place) for tensor in tensors], ends_of([70, 1, 229]).to(place))
        for place in (GPU, "cpu")
    )
    for name, one, other in zip(NAMES, found, expected, strict=True):
        assert relative_error(one, other) < 1e-4, name


def test_the_host_does_not_wait() -> None:
    tensors, ends = inputs_of(sum(LENGTHS), 128), ends_of(LENGTHS, filled=3)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    direction = torch.randn_like(leaves[2])
    for mode in ("default", "error"):  # the first time kernels are compiled and chosen
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            positions = positions_of(ends, len(leaves[2]))
            weight = torch.ones(HEADS * 128, 4, device=GPU)
            convolved(leaves[2].flatten(1), weight, positions, "silu")
            torch.autograd.grad(delta_rule(*leaves, ends)[0], leaves, direction)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# The model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Qwen3.5 whose heads are as wide as the real one's."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    return tmp_path


# What is expected is this project's model on the CPU, which tests/model/test_delta.py compares with
# transformers' own: where fla-core is installed, that one calls its kernels on CPUs too, and fails.


@pytest.mark.parametrize("way", ["bf16 weights", "autocast", "fp32"])
def test_logits_agree_with_the_cpu(folder: Path, way: str) -> None:
    _, batch = documents_and_batch()
    exact, model = load_base(folder, torch.float32), load_on_gpu(folder, torch.float32)
    if way == "bf16 weights":
        model = load_on_gpu(folder, torch.bfloat16)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=way == "autocast"):
        found = logits_at(model, batch.to(GPU), torch.arange(512, device=GPU))[0]
        expected = logits_at(exact, batch, torch.arange(512))[0]
    assert relative_error(found, expected) < (1e-4 if way == "fp32" else 3 * BF16_ERROR)


Gradients = dict[str, Tensor]


def gradients_of(model: nn.Module, batches: list[Batch], is_exact: bool = False) -> Gradients:
    device = next(model.parameters()).device
    for batch in batches:
        with torch.autocast(device.type, torch.bfloat16, enabled=not is_exact):
            loss = loss_sum(model, batch.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_as_exact(found: Gradients, other: Gradients, exact: Gradients) -> None:
    """`found` is off by what bf16 explains: by little, or at most twice as much as `other`.

    `other` is in bf16 too. A decay's parameter has one number a head: terms of both signs are added
    up over all tokens, and rounding shows.
    """
    errors = {
        name: (relative_error(found[name], exact[name]), relative_error(other[name], exact[name]))
        for name in exact
    }
    print({name: pair for name, pair in errors.items() if max(pair) > 0.03})
    assert all(one < max(5 * BF16_ERROR, 2 * another) for one, another in errors.values()), errors
    of_decays = [name for name in errors if name.endswith(("A_log", "dt_bias"))]
    assert len(of_decays) == 6
    assert all(
        one < 5 * BF16_ERROR for name, (one, _) in errors.items() if name not in of_decays
    ), errors


def test_gradients_of_the_model_agree_with_the_cpu(folder: Path) -> None:
    _, batch = documents_and_batch()
    exact = gradients_of(load_base(folder, torch.float32), [batch], is_exact=True)
    rounded = gradients_of(load_base(folder, torch.float32), [batch])
    assert_as_exact(gradients_of(load_on_gpu(folder, torch.float32), [batch]), rounded, exact)


def prepared(folder: Path, **settings: object) -> nn.Module:
    train = Train.model_validate({"method": "full", **settings})
    model = build_trainable(folder, train)
    prepare_layers(model, train)
    load_weights(model, folder, GPU, 0)
    return model


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_layers_are_two_graphs_and_learn_the_same(folder: Path, recompute: str) -> None:
    """One with attention and one without; no break, and none made anew for other documents.

    Other documents: other numbers and lengths of them.
    """
    _, batch = documents_and_batch()
    short = make_batch(
        [
            Block(
                np.zeros(512, np.int32),
                np.ones(512, np.bool_),
                np.arange(512, dtype=np.int32) // 16,
            )
        ]
    )
    exact = gradients_of(load_base(folder, torch.float32), [batch, short], is_exact=True)
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = prepared(folder, recompute=recompute, compile=compiled)
        graphs = []
        for one in (batch, short):
            gradients = gradients_of(model, [one])
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        found.append(gradients)
    # a checkpoint's inside counts by itself
    assert 0 < graphs[0] <= 2 * (2 if recompute == "selective" else 1)
    # before, shapes inside checkpoints were constants
    if recompute != "selective" or torch.__version__ >= "2.13":
        assert graphs[1] == graphs[0]
    assert not torch._dynamo.utils.counters["graph_break"]
    assert_as_exact(found[1], found[0], exact)


def test_recomputation_changes_no_bit(folder: Path) -> None:
    _, batch = documents_and_batch()
    found = []
    for recompute in ("none", "selective", "full"):
        model = prepared(folder, recompute=recompute, compile=False)
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_sum(model, batch.to(GPU))
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(
            {name: p.grad for name, p in model.named_parameters() if "linear_attn" in name}
        )
    assert found[0]
    for others in found[1:]:
        for name, gradient in found[0].items():
            other = others[name]
            assert gradient is not None and other is not None
            assert relative_error(other, gradient) < 1e-5, name


# Last, since a kernel that reads where it must not stops all that follows.


@pytest.mark.slow
def test_whatever_configuration_triton_takes_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers have made wrong code of some: flash-linear-attention, issues 640 and 984."""
    from triton.runtime.errors import OutOfResources

    from pipeline_lib.model.delta_kernels import OFFERED, tuners

    tensors, ends = inputs_of(sum(LENGTHS), 128), ends_of(LENGTHS)
    expected = compute([tensor.float().cpu() for tensor in tensors], ends.cpu())
    compute(tensors, ends)
    kernels = {name: kernel for name, kernel in tuners().items() if hasattr(kernel, "best_config")}
    tried, wrong = 0, []
    for name, kernel in kernels.items():
        for config in OFFERED[name]:
            with monkeypatch.context() as patch:
                patch.setattr(kernel, "configs", [config])
                try:
                    found = compute(tensors, ends)
                except OutOfResources:  # as while it chooses
                    continue
            errors = [relative_error(*pair) for pair in zip(found, expected, strict=True)]
            tried += 1
            if not all(error < bound for error, bound in zip(errors, BOUNDS, strict=True)):
                wrong.append(f"{name} {config}: {errors}")
    print(f"{tried} configurations of {len(kernels)} kernels, {len(wrong)} of them wrong")
    assert tried > len(kernels) > 5
    assert not wrong, "\n".join(wrong)
