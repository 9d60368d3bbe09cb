"""The predicted peak of whole steps, against a count of all live tensors in real ones on a CPU."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.config.train import Train
from pipeline_lib.core.units import from_gigabytes
from pipeline_lib.model import build, loss, recompute
from pipeline_lib.model.lora import add_adapters, fuse_adapters
from pipeline_lib.plan import moments
from pipeline_lib.plan.host import RANK_BYTES
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import predict
from tests.plan.test_activations import attention

TOKENS = 256
LOGITS = 2**17
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
TOLERANCE = 0.04


def peak_bytes(train: Train, config: Any) -> int:
    """Of two steps of two micro-batches each, in one process, with gradients kept as by DDP."""
    config._attn_implementation = "memory_test"
    model: Any = Qwen3ForCausalLM(config).train()
    loss.return_losses(model)
    build.prepare_layers(model, train)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, 2048, (1, TOKENS))
    places = torch.arange(TOKENS)
    tracker = MemTracker()
    tracker.track_external(model, optimizer, ids, places)
    with tracker:
        for _ in range(2):
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=train.precision == "bf16"):
                    total = model(
                        ids,
                        position_ids=places[None],
                        targets=ids,
                        predicted=places,
                        use_cache=False,
                    )[0]
                total.backward()
                tracker.reset_mod_stats()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return max(by_kind["Total"] for by_kind in tracker.get_tracker_snapshot("peak").values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "tied"),
    [
        ({"precision": "bf16"}, False),
        ({"precision": "fp32"}, True),
        ({"precision": "bf16", "recompute": "selective"}, False),
        ({"precision": "bf16", "recompute": "full"}, True),
    ],
)
def test_the_peak_of_a_step(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], tied: bool
) -> None:
    monkeypatch.setattr(recompute, "_KEPT", recompute._KEPT | {"memory_test::_varlen_attn"})
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", LOGITS)
    monkeypatch.setattr(moments, "LOGITS_AT_ONCE", LOGITS)
    AttentionInterface.register("memory_test", attention)
    train = Train.model_validate(settings)
    config = Qwen3Config(**SIZES, tie_word_embeddings=tied)
    geometry = geometry_in(config.to_dict())
    predicted = predict(geometry, train, Ranks(1, 1), TOKENS, 2)
    assert predicted.allocated_bytes == pytest.approx(peak_bytes(train, config), rel=TOLERANCE)


# Peaks of benchmarks/RESULTS.md, in GiB, by layers, ranks, whether they are compiled, method and
# what has adapters: 30B-A3B's widths under fsdp with layers kept gathered, a block of 16,384
# tokens, on H200 and (lora) on an H100.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = (*ATTENTION, "experts.gate_up_proj", "experts.down_proj")
MEASURED = [
    (6, 1, True, "full", ATTENTION, 73.3),
    (6, 1, False, "full", ATTENTION, 78.1),
    (4, 2, True, "full", ATTENTION, 34.9),
    (4, 2, False, "full", ATTENTION, 37.9),
    (6, 1, True, "lora", ATTENTION, 26.1),
    (6, 1, True, "lora", EXPERTS, 31.4),
    (6, 1, False, "lora", ATTENTION, 29.1),
    (6, 1, False, "lora", EXPERTS, 34.2),
]


@pytest.mark.parametrize(
    ("layers", "ranks", "compiled", "method", "targets", "measured_gib"), MEASURED
)
def test_peaks_of_experts_that_were_measured_are_within_the_error(
    layers: int,
    ranks: int,
    compiled: bool,
    method: str,
    targets: tuple[str, ...],
    measured_gib: float,
) -> None:
    widths = {**(published("Qwen/Qwen3-30B-A3B") or {}), "num_hidden_layers": layers}
    settings = {
        "strategy": "fsdp",
        "reshard": False,
        "recompute": "none",
        "compile": compiled,
        "method": method,
    }
    train = Train.model_validate(
        {**settings, "lora": {"rank": 16, "alpha": 32, "targets": targets}}
    )
    found = predict(
        geometry_in(widths), train, Ranks(ranks, ranks, has_triton=True), 16_384, accumulation=1
    )
    assert measured_gib * 2**30 == pytest.approx(found.allocated_bytes, rel=found.error)
    assert found.error == 0.05


# Peaks of layers without experts, by fsdp or with long documents, of the same file: size, layers
# (0: all), ranks, tokens of a micro-batch, micro-batches of a step. The eager ones were without the
# loss's kernel.
EAGER = {"strategy": "fsdp", "recompute": "none", "reshard": True, "compile": False}
GATHERED = {"strategy": "fsdp", "recompute": "none", "reshard": False, "compile": True}
LONG_DOCUMENT = {"strategy": "ddp", "method": "lora", "recompute": "full", "compile": True}
FSDP_OFFLOADED = GATHERED | {"offload": "optimizer+params"}
ZERO2_OFFLOADED = {
    "strategy": "zero2",
    "offload": "optimizer",
    "recompute": "none",
    "compile": True,
}
DENSE: list[tuple[str, int, int, int, int, dict[str, Any], float]] = [
    ("0.6B", 0, 1, 8192, 2, EAGER, 27.74),
    ("0.6B", 0, 2, 8192, 2, EAGER, 23.33),
    ("0.6B", 0, 2, 8192, 2, EAGER | {"recompute": "selective"}, 14.56),
    ("0.6B", 0, 2, 8192, 2, EAGER | {"recompute": "full"}, 8.42),
    ("0.6B", 0, 2, 16_384, 1, EAGER, 37.65),
    ("4B", 0, 1, 8192, 2, EAGER, 111.64),
    ("8B", 0, 2, 4096, 2, EAGER | {"method": "lora"}, 39.21),
    ("8B", 8, 1, 16_384, 1, GATHERED, 58.2),
    ("8B", 8, 2, 16_384, 1, GATHERED, 42.4),
    ("8B", 8, 1, 16_384, 1, GATHERED | {"recompute": "selective"}, 52.1),
    ("8B", 8, 1, 16_384, 1, GATHERED | {"recompute": "full"}, 43.9),
    ("8B", 8, 1, 16_384, 1, GATHERED | {"compile": False}, 68.2),
    ("8B", 0, 2, 8192, 2, GATHERED, 117.8),
    ("8B", 24, 1, 8192, 8, GATHERED, 128.6),
    ("8B", 16, 1, 8192, 8, GATHERED, 94.3),
    ("32B", 4, 1, 16_384, 1, GATHERED, 67.3),
    ("8B", 0, 1, 32_768, 1, LONG_DOCUMENT | {"offload_activations": True}, 20.4),
    ("8B", 0, 1, 32_768, 1, LONG_DOCUMENT, 37.6),
    ("8B", 0, 1, 65_536, 1, LONG_DOCUMENT | {"offload_activations": True}, 24.7),
    ("8B", 0, 1, 131_072, 1, LONG_DOCUMENT | {"offload_activations": True}, 33.4),
    ("4B", 12, 1, 8192, 2, FSDP_OFFLOADED, 15.44),
    ("4B", 12, 1, 8192, 2, ZERO2_OFFLOADED, 22.12),
]


@pytest.mark.parametrize(
    ("size", "layers", "ranks", "tokens", "accumulation", "settings", "measured_gib"), DENSE
)
def test_peaks_that_were_measured_are_within_five_percent(
    size: str,
    layers: int,
    ranks: int,
    tokens: int,
    accumulation: int,
    settings: dict[str, Any],
    measured_gib: float,
) -> None:
    widths = published(f"Qwen/Qwen3-{size}") or {}
    geometry = geometry_in(widths | ({"num_hidden_layers": layers} if layers else {}))
    train = Train.model_validate({**settings, "lora": {"rank": 16, "alpha": 32}})
    has_triton = settings.get("reshard") is not True
    found = predict(geometry, train, Ranks(ranks, ranks, has_triton), tokens, accumulation)
    assert found.allocated_bytes == pytest.approx(measured_gib * 2**30, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "measured_gb"), [(FSDP_OFFLOADED, 42.5), (ZERO2_OFFLOADED, 39.5)]
)
def test_host_memory_of_offloading_that_was_measured_is_what_is_offloaded_and_the_rank(
    settings: dict[str, Any], measured_gb: float
) -> None:
    """Of 12 layers of 4B: how much less memory a host of one rank had while it trained."""
    geometry = geometry_in((published("Qwen/Qwen3-4B") or {}) | {"num_hidden_layers": 12})
    found = predict(geometry, Train.model_validate(settings), Ranks(1, 1, True), 8192, 2)
    assert found.host_bytes < from_gigabytes(measured_gb) < found.host_bytes + RANK_BYTES["cuda"]


# With chunks, the tracker's hooks on modules would keep the graphs of chunks alive.

LONG: dict[str, Any] = {
    **SIZES,
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 320,
    "head_dim": 16,
}
LONG_TOKENS = 2048


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of storages that operators return, while alive, except existing ones."""

    def __init__(self, there: list[Tensor]) -> None:
        """Count nothing of `there`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in there}
        self.most: int = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run it, and count."""
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, Tensor)
                and (storage := tensor.untyped_storage())._cdata not in self.sizes
            ):
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata)
        self.most = max(self.most, sum(self.sizes.values()))
        return result


