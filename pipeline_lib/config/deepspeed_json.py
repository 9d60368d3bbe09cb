"""Read a user's own DeepSpeed config, `train.deepspeed_json`."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pipeline_lib.config.other_tools import NO_KEY
from pipeline_lib.config.train import AUTO
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.files import canonical_json
from pipeline_lib.core.text import did_you_mean

# The keys of a user's own DeepSpeed config that may be merged over the one that is made here: only
# keys about placement and timing (bucket sizes, overlap, logging), never about what is computed. A
# key with a counterpart here is refused, with the counterpart's name. The value "auto" keeps our
# value.

Offload = Literal["none", "optimizer", "optimizer+params"]

_SWITCHES = {
    "contiguous_gradients",
    "reduce_scatter",
    "use_multi_rank_bucket_allreduce",
    "allgather_partitions",
    "overlap_comm",
    "round_robin_gradients",
    "parameter_alignment",
    "ignore_unused_parameters",
    "memory_efficient_linear",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
}
_SIZES = {
    "reduce_bucket_size",
    "allgather_bucket_size",
    "sub_group_size",
    "stage3_module_granularity_threshold",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
}
_OFFLOAD = {"device", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu"}
_LOGGING = {
    "comms_logger",
    "flops_profiler",
    "wall_clock_breakdown",
    "memory_breakdown",
    "steps_per_print",
}
_ZERO = "zero_optimization"

# Keys of DeepSpeed that have no counterpart here, and why.
_SCALE = "the loss is scaled for fp16 by rules of ours, and not at all for bf16"
_WHOLE = "the merged model is always whole, in train's result"
_OPTIMIZER = "DeepSpeed trains with the optimizer of train.optimizer here"
_QUANTIZED = (
    "it changes what is computed; train.gradient_compression: bf16 halves what ranks exchange"
)
_CHECKPOINTS = "checkpoints are ours: train.save_every_steps, train.save_async"
SPEED = "speed and memory only, and chosen here by train.strategy"
_QUANTIZING = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)
_LOADING = ("load_from_fp32_weights", "elastic_checkpoint", "pipeline_loading_checkpoint")
_CHOSEN = (
    "zero_hpz_partition_size",
    "mics_shard_size",
    "mics_hierarchical_params_gather",
    "legacy_stage1",
    "leaf_module",
    "override_module_apply",
    "cpu_offload_use_pin_memory",
    "zenflow",
    "save_muon_momentum_buffer_in_memory",
    "compute_grad_norm",
)
REASONS = {
    **dict.fromkeys(("fp16", "bf16", "bfloat16"), _SCALE),
    "optimizer": "the optimizer is made here by train.optimizer; it has no such setting",
    "scheduler": "the schedule is made here by train.lr_schedule; it has no such setting",
    _ZERO: SPEED,
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": _WHOLE,
    f"{_ZERO}.stage3_gather_fp16_weights_on_model_save": _WHOLE,
    f"{_ZERO}.gather_16bit_weights_on_model_save": _WHOLE,
    **dict.fromkeys((f"{_ZERO}.{key}" for key in _QUANTIZING), _QUANTIZED),
    **dict.fromkeys((f"{_ZERO}.{key}" for key in _LOADING), _CHECKPOINTS),
    **dict.fromkeys((f"{_ZERO}.{key}" for key in _CHOSEN), SPEED),
    "zero_allow_untested_optimizer": _OPTIMIZER,
    "zero_force_ds_cpu_optimizer": _OPTIMIZER,
    "activation_checkpointing": "train.activation_checkpointing: auto takes what fits; the result "
    "is the same",
    "communication_data_type": "gradients are reduced in fp32 here; train.gradient_compression: "
    "bf16 halves them",
    "data_types": "gradients are added up in fp32 here",
    **dict.fromkeys(
        ("prescale_gradients", "gradient_predivide_factor"),
        "gradients are reduced in fp32, unscaled",
    ),
    **dict.fromkeys(
        ("tensorboard", "wandb", "csv_monitor", "comet"), "trackers are named by tracking.to"
    ),
    **dict.fromkeys(("flops_profiler", "comms_logger"), "train.profile_every_steps measures steps"),
    **dict.fromkeys(
        ("wall_clock_breakdown", "memory_breakdown", "dump_state"),
        "every step is timed and recorded",
    ),
    "aio": "nothing is offloaded to NVMe here, only to host memory",
    "checkpoint": _CHECKPOINTS,
    "amp": "the precision is train.precision",
    **dict.fromkeys(
        ("elasticity", "autotuning"),
        "a run can resume on other GPUs; `strategy: auto` chooses what fits",
    ),
    **dict.fromkeys(
        ("curriculum_learning", "data_efficiency", "progressive_layer_drop", "sparse_attention"),
        "there is no such technique here, so the result differs from that of a run with it",
    ),
    **dict.fromkeys(("tensor_parallel", "expert_parallel"), NO_KEY["tensor_parallel"]),
    "monitor_config": "trackers are named by tracking.to",
    "_comment": "a comment",
    **dict.fromkeys(("compression_training", "hybrid_engine"), "there is no such technique here"),
}
# Keys of DeepSpeed, and the keys here that set the same.
_OURS = {
    "train_batch_size": "train.global_batch_samples",
    "train_micro_batch_size_per_gpu": "train.micro_batch_blocks",
    "gradient_accumulation_steps": "train.global_batch_samples and train.micro_batch_blocks, from "
    "which it follows",
    "optimizer": "train.optimizer, train.lr, train.beta1, train.beta2, train.adam_eps and "
    "train.weight_decay",
    "scheduler": "train.lr_schedule",
    "gradient_clipping": "train.max_grad_norm",
    **dict.fromkeys(
        ("bf16", "bfloat16", "fp16", "amp", "torch_autocast", "data_types"), "train.precision"
    ),
    "communication_data_type": "train.gradient_compression (gradients are reduced in fp32 unless "
    "it is bf16)",
    "activation_checkpointing": "train.activation_checkpointing",
    "compile": "train.compile",
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), "tracking.to"),
    "checkpoint": "train.save_every_steps and train.save_async",
    **dict.fromkeys((f"{_ZERO}.cpu_offload", f"{_ZERO}.cpu_offload_param"), "train.offload"),
}


def content_of(given: str) -> str:
    """Return the JSON object in the file `given`, written in one line; of such an object, itself.

    A config file has the path; specs have the content, so that a run does not change with the file.
    Raises ConfigError if the file cannot be read.
    """
    return canonical_json(_document(given))


def _document(given: str) -> dict[str, Any]:
    try:
        text = given if given.startswith("{") else Path(given).read_text(encoding="utf-8")
        document = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(given, [f"cannot be read as JSON ({error})"]) from error
    if not isinstance(document, dict):
        raise ConfigError(given, ["has to hold one JSON object"])
    return document


def read_deepspeed_json(given: str, strategy: str, offload: Offload) -> dict[str, Any]:
    """Return the keys of a path or a content to merge over ours, without "auto".

    Raises ConfigError with all problems, also of what contradicts `strategy` and `offload`.
    """
    chosen = _without_auto(_document(given))
    if problems := list(_problems(chosen, strategy, offload)):
        if any(key in _OURS for key in chosen):
            problems[-1] += f"; `qwen3 import {given}` converts a whole JSON to our keys"
        raise ConfigError(given, problems)
    # DeepSpeed's own examples write sizes as 5e8.
    zero = {
        key: int(value) if key in _SIZES else value for key, value in chosen.get(_ZERO, {}).items()
    }
    return {**chosen, **({_ZERO: zero} if zero else {})}


def json_problems(given: str, strategy: str, offload: Offload) -> list[str]:
    """Return problems of a path or content: wrong values, or keys that are ours or change it.

    Such keys change what is computed.
    """
    try:
        read_deepspeed_json(given, strategy, offload)
    except ConfigError as error:
        return [f"{given}: {problem}" for problem in error.problems]
    return []


def may_be_in_json(name: str) -> bool:
    """Return whether `train.deepspeed_json` takes `name`, as `zero_optimization.overlap_comm`."""
    section, _, key = name.rpartition(".")
    return key in _SWITCHES | _SIZES if section == _ZERO else name.partition(".")[0] in _LOGGING


def _without_auto(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return `value` without keys set to "auto", and without objects that are then empty."""
    kept: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, dict):
            if found := _without_auto(inner):
                kept[key] = found
        elif inner != AUTO:
            kept[key] = inner
    return kept


