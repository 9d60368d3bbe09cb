"""How users set up peers: trainers' arguments, DeepSpeed's JSON, adapters, the model."""

from contextlib import nullcontext
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.train.cases import LORA, Case, Peer
from benchmarks.train.rank import Side
from benchmarks.train.weights import fill, put_whole_or_zero_3

TUTORIAL_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def deepspeed_json(stage: int) -> dict[str, Any]:
    """What transformers' documentation and articles hand round."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if stage == 3:
        sizes = (
            "reduce_bucket_size",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
        )
        zero |= {"sub_group_size": 1e9, **dict.fromkeys(sizes, "auto")}
    auto = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    return {"zero_optimization": zero, "bf16": {"enabled": "auto"}, **dict.fromkeys(auto, "auto")}


def recipe(side: Side, peer: Peer, accumulation: int, is_gpu: bool) -> dict[str, Any]:
    """Arguments of a trainer."""
    return {
        "output_dir": str(side.folder / "trainer"),
        "max_steps": side.steps,
        "per_device_train_batch_size": peer.documents,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": 1e-5,
        "bf16": side.case.precision == "bf16",
        "use_cpu": not is_gpu,
        "gradient_checkpointing": peer.is_checkpointed,
        "use_liger_kernel": peer.is_liger and is_gpu,  # its kernels are Triton's
        "deepspeed": deepspeed_json(peer.zero) if peer.zero is not None else None,
        "optim": "adamw_torch_fused",
        "ddp_find_unused_parameters": False,
        "dataloader_num_workers": 2 if is_gpu else 0,
        "dataloader_drop_last": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def build(side: Side, peer: Peer, device: torch.device) -> PreTrainedModel:
    """The model with the weights that all sides have, made where it is trained.

    In bf16, as transformers loads Qwen3: DeepSpeed keeps fp32 masters of it, and adapters are fp32.
    Under ZeRO-3 transformers spreads it while it is made, if the trainer's arguments exist by then.
    """
    config = AutoConfig.from_pretrained(side.folder)
    has_experts = hasattr(config, "num_experts")
    options = {"experts_implementation": "grouped_mm"} if has_experts else {}
    dtype = torch.bfloat16 if side.case.precision == "bf16" else torch.float32
    with nullcontext() if peer.zero == 3 else device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation="sdpa", **options
        )
    model.config.use_cache = False
    if side.case.method == "lora":
        adapted: Any = get_peft_model(model, adapters(side.case, peer))
        model = adapted
    fill(model, device, put_whole_or_zero_3)
    return model


def adapters(case: Case, peer: Peer) -> LoraConfig:
    """The tutorial's, or the ones that our side trains."""
    if peer.is_tutorial_lora:
        return LoraConfig(
            r=8,
            lora_alpha=32,
            lora_dropout=0.1,
            target_modules=TUTORIAL_TARGETS,
            task_type="CAUSAL_LM",
        )
    return LoraConfig(
        r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
    )
