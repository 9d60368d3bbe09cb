"""Where a model lies and how fast it is computed, not what is computed: ZeRO, FSDP, kernels."""

import re
from typing import Any

from pipeline_lib.config.import_draft import Draft, shown
from pipeline_lib.config.train import Train


def convert_placement(draft: Draft) -> None:
    """Convert what decides where the model lies and how fast it is, not what is computed."""
    stage = draft.value("zero_stage")
    if stage is not None:
        _zero(draft, stage)
    elif draft.value("fsdp") or any(key.startswith("fsdp_config.") for key in draft.given):
        _fsdp(draft)
    else:
        draft.taken("fsdp", why="replicated on each GPU (ddp), as here by default")
    _distributed_type(draft)
    how = "auto takes what is fastest and fits the memory; the result does not depend on it"
    keys = (
        "gradient_checkpointing gradient_checkpointing_kwargs disable_gradient_checkpointing "
        "use_reentrant_gc fsdp_config.activation_checkpointing"
    )
    why = f"train.activation_checkpointing: {how}"
    draft.changed(f"{keys} activation_checkpointing", None, why)
    keys = "torch_compile torch_compile_mode torch_compile_backend"
    draft.changed(keys, None, f"train.compile: {how}")
    keys = (
        "flash_attn attn_implementation attn_impl flash_attention sdp_attention "
        "xformers_attention flex_attention eager_attention"
    )
    draft.changed(keys, None, "train.attention: auto takes the fastest kernel there is")
    limit = Train.model_fields["timeout_s"].default
    why = f"train.timeout_s stays {limit} s: data are tokenized before the ranks start"
    draft.changed("ddp_timeout", None, why)


def _distributed_type(draft: Draft) -> None:
    """Account for what accelerate starts, beside FSDP."""
    key = "distributed_type"
    kind = str(draft.value(key, "NO")).upper()
    if kind == "MULTI_CPU":
        draft.taken(key, {"cluster.gpus_per_node": 0})
    elif kind in ("NO", "MULTI_GPU", "DEEPSPEED"):
        draft.taken(key, why="train.strategy and cluster.gpus_per_node say it")
    else:
        draft.without(key, "here models are trained on CUDA GPUs, with DDP, FSDP or DeepSpeed")


def _fsdp(draft: Draft) -> None:
    keys = (
        "fsdp fsdp_config.version fsdp_config.offload_params "
        "fsdp_config.sharding_strategy fsdp_config.reshard_after_forward"
    )
    said = [str(draft.value(key, "")).lower() for key in keys.split()]
    words = set(re.findall(r"[a-z_]+", " ".join(said)))
    if "no_shard" in words:
        draft.taken(keys, {"train.strategy": "ddp"}, "nothing is sharded")
        return
    values: dict[str, Any] = {"train.strategy": "fsdp"}
    if "offload" in words or draft.truth("fsdp_config.offload_params"):
        values["train.offload"] = "optimizer+params"
    is_resharded = draft.value("fsdp_config.reshard_after_forward", True) is not False
    if "shard_grad_op" in words or not is_resharded:
        values["train.reshard_after_forward"] = False
    if any(word.startswith("hybrid") for word in words):
        why = "hybrid sharding needs several replicas: see hsdp and train.shard_ranks"
        draft.changed(keys, values, why)
    else:
        draft.taken(keys, values)


def _zero(draft: Draft, stage: Any) -> None:
    if stage not in (0, 1, 2, 3):
        draft.problems.append(f"zero_optimization.stage: {shown(stage)} is not 0, 1, 2 or 3")
        return
    draft.taken("zero_stage", {"train.strategy": f"zero{stage}" if stage else "ddp"})
    has_optimizer = draft.value("offload_optimizer.device", "none") != "none"
    has_params = draft.value("offload_param.device", "none") != "none"
    keys = "offload_optimizer.device offload_param.device"
    if has_params and stage == 3:
        draft.taken(keys, {"train.offload": "optimizer+params"}, "into host memory")
    elif has_optimizer and stage:
        draft.taken(keys, {"train.offload": "optimizer"}, "into host memory")
    elif has_optimizer or has_params:
        draft.without(keys, f"stage {stage} does not offload this")
    else:
        draft.taken(keys, why="nothing is offloaded, as here")
