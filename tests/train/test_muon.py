"""Muon: torch's own results on any ranks, states that others take over, runs that go on bitwise."""

import shutil
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.config.train import Train
from pipeline_lib.core.store import Store
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import predict
from pipeline_lib.plan.moments import Model, StepMoments
from pipeline_lib.plan.trained import checkpoint_bytes
from pipeline_lib.plan.ways import Ways
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.native import Native
from pipeline_lib.train.saved_tensors import find_state
from pipeline_lib.train.state import own_part
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import assert_same_result, losses, train, train_until_killed
from tests.train.native import by_hand
from tests.train.poison import INF_GRADIENT, NAN_LOSS, Poison, train_poisoned

MUON = Train(precision="fp32", optimizer="muon", weight_decay=0.1)
STEPS, RATE = 5, 1e-2


class Small(nn.Module):
    """Two matrices of layers, one tall and one wide, of few rows; what is no matrix of a layer."""

    def __init__(self) -> None:
        """Draw the weights, the same each time."""
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 8, bias=False)
        self.model = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(8, 13), nn.Linear(13, 5))})

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.model["layers"](self.embed(inputs))
        return result


def batch(step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def by_torch() -> dict[str, list[Any]]:
    """The weights after steps of torch.optim.Muon and AdamW."""
    model = Small()
    named = dict(model.named_parameters())
    matrices = [named[f"model.layers.{layer}.weight"] for layer in (0, 1)]
    biases = [named[f"model.layers.{layer}.bias"] for layer in (0, 1)]
    groups = [
        {"params": [named["embed.weight"]], "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0},
    ]
    optimizers = [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, fused=True),
    ]
    for step in range(STEPS):
        model(batch(step)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.tolist() for name, parameter in named.items()}


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def by_strategy(environ: Mapping[str, str], mesh: tuple[int, ...] | None) -> dict[str, list[Any]]:
    """The same by our optimizer, whole on each rank or sharded: the whole weights."""
    world = World.from_env(environ, "cpu")
    torch.set_num_threads(1)
    with process_group(world, 30):
        model: nn.Module = Small()
        if mesh is not None:
            names = ("replicate", "shard")[-len(mesh) :]
            fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
        native = Native(world, MUON.model_copy(update={"max_grad_norm": 1e9}), 1)
        native.own(model)
        for step in range(STEPS):
            native.backward(model(batch(step)).square().sum())
            native.update(RATE, 1.0)
        return {
            name: whole_of(parameter.detach()).tolist()
            for name, parameter in native.parameters.items()
        }


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [(1, None), (2, None), (1, (1,)), (4, (4,)), (4, (2, 2))],
    ids=["one", "whole", "one shard", "shards", "replicas of shards"],
)
def test_updates_have_the_bits_of_torchs_own(ranks: int, mesh: tuple[int, ...] | None) -> None:
    """All ranks have the same gradients. Of 5 rows, the last of 4 ranks has none."""
    for found in run_ranks(by_strategy, ranks, mesh).values():
        assert found == by_torch()


# Rounding to bf16 makes much of the last bits of a gradient: where ranks add it up in another order,
# losses differ by 1e-5 after 24 steps. AdamW's differ by 1e-7.
CURVE = 1e-4
SPREAD: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"strategy": "ddp"}),
    (2, {"strategy": "fsdp"}),
    (4, {"strategy": "hsdp", "shard_ranks": 2}),
)


@pytest.mark.parametrize(("ranks", "placement"), SPREAD, ids=["ddp", "fsdp", "hsdp"])
def test_it_learns_and_the_curve_is_that_of_one_rank(
    whole: Callable[..., Path], ranks: int, placement: dict[str, Any]
) -> None:
    found = losses(whole(ranks, optimizer="muon", epochs=4, **placement))
    assert found == pytest.approx(losses(whole(1, optimizer="muon", epochs=4)), rel=CURVE)
    assert found[-1] < found[0] - 0.1


@pytest.mark.parametrize(("ranks", "placement"), SPREAD, ids=["ddp", "fsdp", "hsdp"])
def test_a_killed_run_continues_bitwise_and_on_other_ranks_with_the_same_curve(
    arena: Arena,
    whole: Callable[..., Path],
    tmp_path: Path,
    ranks: int,
    placement: dict[str, Any],
) -> None:
    """Also where another strategy takes over what it had saved."""
    settings: dict[str, Any] = {"optimizer": "muon", "save_every_steps": 2, "epochs": 2}
    killed = arena.job(ranks, tmp_path / "killed", **settings, **placement)
    run_ranks(train_until_killed, ranks, killed, 5)
    saved = find_state(killed.run_dir / "checkpoints" / "step-00000004")
    assert kinds_of(saved, ".layers.0.mlp.up_proj.weight") == {"weights", "momentum_buffer"}
    for name in (".embed_tokens.weight", ".layers.0.input_layernorm.weight"):
        assert kinds_of(saved, name) == {"weights", "exp_avg", "exp_avg_sq"}
    shutil.copytree(arena.store.root.parent, tmp_path / "copy")
    undisturbed = whole(ranks, optimizer="muon", epochs=2, **placement)
    run_ranks(train, ranks, arena.job(ranks, tmp_path / "resumed", **settings, **placement))
    assert_same_result(tmp_path / "resumed", undisturbed)
    other = {"strategy": "ddp" if placement["strategy"] != "ddp" else "fsdp"}
    copy = replace(arena, store=Store(tmp_path / "copy" / "store"))
    run_ranks(train, 3, copy.job(3, tmp_path / "moved", **settings, **other))
    assert losses(tmp_path / "moved") == pytest.approx(losses(undisturbed), rel=CURVE)


