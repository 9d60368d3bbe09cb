"""Predicted memory: the sums by hand, what each strategy divides, the order of strategies."""

import math
from typing import Any

import numpy as np
import pytest

from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.arch.layers import LOGITS_AT_ONCE, feeds_in_chunks, tokens_at_once
from pipeline_lib.config.strategies import STRATEGIES
from pipeline_lib.config.train import Train
from pipeline_lib.core.units import from_gigabytes
from pipeline_lib.plan import moments
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import PARTS, MemoryOfWays, predict, predict_all
from pipeline_lib.plan.ways import Ways
from pipeline_lib.records.plan import Memory
from tests.plan.fleet import QWEN3_06B, QWEN3_8B

NODE = Ranks(8, 8)
EIGHTH = 1 / 8


def of(
    geometry: Geometry = QWEN3_8B, ranks: Ranks = NODE, accumulation: int = 2, **settings: Any
) -> Memory:
    return predict(geometry, Train.model_validate(settings), ranks, 8192, accumulation)


def test_triton_turns_logits_into_gradients_in_place() -> None:
    logits, head = LOGITS_AT_ONCE // 151936 * 151936, 151936 * 4096
    for precision, number in (("bf16", 2), ("fp32", 4)):
        plain, by_triton = (
            of(ranks=Ranks(8, 8, has), precision=precision) for has in (False, True)
        )
        assert plain.moment == by_triton.moment == "at the loss"
        assert by_triton.loss_bytes == number * logits + 4 * head < plain.loss_bytes
        assert plain.activations_bytes == by_triton.activations_bytes


# Bytes for each parameter of a full fine-tune in bf16: weights, gradients, optimizer.
STATE = {
    "ddp": (4.0, 4.0, 8.0),
    "fsdp": (4 * EIGHTH, 4 * EIGHTH, 8 * EIGHTH),
    "hsdp": (4 / 4, 4 / 4, 8 / 4),
    "zero1": (2.0, 4.0, 12 * EIGHTH),
    "zero2": (2.0, 4 * EIGHTH, 12 * EIGHTH),
    "zero3": (2 * EIGHTH, 4 * EIGHTH, 12 * EIGHTH),
}


@pytest.mark.parametrize("strategy", STATE)
def test_state_of_a_full_fine_tune(strategy: str) -> None:
    found = of(strategy=strategy, shard_ranks=4 if strategy == "hsdp" else None)
    held = (found.weights_bytes, found.gradients_bytes, found.optimizer_bytes)
    assert held == pytest.approx(
        [bytes_each * QWEN3_8B.parameters for bytes_each in STATE[strategy]]
    )


@pytest.mark.parametrize(("strategy", "divided_by"), [("ddp", 1), ("fsdp", 8)])
def test_state_of_adapters_is_the_frozen_base_and_16_bytes_an_adapter_parameter(
    strategy: str, divided_by: int
) -> None:
    adapters = QWEN3_8B.adapter_parameters(Train().lora)
    found = of(strategy=strategy, method="lora")
    assert found.state_bytes == pytest.approx(
        (2 * QWEN3_8B.parameters + 16 * adapters) / divided_by
    )


@pytest.mark.parametrize(("strategy", "divided_by"), [("ddp", 1), ("fsdp", 8)])
def test_a_base_in_four_bits_has_half_a_byte_and_its_scales(strategy: str, divided_by: int) -> None:
    """Embedding, head and norms stay in bf16; one weight is dequantized at a time."""
    train: dict[str, Any] = {"method": "lora", "lora": {"base": "nf4"}, "strategy": strategy}
    linears = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    found, plain = of(**train), of(strategy=strategy, method="lora")
    adapters = 4 * QWEN3_8B.adapter_parameters(Train().lora)
    weights = adapters + (0.5 + 1 / 64 + 4 / 16384) * linears + 2 * (QWEN3_8B.parameters - linears)
    assert found.weights_bytes == pytest.approx(weights / divided_by)
    assert plain.optimizer_bytes == found.optimizer_bytes
    backward = of(**train, ranks=Ranks(8, 8, True), recompute="full", micro_batch_blocks=2)
    assert backward.moment == "in the backward pass"
    assert backward.gathered_bytes >= (2 + 4 / 64) * 4096 * 12288


