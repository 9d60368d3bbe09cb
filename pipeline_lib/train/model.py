"""The model: transformers' own Qwen3, with no distributed code in it, and its adapters.

Trained weights are kept in fp32 (they are the master copy); frozen ones in the precision of the arithmetic.
"""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import Lora, Train
from pipeline_lib.train.attention import PACKED, register
from pipeline_lib.train.loss import return_losses

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load_base(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model in the Hugging Face folder, on the CPU, in `dtype`. Never runs code from the folder.

    It attends within documents and returns losses, if it is called as train/batch.py does.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    register()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=PACKED, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{folder}: transformers cannot load this model ({reason})") from error
    if getattr(model.config, "sliding_window", None) is not None:
        raise DataError(f"{folder}: this model attends in a sliding window, which is not supported for packed blocks")
    model.config.use_cache = False
    return_losses(model)
    return model


def build_trainable(folder: Path, train: Train) -> nn.Module:
    """The model that is trained: all of the base in fp32, or frozen with fp32 adapters beside it."""
    if train.method == "full":
        return load_base(folder, torch.float32)
    return add_adapters(load_base(folder, DTYPES[train.precision]), train.lora, train.seed)


def add_adapters(base: PreTrainedModel, lora: Lora, seed: int) -> PeftModel:
    """`base` frozen, with new adapters: A random from `seed`, B zero, so that at first nothing changes."""
    targets: str | list[str] = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = get_peft_model(base, config)
        except ValueError as error:
            raise DataError(f"train.lora.targets: {error}") from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; a tied one appears once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
