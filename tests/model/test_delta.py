"""Gated DeltaNet over packed documents: each has its lone bits, and nothing crosses its start."""

import sys
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

import pipeline_lib.model
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import ConfigError, TrainingError
from pipeline_lib.model import delta, recompute
from pipeline_lib.model.batch import loss_sum, make_batch
from pipeline_lib.model.build import build_trainable, decoder_layers, load_base, prepare_layers
from pipeline_lib.model.context import Part
from pipeline_lib.model.delta import convolved, delta_rule, install, positions_of
from pipeline_lib.model.weights import load_weights
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.mesh import batch_share_of
from tests.model.test_attention import assert_documents_are_as_alone, packed, plain_model
from tests.model.test_streaming import blocks
from tests.ranks import run_ranks
from tests.train.conftest import VOCAB, make_documents

CPU = torch.device("cpu")
KEY_HEADS, HEADS, WIDTH, KERNEL = 2, 4, 8, 4
# The convolution's width, the chunk of the delta rule, and powers of two, each with its neighbours.
LENGTHS = st.lists(
    st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129]),
    min_size=1,
    max_size=5,
)
few = settings(max_examples=15, deadline=None)
MIXED = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
SMALL: dict[str, Any] = {
    **{
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "layer_types": MIXED,
        "head_dim": 16,
    },
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": KEY_HEADS},
    **{
        "linear_num_value_heads": HEADS,
        "linear_key_head_dim": WIDTH,
        "linear_value_head_dim": WIDTH,
    },
}
DENSE = Qwen3_5TextConfig(**SMALL, intermediate_size=64)
SPARSE = Qwen3_5MoeTextConfig(
    **SMALL,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)


def ends_of(lengths: list[int]) -> Tensor:
    """cu_seq_lens of documents, filled up as those of a batch are."""
    total = sum(lengths)
    return torch.tensor([0, *accumulate(lengths), total, total], dtype=torch.int32)


def parts_of(lengths: list[int]) -> list[slice]:
    return [slice(begin, end) for begin, end in pairwise([0, *accumulate(lengths)])]


def bits_of(output: Tensor, inputs: list[Tensor], direction: Tensor) -> list[Tensor]:
    """The output and the gradients of the inputs in that direction."""
    return [output.detach(), *torch.autograd.grad(output, inputs, direction)]


# Its parts


