"""Groups, rates, and moments of 8 bits."""

import sys
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.train import native as native_module
from pipeline_lib.train.adamw_8bit import is_8bit, take_values, values_of
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.keepers import grouped
from pipeline_lib.train.native import Native
from pipeline_lib.train.optimizer import (
    make_optimizer,
    parameter_groups,
    set_learning_rate,
    trainable,
    update,
    zero_moments,
)
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.native import by_hand, same, state_of

EIGHT = Train(precision="fp32", optimizer="adamw_8bit", weight_decay=0.1)
LORA_PLUS: dict[str, Any] = {"method": "lora", "lora": {"rank": 4, "alpha": 8, "lr_ratio": 16.0}}


def named(module: nn.Module, groups: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Decay and rate of each parameter."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        names[id(p)]: (group["weight_decay"], group["lr_ratio"])
        for group in groups
        for p in group["params"]
    }


def test_decay_is_on_matrices_only() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    groups = parameter_groups(trainable(module), Train(weight_decay=0.1))
    assert named(module, groups) == {
        "0.weight": (0.1, 1),
        "0.bias": (0, 1),
        "1.weight": (0, 1),
        "1.bias": (0, 1),
    }


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_epsilon_is_that_of_the_config(optimizer: Literal["adamw", "adamw_8bit"]) -> None:
    """AdamW's first update is lr * g / (|g| + eps): half the rate if eps equals the gradient."""
    if optimizer == "adamw_8bit":
        pytest.importorskip("torchao")
    module = nn.Linear(64, 64, bias=False)
    module.weight.data.zero_()
    train = Train(optimizer=optimizer, adam_eps=0.25, lr=1e-2, weight_decay=0.0)
    made = make_optimizer(trainable(module), train)
    zero_moments(made)
    set_learning_rate(made, train.lr)
    module.weight.grad = torch.full_like(module.weight, 0.25)
    update(made, 1.0)
    torch.testing.assert_close(
        module.weight, torch.full_like(module.weight, -5e-3), rtol=1e-2, atol=0
    )


def rates_by_hand(
    environ: Mapping[str, str], arena: Arena
) -> tuple[dict[str, tuple[float, float]], list[float]]:
    """Decay and rate of each parameter, and how far the first update at 1e-2 moved each B."""
    with by_hand(environ, arena, **LORA_PLUS) as hand:
        hand.step(0)
        moved = [
            float(tensor.abs().max()) for name, tensor in hand.weights().items() if "lora_B" in name
        ]
        set_learning_rate(hand.strategy.optimizer, 1e-3)
        groups = [
            {**group, "lr_ratio": group["lr"]} for group in hand.strategy.optimizer.param_groups
        ]
        return named(hand.wrapped, groups), moved


def test_lora_plus_trains_b_at_its_own_rate(arena: Arena) -> None:
    rates, moved = run_ranks(rates_by_hand, 1, arena)[0]
    assert len(rates) == 2 * 7 * 2
    for name, (_, rate) in rates.items():
        assert rate == (16e-3 if "lora_B" in name else 1e-3)
    # Adam's first update is as long as its rate
    assert moved == pytest.approx([16e-2] * 14, rel=1e-3)


def updated(environ: Mapping[str, str], sharded: bool) -> bool:
    """Whether updates have the bits of torch's own `step`, with clipped gradients or none."""
    world = World.from_env(environ, "cpu")
    train = Train(precision="fp32", weight_decay=0.1)
    states: list[dict[str, Tensor]] = []
    with process_group(world, 30):
        for is_own in (True, False):
            torch.manual_seed(0)
            # ranks without a row
            module = nn.Sequential(nn.Linear(16, 3), nn.LayerNorm(3), nn.Linear(3, 1))
            unused = nn.Linear(4, 4)
            if sharded:
                fully_shard(module, mesh=init_device_mesh("cpu", (world.size,)))
            native = Native(world, train, 1)
            native.own(nn.ModuleDict({"used": module, "unused": unused}))
            for step in range(1, 4):
                native.backward(module(torch.randn(8, 16)).square().sum())
                set_learning_rate(native.optimizer, 1e-2 / step)
                if is_own:
                    update(native.optimizer, 0.3)
                else:
                    torch._foreach_mul_(native.gradients(), 0.3)
                    native.optimizer.step()
                native.drop_gradients()
            taken = {
                f"step.{n}": native.optimizer.state[p]["step"].clone()
                for n, p in native.parameters.items()
            }
            states.append(local({n: t.clone() for n, t in state_of(native).items()}) | taken)
    steps = [float(states[0][f"step.{name}.weight"]) for name in ("used.0", "unused")]
    return same(*states) and steps == [3.0, 0.0]


@pytest.mark.parametrize(("sharded", "ranks"), [(False, 1), (True, 4)], ids=["whole", "sharded"])
def test_an_update_has_the_bits_of_torchs_own(sharded: bool, ranks: int) -> None:
    assert all(run_ranks(updated, ranks, sharded).values())


# 8 bits


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(
        ConfigError, match=r"torchao, which is not installed: pip install -e '.\[optim8bit"
    ):
        make_optimizer(trainable(nn.Linear(2, 2)), EIGHT)


def trained(native: Native, module: nn.Module, steps: range) -> dict[str, Tensor]:
    """The state after these steps, each with gradients of its own."""
    for step in steps:
        torch.manual_seed(step)
        native.backward((module(torch.randn(8, 256)) * torch.randn(8, 128)).sum())
        native.update(1e-2, float(native.grad_norm()))
    return {name: tensor.clone() for name, tensor in state_of(native).items()}


