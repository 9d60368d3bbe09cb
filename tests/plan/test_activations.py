"""What a layer keeps, against what autograd saves for real layers, eager and compiled.

The layers are transformers'.
"""

import contextlib
import gc
from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AttentionInterface,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from pipeline_lib.arch.families import geometry_in
from pipeline_lib.arch.geometry import DELTA_CHUNK, FP32_BYTES, Geometry, LayerKind
from pipeline_lib.arch.layers import has_fused_adapters
from pipeline_lib.config.train import Lora, Train
from pipeline_lib.model import build, chunks, delta, experts
from pipeline_lib.model import recompute as recompute_module
from pipeline_lib.model.build import prepare_layers
from pipeline_lib.model.context import Part, heads_to_tokens, tokens_to_heads
from pipeline_lib.model.experts import GROUPED
from pipeline_lib.model.lora import fuse_adapters
from pipeline_lib.plan.activations import Arithmetic, before_chunks, fed_per_token, kept_per_token
from tests.model.graphs import compile_without_kernels

TOKENS = 100  # no size of a weight
HIDDEN = 80  # that of no other tensor
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 176,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "head_dim": 32,
}
DELTA: dict[str, Any] = {
    **{
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 20,
    },
    "layer_types": ["linear_attention", "full_attention"],
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
    "mrope_section": [6, 5, 5],
}
CONFIGS: dict[str, Any] = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig(
        **{**SIZES, **EXPERTS, "num_hidden_layers": 2},
        **DELTA,
        rope_parameters=ROPE,
        shared_expert_intermediate_size=56,
    ),
    "qwen3_5_text": Qwen3_5TextConfig(
        **{**SIZES, "num_hidden_layers": 2}, **DELTA, head_dim=32, rope_parameters=ROPE
    ),
}
LAYERS: dict[str, Any] = {
    "qwen2": Qwen2DecoderLayer,
    "qwen3": Qwen3DecoderLayer,
    "qwen3_moe": Qwen3MoeDecoderLayer,
    "qwen3_5_moe_text": Qwen3_5MoeDecoderLayer,
    "qwen3_5_text": Qwen3_5DecoderLayer,
}
RANK = 3
OF_DELTA = ["in_proj_qkv", "in_proj_z", "out_proj"]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@torch.library.custom_op("memory_test::_varlen_attn", mutates_args=())
def kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Stands for the attention kernel: the same shapes, and the same tensors kept."""
    return torch.zeros_like(query), query.new_zeros(query.shape[:2], dtype=torch.float32)


@kernel.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("memory_test::_varlen_attn_backward", mutates_args=())
def of_kernel(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients, which need all of these."""
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


@of_kernel.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, of_output: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = of_kernel(of_output, *ctx.saved_tensors)
    return gradients


kernel.register_autograd(_backward, setup_context=_setup)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    part: Part | None = None,
    **kwargs: Any,
) -> Any:
    """As model/attention.py calls the kernel."""
    query, key, value = (tensor.to(value.dtype) for tensor in (query, key, value))
    if part is not None:
        query, key, value = tokens_to_heads(query, key, value, part)
    shape = query.shape
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    output = kernel(query, key, value)[0].view(shape[0], shape[2], shape[1], shape[3])
    return output if part is None else heads_to_tokens(output, part), None


AttentionInterface.register("memory_test", attention)
experts.register()


def layer_of(kind: str, train: Train, number: int = 0) -> tuple[nn.Module, Any]:
    """The layer of that number in the dtypes that `train`'s strategy gives it, and its config."""
    config: Any = CONFIGS[kind]
    config._attn_implementation = "memory_test"
    by_autocast = train.strategy == "ddp" and train.precision == "bf16"
    base = (
        torch.float32
        if train.precision == "fp32" or (by_autocast and train.method == "full")
        else torch.bfloat16
    )
    config._experts_implementation = GROUPED
    layer: nn.Module = LAYERS[kind](config, number).to(base)
    delta.install(layer)
    if train.method == "lora":
        of_layer = [*LINEARS[:4], *OF_DELTA] if kind.endswith("moe_text") else [*LINEARS, *OF_DELTA]
        every = train.lora.targets == "all-linear"
        names: list[str] = of_layer if every else [str(name) for name in train.lora.targets]
        config_of_adapters = LoraConfig(
            r=RANK, target_modules=names, lora_dropout=train.lora.dropout
        )
        layer = inject_adapter_in_model(config_of_adapters, layer)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_" in name:
                parameter.data = parameter.data.float() if by_autocast else parameter.data.to(base)
        if has_fused_adapters(train):
            fuse_adapters(layer)
    return layer.train(), config


