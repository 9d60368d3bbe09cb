"""DeepSpeed's config, made from ours."""

from collections.abc import Mapping
from typing import Any

from pipeline_lib.config.schema import Train

# Elements exchanged at a time: 256 MiB in fp32. DeepSpeed's own 5e8 would take 2 GB, and twice that to overlap.
BUCKET_ELEMENTS = 2**26
_CPU = {"device": "cpu", "pin_memory": True}


def zero_config(train: Train, world_size: int, accumulation: int, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What DeepSpeed is told: keys that follow from `train`, then those that a user's JSON has `chosen`.

    Gradients are reduced and added up in fp32. The optimizer is ours also where it is offloaded, so that nothing is
    compiled when training starts.
    """
    stage = stage_of(train)
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": stage > 1,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
    }
    if train.offload != "none":
        zero["offload_optimizer"] = dict(_CPU)
    if train.offload == "optimizer+params":
        zero["offload_param"] = dict(_CPU)
    ours: dict[str, Any] = {
        "train_batch_size": train.micro_batch_blocks * accumulation * world_size,
        "train_micro_batch_size_per_gpu": train.micro_batch_blocks,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": train.max_grad_norm,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": train.precision == "bf16"},
        "fp16": {"enabled": train.precision == "fp16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},
    }
    return merged(ours, chosen)


def stage_of(train: Train) -> int:
    """1, 2 or 3: how much is spread, optimizer, gradients too, weights too."""
    return int(train.strategy.removeprefix("zero"))


def merged(ours: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """`ours` with the values of `chosen` in their places, objects key by key."""
    result = dict(ours)
    for key, value in chosen.items():
        held = result.get(key)
        result[key] = merged(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return result
