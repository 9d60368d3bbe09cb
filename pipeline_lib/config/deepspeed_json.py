"""Read a user's own DeepSpeed config, `train.deepspeed_json`."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pipeline_lib.config.train import AUTO
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.text import did_you_mean

# The keys of a user's own DeepSpeed config that may be merged over the one that is made here: only keys about placement
# and timing (bucket sizes, overlap, logging), never about what is computed. A key with a counterpart here is refused,
# with the counterpart's name. The value "auto" keeps our value.

Offload = Literal["none", "optimizer", "optimizer+params"]

_SWITCHES = {
    *("contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce", "allgather_partitions"),
    *("overlap_comm", "round_robin_gradients", "parameter_alignment", "ignore_unused_parameters"),
    *("memory_efficient_linear", "log_trace_cache_warnings", "enable_sanity_checks"),
    *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"),
}
_SIZES = {
    *("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "stage3_module_granularity_threshold"),
    *("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
    *("stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
}
_OFFLOAD = {"device", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu"}
_LOGGING = {"comms_logger", "flops_profiler", "wall_clock_breakdown", "memory_breakdown", "steps_per_print"}
_ZERO = "zero_optimization"

# Keys of DeepSpeed, and the keys here that set the same.
_OURS = {
    "train_batch_size": "train.global_batch_samples",
    "train_micro_batch_size_per_gpu": "train.micro_batch_blocks",
    "gradient_accumulation_steps": "train.global_batch_samples and train.micro_batch_blocks, from which it follows",
    "optimizer": "train.optimizer, train.lr, train.beta1, train.beta2, train.adam_eps and train.weight_decay",
    "scheduler": "train.lr_schedule",
    "gradient_clipping": "train.max_grad_norm",
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "amp", "torch_autocast", "data_types"), "train.precision"),
    "communication_data_type": "train.gradient_compression (gradients are reduced in fp32 unless it is bf16)",
    "activation_checkpointing": "train.activation_checkpointing",
    "compile": "train.compile",
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), "tracking.to"),
    "checkpoint": "train.save_every_steps and train.save_async",
    f"{_ZERO}.stage": "train.strategy",
    **dict.fromkeys((f"{_ZERO}.cpu_offload", f"{_ZERO}.cpu_offload_param"), "train.offload"),
}


def read_deepspeed_json(path: Path, offload: Offload) -> dict[str, Any]:
    """Return the keys of the file `path` to merge over ours, without "auto". Raises ConfigError with all problems."""
    chosen, problems = _read(path, offload)
    if problems:
        raise ConfigError(str(path), problems)
    # DeepSpeed's own examples write sizes as 5e8.
    zero = {key: int(value) if key in _SIZES else value for key, value in chosen.get(_ZERO, {}).items()}
    return {**chosen, **({_ZERO: zero} if zero else {})}


def json_problems(path: Path, offload: Offload) -> list[str]:
    """Return the problems of the file at `path`: keys that are ours or change what is computed, wrong values."""
    return [f"{path}: {problem}" for problem in _read(path, offload)[1]]


def may_be_in_json(name: str) -> bool:
    """Return whether `train.deepspeed_json` takes the key `name`, as `zero_optimization.overlap_comm`."""
    section, _, key = name.rpartition(".")
    return key in _SWITCHES | _SIZES if section == _ZERO else name.partition(".")[0] in _LOGGING


def _read(path: Path, offload: Offload) -> tuple[dict[str, Any], list[str]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, [f"cannot be read as JSON ({error})"]
    if not isinstance(document, dict):
        return {}, ["has to hold one JSON object"]
    chosen = _without_auto(document)
    return chosen, list(_problems(chosen, offload))


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


def _problems(chosen: Mapping[str, Any], offload: Offload) -> Iterator[str]:
    for key, value in chosen.items():
        if key in _OURS:
            yield f"{key}: set {_OURS[key]} instead"
        elif key == _ZERO:
            if isinstance(value, dict):
                yield from _zero_problems(value, offload)
            else:
                yield f"{key}: {json.dumps(value)} is not an object"
        elif key not in _LOGGING:
            yield _unknown(key, key, {*_LOGGING, _ZERO})


def _zero_problems(chosen: Mapping[str, Any], offload: Offload) -> Iterator[str]:
    for key, value in chosen.items():
        name = f"{_ZERO}.{key}"
        if name in _OURS:
            yield f"{name}: set {_OURS[name]} instead"
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
    is_offloaded = offload == "optimizer+params" or (offload == "optimizer" and key == "offload_optimizer")
    wanted = "cpu" if is_offloaded else "none"
    if chosen.get("device", wanted) != wanted:
        yield f"{name}.device: {json.dumps(chosen['device'])} contradicts train.offload: {offload}; set that instead"
    elif not is_offloaded and set(chosen) - {"device"}:
        yield f"{name}: has no effect with train.offload: {offload}; set train.offload, or remove it"
    for inner in chosen:
        if inner not in _OFFLOAD:
            yield _unknown(f"{name}.{inner}", inner, _OFFLOAD)


def _unknown(name: str, key: str, valid: set[str]) -> str:
    hint = did_you_mean(key, sorted(valid)) or f"; remove it. Allowed keys: {', '.join(sorted(valid))}"
    return f"{name}: not allowed: unknown, or not about placement and speed{hint}"