def _store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]


def shared_with(ranks: int) -> dict[str, Part]:
    """The argument of a layer of a rank sharing blocks: its own exchange keeps as much."""
    if ranks == 1:
        return {}
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=_store(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    return {"part": Part(0, ranks, group.group_name)}


def saved_bytes(kind: str, train: Train, number: int = 0) -> tuple[float, Geometry]:
    """Bytes a token that autograd keeps in that layer, but not weights, their casts and angles.

    The angles are those that layers share. Compiled layers are cut in two as torch.compile does it,
    and run without its kernels.
    """
    layer, config = layer_of(kind, train, number)
    with pytest.MonkeyPatch.context() as patch:
        compile_without_kernels(patch)
        prepare_layers(Model(layer), train)
    stream = next(
        parameter for name, parameter in layer.named_parameters() if "lora_" not in name
    ).dtype
    hidden = torch.randn(1, TOKENS, HIDDEN, dtype=stream, requires_grad=True)
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
        ends = (
            {"cu_seq_lens_q": torch.tensor([0, TOKENS // 3, TOKENS])}
            if kind.startswith("qwen3_5")
            else {}
        )
        layer(
            hidden,
            position_embeddings=angles,
            attention_mask=None,
            **ends,
            **shared_with(train.ranks_per_block),
        )
    assert not train.compile or not torch._dynamo.utils.counters["graph_break"]
    return sum(kept.values()) / TOKENS, geometry_in({**config.to_dict(), "model_type": kind})


WAYS = [("ddp", "bf16"), ("fsdp", "bf16"), ("ddp", "fp32")]


@pytest.mark.parametrize(
    ("kind", "strategy", "precision", "compiled"),
    [(kind, *way, False) for kind in ("qwen3", "qwen2") for way in WAYS]
    + [("qwen3", *way, True) for way in WAYS]  # compiling takes seconds
    + [("qwen2", "fsdp", "bf16", True)],
)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_it_is_what_autograd_saves(
    kind: str, strategy: Any, precision: Any, compiled: bool, method: Any
) -> None:
    train = Train(
        strategy=strategy,
        precision=precision,
        method=method,
        compile=compiled,
        lora=Lora(rank=RANK),
    )
    saved, geometry = saved_bytes(kind, train)
    near = {"rel": 0.03} if compiled else {"abs": 3}
    assert kept_per_token(geometry, train, LayerKind(), "none") == pytest.approx(saved, **near)


# Compiling takes seconds: every way, method and kind of layer, but not each with each.
EAGER_OF_HYBRID = list(product(WAYS, ("full", "lora"), (True, False), (False,)))
COMPILED_OF_HYBRID = [
    (WAYS[0], "full", True, True),
    (WAYS[0], "lora", False, True),
    (WAYS[1], "full", False, True),
    (WAYS[1], "lora", True, True),
    (WAYS[2], "lora", True, True),
    (WAYS[2], "full", False, True),
]


@pytest.mark.parametrize(
    ("way", "method", "is_recurrent", "compiled"), EAGER_OF_HYBRID + COMPILED_OF_HYBRID
)
def test_it_is_what_both_kinds_of_layers_of_a_hybrid_save(
    way: tuple[Any, Any], method: Any, is_recurrent: bool, compiled: bool
) -> None:
    """Without the inverses that kernels keep beside, of which there are none on CPUs."""
    strategy, precision = way
    train = Train(
        strategy=strategy,
        precision=precision,
        method=method,
        compile=compiled,
        lora=Lora(rank=RANK),
    )
    saved, geometry = saved_bytes("qwen3_5_text", train, 0 if is_recurrent else 1)
    kept = kept_per_token(geometry, train, LayerKind(is_recurrent), "none")
    if is_recurrent:
        kept -= inverses_bytes(geometry, train)
    assert kept == pytest.approx(saved, rel=0.03)


@pytest.mark.parametrize(
    ("method", "compiled", "is_recurrent"),
    [
        *product(("full", "lora"), (False,), (True, False)),
        ("full", True, True),
        ("lora", True, False),
    ],
)
def test_it_is_what_layers_of_a_hybrid_with_experts_save(
    method: Any, compiled: bool, is_recurrent: bool
) -> None:
    """Among the experts a shared one."""
    train = Train(strategy="fsdp", method=method, compile=compiled, lora=Lora(rank=RANK))
    saved, geometry = saved_bytes("qwen3_5_moe_text", train, 0 if is_recurrent else 1)
    kept = kept_per_token(geometry, train, LayerKind(is_recurrent, has_experts=True), "none")
    if is_recurrent:
        kept -= inverses_bytes(geometry, train)
    assert kept == pytest.approx(saved, rel=0.03)


def inverses_bytes(geometry: Geometry, train: Train) -> int:
    assert geometry.delta is not None
    return Arithmetic.of(train).number_bytes * geometry.delta.value_heads * DELTA_CHUNK


@pytest.fixture
def alone() -> Iterator[None]:
    """No process group is left."""
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "method", "compiled"),
    [
        (2, "full", False),
        (4, "full", False),
        (4, "lora", False),
        (2, "full", True),
        (4, "lora", True),
    ],
)
def test_it_is_what_a_rank_saves_that_shares_blocks(
    alone: None, ranks: int, method: Any, compiled: bool
) -> None:
    """Four ranks are more than there are heads of keys."""
    train = Train(
        strategy="fsdp", method=method, compile=compiled, context_ranks=ranks, lora=Lora(rank=RANK)
    )
    saved, geometry = saved_bytes("qwen3", train)
    assert kept_per_token(geometry, train, LayerKind(), "none") == pytest.approx(saved, rel=0.03)


@pytest.mark.parametrize(
    ("method", "recompute", "compiled"),
    [("full", "none", False), ("full", "none", True), ("full", "selective", True)]
    + [("lora", "none", False), ("lora", "none", True)],
)
def test_it_is_what_a_layer_with_experts_saves(
    monkeypatch: pytest.MonkeyPatch,
    method: Any,
    recompute: Literal["none", "selective"],
    compiled: bool,
) -> None:
    """Under fsdp: the casts that ddp makes of experts cannot be told from what is kept."""
    monkeypatch.setattr(
        recompute_module, "_KEPT", recompute_module._KEPT | {"memory_test::_varlen_attn"}
    )
    train = Train(
        strategy="fsdp", method=method, compile=compiled, recompute=recompute, lora=Lora(rank=RANK)
    )
    saved, geometry = saved_bytes("qwen3_moe", train)
    assert kept_per_token(geometry, train, LayerKind(has_experts=True), recompute) == pytest.approx(
        saved, rel=0.03
    )


@pytest.mark.parametrize(
    ("lora", "compiled"),
    [
        *(({"targets": ("q_proj", "v_proj")}, compiled) for compiled in (False, True)),
        ({"targets": ("gate_proj", "down_proj")}, False),
        ({"dropout": 0.1}, True),  # eager, CPUs keep more of it than GPUs
    ],
)
def test_adapters_keep_what_they_need(lora: dict[str, Any], compiled: bool) -> None:
    """The inputs of the modules that have them; with dropout each what is left of it, by itself."""
    way = {
        "strategy": "fsdp",
        "method": "lora",
        "compile": compiled,
        "lora": {"rank": RANK, **lora},
    }
    train = Train.model_validate(way)
    saved, geometry = saved_bytes("qwen3", train)
    assert kept_per_token(geometry, train, LayerKind(), "none") == pytest.approx(
        saved, rel=0.03 if compiled else 0.001
    )


@pytest.mark.parametrize(
    ("name", "compiled", "copies"),
    [("8B", False, 26.3), ("4B", False, 33.3), ("8B", True, 16.8), ("4B", True, 21.4)],
)
def test_copies_of_the_hidden_state(name: str, compiled: bool, copies: float) -> None:
    sizes = {"8B": (4096, 12288, 36), "4B": (2560, 9728, 36)}[name]
    geometry = Geometry(151936, sizes[0], sizes[1], sizes[2], 32, 8, 128, name == "4B", 40960)
    kept = kept_per_token(geometry, Train(strategy="fsdp", compile=compiled), LayerKind(), "none")
    assert kept / (2 * geometry.hidden) == pytest.approx(copies, abs=0.1)


@pytest.mark.parametrize(
    ("strategy", "method", "compiled"),
    [
        *product(("ddp", "fsdp"), ("full", "lora"), (False,)),
        ("ddp", "full", True),
        ("fsdp", "lora", True),
    ],
)
def test_in_chunks_the_halves_keep_what_they_need(
    monkeypatch: pytest.MonkeyPatch, strategy: Any, method: Any, compiled: bool
) -> None:
    """The first half, for all tokens; the second for one chunk, whose input is a view of it.

    The first half comes with its result.
    """
    chunk = TOKENS // 4
    kept: dict[int, Tensor] = {}
    monkeypatch.setattr("pipeline_lib.arch.layers.FED_AT_ONCE", chunk)
    # which would keep the input alone
    monkeypatch.setattr(build, "fully_recomputed", lambda forward, *_: forward)

    def pack(tensor: Tensor) -> Tensor:
        if chunk in tensor.shape and tensor.untyped_storage().nbytes() != stream_bytes * TOKENS:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    monkeypatch.setattr(
        chunks, "_keeping_for_itself", lambda: saved_tensors_hooks(pack, lambda tensor: tensor)
    )
    way = {
        "strategy": strategy,
        "method": method,
        "compile": compiled,
        "recompute": "full",
        "lora": {"rank": RANK},
    }
    train = Train.model_validate(way)
    stream_bytes = Arithmetic.of(train).stream_bytes(train) * HIDDEN
    near = {"rel": 0.03} if compiled else {"abs": 4}
    saved, geometry = saved_bytes("qwen3", train)
    assert before_chunks(geometry, train, LayerKind()) == pytest.approx(saved, **near)
    # all are alive
    of_chunks = sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / TOKENS
    view = stream_bytes if stream_bytes == FP32_BYTES * HIDDEN and not compiled else 0
    assert fed_per_token(geometry, train, False) - view == pytest.approx(of_chunks, abs=1)


class Model(nn.Module):
    """Layers as a decoder has them."""

    def __init__(self, layer: nn.Module) -> None:
        """One layer."""
        super().__init__()
        self.layers = nn.ModuleList([layer])


@pytest.mark.parametrize(("strategy", "method"), [("ddp", "full"), ("fsdp", "lora")])
def test_a_compiled_layer_keeps_products_and_attention_where_it_is_to_be_selective(
    monkeypatch: pytest.MonkeyPatch, strategy: Any, method: Any
) -> None:
    monkeypatch.setattr(
        recompute_module, "_KEPT", recompute_module._KEPT | {"memory_test::_varlen_attn"}
    )
    train = Train(
        strategy=strategy, method=method, recompute="selective", compile=True, lora=Lora(rank=RANK)
    )
    saved, geometry = saved_bytes("qwen3", train)
    assert kept_per_token(geometry, train, LayerKind(), "selective") == pytest.approx(
        saved, rel=0.03
    )


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_is_computed_again_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
    strategy: Any,
    method: Any,
    recompute: Literal["selective", "full"],
) -> None:
    """Each tensor alive after the forward pass, except weights, their casts and the result."""
    monkeypatch.setattr(
        recompute_module, "_KEPT", recompute_module._KEPT | {"memory_test::_varlen_attn"}
    )
    train = Train(strategy=strategy, method=method, recompute=recompute, lora=Lora(rank=RANK))
    layer, config = layer_of("qwen3", train)
    prepare_layers(Model(layer), train)
    stream = torch.float32 if strategy == "ddp" and method == "full" else torch.bfloat16
    hidden = torch.randn(1, TOKENS, HIDDEN, dtype=stream, requires_grad=True)
    angles = Qwen3RotaryEmbedding(config)(hidden, torch.arange(TOKENS)[None])
    gc.collect()
    gc.freeze()  # of all that there is now, the collector says nothing below
    cast: Any = (
        torch.autocast("cpu", torch.bfloat16) if strategy == "ddp" else contextlib.nullcontext()
    )
    with cast:
        result = layer(hidden, position_embeddings=angles, attention_mask=None)
    gc.collect()
    alive = {
        thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if isinstance(thing, Tensor) and thing is not result
    }
    gc.unfreeze()
    geometry = geometry_in({**config.to_dict(), "model_type": "qwen3"})
    stream_bytes = stream.itemsize * geometry.hidden  # the input was there before
    predicted = kept_per_token(geometry, train, LayerKind(), recompute) - stream_bytes
    assert sum(alive.values()) / TOKENS == pytest.approx(predicted, rel=0.02, abs=3)