def test_frozen_parameters_keep_their_weight_alone() -> None:
    embedding = 151936 * 4096
    frozen = of(freeze=("model.embed_tokens.*",))
    assert frozen.state_bytes == 16 * QWEN3_8B.parameters - (16 - 2) * embedding
    exact = of(freeze=("model.embed_tokens.*",), precision="fp32")
    assert exact.state_bytes == 16 * QWEN3_8B.parameters - (16 - 4) * embedding


def test_8_bit_moments_take_a_quarter() -> None:
    assert of(optimizer="adamw_8bit").optimizer_bytes == pytest.approx(
        2.03 * QWEN3_8B.parameters, rel=1e-3
    )


@pytest.mark.parametrize(("strategy", "divided_by"), [("ddp", 1), ("fsdp", 8)])
def test_muon_has_one_moment_for_the_matrices_of_layers(strategy: str, divided_by: int) -> None:
    matrices = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    moments = 4 * matrices + 8 * (QWEN3_8B.parameters - matrices)
    found = of(strategy=strategy, optimizer="muon")
    assert found.optimizer_bytes == pytest.approx(moments / divided_by)
    assert found.checkpoint_bytes == 4 * QWEN3_8B.parameters + moments
    frozen = of(strategy=strategy, optimizer="muon", freeze=("model.layers.*",))
    assert frozen.optimizer_bytes == pytest.approx(8 * (2 * 151936 + 1) * 4096 / divided_by)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_parts_make_up_the_total(strategy: str, recompute: str) -> None:
    found = of(
        strategy=strategy, recompute=recompute, shard_ranks=4 if strategy == "hsdp" else None
    )
    described = vars(found)
    assert sum(described[f"{part}_bytes"] for part in PARTS) == described["total_bytes"]
    assert described["total_bytes"] - described["reserve_bytes"] == described["allocated_bytes"]
    assert min(described[f"{part}_bytes"] for part in PARTS) >= 0


def test_recomputing_keeps_less_and_less() -> None:
    none, selective, full = (
        of(strategy="fsdp", recompute=name) for name in ("none", "selective", "full")
    )
    assert none.activations_bytes > 1.8 * selective.activations_bytes > 3 * full.activations_bytes


def test_activations_grow_with_the_micro_batch_and_the_loss_does_not() -> None:
    one, two = (of(strategy="ddp", micro_batch_blocks=blocks) for blocks in (1, 2))
    assert two.activations_bytes == pytest.approx(2 * one.activations_bytes)
    assert two.loss_bytes == one.loss_bytes
    assert one.loss_bytes == pytest.approx(10 * LOGITS_AT_ONCE + 4 * 151936 * 4096, rel=1e-3)


def test_at_the_loss_embedding_and_head_are_gathered_and_the_heads_buffer_is_there() -> None:
    found = predict(QWEN3_8B, Train(strategy="fsdp"), NODE, 256, accumulation=1)
    matrix = 151936 * 4096
    assert found.moment == "at the loss"
    assert found.gathered_bytes == (2 + 2 + 2) * matrix + 2 * 4096


def test_layers_that_stay_gathered_are_there_whole_and_need_no_buffers() -> None:
    kept, let_go = (of(strategy="fsdp", reshard=reshard) for reshard in (False, True))
    assert kept.gathered_bytes == 2 * QWEN3_8B.parameters
    layers = QWEN3_8B.parameters - 2 * 151936 * 4096 - 4096
    assert kept.allocated_bytes - let_go.allocated_bytes == pytest.approx(2 * layers, rel=0.2)
    assert of(strategy="ddp", reshard=True).allocated_bytes == of(strategy="ddp").allocated_bytes


def test_offloading_moves_state_to_the_host() -> None:
    here = of(strategy="fsdp")
    away = of(strategy="fsdp", offload="optimizer+params")
    assert away.state_bytes == 0
    assert away.allocated_bytes == here.allocated_bytes - here.state_bytes
    halfway = of(strategy="zero2", offload="optimizer")
    assert halfway.weights_bytes == 2 * QWEN3_8B.parameters
    assert halfway.optimizer_bytes == 2 * 151936 * 4096  # the buffer through which gradients leave
    assert halfway.gradients_bytes == pytest.approx(4 * QWEN3_8B.parameters * EIGHTH)