@few
@given(LENGTHS)
def test_a_convolved_document_has_the_bits_that_it_has_alone(lengths: list[int]) -> None:
    torch.manual_seed(0)
    # two of the widest vectors (AVX-512): torch rounds the activation of what is left over
    # otherwise
    channels = 32
    mixed, direction = torch.randn(2, sum(lengths), channels)
    weight = torch.randn(channels, KERNEL, requires_grad=True)

    def convolve(part: slice, ends: Tensor) -> list[Tensor]:
        leaf = mixed[part].clone().requires_grad_()
        output = convolved(leaf, weight, positions_of(ends, len(leaf)), "silu")
        return bits_of(output, [leaf, weight], direction[part])

    output, of_mixed, of_weight = convolve(slice(None), ends_of(lengths))
    total = torch.zeros_like(weight)
    for part in parts_of(lengths):
        alone, of_alone, of_its_weight = convolve(part, ends_of([part.stop - part.start]))
        assert torch.equal(output[part], alone)
        assert torch.equal(of_mixed[part], of_alone)
        total += of_its_weight
    torch.testing.assert_close(of_weight, total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_convolution_is_that_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mixed, weight = torch.randn(9, 6).to(dtype), torch.randn(6, KERNEL).to(dtype)
    found = convolved(mixed, weight, torch.arange(9), "silu")
    conv = nn.functional.conv1d(
        mixed.T[None].float(), weight[:, None].float(), padding=KERNEL - 1, groups=6
    )
    expected = nn.functional.silu(conv[0, :, :9].T).to(dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)


def inputs_of(tokens: int) -> list[Tensor]:
    """Query, key, value, log_decay and beta."""
    torch.manual_seed(0)
    query, key = torch.randn(2, tokens, KEY_HEADS, WIDTH)
    value = torch.randn(tokens, HEADS, WIDTH)
    return [query, key, value, -torch.rand(tokens, HEADS), torch.rand(tokens, HEADS)]


@few
@given(LENGTHS)
def test_the_delta_rule_of_a_document_has_the_bits_that_it_has_alone(lengths: list[int]) -> None:
    tensors = inputs_of(sum(lengths))
    direction = torch.randn(sum(lengths), HEADS, WIDTH)

    def compute(part: slice, ends: Tensor) -> list[Tensor]:
        leaves = [tensor[part].clone().requires_grad_() for tensor in tensors]
        return bits_of(delta_rule(*leaves, ends)[0], leaves, direction[part])

    found = compute(slice(None), ends_of(lengths))
    for part in parts_of(lengths):
        alone = compute(part, ends_of([part.stop - part.start]))
        assert all(torch.equal(one[part], other) for one, other in zip(found, alone, strict=True))


def test_the_delta_rule_is_its_recurrence() -> None:
    """Token by token in fp64, with gradients; a state of one token's document is its own."""
    lengths = [1, 70, 5]
    leaves = [tensor.requires_grad_() for tensor in inputs_of(sum(lengths))]
    direction = torch.randn(sum(lengths), HEADS, WIDTH)
    found = bits_of(delta_rule(*leaves, ends_of(lengths))[0], leaves, direction)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    query, key = (
        nn.functional.normalize(tensor, dim=-1).repeat_interleave(HEADS // KEY_HEADS, 1)
        for tensor in exact[:2]
    )
    outputs = []
    for part in parts_of(lengths):
        state = torch.zeros(HEADS, WIDTH, WIDTH, dtype=torch.float64)
        for token in range(part.start, part.stop):
            state = state * exact[3][token].exp()[:, None, None]
            read = torch.einsum("hde,hd->he", state, key[token])
            change = exact[4][token][:, None] * (exact[2][token] - read)
            state = state + torch.einsum("hd,he->hde", key[token], change)
            outputs.append(torch.einsum("hde,hd->he", state, query[token]) * WIDTH**-0.5)
    expected = bits_of(torch.stack(outputs), exact, direction.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_the_operator_keeps_the_rules_of_operators() -> None:
    """Its fake result has the real shape, dtype and layout, and its gradient can be traced."""
    leaves = [tensor.requires_grad_() for tensor in inputs_of(12)]
    torch.library.opcheck(delta_rule, (*leaves, ends_of([5, 7])))


# A layer


def layer_of() -> Any:
    torch.manual_seed(0)
    config: Any = DENSE  # which has all that a layer reads
    return Qwen3_5GatedDeltaNet(config, 0)


def gradients(layer: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in layer.parameters()]
    return [gradient for gradient in found if gradient is not None]


def of_documents(layer: Any, hidden: Tensor, direction: Tensor, lengths: list[int]) -> list[Tensor]:
    """The output and gradients of `hidden` [T, H] and parameters, by transformers' forward.

    It is its own forward of each.
    """
    own, leaf = type(layer).forward, hidden.clone().requires_grad_()
    layer.zero_grad()
    output = torch.cat([own(layer, leaf[None, part])[0] for part in parts_of(lengths)])
    output.backward(direction)  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return [output.detach(), leaf.grad, *gradients(layer)]


def of_blocks(
    layer: Any, hidden: Tensor, direction: Tensor, ends: Tensor, rows: int = 1
) -> list[Tensor]:
    """The same of packed documents in so many rows."""
    leaf = hidden.clone().requires_grad_()
    layer.zero_grad()
    output = layer(
        leaf.view(rows, -1, hidden.shape[-1]), cu_seq_lens_q=ends, max_length_q=9
    ).flatten(0, 1)
    output.backward(direction)
    assert leaf.grad is not None
    return [output.detach(), leaf.grad, *gradients(layer)]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest of the differences, each relative to the largest element that was expected."""
    assert len(found) == len(expected) == 2 + len(list(layer_of().parameters()))
    return max(
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(found, expected, strict=True)
    )


ROUNDING = 1e-4


@few
@given(LENGTHS)
def test_a_layer_is_transformers_own_of_each_document(lengths: list[int]) -> None:
    layer = layer_of()
    hidden, direction = torch.randn(2, sum(lengths), 32)
    expected = of_documents(layer, hidden, direction, lengths)
    install(layer)
    assert error(of_blocks(layer, hidden, direction, ends_of(lengths)), expected) < ROUNDING


def test_rows_of_a_batch_are_apart() -> None:
    layer = layer_of()
    hidden, direction = torch.randn(2, 24, 32)
    expected = of_documents(layer, hidden, direction, [5, 7, 9, 3])
    install(layer)
    assert (
        error(of_blocks(layer, hidden, direction, ends_of([5, 7, 9, 3]), rows=2), expected)
        < ROUNDING
    )


@pytest.mark.parametrize("part", ["convolution", "delta rule"])
def test_ends_that_are_withheld_from_a_part_are_noticed(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others do wrong: the error is thousands of times the rounding in the tests above."""
    layer, lengths = layer_of(), [5, 9, 70, 3]
    hidden, direction = torch.randn(2, sum(lengths), 32)
    expected = of_documents(layer, hidden, direction, lengths)
    install(layer)
    if part == "convolution":
        monkeypatch.setattr(delta, "positions_of", lambda ends, tokens: torch.arange(tokens))
    else:
        monkeypatch.setattr(
            delta, "delta_rule", lambda *inputs: delta_rule(*inputs[:-1], inputs[-1][[0, -1]])
        )
    assert error(of_blocks(layer, hidden, direction, ends_of(lengths)), expected) > 1000 * ROUNDING


def in_parts(environ: Mapping[str, str]) -> list[Any]:
    """This rank's part of the output and gradients: all inputs of its tokens, its parameters.

    Of parameters it has its share.
    """
    world = World.from_env(environ, "cpu")
    with process_group(world, 60):
        part = batch_share_of(world, Train(context_ranks=world.size)).part
        assert part is not None
        layer = layer_of()
        install(layer)
        hidden, direction = (part.of(tensor) for tensor in torch.randn(2, 2, 32, 32))
        leaf = hidden.requires_grad_()
        output = layer(leaf, cu_seq_lens_q=ends_of(SHARED), part=part)
        output.backward(direction)
        return [
            tensor.detach().numpy()
            for tensor in (output, leaf.grad, *gradients(layer))
            if tensor is not None
        ]


SHARED = [3, 13, 16, 27, 5]  # documents of two blocks of 32 tokens, cut in the middle of some


def test_ranks_that_share_blocks_compute_what_one_does() -> None:
    """Each has half of the heads: of the channels of the convolution, and of decays."""
    layer = layer_of()
    install(layer)
    hidden, direction = torch.randn(2, 2, 32, 32)
    expected = of_blocks(
        layer, hidden.flatten(0, 1), direction.flatten(0, 1), ends_of(SHARED), rows=2
    )
    found = run_ranks(in_parts, 2)
    first, second = ([torch.from_numpy(each) for each in found[rank]] for rank in range(2))
    whole = [
        torch.cat(pair, dim=1).flatten(0, 1) for pair in zip(first[:2], second[:2], strict=True)
    ]
    summed = [one + other for one, other in zip(first[2:], second[2:], strict=True)]
    assert error([*whole, *summed], expected) < ROUNDING


def test_ranks_that_cannot_share_the_heads_are_refused() -> None:
    layer = layer_of()
    install(layer)
    with pytest.raises(
        TrainingError, match="train.context_ranks: 4 ranks cannot share 2 key heads"
    ):
        layer(torch.zeros(1, 4, 32), cu_seq_lens_q=ends_of([16]), part=Part(0, 4, "group"))


def test_a_gpu_without_fla_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "has_kernel", lambda value: True)
    monkeypatch.setitem(sys.modules, "pipeline_lib.model.delta_kernels", None)
    monkeypatch.delattr(pipeline_lib.model, "delta_kernels", raising=False)
    delta._kernels.cache_clear()
    with pytest.raises(ConfigError, match=r"fla-core: pip install -e '\.\[delta\]'"):
        delta_rule(*inputs_of(4), ends_of([4]))


# A model


def write(folder: Path, config: PreTrainedConfig) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")  # type: ignore[no-untyped-call]


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    write(tmp_path, DENSE)
    return load_base(tmp_path / "model", torch.float32)


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "experts"])
def test_a_packed_document_has_the_logits_that_it_has_alone(
    tmp_path: Path, config: PreTrainedConfig
) -> None:
    write(tmp_path, config)
    assert_documents_are_as_alone(
        load_base(tmp_path / "model", torch.float32), tmp_path, make_documents(3, seed=4)
    )


