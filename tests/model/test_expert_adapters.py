"""Each expert has its own adapters: grouped products against dense ones, peft, the merge.

Of peft, it is the values and the files.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from pipeline_lib.arch.families import geometry_in
from pipeline_lib.arch.geometry import flops_per_token
from pipeline_lib.config.train import Lora, Train
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json
from pipeline_lib.export.adapter import export_adapter
from pipeline_lib.export.fold import plan_fold
from pipeline_lib.export.write import Buffers
from pipeline_lib.model.batch import loss_sums, make_batch
from pipeline_lib.model.build import build_trainable, prepare_layers
from pipeline_lib.model.experts import adapted_experts
from pipeline_lib.model.lora import add_adapters
from pipeline_lib.model.probe import probe_logits
from pipeline_lib.model.weights import load_weights
from pipeline_lib.plan.trained import trained_shapes
from pipeline_lib.train.optimizer import trainable
from pipeline_lib.train.saved_tensors import save_tensors
from tests.model.test_lora import CPU, alone, block, train_and_leave
from tests.ranks import run_ranks
from tests.train.loading import SIZES, write_random

EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MATRICES: tuple[Any, ...] = ("experts.gate_up_proj", "experts.down_proj")
LORA = Lora(rank=8, alpha=16, targets=("q_proj", *MATRICES))
TRAIN = Train(method="lora", precision="fp32", lr=1e-2, lora=LORA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose second layer has no experts."""
    sizes = {
        **SIZES,
        **EXPERTS,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
    }
    made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    return write_random(tmp_path_factory.mktemp("moe"), made, torch.float32)


def loaded(folder: Path, train: Train) -> nn.Module:
    model = build_trainable(folder, train)
    prepare_layers(model, train)
    load_weights(model, folder, CPU, train.seed)
    return model


def randomized(model: nn.Module) -> nn.Module:
    """With adapters that change something."""
    torch.manual_seed(1)
    for parameter in trainable(model).values():
        parameter.data = torch.randn_like(parameter) / 10
    return model


def dense(experts: Any, factors: Mapping[str, tuple[Tensor, Tensor]], *inputs: Tensor) -> Tensor:
    """The experts one by one, each with its own merged matrices."""
    hidden, chosen, weights = inputs
    result = torch.zeros_like(hidden)
    matrices = {}
    for name in ("gate_up_proj", "down_proj"):
        a, b = factors[name]
        matrices[name] = getattr(experts, name) + torch.stack([b[e] @ a[e] for e in range(len(a))])
    for token in range(len(hidden)):
        for place, expert in enumerate(chosen[token]):
            gate, up = F.linear(hidden[token], matrices["gate_up_proj"][expert]).chunk(2)
            result[token] += weights[token, place] * F.linear(
                F.silu(gate) * up, matrices["down_proj"][expert]
            )
    return result


def test_grouped_products_are_those_of_each_expert_with_its_own_adapters(folder: Path) -> None:
    """The result and all gradients; one expert gets no token."""
    experts: Any = AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.experts
    torch.manual_seed(0)
    widths = {"gate_up_proj": (SIZES["hidden_size"], 32), "down_proj": (16, SIZES["hidden_size"])}
    factors = {
        name: (
            torch.randn(6, 8, inputs).requires_grad_(),
            torch.randn(6, outputs, 8).requires_grad_(),
        )
        for name, (inputs, outputs) in widths.items()
    }
    hidden = torch.randn(9, SIZES["hidden_size"]).requires_grad_()
    weights = torch.rand(9, 2).requires_grad_()
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(9)])
    leaves = [hidden, weights, *(factor for pair in factors.values() for factor in pair)]
    gradient = torch.randn(9, SIZES["hidden_size"])

    expected = dense(experts, factors, hidden, chosen, weights)
    found = adapted_experts(experts, factors, hidden, chosen, weights)
    gradients = [torch.autograd.grad(result, leaves, gradient) for result in (found, expected)]
    for mine, theirs in [(found, expected), *zip(*gradients, strict=True)]:
        scale = float(theirs.detach().abs().max())  # a sum of large terms may be small
        torch.testing.assert_close(mine / scale, theirs / scale, rtol=1e-4, atol=1e-5)