def _problems(chosen: Mapping[str, Any], strategy: str, offload: Offload) -> Iterator[str]:
    for key, value in chosen.items():
        if key in _OURS:
            yield f"{key}: set {_OURS[key]} instead"
        elif key == _ZERO:
            if isinstance(value, dict):
                yield from _zero_problems(value, strategy, offload)
            else:
                yield f"{key}: {json.dumps(value)} is not an object"
        elif key in _LOGGING:
            continue
        elif key in REASONS:
            yield f"{key}: remove it: {REASONS[key]}"
        else:
            yield _unknown(key, key, {*_LOGGING, _ZERO})


def _zero_problems(chosen: Mapping[str, Any], strategy: str, offload: Offload) -> Iterator[str]:
    for key, value in chosen.items():
        name = f"{_ZERO}.{key}"
        if name in _OURS:
            yield f"{name}: set {_OURS[name]} instead"
        elif key == "stage":
            if f"zero{value}" != strategy:
                yield (
                    f"{name}: {json.dumps(value)} contradicts train.strategy: {strategy}; change "
                    "one of them"
                )
        elif name in REASONS:
            yield f"{name}: remove it: {REASONS[name]}"
        elif key in ("offload_optimizer", "offload_param"):
            yield from _offload_problems(name, value, key, offload)
        elif key in _SWITCHES:
            if not isinstance(value, bool):
                yield f"{name}: {json.dumps(value)} is not true or false"
        elif key in _SIZES:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or value < 0 or value != int(value):
                yield f"{name}: {json.dumps(value)} is not a whole number of elements"
        else:
            yield _unknown(name, key, {*_SWITCHES, *_SIZES, "offload_optimizer", "offload_param"})


def _offload_problems(name: str, chosen: Any, key: str, offload: Offload) -> Iterator[str]:
    if not isinstance(chosen, dict):
        yield f"{name}: {json.dumps(chosen)} is not an object"
        return
    is_offloaded = offload == "optimizer+params" or (
        offload == "optimizer" and key == "offload_optimizer"
    )
    wanted = "cpu" if is_offloaded else "none"
    if chosen.get("device", wanted) != wanted:
        yield (
            f"{name}.device: {json.dumps(chosen['device'])} contradicts train.offload: "
            f"{offload}; set that instead"
        )
    elif not is_offloaded and set(chosen) - {"device"}:
        yield (
            f"{name}: has no effect with train.offload: {offload}; set train.offload, or remove it"
        )
    for inner in chosen:
        if inner not in _OFFLOAD:
            yield _unknown(f"{name}.{inner}", inner, _OFFLOAD)


def _unknown(name: str, key: str, valid: set[str]) -> str:
    hint = (
        did_you_mean(key, sorted(valid)) or f"; remove it. Allowed keys: {', '.join(sorted(valid))}"
    )
    return f"{name}: not allowed: unknown, or not about placement and speed{hint}"
