"""The keys of a DeepSpeed JSON, under the names that transformers' Trainer has for the same.

transformers fills in whatever is "auto" by the same correspondence, and refuses a JSON that
contradicts its arguments.
"""

from typing import Any

from pipeline_lib.config.deepspeed_json import REASONS, SPEED, may_be_in_json
from pipeline_lib.config.import_draft import Draft, Given
from pipeline_lib.config.section import flat
from pipeline_lib.config.train import AUTO

_ZERO = "zero_optimization"
_NAMES = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_clipping": "max_grad_norm",
    "bfloat16.enabled": "bf16",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "optimizer.type": "deepspeed_optimizer",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.type": "deepspeed_scheduler",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "total_num_steps",
    "scheduler.params.warmup_type": "warmup_type",
    "scheduler.params.warmup_min_lr": "warmup_min_lr",
    "scheduler.params.warmup_min_ratio": "warmup_min_lr",
    "scheduler.params.cos_min_ratio": "cos_min_ratio",
    f"{_ZERO}.stage": "zero_stage",
    f"{_ZERO}.offload_optimizer.device": "offload_optimizer.device",
    f"{_ZERO}.offload_param.device": "offload_param.device",
}
# What DeepSpeed takes where its own optimizer or schedule is named without the value.
_OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
_WARMUP: dict[str, Any] = {"warmup_max_lr": 1e-3, "warmup_num_steps": 1000, "warmup_type": "log"}
_COSINE: dict[str, Any] = {"warmup_num_steps": 1000, "warmup_type": "log", "cos_min_ratio": 0.0001}
_SCHEDULES = {"WarmupLR": _WARMUP, "WarmupDecayLR": _WARMUP, "WarmupCosineLR": _COSINE}


def is_deepspeed(document: dict[str, Any]) -> bool:
    """Return whether `document` has the form of a DeepSpeed JSON."""
    objects = ("fp16", "bf16", _ZERO, "optimizer", "scheduler")
    if any(isinstance(document.get(key), dict) for key in objects):
        return True
    return "train_batch_size" in document or "train_micro_batch_size_per_gpu" in document


def add_deepspeed(draft: Draft, document: dict[str, Any], file: str, above: str = "") -> None:
    """Add the DeepSpeed JSON `document`'s keys to `draft`; `above` precedes their names."""
    scheduler = document.get("scheduler")
    optimizer = document.get("optimizer")
    schedule = scheduler.get("params") if isinstance(scheduler, dict) else None
    is_rate_scheduled = isinstance(schedule, dict) and schedule.get("warmup_max_lr", AUTO) != AUTO
    for name, value in flat(document):
        given = Given(file, above + name, value)
        if name == "optimizer.params.betas":
            _add_betas(draft, given)
        elif name == "scheduler.params.warmup_max_lr":
            draft.add("learning_rate" if is_rate_scheduled else "warmup_max_lr", given)
        elif name == "optimizer.params.lr" and is_rate_scheduled:
            draft.add("optimizer_lr", given)
        else:
            draft.add(_NAMES.get(name, name), given)
    if isinstance(optimizer, dict):
        defaults = dict(_OPTIMIZER)
        if is_rate_scheduled:
            del defaults["lr"]
        _add_defaults(draft, optimizer, defaults, file, f"{above}optimizer.params")
    if isinstance(scheduler, dict):
        defaults = _SCHEDULES.get(str(scheduler.get("type")), {})
        _add_defaults(draft, scheduler, defaults, file, f"{above}scheduler.params")


def _add_defaults(
    draft: Draft, section: dict[str, Any], defaults: dict[str, Any], file: str, above: str
) -> None:
    """Add DeepSpeed's defaults for whatever its `optimizer` or `scheduler` does not say."""
    params = section.get("params")
    for key, value in defaults.items():
        if isinstance(params, dict) and key in params:
            continue
        if key == "warmup_max_lr" and draft.has("learning_rate"):
            continue
        given = Given(file, f"{above}.{key} (DeepSpeed's default)", value)
        name = f"{above.rpartition('deepspeed.')[2]}.{key}"
        if key == "betas":
            _add_betas(draft, given)
        else:
            draft.add("learning_rate" if key == "warmup_max_lr" else _NAMES.get(name, name), given)


def _add_betas(draft: Draft, given: Given) -> None:
    betas = given.value
    if betas == AUTO:
        draft.add("adam_beta1", given)
    elif not isinstance(betas, list) or len(betas) != 2:
        draft.problems.append(f"{given.file}: {given}: expected two numbers")
    else:
        for number, beta in enumerate(betas, start=1):
            draft.add(f"adam_beta{number}", Given(given.file, f"{given.name}[{number - 1}]", beta))


def account_for_placement(draft: Draft) -> None:
    """Account for what users may put into their own JSON, and what the Trainer would fill in."""
    speed = [key for key in draft.given if key not in REASONS and may_be_in_json(key)]
    if any(draft.has(key) for key in speed):
        why = f"{SPEED}; to keep them, put them into a JSON that train.deepspeed_json names"
        draft.without(" ".join(key for key in speed if draft.has(key)), why)
    filled = [key for key, found in draft.given.items() if any(one.value == AUTO for one in found)]
    known = [key for key in filled if draft.has(key)]
    draft.taken(" ".join(known), why="auto: what the Trainer's arguments say")
    missing = [key for key in filled if not draft.has(key)]
    why = "auto: no file gives a value, so this config decides, or else the default"
    draft.changed(" ".join(missing), None, why)
    why = "the schedule's warmup_max_lr decides, as it does in DeepSpeed"
    draft.changed("optimizer_lr", None, why)
