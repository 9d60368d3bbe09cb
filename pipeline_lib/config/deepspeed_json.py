"""A user's own DeepSpeed config: which of its keys may be merged over the one that is made here.

Only those that say where and when, never what is computed: how large buckets are, what overlaps, what is logged.
Whatever belongs to a key of ours is refused with that key's name. The value "auto" stands for ours.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pipeline_lib.base.errors import ConfigError

AUTO = "auto"
Offload = Literal["none", "optimizer", "optimizer+params"]

_SWITCHES = frozenset(
    {
        *("contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce", "allgather_partitions"),
        *("overlap_comm", "round_robin_gradients", "parameter_alignment", "ignore_unused_parameters"),
        *("memory_efficient_linear", "log_trace_cache_warnings", "enable_sanity_checks"),
        *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"),
    }
)
_SIZES = frozenset(
    {
        *("reduce_bucket_size", "allgather_bucket_size", "sub_group_size"),
        *("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
        *("stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
        "stage3_module_granularity_threshold",
    }
)
_OFFLOAD = frozenset({"device", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu"})
_LOGGING = frozenset({"comms_logger", "flops_profiler", "wall_clock_breakdown", "memory_breakdown", "steps_per_print"})
_ZERO = "zero_optimization"

# Keys of DeepSpeed's, and where the same is set here.
_OURS = {
    "train_batch_size": "train.global_batch_tokens",
    "train_micro_batch_size_per_gpu": "train.micro_batch_blocks",
    "gradient_accumulation_steps": "train.global_batch_tokens and train.micro_batch_blocks, from which it follows",
    "optimizer": "train.optimizer, train.lr, train.beta1, train.beta2 and train.weight_decay",
    "scheduler": "train.lr_schedule",
    "gradient_clipping": "train.max_grad_norm",
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "amp", "torch_autocast", "data_types"), "train.precision"),
    "communication_data_type": "train.precision (gradients are always reduced in fp32)",
    "activation_checkpointing": "train.recompute",
    "compile": "train.compile",
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), "tracking.to"),
    "checkpoint": "train.save_every_steps and train.save_async",
    f"{_ZERO}.stage": "train.strategy",
    **dict.fromkeys((f"{_ZERO}.cpu_offload", f"{_ZERO}.cpu_offload_param"), "train.offload"),
}


def read_deepspeed_json(path: Path, offload: Offload) -> dict[str, Any]:
    """The keys of the file at `path` to merge over ours, "auto" left out. Raises ConfigError with every problem."""
    chosen, problems = _read(path, offload)
    if problems:
        raise ConfigError(str(path), problems)
    return _with_whole_sizes(chosen)


def json_problems(path: Path, offload: Offload) -> list[str]:
    """What is wrong with the file at `path`: keys that are ours or change what is computed, wrong values."""
    return [f"{path}: {problem}" for problem in _read(path, offload)[1]]


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
    """`value` without the keys left to us, and without objects that hold nothing else."""
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
            if not _is_whole(value):
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
        yield f"{name}: nothing of it is offloaded with train.offload: {offload}; set that, or remove it"
    for inner in chosen:
        if inner not in _OFFLOAD:
            yield _unknown(f"{name}.{inner}", inner, set(_OFFLOAD))


def _unknown(name: str, key: str, valid: set[str]) -> str:
    close = difflib.get_close_matches(key, sorted(valid), n=1, cutoff=0.6)
    hint = f"did you mean {close[0]!r}?" if close else f"remove it. Keys that may: {', '.join(sorted(valid))}"
    return f"{name}: may not be set here, since it is no matter of placement or unknown; {hint}"


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and value >= 0 and value == int(value)


def _with_whole_sizes(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """5e8, as DeepSpeed's own examples have it, is a whole number."""
    zero = {key: int(value) if key in _SIZES else value for key, value in chosen.get(_ZERO, {}).items()}
    return {**chosen, **({_ZERO: zero} if zero else {})}