def test_page_locked_copies_take_a_power_of_two() -> None:
    """By fsdp weights and gradients twice, tensor by tensor; by zero2 masters and both, flat.

    Both are gradients and weights.
    """
    parts = [4 * math.prod(shape) // 8 for shape in QWEN3_8B.shapes().values()]
    rounded = sum(1 << (part - 1).bit_length() for part in parts)
    moments = 8 * QWEN3_8B.parameters * EIGHTH
    assert of(strategy="fsdp", offload="optimizer+params").host_bytes == pytest.approx(
        moments + 3 * rounded, rel=1e-6
    )
    assert sum(parts) < rounded < 2 * sum(parts)
    # 4.1, 4.1 and 2.0 GB; the embedding
    flat = 2 * 2**32 + 2**31 + 2 ** math.ceil(math.log2(2 * 151936 * 4096))
    assert of(strategy="zero2", offload="optimizer").host_bytes == pytest.approx(
        moments + flat, rel=1e-6
    )


def test_full_checkpointing_keeps_the_attention_of_long_documents() -> None:
    """A layer's input, 4096 numbers, and from 16,384 tokens on many of 32 heads, with sums.

    As many as fit, and a sum for each.
    """

    def kept(block_tokens: int, **settings: Any) -> float:
        train = Train.model_validate(
            {"strategy": "fsdp", "method": "lora", "recompute": "full", **settings}
        )
        away = Ways.one(train.model_copy(update={"offload_activations": True}), QWEN3_8B)
        memory = MemoryOfWays(QWEN3_8B, away, NODE, block_tokens, np.ones(1))
        return float(memory.kept_on_host[0])

    assert kept(8192, micro_batch_blocks=4) == 36 * 4 * 8192 * 2 * 4096
    assert kept(16384) == 36 * 16384 * (2 * 4096 + 2 * 4096 + 4 * 32)
    assert kept(16384, kept_attention_layers=5) == 16384 * (36 * 2 * 4096 + 5 * (2 * 4096 + 4 * 32))
    assert kept(16384, precision="fp32") == 36 * 16384 * 4 * 4096


def test_activations_on_the_host_leave_two_layers_on_the_device() -> None:
    """Of 36, with their inputs and attention of 16,384 tokens; nothing else changes."""
    way = {"strategy": "fsdp", "method": "lora", "recompute": "full"}
    here, away = (
        predict(
            QWEN3_8B, Train.model_validate({**way, "offload_activations": value}), NODE, 16384, 2
        )
        for value in (False, True)
    )
    kept = 36 * 16384 * (2 * 4096 + 2 * 4096 + 4 * 32)
    assert (here.host_bytes, away.host_bytes) == (0, kept)
    assert here.allocated_bytes - away.allocated_bytes == kept * 34 // 36
    unused = Train.model_validate({**way, "recompute": "none", "offload_activations": True})
    assert predict(QWEN3_8B, unused, NODE, 16384, 2).host_bytes == 0


@pytest.mark.parametrize(("tokens", "gigabytes"), [(131_072, 45), (262_144, 70)])
def test_one_long_document_on_one_gpu(
    monkeypatch: pytest.MonkeyPatch, tokens: int, gigabytes: int
) -> None:
    """LoRA of Qwen3-8B.

    The MLP's chunks have a constant size, so that memory grows with the rest of a layer.
    """
    way = {
        "method": "lora",
        "strategy": "ddp",
        "recompute": "full",
        "compile": True,
        "offload_activations": True,
    }
    train = Train.model_validate(way)
    needed = predict(QWEN3_8B, train, Ranks(1, 1), tokens, 1)
    assert needed.total_bytes < from_gigabytes(gigabytes)
    assert needed.error == 0.15
    monkeypatch.setattr("pipeline_lib.arch.layers.FED_AT_ONCE", tokens)
    whole = predict(QWEN3_8B, train, Ranks(1, 1), tokens, 1)
    assert whole.total_bytes > from_gigabytes(gigabytes)
    of_mlp = tokens * QWEN3_8B.intermediate * 2 * 5  # gate, up and their product, and two gradients
    # now attention needs most
    assert 0.5 * of_mlp < whole.allocated_bytes - needed.allocated_bytes < of_mlp


def test_chunks_are_equal_where_that_is_possible() -> None:
    at_once = {
        tokens: tokens_at_once(tokens) for tokens in (131_072, 16_385, 40_960, 20_000, 16_411)
    }
    assert at_once == {
        131_072: 16_384,
        16_385: 8_193,
        40_960: 10_240,
        20_000: 10_000,
        16_411: 8_206,
    }


def test_chunks_are_for_full_checkpointing_of_dense_layers() -> None:
    def chunks(tokens: int = 16_385, has_experts: bool = False, **way: Any) -> bool:
        return feeds_in_chunks(
            Train.model_validate({"recompute": "full", **way}), has_experts, tokens
        )

    assert chunks() and chunks(strategy="fsdp", method="lora")
    assert not chunks(16_384) and not chunks(has_experts=True) and not chunks(recompute="selective")
    assert not chunks(strategy="zero3") and not chunks(precision="fp8")


def test_without_accumulation_fsdp_has_no_gradients_while_it_keeps_activations() -> None:
    assert of(strategy="fsdp", accumulation=1).gradients_bytes == 0
    assert of(strategy="ddp", accumulation=1).gradients_bytes == 4 * QWEN3_8B.parameters


def test_what_is_larger_stays_larger() -> None:
    totals = {
        name: found.total_bytes
        for name, found in predict_all(QWEN3_8B, Train(), NODE, 8192, 2).items()
    }
    assert "hsdp" not in totals  # there is one node
    assert totals["ddp"] > totals["zero1"] > totals["zero2"] > totals["zero3"]
    assert totals["zero2"] > totals["fsdp"]
    assert "hsdp" in predict_all(QWEN3_8B, Train(), Ranks(16, 8), 8192, 2)


def test_zero3_gathers_all_experts_of_a_layer_whatever_its_limits() -> None:
    """4.5 GiB of each layer of 235B in bf16, in a buffer and a copy; and a gradient of 3 GiB."""
    large = geometry_in(published("Qwen/Qwen3-235B-A22B") or {})
    of_layer = 3 * 128 * 4096 * 1536
    found = of(large, Ranks(64, 8, True), strategy="zero3", recompute="full")
    assert found.moment == "in the backward pass"
    assert found.gathered_bytes == 2 * 2 * of_layer == 9 * 2**30
    assert found.exchanged_bytes == 2 * 151936 * 4096 + (2 + 4) * (2 * of_layer // 3)
    dense = of(QWEN3_8B, Ranks(64, 8, True), strategy="zero3", recompute="full")
    assert dense.gathered_bytes == 2 * moments.ZERO3_LIVE


def test_precision_halves_what_is_kept_but_not_the_masters() -> None:
    fp32, bf16 = (of(QWEN3_06B, strategy="fsdp", precision=name) for name in ("fp32", "bf16"))
    assert fp32.state_bytes == bf16.state_bytes
    assert 1.5 < fp32.activations_bytes / bf16.activations_bytes < 2


@pytest.mark.parametrize(
    ("blocks", "reshard", "measured_gib"), [(1, True, 58), (2, True, 99.6), (2, False, 112)]
)
def test_the_sketch_that_was_measured(blocks: int, reshard: bool, measured_gib: float) -> None:
    """8B under FSDP2, compiled, 8 H200, blocks of 8192 tokens, as measured; eager needs more."""
    way: dict[str, Any] = {
        "strategy": "fsdp",
        "reshard": reshard,
        "micro_batch_blocks": blocks,
        "accumulation": 1,
    }
    compiled, eager = (of(compile=value, **way).allocated_bytes / 2**30 for value in (True, False))
    assert compiled == pytest.approx(measured_gib, rel=0.1)
    assert eager > 1.2 * compiled