def test_initial_values_are_those_of_peft(folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(TRAIN.seed)
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    theirs = {
        name: p for name, p in get_peft_model(plain, config).named_parameters() if ".lora_" in name
    }
    ours = trainable(loaded(folder, TRAIN))
    assert ours.keys() == theirs.keys()
    assert sum(".experts." in name for name in ours) == 8
    for name, parameter in ours.items():
        assert torch.equal(parameter.float(), theirs[name].float()), name


def test_the_plan_counts_what_is_trained(folder: Path) -> None:
    geometry = geometry_in(read_json(folder / "config.json"))
    ours = trainable(loaded(folder, TRAIN))
    assert geometry.adapter_parameters(LORA) == sum(p.numel() for p in ours.values())
    shapes = sorted(tuple(p.shape) for p in ours.values())
    assert sorted(trained_shapes(geometry, TRAIN).values()) == shapes
    assert next(geometry.adapter_problems(TRAIN), None) is None
    without = TRAIN.model_copy(update={"lora": Lora(rank=8, targets=("q_proj",))})
    more = flops_per_token(geometry, TRAIN) - flops_per_token(geometry, without)
    of_one = 8 * (SIZES["hidden_size"] + 32 + 16 + SIZES["hidden_size"])
    assert more == 6 * 2 * 2 * of_one  # two layers, two experts for each token


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_layers_have_the_same_gradients(folder: Path, recompute: str) -> None:
    batch = make_batch([block(1), block(2)])
    found = []
    for train in (TRAIN, TRAIN.model_copy(update={"recompute": recompute})):
        model = randomized(loaded(folder, train))
        sum(loss_sums(model, batch)).backward()  # type: ignore[union-attr]
        found.append({name: p.grad for name, p in trainable(model).items()})
    for name, gradient in found[0].items():
        assert gradient is not None and float(gradient.abs().max()) > 0, name
        assert torch.equal(gradient, found[1][name]), name  # type: ignore[arg-type]


def test_without_adapters_it_is_the_base(folder: Path) -> None:
    model: Any = randomized(loaded(folder, TRAIN))
    changed = probe_logits(model, block(9), CPU)
    with model.disable_adapter():
        base = probe_logits(model, block(9), CPU)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    np.testing.assert_allclose(base.numpy(), alone(plain), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(base, changed, atol=1e-3)


@pytest.mark.parametrize("targets", [("q_proj", *MATRICES), MATRICES[1:]])
def test_what_is_merged_and_what_is_exported_are_the_trained_model(
    folder: Path, tmp_path: Path, targets: tuple[Any, ...]
) -> None:
    train = TRAIN.model_copy(
        update={"lora": LORA.model_copy(update={"targets": targets, "rslora": True})}
    )
    model: Any = randomized(loaded(folder, train))
    save_tensors(tmp_path / "weights", dict(trainable(model)))
    logits = probe_logits(model, block(9), CPU)
    fold = plan_fold(folder, tmp_path, train)
    export_adapter(fold.trained.adapters, train, {"source": "local"}, tmp_path)

    with_adapter = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter"
    )
    np.testing.assert_allclose(alone(with_adapter), logits.numpy(), rtol=1e-4, atol=1e-4)

    merged = copy.deepcopy(with_adapter).merge_and_unload().state_dict()
    checked = 0
    for name, recipe in fold.recipes.items():
        owner = next(
            each
            for each in merged
            if each == name or name.startswith(f"{each.rpartition('.')[0]}.")
        )
        if ".experts." in name:
            part = "down_proj" if "down_proj" in name else "gate_up_proj"
            owner = f"{name.partition('.experts.')[0]}.experts.{part}"
        value = fold.value(name, torch.float32, Buffers())
        expected = merged[owner][recipe.piece.slices].reshape(value.shape)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
        checked += recipe.adapter is not None
    assert checked == (6 * 2 if len(targets) == 1 else 3 + 6 * 2 * 3)


@pytest.mark.slow
def test_every_strategy_trains_them_alike(folder: Path, tmp_path: Path) -> None:
    first: list[float] = []
    for strategy, ranks in (("ddp", 1), ("ddp", 2), ("fsdp", 2), ("zero2", 2)):
        train = TRAIN.model_copy(update={"strategy": strategy})
        found = run_ranks(train_and_leave, ranks, folder, train, tmp_path / f"{strategy}-{ranks}")[
            0
        ]
        first = first or found["losses"]
        assert found["losses"] == pytest.approx(first, rel=1e-5), strategy
        assert found["losses"][-1] < found["losses"][0]


def test_targets_that_the_model_lacks_are_named(folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder)
    wrong = Lora(rank=8, targets=("gate_proj",))
    with pytest.raises(
        DataError, match=r"no linear .* called gate_proj; it has q_proj.*experts\.gate_up_proj"
    ):
        add_adapters(base, wrong, 0)
    geometry = geometry_in(read_json(folder / "config.json"))
    [problem] = geometry.adapter_problems(TRAIN.model_copy(update={"lora": wrong}))
    assert problem.startswith("train.lora.targets: this model has no gate_proj; it has q_proj")
    assert problem.endswith("experts.gate_up_proj, experts.down_proj")
