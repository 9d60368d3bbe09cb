"""Building the model: Qwen with adapters; checkpointed, compiled or fp8 layers; and losses."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from pipeline_lib.arch.config_json import read_object
from pipeline_lib.arch.families import family_in
from pipeline_lib.arch.geometry import frozen_names
from pipeline_lib.arch.layers import can_feed_in_chunks, has_fused_adapters, keeps_on_host
from pipeline_lib.arch.rope import stretched
from pipeline_lib.config.checks import FP8_TILE
from pipeline_lib.config.rope import Rope
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import ConfigError, DataError
from pipeline_lib.core.text import how_to_install
from pipeline_lib.model import attention, delta, experts
from pipeline_lib.model.attention import PACKED, PACKED_FLASH, sized
from pipeline_lib.model.chunks import attended, fed_forward, in_chunks
from pipeline_lib.model.experts import (
    GROUPED,
    has_router,
    keeping_router_logits,
    return_router_logits,
    with_router_logits,
)
from pipeline_lib.model.loss import return_losses
from pipeline_lib.model.nf4 import quantize_linears
from pipeline_lib.model.offload import HostMemory
from pipeline_lib.model.recompute import (
    fully_recomputed,
    keep_attention_of_last,
    selectively_recomputed,
)
from pipeline_lib.model.weights import base_parameters

# fp8 matmuls in the decoder layers (torchao), about twice as fast as bf16 ones. Inputs, weights and
# gradients are each scaled per tensor (torchao's recipe). Norms, attention, the head and the fp32
# master weights are as under bf16. Only passes with gradients use fp8: validation, generation and
# the probe run in bf16, as the model is exported.

_ADA = (8, 9)  # the first compute capability with fp8 matmuls


def use_fp8(layer: nn.Module) -> None:
    """Make the linear modules of `layer` multiply in fp8; names and weights stay the same.

    Routers, and linears whose sizes are not multiples of the kernels' tile, are left unchanged.
    Raises ConfigError if torchao is not installed, or if the GPU has no fp8 matmuls.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        raise ConfigError(
            "train.precision", [f"fp8 needs torchao: {how_to_install('fp8')}"]
        ) from error
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _ADA:
        raise ConfigError(
            "train.precision",
            [f"{torch.cuda.get_device_name()} has no products in fp8; it may be bf16"],
        )
    recipe = Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(layer, config=recipe, module_filter_fn=_is_meant)
    for module in layer.modules():
        if isinstance(module, Float8Linear):
            module.forward = MethodType(_forward, module)


