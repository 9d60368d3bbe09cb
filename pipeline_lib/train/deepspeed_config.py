"""DeepSpeed's config, derived from `Train`."""

from collections.abc import Mapping
from typing import Any

from pipeline_lib.config.train import Train
from pipeline_lib.plan.moments import ZERO_BUCKET


def zero_config(
    train: Train, world_size: int, accumulation: int, chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """Return DeepSpeed's config: keys derived from `train`, overridden by the user's `chosen`.

    Gradients are accumulated in fp32, and reduced in fp32 or, with `gradient_compression: bf16`, in
    bf16. The optimizer is ours even where it is offloaded, so that nothing is compiled when
    training starts.
    """
    stage = stage_of(train)
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": stage > 1,
        "reduce_bucket_size": ZERO_BUCKET,
        "allgather_bucket_size": ZERO_BUCKET,
    }
    if train.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if train.offload == "optimizer+params":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    ours: dict[str, Any] = {
        "train_batch_size": train.micro_batch_blocks * accumulation * world_size,
        "train_micro_batch_size_per_gpu": train.micro_batch_blocks,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": train.max_grad_norm,
        "communication_data_type": "bf16" if train.gradient_compression == "bf16" else "fp32",
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
    """Return the ZeRO stage: 1, 2 or 3."""
    return int(train.strategy.removeprefix("zero"))


def merged(ours: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ours` overridden by `chosen`; nested objects are merged key by key."""
    result = dict(ours)
    for key, value in chosen.items():
        before = result.get(key)
        result[key] = (
            merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
        )
    return result
