"""What a layer keeps, against what autograd saves for transformers' real layers."""

import contextlib
import gc
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import AttentionInterface, Qwen2Config, Qwen3Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from pipeline_lib.config.schema import Train
from pipeline_lib.plan.activations import kept_per_token
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.train import layers
from pipeline_lib.train.layers import prepare_layers

TOKENS = 100  # no size of a weight
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@torch.library.custom_op("memory_test::_varlen_attn", mutates_args=())
def kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Stands for the attention kernel: the same shapes, and the same tensors kept."""
    return torch.zeros_like(query), query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, of_output: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    query, key, value, *_ = ctx.saved_tensors
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


kernel.register_autograd(_backward, setup_context=_setup)


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any) -> Any:
    """As train/attention.py calls the kernel."""
    shape = query.shape
    query, key, value = (tensor.to(value.dtype).transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    return kernel(query, key, value)[0].view(shape[0], shape[2], shape[1], shape[3]), None


AttentionInterface.register("memory_test", attention)


def layer_of(kind: str, train: Train) -> tuple[nn.Module, Any]:
    """A layer in the dtypes that the strategy of `train` gives it, and its config."""
    config: Any = Qwen3Config(**SIZES, head_dim=32) if kind == "qwen3" else Qwen2Config(**SIZES)
    config._attn_implementation = "memory_test"
    by_autocast = train.strategy == "ddp" and train.precision == "bf16"
    base = torch.float32 if train.precision == "fp32" or (by_autocast and train.method == "full") else torch.bfloat16
    layer: nn.Module = (Qwen3DecoderLayer if kind == "qwen3" else Qwen2DecoderLayer)(config, 0).to(base)
    if train.method == "lora":
        names: list[str] = LINEARS if train.lora.targets == "all-linear" else [str(name) for name in train.lora.targets]
        layer = inject_adapter_in_model(LoraConfig(r=1, target_modules=names), layer)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_" in name:
                parameter.data = parameter.data.float() if by_autocast else parameter.data.to(base)
    return layer.train(), config


def saved_bytes(kind: str, train: Train) -> tuple[float, Geometry]:
    """Bytes a token that autograd keeps, without weights, their casts, and angles that all layers share."""
    layer, config = layer_of(kind, train)
    stream = next(parameter for name, parameter in layer.named_parameters() if "lora_" not in name).dtype
    hidden = torch.randn(1, TOKENS, 64, dtype=stream, requires_grad=True)
    angles = Qwen3RotaryEmbedding(config)(hidden, torch.arange(TOKENS)[None])
    shapes = {tuple(parameter.shape) for parameter in layer.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    shared = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *angles)}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared and tuple(tensor.shape) not in shapes:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    cast: Any = contextlib.nullcontext()
    if train.strategy == "ddp" and train.precision == "bf16":
        cast = torch.autocast("cpu", torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), cast:
        layer(hidden, position_embeddings=angles, attention_mask=None)
    return sum(kept.values()) / TOKENS, Geometry.from_config({**config.to_dict(), "model_type": kind})


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "bf16"), ("fsdp", "bf16"), ("ddp", "fp32")])
def test_it_is_what_autograd_saves(kind: str, method: Any, strategy: Any, precision: Any) -> None:
    train = Train(strategy=strategy, precision=precision, method=method)
    saved, geometry = saved_bytes(kind, train)
    ranks_of_adapters = 0 if method == "full" else 7 * (4 if precision == "fp32" else 2)
    assert kept_per_token(geometry, train, False, "none") + ranks_of_adapters == pytest.approx(saved, abs=3)


def test_adapters_on_some_modules_keep_the_inputs_of_those() -> None:
    train = Train.model_validate({"strategy": "fsdp", "method": "lora", "lora": {"targets": ("q_proj", "v_proj")}})
    saved, geometry = saved_bytes("qwen3", train)
    assert kept_per_token(geometry, train, False, "none") + 2 * 2 == pytest.approx(saved, abs=3)


@pytest.mark.parametrize(("name", "copies"), [("8B", 26.3), ("4B", 33.3)])
def test_copies_of_the_hidden_state(name: str, copies: float) -> None:
    sizes = {"8B": (4096, 12288, 36), "4B": (2560, 9728, 36)}[name]
    geometry = Geometry(151936, sizes[0], sizes[1], sizes[2], 32, 8, 128, name == "4B", 40960)
    kept = kept_per_token(geometry, Train(strategy="fsdp"), False, "none")
    assert kept / (2 * geometry.hidden) == pytest.approx(copies, abs=0.1)


class Model(nn.Module):
    """Layers as a decoder has them."""

    def __init__(self, layer: nn.Module) -> None:
        """One layer."""
        super().__init__()
        self.layers = nn.ModuleList([layer])


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_is_computed_again_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, strategy: Any, recompute: Literal["selective", "full"]
) -> None:
    """Every tensor that is alive after the forward pass, but for weights, their casts and the result."""
    monkeypatch.setattr(layers, "_KEPT", layers._KEPT | {"memory_test::_varlen_attn"})
    train = Train(strategy=strategy, recompute=recompute)
    layer, config = layer_of("qwen3", train)
    prepare_layers(Model(layer), train)
    stream = torch.float32 if strategy == "ddp" else torch.bfloat16
    hidden = torch.randn(1, TOKENS, 64, dtype=stream, requires_grad=True)
    angles = Qwen3RotaryEmbedding(config)(hidden, torch.arange(TOKENS)[None])
    gc.collect()
    before = {id(thing) for thing in gc.get_objects()}
    cast: Any = torch.autocast("cpu", torch.bfloat16) if strategy == "ddp" else contextlib.nullcontext()
    with cast:
        result = layer(hidden, position_embeddings=angles, attention_mask=None)
    gc.collect()
    alive = {
        thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if id(thing) not in before and isinstance(thing, Tensor) and thing is not result
    }
    geometry = Geometry.from_config({**config.to_dict(), "model_type": "qwen3"})
    stream_bytes = stream.itemsize * geometry.hidden  # the input was there before
    predicted = kept_per_token(geometry, train, False, recompute) - stream_bytes
    assert sum(alive.values()) / TOKENS == pytest.approx(predicted, rel=0.02, abs=3)
