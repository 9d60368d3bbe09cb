"""What is offered when memory is full: it fits, is legal and cheap, and is never in vain."""

from typing import Any

import pytest

from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.config.train import Train
from pipeline_lib.plan.legal import is_legal
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import predict
from pipeline_lib.plan.predict import usable_fraction
from pipeline_lib.plan.remedies import AT_MOST, Load, least, remedies
from tests.plan.fleet import QWEN3_06B, QWEN3_8B

H200 = 139 * 2**30
BLOCKS = 256  # of a step: several micro-batches for every rank
NODE = Ranks(8, 8)


def offered(
    ratio: float = 1.0, ranks: Ranks = NODE, device_bytes: int = H200, **settings: Any
) -> list[dict[str, Any]]:
    found = remedies(
        Load(QWEN3_8B, Train.model_validate(settings), ranks, 8192, BLOCKS),
        device_bytes,
        ratio,
        has_deepspeed=True,
    )
    return [remedy.changes for remedy in found]


def test_ddp_of_a_model_that_is_too_large_is_offered_sharding() -> None:
    assert offered() == [{"strategy": "fsdp"}, {"strategy": "zero2"}, {"strategy": "zero3"}]


def test_too_large_a_micro_batch_is_offered_a_smaller_one_first() -> None:
    assert offered(strategy="fsdp", micro_batch_blocks=4)[0] == {"micro_batch_blocks": 1}
    assert {"recompute": "full"} in offered(strategy="fsdp", micro_batch_blocks=4)


def test_layers_that_stay_gathered_are_given_back_first() -> None:
    train = Train(strategy="fsdp", reshard=False, compile=True, micro_batch_blocks=2)
    first, *_ = remedies(Load(QWEN3_8B, train, NODE, 8192, BLOCKS), H200, 1.1, has_deepspeed=True)
    assert first.changes == {"reshard": True}
    assert str(first).startswith("train.reshard_after_forward: true  (")


def test_one_gpu_is_offered_no_sharding() -> None:
    for changes in offered(ranks=Ranks(1, 1)):
        assert "strategy" not in changes
    assert {"method": "lora"} in offered(ranks=Ranks(1, 1), device_bytes=100 * 2**30)


def test_one_long_document_is_offered_the_host_for_its_activations_or_attention_twice() -> None:
    train = Train(method="lora", recompute="full")
    away, again = remedies(
        Load(QWEN3_8B, train, Ranks(1, 1), 131_072, BLOCKS), 86 * 2**30, 1.0, has_deepspeed=True
    )
    assert str(away).startswith("train.offload_activations: true  (")
    assert str(again).startswith("train.kept_attention_layers: 0  (")
    assert not any("kept_attention_layers" in changes for changes in offered(recompute="full"))


def test_a_number_of_layers_that_keep_their_attention_hides_no_remedy() -> None:
    """It has an effect with full checkpointing alone, which the plan may choose."""
    given: dict[str, Any] = {"strategy": "fsdp", "micro_batch_blocks": 4}
    assert (
        offered(**given, kept_attention_layers=18)[0]
        == offered(**given)[0]
        == {"micro_batch_blocks": 1}
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero3"])
@pytest.mark.parametrize("micro", [1, 6])
@pytest.mark.parametrize("device_gib", [24, 80, 139])
def test_all_that_is_offered_fits_with_a_margin_and_is_legal(
    strategy: Any, micro: int, device_gib: int
) -> None:
    train, ratio = Train(strategy=strategy, micro_batch_blocks=micro), 1.1
    found = remedies(
        Load(QWEN3_8B, train, NODE, 8192, BLOCKS), device_gib * 2**30, ratio, has_deepspeed=True
    )
    assert len(found) <= AT_MOST
    assert [remedy.cost for remedy in found] == sorted(remedy.cost for remedy in found)
    for remedy in found:
        changed = Train.model_validate({**train.model_dump(), **remedy.changes})
        memory = predict(QWEN3_8B, changed, NODE, 8192, 2)
        again = memory.total_bytes * ratio
        assert remedy.needed_bytes == pytest.approx(again)
        assert again <= device_gib * 2**30 * usable_fraction(memory)
        assert is_legal(changed, NODE)
        assert micro % changed.micro_batch_blocks == 0
        assert not any(one.changes.items() < remedy.changes.items() for one in found)


def test_a_run_that_needs_more_than_predicted_is_offered_less() -> None:
    assert {"strategy": "zero2"} in offered(1.0)
    assert {"strategy": "zero2"} not in offered(1.4)
    assert offered(0.5) == offered(1.0)  # it may have ended before its peak


def test_what_cannot_train_the_model_is_not_offered() -> None:
    geometry = geometry_in(published("Qwen/Qwen3.5-9B") or {})
    train = Train.model_validate({"strategy": "ddp"})
    found = remedies(Load(geometry, train, NODE, 8192, BLOCKS), H200, ratio=1.0, has_deepspeed=True)
    assert {"fsdp"} < {remedy.changes.get("strategy") for remedy in found}
    assert "zero3" not in {remedy.changes.get("strategy") for remedy in found}


def test_approximations_of_ddp_are_not_given_up_in_silence() -> None:
    for changes in offered(gradient_compression="powersgd"):
        assert "strategy" not in changes


def test_if_nothing_fits_the_least_is_known() -> None:
    assert offered(device_bytes=2**30) == []
    found = least(Load(QWEN3_8B, Train(), NODE, 8192, BLOCKS), 1.0, has_deepspeed=True)
    assert found is not None
    assert found.needed_bytes > 2**30


def test_where_nothing_can_be_changed_nothing_is_found() -> None:
    smallest = Train(strategy="ddp", recompute="full", optimizer="adamw_8bit", method="lora")
    assert (
        least(Load(QWEN3_06B, smallest, Ranks(1, 1), 256, BLOCKS), 1.0, has_deepspeed=True) is None
    )


def test_without_deepspeed_its_strategies_leave_room_for_others() -> None:
    """Not those that are left of the cheapest with it, which may be none."""
    two, train = Ranks(2, 2), Train(strategy="ddp", recompute="full", precision="fp16")
    here = [
        remedies(Load(QWEN3_8B, train, two, 4096, BLOCKS), 68 * 2**30, 1.0, has_deepspeed=has)
        for has in (True, False)
    ]
    assert all(remedy.changes["strategy"].startswith("zero") for remedy in here[0])
    assert here[1][0].changes == {"strategy": "fsdp", "offload": "optimizer+params"}
    assert not any(remedy.changes.get("strategy", "").startswith("zero") for remedy in here[1])
    best = least(Load(QWEN3_8B, train, two, 4096, BLOCKS), 1.0, has_deepspeed=False)
    assert best is not None
    assert not best.changes["strategy"].startswith("zero")


def test_moments_in_32_bits_are_offered_where_it_takes_offloading_to_fit() -> None:
    alone, device_bytes = Ranks(1, 1), 79 * 2**30
    found = offered(
        ranks=alone,
        device_bytes=device_bytes,
        strategy="fsdp",
        optimizer="adamw_8bit",
        recompute="full",
    )
    assert {"optimizer": "adamw", "offload": "optimizer+params"} in found
    train = Train(strategy="fsdp", optimizer="adamw_8bit", recompute="full")
    first, *_ = remedies(
        Load(QWEN3_8B, train, alone, 8192, BLOCKS), device_bytes, 1.0, has_deepspeed=True
    )
    assert "train.optimizer: adamw  (" in str(first)
    assert "another optimizer, so another run" in str(first)
