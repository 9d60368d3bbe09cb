"""FSDP2's predicted peak, against torch's tracker: one rank of eight runs, on tensors without data.

The tracker sees what FSDP2 itself allocates, gathers and reduces. It does not see what kernels use
beside tensors, and its hooks run FSDP2's for each layer of a group, so that units of several layers
are not checked here.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from pipeline_lib.arch.families import geometry_in
from pipeline_lib.config.train import Train
from pipeline_lib.model import build, experts, loss, recompute
from pipeline_lib.model.experts import GROUPED
from pipeline_lib.model.lora import add_adapters, fuse_adapters
from pipeline_lib.plan import moments
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import predict
from pipeline_lib.train import fsdp
from pipeline_lib.train.dist import World
from pipeline_lib.train.mesh import state_mesh
from pipeline_lib.train.strategies import make_strategy
from tests.plan.test_activations import attention

WORLD = World(0, 0, 8, torch.device("cpu"), local_size=4)
UNTIED: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
TIED = UNTIED | {"tie_word_embeddings": True}
OF_EXPERTS = {
    "moe_intermediate_size": 384,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
EXPERTS = UNTIED | OF_EXPERTS | {"model_type": "qwen3_moe"}
LOGITS = 2**20
# tokens: with many, activations are most of the memory; with few, weights and gradients
MANY = 1024
FEW = 64
TOLERANCE = 0.03


@pytest.fixture
def group() -> Iterator[None]:
    """A process group in which nothing is exchanged."""
    dist.init_process_group("fake", store=FakeStore(), rank=WORLD.rank, world_size=WORLD.size)
    yield
    dist.destroy_process_group()


def without_data(model: nn.Module) -> None:
    """Replace what is on the meta device by fake tensors of this mode."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                new = nn.Parameter(torch.empty(old.shape, dtype=old.dtype), old.requires_grad)
                module._parameters[name] = made.setdefault(old, new)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def peak_bytes(model: Any, train: Train, tokens: int, accumulation: int) -> int:
    """Of a step of rank 0, whose moments exist."""
    with FakeTensorMode():
        without_data(model)
        strategy = make_strategy(WORLD, train, accumulation)
        wrapped = strategy.spread(model, lambda _: None)
        ids, places = torch.zeros(1, tokens, dtype=torch.int64), torch.arange(tokens)
        tracker = FSDPMemTracker(wrapped, strategy.optimizer)  # type: ignore[attr-defined]
        tracker.track_inputs((ids, places))
        with tracker:
            for number in range(accumulation):
                with strategy.accumulating(number == accumulation - 1):
                    with strategy.autocast():
                        total = wrapped(
                            ids,
                            position_ids=places[None],
                            targets=ids,
                            predicted=places,
                            use_cache=False,
                        )
                    strategy.backward(total[0])
                del total
                tracker.reset_mod_stats()
            strategy.update(1e-3, 1.0)
    return max(by_kind["Total"] for by_kind in tracker.get_tracker_snapshot("peak").values())


def model_of(config: Any, train: Train) -> Any:
    """A model without data, as it is trained."""
    config._attn_implementation = "memory_test"
    config._experts_implementation = GROUPED
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).train()  # type: ignore[no-untyped-call]
    loss.return_losses(model)
    if train.method == "lora":
        model = add_adapters(model.to(build.DTYPES[train.precision]), train.lora, 0)
        fuse_adapters(model)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "config", "tokens", "accumulation"),
    [
        ({"strategy": "fsdp"}, UNTIED, MANY, 2),
        ({"strategy": "fsdp", "reshard": False}, TIED, MANY, 1),
        ({"strategy": "fsdp", "reshard": False}, UNTIED, FEW, 3),
        ({"strategy": "fsdp"}, TIED, FEW, 2),
        ({"strategy": "fsdp", "optimizer": "muon"}, TIED, FEW, 2),
        ({"strategy": "hsdp", "optimizer": "muon"}, UNTIED, FEW, 2),
        ({"strategy": "fsdp", "precision": "fp32"}, UNTIED, FEW, 1),
        ({"strategy": "fsdp", "recompute": "full"}, TIED, MANY, 2),
        ({"strategy": "hsdp", "recompute": "selective"}, UNTIED, MANY, 2),
        ({"strategy": "hsdp", "gradient_compression": "bf16"}, TIED, FEW, 2),
        ({"strategy": "fsdp", "method": "lora"}, TIED, MANY, 2),
        ({"strategy": "fsdp", "method": "lora", "recompute": "full"}, UNTIED, MANY, 2),
        ({"strategy": "hsdp", "method": "lora", "reshard": False}, UNTIED, FEW, 2),
        ({"strategy": "fsdp", "recompute": "selective"}, EXPERTS, MANY, 2),
        ({"strategy": "hsdp", "recompute": "full"}, EXPERTS, MANY, 1),
    ],
)
def test_the_peak_of_a_sharded_step(
    monkeypatch: pytest.MonkeyPatch,
    group: None,
    settings: dict[str, Any],
    config: dict[str, Any],
    tokens: int,
    accumulation: int,
) -> None:
    monkeypatch.setattr(recompute, "_KEPT", recompute._KEPT | {"memory_test::_varlen_attn"})
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", LOGITS)
    monkeypatch.setattr(moments, "LOGITS_AT_ONCE", LOGITS)
    AttentionInterface.register("memory_test", attention)
    experts.register()
    train = Train.model_validate({"precision": "bf16", "recompute": "none", **settings})
    mesh = state_mesh(WORLD, train)  # made of tensors with data
    monkeypatch.setattr(fsdp, "state_mesh", lambda *_: mesh)
    model = model_of(AutoConfig.for_model(**config), train)
    predicted = predict(
        geometry_in(config), train, Ranks(WORLD.size, WORLD.local_size), tokens, accumulation
    )
    assert predicted.allocated_bytes == pytest.approx(
        peak_bytes(model, train, tokens, accumulation), rel=TOLERANCE
    )
