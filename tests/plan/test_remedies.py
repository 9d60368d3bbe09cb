"""What is offered when memory is full: it fits, is legal and fast, and is never in vain."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.config.train import Train
from pipeline_lib.plan.fitting import AT_MOST
from pipeline_lib.plan.legal import is_legal
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import predict
from pipeline_lib.plan.predict import usable_fraction
from pipeline_lib.plan.remedies import Load, least, remedies
from tests.plan.fleet import QWEN3_06B, QWEN3_8B

H200 = 139 * 2**30
BLOCKS = 256  # of a step: several micro-batches for every rank
NODE = Ranks(8, 8)
ALONE = Ranks(1, 1)


def offered(
    ratio: float = 1.0, ranks: Ranks = NODE, device_bytes: int = H200, **settings: Any
) -> list[Mapping[str, Any]]:
    load = Load(QWEN3_8B, Train.model_validate(settings), ranks, 8192, BLOCKS)
    found = remedies(load, device_bytes, ratio, has_deepspeed=True)
    return [each.remedy.keys for each in found]


def applied(train: Train, keys: Mapping[str, Any]) -> Train:
    """The training with these values of keys, as a reader sets them."""
    given = train.model_dump()
    for key, value in keys.items():
        if key == "lora.base":
            given["lora"]["base"] = value
        else:
            given[key] = value
    return Train.model_validate(given)


def test_ddp_of_a_model_that_is_too_large_is_offered_sharding_before_another_training() -> None:
    sharded, *others = offered()
    assert sharded == {"strategy": "fsdp"}
    assert {"method": "lora"} in others


def test_too_large_a_micro_batch_is_offered_a_smaller_one_first() -> None:
    first, *others = offered(strategy="fsdp", micro_batch_blocks=4)
    assert first.keys() == {"micro_batch_blocks"}
    assert first["micro_batch_blocks"] < 4
    assert {"recompute": "full"} in others


def test_layers_that_stay_gathered_are_given_back() -> None:
    train = Train(strategy="fsdp", reshard=False, compile=True, micro_batch_blocks=2)
    load = Load(QWEN3_8B, train, Ranks(8, 8, has_triton=True), 8192, BLOCKS)
    found = remedies(load, H200, 1.2, has_deepspeed=True)
    [given_back] = [each for each in found if each.remedy.keys == {"reshard": True}]
    assert str(given_back).startswith("train.reshard_after_forward: true  (")


def test_one_gpu_is_offered_what_offloads_and_then_adapters() -> None:
    first, second, *_ = offered(ranks=ALONE, device_bytes=100 * 2**30)
    assert first["offload"] != "none"
    assert second == {"method": "lora"}


def test_one_long_document_is_offered_the_host_for_its_activations_or_attention_twice() -> None:
    train = Train(method="lora", recompute="full")
    load = Load(QWEN3_8B, train, ALONE, 131_072, BLOCKS)
    found = remedies(load, 86 * 2**30, 1.0, has_deepspeed=True)
    changed = [each.remedy.keys for each in found]
    assert {"offload_activations": True} in changed
    assert {"kept_attention_layers"} in [set(keys) for keys in changed]
    assert not any("kept_attention_layers" in keys for keys in offered(recompute="full"))


def test_a_number_of_layers_that_keep_their_attention_hides_no_remedy() -> None:
    """It has an effect with full checkpointing alone, which the plan may choose."""
    given: dict[str, Any] = {"strategy": "fsdp", "micro_batch_blocks": 4}
    assert offered(**given, kept_attention_layers=18)[0] == offered(**given)[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero3"])
@pytest.mark.parametrize("micro", [1, 6])
@pytest.mark.parametrize("device_gib", [24, 80, 139])
def test_all_that_is_offered_fits_with_a_margin_and_is_legal(
    strategy: Any, micro: int, device_gib: int
) -> None:
    train = Train(strategy=strategy, micro_batch_blocks=micro)
    load = Load(QWEN3_8B, train, NODE, 8192, BLOCKS)
    ratio = 1.1
    found = remedies(load, device_gib * 2**30, ratio, has_deepspeed=True)
    assert len(found) <= AT_MOST
    for each in found:
        changed = applied(train, each.remedy.keys)
        accumulation = changed.accumulation(BLOCKS, NODE.total)
        memory = predict(QWEN3_8B, changed, NODE, 8192, accumulation)
        again = memory.total_bytes * ratio
        assert each.needed_bytes == pytest.approx(again)
        assert again <= device_gib * 2**30 * usable_fraction(memory)
        assert is_legal(changed, NODE)


def test_a_run_that_needs_more_than_predicted_is_offered_less() -> None:
    given: dict[str, Any] = {
        "strategy": "fsdp",
        "micro_batch_blocks": 8,
        "device_bytes": 200 * 2**30,
    }
    few, fewer = (offered(ratio, **given)[0]["micro_batch_blocks"] for ratio in (1.0, 1.5))
    assert fewer < few
    assert offered(0.5) == offered(1.0)  # it may have ended before its peak


def test_what_cannot_train_the_model_is_not_offered() -> None:
    geometry = geometry_in(published("Qwen/Qwen3.5-9B") or {})
    load = Load(geometry, Train.model_validate({"strategy": "ddp"}), NODE, 8192, BLOCKS)
    found = remedies(load, H200, ratio=1.0, has_deepspeed=True)
    strategies = {each.remedy.keys.get("strategy") for each in found}
    assert "fsdp" in strategies
    assert not strategies & set(geometry.left_out)


def test_approximations_of_ddp_are_not_given_up_in_silence() -> None:
    for changes in offered(gradient_compression="powersgd"):
        assert "strategy" not in changes


def test_if_nothing_fits_the_least_is_known() -> None:
    assert offered(device_bytes=2**30) == []
    found = least(Load(QWEN3_8B, Train(), NODE, 8192, BLOCKS), 1.0, has_deepspeed=True)
    assert found is not None
    assert found.needed_bytes > 2**30


def test_where_nothing_can_be_changed_nothing_is_found() -> None:
    """As when the least has been taken."""
    load = Load(QWEN3_06B, Train(strategy="ddp"), ALONE, 256, BLOCKS)
    found = least(load, 1.0, has_deepspeed=True)
    assert found is not None
    smallest = replace(load, train=applied(load.train, found.remedy.keys))
    assert least(smallest, 1.0, has_deepspeed=True) is None


def test_without_deepspeed_its_strategies_leave_room_for_others() -> None:
    """Not those that are left of the fastest with it, which may be none."""
    two = Ranks(2, 2)
    train = Train(strategy="ddp", recompute="full", precision="fp16")
    load = Load(QWEN3_8B, train, two, 4096, BLOCKS)
    first, *_ = remedies(load, 68 * 2**30, 1.0, has_deepspeed=True)
    assert first.remedy.keys["strategy"].startswith("zero")
    here = remedies(load, 68 * 2**30, 1.0, has_deepspeed=False)
    assert here[0].remedy.keys == {"strategy": "fsdp", "offload": "optimizer+params"}
    assert not any(each.remedy.keys.get("strategy", "").startswith("zero") for each in here)
    best = least(load, 1.0, has_deepspeed=False)
    assert best is not None
    assert not best.remedy.keys["strategy"].startswith("zero")


def test_moments_in_32_bits_are_offered_where_it_takes_offloading_to_fit() -> None:
    train = Train(strategy="fsdp", optimizer="adamw_8bit", recompute="full")
    load = Load(QWEN3_8B, train, ALONE, 8192, BLOCKS)
    found = remedies(load, 79 * 2**30, 1.0, has_deepspeed=True)
    changes = {"optimizer": "adamw", "offload": "optimizer+params"}
    [offloaded] = [each for each in found if each.remedy.keys == changes]
    assert "another optimizer, so another run" in str(offloaded)