def working_bytes(model: nn.Module, precision: str) -> int:
    """The most that a micro-batch uses beside weights and gradients, which exist."""
    ids, places = torch.randint(0, 256, (1, LONG_TOKENS)), torch.arange(LONG_TOKENS)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            total = model(
                ids, position_ids=places[None], targets=ids, predicted=places, use_cache=False
            )[0]
        total.backward()

    run()
    gc.collect()
    parameters = list(model.parameters())
    with Alive(
        [*parameters, *(one.grad for one in parameters if one.grad is not None), ids, places]
    ) as alive:
        run()
    return int(alive.most)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_peak_of_a_micro_batch_in_chunks(
    monkeypatch: pytest.MonkeyPatch, method: str, precision: str
) -> None:
    """Against one chunk; this attention needs nothing of what flash kernels' gradients need."""
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", LOGITS)
    monkeypatch.setattr(moments, "LOGITS_AT_ONCE", LOGITS)
    AttentionInterface.register("memory_test", attention)
    train = Train.model_validate(
        {"method": method, "precision": precision, "recompute": "full", "lora": {"rank": 2}}
    )
    config: Any = Qwen3Config(**LONG, tie_word_embeddings=False)
    config._attn_implementation = "memory_test"
    model: Any = Qwen3ForCausalLM(config).train()
    loss.return_losses(model)
    if method == "lora":
        model = add_adapters(model.to(build.DTYPES[precision]), train.lora, 0)
        fuse_adapters(model)
    build.prepare_layers(model, train)
    geometry, found = geometry_in(config.to_dict()), []
    for at_once in (LONG_TOKENS, LONG_TOKENS // 4):
        monkeypatch.setattr("pipeline_lib.arch.layers.FED_AT_ONCE", at_once)
        predicted = predict(geometry, train, Ranks(1, 1), LONG_TOKENS, 2)
        found.append(working_bytes(model, precision))
        assert 0.87 < found[-1] / (predicted.allocated_bytes - predicted.state_bytes) < 1.02
    assert found[1] < 0.7 * found[0]
