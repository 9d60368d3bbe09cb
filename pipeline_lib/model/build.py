"""The model: transformers' own Qwen, its adapters, and how its decoder layers run."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from pipeline_lib.config.checks import FP8_TILE
from pipeline_lib.config.schema import Train
from pipeline_lib.core.errors import ConfigError, DataError
from pipeline_lib.model import attention, experts
from pipeline_lib.model.attention import PACKED, PACKED_FLASH, sized
from pipeline_lib.model.experts import (
    GROUPED,
    has_router,
    keeping_router_logits,
    tell_router_logits,
    with_router_logits,
)
from pipeline_lib.model.geometry import frozen_names
from pipeline_lib.model.lora import add_adapters, fuse_adapters
from pipeline_lib.model.loss import return_losses
from pipeline_lib.plan.workload import has_fused_adapters

# Products of the decoder layers in 8-bit floating point (torchao), by themselves about twice as fast as in bf16.
#
# Inputs, weights and gradients are each scaled by their largest value as a whole (torchao's recipe `tensorwise`).
# Norms, attention, the head and the masters in fp32 are as under bf16. Only passes with gradients compute so:
# validations, answers and the probe see the model as it will be exported, in bf16.

RECIPE = "tensorwise"
_ADA = (8, 9)  # the first compute capability with products in fp8


def use_fp8(layer: nn.Module) -> None:
    """Let the linear modules of `layer` multiply in 8 bits; names and weights stay.

    Routers of experts are left alone, and what the kernels' tiles do not fit. Raises ConfigError where torchao is not
    installed, or for a GPU that has no such products.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        raise ConfigError("train.precision", ["fp8 needs torchao: pip install 'qwen3-pipeline[fp8]'"]) from error
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _ADA:
        raise ConfigError("train.precision", [f"{torch.cuda.get_device_name()} has no products in fp8; it may be bf16"])
    convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(RECIPE), module_filter_fn=_is_meant)
    for module in layer.modules():
        if isinstance(module, Float8Linear):
            module.forward = MethodType(_forward, module)


def _is_meant(module: nn.Module, name: str) -> bool:
    sizes = getattr(module, "weight", torch.empty(0)).shape
    return not name.endswith("mlp.gate") and all(size % FP8_TILE == 0 for size in sizes)


def _forward(linear: Any, hidden: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return F.linear(hidden, linear.weight, linear.bias)
    found: Tensor = type(linear).forward(linear, hidden)
    return found


# The decoder layers of a model: how they multiply, what they compute again, and whether they are compiled.
#
# All is done to each layer's `forward`, in place, before a strategy wraps anything: a strategy's hooks stay outside,
# and parameters keep their names.

# What `selective` keeps, as torch's operators are called: products, attention, what was exchanged. Not the
# choice of experts, whose weights transformers divides in place: of the same products it is the same again.
_KEPT = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::_grouped_mm"),
        *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
        *("aten::_scaled_dot_product_fused_attention_overrideable", "torch_attn::_varlen_attn"),
        *("qwen3_pipeline::cudnn_attention", "qwen3_pipeline::adapted"),
        *("transformers::grouped_mm_fallback", "_c10d_functional::reduce_scatter_tensor"),
    }
)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformers decoder, also beneath adapters."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.endswith("layers"):
            return list(module)
    return []


def prepare_layers(model: nn.Module, train: Train) -> None:
    """Let the decoder layers of `model` compute as `train` says.

    It may be called while the model is on the meta device: what is compiled is compiled when it first runs, and layers
    that are alike share it. Only passes with gradients are: answers and validations come in other shapes.
    """
    prepared: dict[tuple[type, bool, bool], Callable[..., Any]] = {}
    for layer in decoder_layers(model):
        if train.precision == "fp8":
            use_fp8(layer)
        kind = type(layer), has_dropout(layer), has_router(layer) and train.router_aux_loss > 0
        if kind[2]:
            tell_router_logits(layer)
        if kind not in prepared:
            prepared[kind] = _prepared(kind[0].forward, train, has_random=kind[1], keeps_router_logits=kind[2])
        if prepared[kind] is not kind[0].forward:
            layer.forward = MethodType(prepared[kind], layer)


def _prepared(
    plain: Callable[..., Any], train: Train, has_random: bool, keeps_router_logits: bool
) -> Callable[..., Any]:
    """A `forward` for all layers of a class; they come as its first argument."""
    if keeps_router_logits:  # outside of what is computed again
        return keeping_router_logits(_prepared(with_router_logits(plain), train, has_random, False))
    forward = plain
    if train.recompute == "selective":
        forward = _recomputing(forward, {"context_fn": _SELECTIVE}, has_random)
    if train.compile is True:
        torch._dynamo.config.optimize_ddp = False  # its hooks are outside of layers, which need not be cut for them
        forward = _compiled(forward, plain)
    # Outside of what is compiled, so that a layer keeps nothing but its input.
    return _recomputing(forward, {}, has_random) if train.recompute == "full" else forward


def _compiled(forward: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` compiled for any number of documents, which differs from batch to batch; without gradients `plain`."""
    compiled = torch.compile(forward)

    @functools.wraps(plain)  # transformers reads the signature
    def run(layer: nn.Module, *args: Any, max_length_q: Any = None, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(layer, *args, max_length_q=max_length_q, **kwargs)
        ends = kwargs.get("cu_seq_lens_q")
        if ends is not None and max_length_q is not None:
            max_length_q = sized(max_length_q, ends.device)
            for tensor in (ends, max_length_q):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(layer, *args, max_length_q=max_length_q, **kwargs)

    return run


def has_dropout(layer: nn.Module) -> bool:
    """Whether `layer` draws random numbers in training."""
    in_attention = any(getattr(module, "attention_dropout", 0.0) > 0.0 for module in layer.modules())
    return in_attention or any(isinstance(module, nn.Dropout) and module.p > 0.0 for module in layer.modules())


def _recomputing(forward: Callable[..., Any], options: dict[str, Any], has_random: bool) -> Callable[..., Any]:
    """`forward` with its activations computed again in the backward pass, with the same random numbers."""

    @functools.wraps(forward)
    def recomputed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            forward, layer, *args, use_reentrant=False, preserve_rng_state=has_random, **options, **kwargs
        )

    return recomputed


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator.name().partition(".")[0] in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = functools.partial(create_selective_checkpoint_contexts, _policy)


# The model: transformers' own Qwen2, Qwen3 or Qwen3-MoE, with no distributed code in it, and its adapters.
#
# Trained weights are kept in fp32 (they are the master copy); frozen ones in the precision of the arithmetic.
# What is trained is built without memory, and filled (weights.py) when it has been spread over the ranks.

# Of weights as they are computed with, and of activations; products in fp8 round both by themselves (fp8.py).
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def load_base(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model in the Hugging Face folder, whole, on the CPU, in `dtype`. Never runs code from the folder.

    It attends within documents and returns losses, if it is called as model/batch.py does; by torch's kernel, since
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