def kinds_of(names: Collection[str], of: str) -> set[str]:
    return {name.partition(".")[0] for name in names if name.endswith(of)}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("to_step", [0, 6], ids=["to the start", "to a checkpoint"])
def test_guards_take_it_back_to_the_moments_of_that_step(
    arena: Arena, tmp_path: Path, strategy: str, to_step: int
) -> None:
    guards = {"max_skips": 1, "rollback_every_steps": to_step or 100}
    settings: dict[str, Any] = {"optimizer": "muon", "strategy": strategy, "epochs": 2}
    job = arena.job(2, tmp_path / "out", guards=guards, **settings)
    courses = run_ranks(train_poisoned, 2, job, Poison({8: NAN_LOSS, 9: INF_GRADIENT}))
    for course in courses.values():
        assert course.digests[10] == course.digests[to_step + 1] != course.digests[8]
        assert course.digests[11] != course.digests[10]


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of tensors made in its context that are there at once."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[int] = set()
        self.now_bytes = self.most_bytes = 0

    def __torch_dispatch__(
        self, function: Any, _: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        for tensor in tree_leaves((arguments, named)):  # what was there before counts for nothing
            if isinstance(tensor, Tensor):
                self.seen.add(tensor.untyped_storage()._cdata)
        result = function(*arguments, **(named or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage: Any) -> None:
        if storage._cdata in self.seen:
            return
        self.seen.add(storage._cdata)
        self.now_bytes += storage.nbytes()
        self.most_bytes = max(self.most_bytes, self.now_bytes)
        weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())

    def forget(self, number: int, size_bytes: int) -> None:
        self.seen.discard(number)
        self.now_bytes -= size_bytes


ONE = np.ones(1)


def update_bytes(
    environ: Mapping[str, str], arena: Arena, placement: Mapping[str, Any]
) -> tuple[int, float]:
    """The most bytes that an update uses, and how many the plan counts for it."""
    with by_hand(environ, arena, optimizer="muon", **placement) as hand:
        hand.accumulate(0)
        with Tracker() as tracker:
            hand.strategy.optimizer.step()
        geometry = read_geometry(arena.store.sealed(arena.model))
        settings, ranks = hand.strategy.train, Ranks(hand.world.size, hand.world.size)
        model = Model.of(geometry, settings)
        step = StepMoments(geometry, Ways.one(settings, geometry), model, ranks, 32, ONE, 0 * ONE)
        return tracker.most_bytes, float(step.moments()[-1].sum[0])


@pytest.mark.parametrize(("ranks", "placement"), SPREAD, ids=["ddp", "fsdp", "hsdp"])
def test_the_plan_counts_what_an_update_uses(
    arena: Arena, ranks: int, placement: dict[str, Any]
) -> None:
    for used_bytes, expected_bytes in run_ranks(update_bytes, ranks, arena, placement).values():
        assert used_bytes == pytest.approx(expected_bytes, rel=1e-3)


def state_bytes(
    environ: Mapping[str, str], arena: Arena, placement: Mapping[str, Any]
) -> tuple[int, int]:
    """The bytes of all moments on this rank, and of a whole checkpoint's tensors."""
    with by_hand(environ, arena, optimizer="muon", **placement) as hand:
        native = hand.strategy
        own_bytes = sum(
            own_part(tensor).nbytes
            for state in native.optimizer.state.values()
            for name, tensor in state.items()
            if name != "step"
        )
        return own_bytes, 4 * sum(native.state_sizes().values())


@pytest.mark.parametrize(("ranks", "placement"), SPREAD, ids=["ddp", "fsdp", "hsdp"])
def test_the_plan_counts_the_bytes_that_moments_take(
    arena: Arena, ranks: int, placement: dict[str, Any]
) -> None:
    geometry = read_geometry(arena.store.sealed(arena.model))
    settings = Train(optimizer="muon", **placement)
    expected = predict(geometry, settings, Ranks(ranks, ranks), 32, 1)
    for own_bytes, checkpoint in run_ranks(state_bytes, ranks, arena, placement).values():
        assert own_bytes == expected.optimizer_bytes
        assert checkpoint == expected.checkpoint_bytes == checkpoint_bytes(geometry, settings)