def _forward(linear: Any, hidden: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return F.linear(hidden, linear.weight, linear.bias)
    return cast(Tensor, type(linear).forward(linear, hidden))


def _is_meant(module: nn.Module, name: str) -> bool:
    sizes = getattr(module, "weight", torch.empty(0)).shape
    return not name.endswith("mlp.gate") and all(size % FP8_TILE == 0 for size in sizes)


# Preparation of the decoder layers: fp8, activation checkpointing and compilation. Each layer's
# `forward` is replaced before a strategy wraps the layer, so that the strategy's hooks stay outside
# and parameters keep their names.


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return a transformers model's decoder layers, with or without adapters; may be empty."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.endswith("layers"):
            return list(module)
    return []


def prepare_layers(model: nn.Module, train: Train) -> None:
    """Apply the precision, checkpointing and compilation of `train` to the layers of `model`.

    The model may be on the meta device: compilation happens at the first run, and equal layers
    share the result. Only passes with gradients are compiled, since generation and validation have
    other shapes.
    """
    prepared: dict[_Kind, Callable[..., Any]] = {}
    host = HostMemory() if keeps_on_host(train) else None
    layers = decoder_layers(model)
    if train.kept_attention_layers != "auto":
        keep_attention_of_last(layers, train.kept_attention_layers)
    for layer in layers:
        if train.precision == "fp8":
            use_fp8(layer)
        kind = _Kind.of_layer(layer, train)
        if kind.keeps_router_logits:
            return_router_logits(layer)
        if kind not in prepared:
            prepared[kind] = _prepared(kind, train, host)
        if prepared[kind] is not kind.layer.forward:
            layer.forward = MethodType(prepared[kind], layer)


@dataclass(frozen=True)
class _Kind:
    """What a layer's prepared `forward` depends on: equal layers share it and its compilation."""

    layer: Any  # the class
    is_dense: bool
    has_random: bool  # numbers, in training
    keeps_router_logits: bool

    @staticmethod
    def of_layer(layer: nn.Module, train: Train) -> "_Kind":
        has_random = any(
            getattr(module, "attention_dropout", 0.0) > 0.0
            or (isinstance(module, nn.Dropout) and module.p > 0.0)
            for module in layer.modules()
        )
        is_dense = not has_router(layer)
        return _Kind(type(layer), is_dense, has_random, not is_dense and train.router_aux_loss > 0)


def _prepared(kind: _Kind, train: Train, host: HostMemory | None) -> Callable[..., Any]:
    """Return the `forward` of layers of a kind, which takes the layer as its first argument.

    `host` is for what full checkpointing keeps, if that is to be kept on the host.
    """
    plain = (
        with_router_logits(kind.layer.forward) if kind.keeps_router_logits else kind.layer.forward
    )
    forward = plain
    if train.recompute == "selective":
        forward = selectively_recomputed(forward, kind.has_random)
    attend, feed = attended, fed_forward
    if train.compile is True:
        # DDP's hooks are outside of layers, so no graph breaks are needed
        torch._dynamo.config.optimize_ddp = False
        forward = _compiled(forward, plain)
        attend = _compiled(attended, plain)
        feed = torch.compile(fed_forward)
    if kind.is_dense and can_feed_in_chunks(train):
        forward = in_chunks(forward, attend, feed, kind.has_random)
    # outside of the compiled part, which would keep more than the layer's input
    if train.recompute == "full":
        forward = fully_recomputed(forward, kind.has_random, host)
    return keeping_router_logits(forward) if kind.keeps_router_logits else forward


def _compiled(forward: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` compiled for any number of documents; without gradients it runs `plain`."""
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


# The model itself: transformers' Qwen2, Qwen3 or Qwen3-MoE, without distributed code, and its
# adapters. Trained weights are kept in fp32 as the master copy, frozen ones in the compute
# precision. A model to train is built on the meta device, and model/weights.py fills it after it
# has been sharded.

# The dtype of weights in computation and of activations; fp8 matmuls round both by themselves
# (`use_fp8`).
DTYPES = {
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def load_base(
    folder: Path, dtype: torch.dtype, rope: Rope | None = None, **options: Any
) -> PreTrainedModel:
    """Load the whole model in the Hugging Face folder in `dtype`. Never runs code from the folder.

    The model can attend within documents and return losses, as model/batch.py calls it. It uses
    torch's attention kernel, since speed matters little here and cuDNN's may not support the shape.
    It is on the CPU unless `options` of `from_pretrained` say otherwise. Raises DataError if
    transformers cannot load the model, or if weights are missing.
    """
    attention.register()
    experts.register()
    options |= {"attn_implementation": PACKED_FLASH, "experts_implementation": GROUPED}
    return _prepare(load_plain(folder, dtype, rope, **options), folder)


def prepare_to_generate(model: PreTrainedModel) -> None:
    """Give a model of `load_base` the attention, experts and cache of a model of `load_plain`."""
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation(model.get_correct_experts_implementation(None))
    model.config.use_cache = True


def load_plain(
    folder: Path, dtype: torch.dtype, rope: Rope | None = None, **options: Any
) -> PreTrainedModel:
    """Load transformers' model in `folder` with `rope`; `options` are those of `from_pretrained`.

    Raises DataError if transformers cannot load the model, or if weights are missing.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with _named_failure(folder):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=_config_of(folder, rope),
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):
        raise DataError(
            f"{folder}: its files lack {', '.join(missing[:5])}; get the whole model again"
        )
    return model


def _config_of(folder: Path, rope: Rope | None) -> PreTrainedConfig:
    """Return the text model's config."""
    whole: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    content = read_object(folder / "config.json")
    text = family_in(content).text(content)
    if rope is None and text is content:
        return whole
    kind: type[PreTrainedConfig] = type(whole.get_text_config())
    return kind.from_dict(stretched(text, rope))


def empty_base(
    folder: Path, dtype: torch.dtype, attend: str = PACKED, rope: Rope | None = None
) -> PreTrainedModel:
    """Build the model of `folder` with `rope` on the meta device, without memory or values.

    `attend` is the attention implementation. Raises DataError if transformers cannot build the
    model.
    """
    attention.register()
    experts.register()
    with _named_failure(folder), torch.device("meta"):
        config = _config_of(folder, rope)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config,
            dtype=dtype,
            attn_implementation=attend,
            experts_implementation=GROUPED,
            trust_remote_code=False,
        )
    for name, module in list(model.named_modules()):
        # rotary frequencies are computed, not loaded
        if next(module.buffers(recurse=False), None) is not None:
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
        raise DataError(
            f"{folder}: this model attends in a sliding window, which is not supported for packed "
            "blocks"
        )
    model.config.use_cache = False
    delta.install(model)
    return_losses(model)
    return model


def build_trainable(folder: Path, train: Train, rope: Rope | None = None) -> nn.Module:
    """Build the model on the meta device: trained weights in fp32, frozen in the compute precision.

    `rope` is the config's `model.rope`.

    Raises DataError if a glob of `train.freeze` or a name in `train.lora.targets` matches nothing,
    or if the model does not fit `train.lora.base`.
    """
    is_full = train.method == "full"
    attend = PACKED_FLASH if train.attention == "flash" else PACKED
    model = empty_base(folder, torch.float32 if is_full else DTYPES[train.precision], attend, rope)
    if hasattr(model.config, "output_router_logits"):  # it has experts
        model.config.output_router_logits = train.router_aux_loss > 0
        model.config.router_aux_loss_coef = train.router_aux_loss
    if not is_full:
        from pipeline_lib.model.lora import add_adapters, fuse_adapters  # loads peft

        if train.lora.base == "nf4":
            quantize_linears(decoder_layers(model))
        adapted = add_adapters(model, train.lora, train.seed)
        if has_fused_adapters(train):
            fuse_adapters(adapted)
        return adapted
    freeze(model, train)
    return model


def freeze(model: PreTrainedModel, train: Train) -> None:
    """Freeze the parameters that `train.freeze` matches, and convert them to compute precision."""
    named = {names[0]: (parameter, names) for parameter, names in base_parameters(model)}
    for name in frozen_names({name: names for name, (_, names) in named.items()}, train.freeze):
        parameter, _ = named[name]
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(DTYPES[train.precision])
