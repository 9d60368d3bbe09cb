"""The model: transformers' own Qwen3, with no distributed code in it, and its adapters.

Trained weights are kept in fp32 (they are the master copy); frozen ones in the precision of the arithmetic.
What is trained is built without memory, and filled (weights.py) when it has been spread over the ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import Lora, Train
from pipeline_lib.train.attention import PACKED, register
from pipeline_lib.train.loss import return_losses

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def load_base(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model in the Hugging Face folder, whole, on the CPU, in `dtype`. Never runs code from the folder.

    It attends within documents and returns losses, if it is called as train/batch.py does.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    register()
    with _named_failure(folder):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=PACKED, trust_remote_code=False, use_safetensors=True
        )
    return _prepare(model, folder)


def empty_base(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """`load_base` with all parameters on the meta device, where they have no memory and no values."""
    register()
    with _named_failure(folder), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=PACKED, trust_remote_code=False
        )
    for name, module in list(model.named_modules()):
        if next(module.buffers(recurse=False), None) is not None:  # rotary frequencies: computed, in no file
            model.set_submodule(name, type(module)(model.config))
    return _prepare(model, folder)


@contextmanager
def _named_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{folder}: transformers cannot load this model ({reason})") from error


def _prepare(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    if getattr(model.config, "sliding_window", None) is not None:
        raise DataError(f"{folder}: this model attends in a sliding window, which is not supported for packed blocks")
    model.config.use_cache = False
    return_losses(model)
    return model


def build_trainable(folder: Path, train: Train) -> nn.Module:
    """The model to train, without memory yet: all of the base in fp32, or frozen with fp32 adapters beside it."""
    if train.method == "full":
        return empty_base(folder, torch.float32)
    return add_adapters(empty_base(folder, DTYPES[train.precision]), train.lora, train.seed)


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
