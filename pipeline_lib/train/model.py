"""The model: transformers' own Qwen2, Qwen3 or Qwen3-MoE, with no distributed code in it, and its adapters.

Trained weights are kept in fp32 (they are the master copy); frozen ones in the precision of the arithmetic.
What is trained is built without memory, and filled (weights.py) when it has been spread over the ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import Train
from pipeline_lib.plan.frozen import frozen_names
from pipeline_lib.plan.placement import has_fused_adapters
from pipeline_lib.train import attention, experts
from pipeline_lib.train.adapted import fuse_adapters
from pipeline_lib.train.adapters import add_adapters
from pipeline_lib.train.attention import PACKED, PACKED_FLASH
from pipeline_lib.train.experts import GROUPED
from pipeline_lib.train.loss import return_losses

# Of weights as they are computed with, and of activations; products in fp8 round both by themselves (fp8.py).
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def load_base(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model in the Hugging Face folder, whole, on the CPU, in `dtype`. Never runs code from the folder.

    It attends within documents and returns losses, if it is called as train/batch.py does; by torch's kernel, since
    speed matters little here, and cuDNN's may not take the shape. Raises DataError if the folder does not hold all.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    attention.register()
    experts.register()
    with _named_failure(folder):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=PACKED_FLASH,
            experts_implementation=GROUPED,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):
        raise DataError(f"{folder}: its files lack {', '.join(missing[:5])}; get the whole model again")
    return _prepare(model, folder)


def empty_base(folder: Path, dtype: torch.dtype, attend: str = PACKED) -> PreTrainedModel:
    """`load_base` with all parameters on the meta device, where they have no memory and no values."""
    attention.register()
    experts.register()
    with _named_failure(folder), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=attend, experts_implementation=GROUPED, trust_remote_code=False
        )
    for name, module in list(model.named_modules()):
        if next(module.buffers(recurse=False), None) is not None:  # rotary frequencies: computed, in no file
            model.set_submodule(name, type(module)(model.config))
    return _prepare(model, folder)


@contextmanager
def _named_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{folder}: transformers cannot load this model ({reason})") from error


def _prepare(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    if getattr(model.config, "sliding_window", None) is not None:
        raise DataError(f"{folder}: this model attends in a sliding window, which is not supported for packed blocks")
    model.config.use_cache = False
    return_losses(model)
    return model


def build_trainable(folder: Path, train: Train) -> nn.Module:
    """The model to train, without memory yet: what is trained in fp32, what is frozen in the arithmetic's precision.

    Raises DataError for a glob of `train.freeze`, or a name in `train.lora.targets`, that matches nothing.
    """
    is_full = train.method == "full"
    attend = PACKED_FLASH if train.attention == "flash" else PACKED
    model = empty_base(folder, torch.float32 if is_full else DTYPES[train.precision], attend)
    if hasattr(model.config, "output_router_logits"):  # it has experts
        model.config.output_router_logits = train.router_aux_loss > 0
        model.config.router_aux_loss_coef = train.router_aux_loss
    if not is_full:
        adapted = add_adapters(model, train.lora, train.seed)
        if has_fused_adapters(train):
            fuse_adapters(adapted)
        return adapted
    freeze(model, train)
    return model


def freeze(model: PreTrainedModel, train: Train) -> None:
    """Let the parameters that `train.freeze` names have no gradients, and the precision of the arithmetic."""
    called: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        called.setdefault(id(parameter), []).append(name)
    named = {name: (parameter, called[id(parameter)]) for name, parameter in model.named_parameters()}
    for name in frozen_names({name: names for name, (_, names) in named.items()}, train.freeze):
        parameter, _ = named[name]
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(DTYPES[train.precision])
