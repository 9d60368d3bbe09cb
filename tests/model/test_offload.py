"""What layers keep goes to the host and back, with equal loss and gradients; here all on CPU."""

import gc
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline_lib.config.train import Train
from pipeline_lib.model import build, recompute
from pipeline_lib.model.batch import loss_sum, make_batch
from pipeline_lib.model.build import build_trainable
from pipeline_lib.model.offload import HostMemory, LayerCall, _Away
from pipeline_lib.model.weights import load_weights
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.strategies import make_strategy
from tests.model.graphs import compile_without_kernels
from tests.model.test_recompute import LAYERS, calls, folder, model_of, step
from tests.model.test_streaming import blocks
from tests.ranks import run_ranks
from tests.train.loading import SIZES

__all__ = ["calls", "folder"]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> list[HostMemory]:
    """The host memory of each model that is built; all tensors are large enough."""
    made: list[HostMemory] = []

    def make() -> HostMemory:
        made.append(HostMemory(least_bytes=0))
        return made[-1]

    monkeypatch.setattr(build, "HostMemory", make)
    return made


AWAY: dict[str, Any] = {"recompute": "full", "offload_activations": True}


@pytest.mark.parametrize("kept_from", [8, 1000], ids=["long", "short"])
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "full"},
        {"method": "lora"},
        {"method": "lora", "lora": {"rank": 2, "dropout": 0.2}},
        pytest.param({"method": "lora", "compile": True}, marks=pytest.mark.slow),
    ],
    ids=["full", "lora", "dropout", "compiled"],
)
def test_loss_and_gradients_are_the_same_bits(
    folder: Path,
    calls: Counter[str],
    hosts: list[HostMemory],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    kept_from: int,
) -> None:
    compile_without_kernels(monkeypatch)
    monkeypatch.setattr(recompute, "KEPT_FROM", kept_from)
    found = []
    for more in ({"recompute": "full"}, AWAY):
        torch.manual_seed(3)
        model = model_of(folder, **settings, **more)
        torch.manual_seed(3)
        found.append([step(model), step(model)])
    for here, away in zip(*found, strict=True):
        assert len(here) == len(away) > 2 + LAYERS
        assert all(map(torch.equal, here, away))
    [host] = hosts
    assert host.allocated_bytes > 0


@pytest.mark.parametrize("method", ["full", "lora"])
def test_only_layers_that_keep_their_attention_take_host_memory_for_it(
    folder: Path,
    calls: Counter[str],
    hosts: list[HostMemory],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """Of 40 fp32 tokens: a result as wide as the queries, and a log-sum-exp for each head."""
    monkeypatch.setattr(recompute, "KEPT_FROM", 8)
    plain = step(model_of(folder, method=method, recompute="full"))
    for kept in range(LAYERS + 1):
        calls.clear()
        found = step(model_of(folder, method=method, **AWAY, kept_attention_layers=kept))
        assert calls["forward"] == 2 * (LAYERS + LAYERS - kept)
        assert all(map(torch.equal, found, plain))
    heads = SIZES["num_attention_heads"]
    of_layer = 40 * 4 * (heads * SIZES["head_dim"] + heads)
    assert [host.allocated_bytes - hosts[0].allocated_bytes for host in hosts] == [
        kept * of_layer for kept in range(LAYERS + 1)
    ]


def spread_steps(
    environ: Mapping[str, str], folder: Path, strategy: str, ways: Iterable[dict[str, Any]]
) -> list[tuple[list[Any], int]]:
    """Of each way in turn, losses and gradients of a rank, and the bytes of host memory."""
    world = World.from_env(environ, "cpu")
    with process_group(world, 60):
        return [_spread_step(world, folder, strategy, way) for way in ways]


def _spread_step(
    world: World, folder: Path, strategy: str, way: dict[str, Any]
) -> tuple[list[Any], int]:
    made: list[HostMemory] = []

    def make() -> HostMemory:
        made.append(HostMemory(least_bytes=0))
        return made[-1]

    vars(build)["HostMemory"] = make
    train = Train.model_validate(
        {"method": "lora", "strategy": strategy, "lora": {"rank": 2}, **way}
    )
    settings = make_strategy(world, train, 2)
    model = build_trainable(folder, train)
    wrapped = settings.spread(model, lambda one: load_weights(one, folder, world.device, 0))
    wrapped.train()
    found: list[Any] = []
    for block in blocks(2, 40):
        with settings.autocast():
            loss = loss_sum(wrapped, make_batch([block]))
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(loss.detach().numpy())
    gradients: list[Any] = [one.grad for one in model.parameters() if one.grad is not None]
    found += [getattr(one, "_local_tensor", one).numpy() for one in gradients]
    return found, made[0].allocated_bytes if made else 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_is_the_same_on_two_ranks(folder: Path, strategy: str) -> None:
    for here, away in run_ranks(
        spread_steps, 2, folder, strategy, [{"recompute": "full"}, AWAY]
    ).values():
        assert len(here[0]) == len(away[0]) > 2 + LAYERS
        assert all(map(np.array_equal, here[0], away[0]))
        assert (here[1] > 0, away[1] > 0) == (False, True)


def test_every_step_uses_the_memory_of_the_first(
    folder: Path, calls: Counter[str], hosts: list[HostMemory]
) -> None:
    model = model_of(folder, **AWAY)
    step(model)
    [host] = hosts
    first = host.allocated_bytes
    assert first >= LAYERS * 40 * SIZES["hidden_size"] * 4
    for _ in range(3):
        step(model)
        with torch.no_grad():
            loss_sum(model, make_batch(blocks(1, 40)))
    assert host.allocated_bytes == first
    loss_sum(model, make_batch(blocks(1, 40)))  # dropped without a backward pass
    gc.collect()
    step(model)
    assert host.allocated_bytes == first


def test_tensors_leave_the_device_and_come_one_layer_ahead() -> None:
    """Of what calls keep only the last two are still there at the end of the forward pass."""
    host = HostMemory(least_bytes=0)
    made: list[tuple[LayerCall, Any, Tensor]] = []
    for number in range(5):
        call = host.call()
        tensor = torch.full((3, 4), float(number))
        made.append((call, call.keep(tensor), tensor))

    def there() -> list[bool]:
        return [kept._value is not None for _, kept, _ in made]

    assert there() == [False, False, False, True, True]
    for number in reversed(range(5)):
        call, kept, expected = made[number]
        assert torch.equal(call.get(kept), expected)
        assert torch.equal(call.get(kept), expected)
        assert there() == [index >= number - 1 for index in range(5)]
    assert host.allocated_bytes == 5 * 48
    made.clear()
    del call, kept
    host.call().keep(torch.zeros(3, 4))
    assert host.allocated_bytes == 5 * 48


def test_what_is_small_or_a_parameter_stays() -> None:
    host = HostMemory(least_bytes=100)
    call = host.call()
    for tensor in (torch.zeros(24), nn.Parameter(torch.zeros(100)), torch.zeros(40, 40).T[:, ::2]):
        assert call.keep(tensor) is tensor
        assert call.get(tensor) is tensor
    assert isinstance(call.keep(torch.zeros(25)), _Away)