def made(world: World, sharded: bool, train: Train = EIGHT) -> tuple[Native, nn.Module]:
    torch.manual_seed(0)
    module = nn.Linear(256, 128)  # each rank of four has 32 blocks
    if sharded:
        fully_shard(module, mesh=init_device_mesh("cpu", (world.size,)))
    native = Native(world, train, 1)
    native.own(module)
    return native, module


def continued_equals_whole(environ: Mapping[str, str], sharded: bool) -> tuple[bool, bool, bool]:
    """Whether moments have 8 bits, a copy went on bitwise, and all is near AdamW in fp32."""
    world = World.from_env(environ, "cpu")
    with process_group(world, 30):
        native, module = made(world, sharded)
        middle = trained(native, module, range(5))
        whole = trained(native, module, range(5, 9))
        other, other_module = made(world, sharded)

        def read(tensors: Mapping[str, Tensor]) -> None:
            for name, tensor in tensors.items():
                tensor.copy_(middle[name])

        other.restore(read, 5)
        continued = trained(other, other_module, range(5, 9))
        exact = trained(*made(world, sharded, Train(precision="fp32", weight_decay=0.1)), range(9))
        weight = "weights.weight"
        moved = exact[weight] - state_of(made(world, sharded)[0])[weight]
        error = (whole[weight] - exact[weight]).norm() / moved.norm()
        has_codes = is_8bit(native.optimizer.state[native.parameters["weight"]]["exp_avg"])
        return has_codes, same(local(continued), local(whole)), float(error) < 0.05


def local(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(("sharded", "ranks"), [(False, 1), (True, 4)], ids=["whole", "sharded"])
def test_eight_bits_resume_bitwise_and_are_near_adamw(sharded: bool, ranks: int) -> None:
    pytest.importorskip("torchao")
    for found in run_ranks(continued_equals_whole, ranks, sharded).values():
        assert found == (True, True, True)


AT_ONCE = 20_000  # bytes; the largest tensor of the little model has 8,192, its moments 165,000


def rewritten_by_hand(environ: Mapping[str, str], arena: Arena) -> tuple[int, int, bool, bool]:
    """Most bytes of moments' values at a time, as ranks average theirs and resume.

    Moments in fp32 stand for those of 8 bits.
    """
    with by_hand(environ, arena, strategy="ddp", local_sgd_steps=4) as hand:
        strategy = hand.strategy
        hand.step(0)
        expected = hand.state()
        for tensor in expected.values():
            dist.all_reduce(tensor)
            tensor.div_(hand.world.size)
        made: list[weakref.ref[Tensor]] = []
        most = 0

        def values(moment: Tensor) -> Tensor:
            nonlocal most
            made.append(weakref.ref(found := moment.clone()))
            most = max(most, sum(tensor.nbytes for ref in made if (tensor := ref()) is not None))
            return found

        moments = {
            id(each[kind])
            for each in strategy.optimizer.state.values()
            for kind in ("exp_avg", "exp_avg_sq")
        }
        vars(native_module).update(  # in a process of its own
            VALUES_AT_ONCE_BYTES=AT_ONCE,
            is_8bit=lambda tensor: id(tensor) in moments,
            values_of=values,
            take_values=lambda moment, taken: moment.copy_(taken),
        )
        strategy.train = strategy.train.model_copy(update={"optimizer": "adamw_8bit"})
        strategy._average()
        to_average, most = most, 0
        averaged = {
            name: tensor.clone()
            for name, tensor in strategy._stored(("weights", "exp_avg", "exp_avg_sq")).items()
        }
        names: list[str] = []

        def read(tensors: Mapping[str, Tensor]) -> None:
            for name, tensor in tensors.items():
                tensor.copy_(averaged[name] + 1)
                names.append(name)

        strategy.restore(read, 1)
        restored = {
            name: tensor - 1
            for name, tensor in strategy._stored(("weights", "exp_avg", "exp_avg_sq")).items()
        }
        is_read = sorted(names) == sorted(averaged) and same(
            restored, {n: (t + 1) - 1 for n, t in averaged.items()}
        )
        return to_average, most, same(averaged, expected), is_read


def test_values_of_eight_bits_are_made_a_few_at_a_time(arena: Arena) -> None:
    """Together they would take as much memory as fp32 moments, which a fitting run may lack."""
    for to_average, to_resume, is_average, is_read in run_ranks(
        rewritten_by_hand, 2, arena
    ).values():
        assert 0 < to_average <= 4 * AT_ONCE  # gloo lets go of what it exchanged a moment later
        assert 0 < to_resume <= AT_ONCE
        assert is_average and is_read


def test_groups_are_as_large_as_allowed_and_keep_the_order() -> None:
    assert list(grouped({"a": 40, "b": 60, "c": 4, "d": 400, "e": 4}, 100)) == [
        ["a", "b"],
        ["c"],
        ["d"],
        ["e"],
    ]


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
def test_values_of_eight_bits_are_taken_back_exactly(kind: str) -> None:
    """Also in blocks whose largest value is negative: the most negative code is not -1."""
    pytest.importorskip("torchao")
    parameter = nn.Parameter(torch.zeros(64, 256))
    optimizer = make_optimizer({"p": parameter}, EIGHT)
    moment = optimizer.state[parameter][kind]
    torch.manual_seed(0)
    values = torch.randn(64, 256) * torch.logspace(-12, 2, 64)[:, None]
    moment.copy_(values.abs() if kind == "exp_avg_sq" else values)
    before = values_of(moment)
    take_values(moment, before)
    assert torch.equal(values_of(moment), before)
    take_values(moment, torch.zeros(64, 256))
    assert not values_of(moment).any()