def test_gradients_are_those_of_the_documents_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    bins = make_documents(3, seed=5)
    loss_sum(model, make_batch(packed(tmp_path, bins))).backward()  # type: ignore[no-untyped-call]
    plain = plain_model(tmp_path)
    for document in (document for documents in bins for document in documents):
        tokens = torch.from_numpy(document.tokens).long()
        labels = torch.where(torch.from_numpy(document.supervised), tokens, -100)
        (
            plain(tokens[None], labels=labels[None]).loss * int(document.supervised[1:].sum())
        ).backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_generation_is_that_of_transformers(model: PreTrainedModel, tmp_path: Path) -> None:
    prompt = torch.tensor([[5, 9, 17, 33, 2, 40]])
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": 12,
        "do_sample": False,
    }
    expected = plain_model(tmp_path).generate(prompt, use_cache=False, **options)  # type: ignore[operator]
    for use_cache in (True, False):
        assert torch.equal(model.generate(prompt, use_cache=use_cache, **options), expected)  # type: ignore[operator]


def test_names_are_those_of_transformers(model: PreTrainedModel, tmp_path: Path) -> None:
    names = [name for name, _ in plain_model(tmp_path).named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names


def test_compiled_layers_are_one_graph_that_they_share(model: PreTrainedModel) -> None:
    """Forward and backward, with eager code's bits; other document counts take the same graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda layer, hidden, ends: layer(hidden, cu_seq_lens_q=ends),
        backend=counter,
        fullgraph=True,
    )
    layers: list[Any] = [
        layer.linear_attn for layer in decoder_layers(model) if hasattr(layer, "linear_attn")
    ]
    hidden = torch.randn(1, 24, 32)
    for layer in layers:
        for lengths in ([5, 12, 7], [1, 2, 3, 10, 8]):
            ends = ends_of(lengths)
            torch._dynamo.maybe_mark_dynamic(ends, 0)
            leaves = [hidden.clone().requires_grad_() for _ in range(2)]
            found, expected = compiled(layer, leaves[0], ends), layer(leaves[1], cu_seq_lens_q=ends)
            for one, other in zip(
                bits_of(found, [leaves[0]], hidden),
                bits_of(expected, [leaves[1]], hidden),
                strict=True,
            ):
                assert torch.equal(one, other)
    assert len(layers) == 3
    assert counter.frame_count == 1


# Activation checkpointing


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that are computed."""

    def __init__(self) -> None:
        """Nothing counted yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def step(folder: Path, **chosen: Any) -> tuple[list[Tensor], int]:
    """Loss and gradients of a batch, and how often the delta rule ran forward."""
    train = Train.model_validate({"precision": "fp32", "method": "full", **chosen})
    model = build_trainable(folder, train)
    prepare_layers(model, train)
    load_weights(model, folder, CPU, 0)
    with Calls() as calls:
        loss = loss_sum(model.train(), make_batch(blocks(2, 40)))
        loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *gradients(model)], calls.counts["qwen3_pipeline::delta_rule"]


def test_recomputation_changes_no_bit_and_selective_keeps_the_delta_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full recomputation of long documents, too, where the attention's results are kept."""
    monkeypatch.setattr(recompute, "KEPT_FROM", 8)
    write(tmp_path, DENSE)
    expected, once = step(tmp_path / "model", recompute="none")
    assert once == 3
    for kind, forward in (("selective", 3), ("full", 6)):
        found, calls = step(tmp_path / "model", recompute=kind)
        assert calls == forward, kind
        assert all(map(torch.equal, found, expected)), kind


def test_chunks_of_the_mlp_change_rounding_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, DENSE)
    expected, _ = step(tmp_path / "model", recompute="full")
    monkeypatch.setattr("pipeline_lib.arch.layers.FED_AT_ONCE", 16)
    found, _ = step(tmp_path / "model", recompute="full")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
