"""Adapters of every kind under every strategy, and parameters that are left alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipeline_lib.config.train import Lora, Train
from pipeline_lib.data.blocks import Block
from pipeline_lib.export.adapter import export_adapter
from pipeline_lib.export.fold import plan_fold
from pipeline_lib.launch.ranks import StopRequest
from pipeline_lib.model.batch import make_batch
from pipeline_lib.model.build import build_trainable, load_base
from pipeline_lib.model.lora import add_adapters
from pipeline_lib.model.probe import probe_logits
from pipeline_lib.model.weights import load_weights
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.saved_tensors import save_tensors
from pipeline_lib.train.step import Stepper
from pipeline_lib.train.strategies import make_strategy
from tests.ranks import run_ranks
from tests.train.loading import SIZES, write_dense, write_random

Values = NDArray[np.float32]
CPU = torch.device("cpu")
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LORA = Train(method="lora", precision="fp32", lr=1e-2, lora=Lora(rank=4, alpha=8))
KINDS = {
    "lora": LORA.lora,
    "rslora": Lora(rank=4, alpha=8, rslora=True, targets=("q_proj", "o_proj")),
    "dora": Lora(rank=4, alpha=8, dora=True),
}
STEPS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model and one with experts."""
    folder = tmp_path_factory.mktemp("models")
    moe = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False))
    return {
        "dense": write_dense(folder / "dense", tied=True),
        "moe": write_random(folder / "moe", moe, torch.float32),
    }


def block(seed: int) -> Block:
    random = np.random.default_rng(seed)
    return Block(
        random.integers(3, 60, 16).astype(np.int32),
        np.arange(16) % 8 > 3,
        (np.arange(16) // 8).astype(np.int32),
    )


def whole(tensor: Tensor) -> Values:
    gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered.detach().float().numpy()


def train_and_leave(
    environ: Mapping[str, str], folder: Path, train: Train, out: Path
) -> dict[str, Any]:
    """A few steps over four blocks; weights go to `out`, and losses and probe logits are told."""
    world = World.from_env(environ, "cpu")
    torch.set_num_threads(1)
    with process_group(world, 60):
        batches = [make_batch([block(seed)]) for seed in range(4)][world.rank :: world.size]
        strategy = make_strategy(world, train, len(batches))
        model = build_trainable(folder, train)
        wrapped = strategy.spread(
            model, lambda empty: load_weights(empty, folder, world.device, train.seed)
        )
        stepper = Stepper(wrapped, strategy, world, StopRequest())
        supervised = float(4 * batches[0].supervised_tokens)
        losses = []
        for _ in range(STEPS):
            total = stepper.accumulate(batches, lambda: (supervised, 64.0))
            torch.distributed.all_reduce(total)
            strategy.update(train.lr, float(strategy.grad_norm()))
            losses.append(float(total) / supervised)
        weights = strategy.snapshot(strategy.state_sizes(("weights",)))
        save_tensors(
            out / "weights",
            {name.removeprefix("weights."): tensor for name, tensor in weights.items()},
        )
        with strategy.autocast():
            logits = probe_logits(wrapped, block(9), world.device)
        frozen = {
            name: (parameter.dtype, whole(parameter))
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad and train.strategy in ("ddp", "fsdp")
        }
        return {"losses": losses, "logits": logits.numpy(), "frozen": frozen}


SPREADS = [("ddp", 1), ("ddp", 2), ("fsdp", 2), ("zero2", 2), ("zero3", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kind", "spreads"),
    [
        ("dense", "lora", SPREADS),
        ("moe", "lora", [("ddp", 1), ("fsdp", 2), ("zero3", 2)]),
        ("dense", "rslora", [("ddp", 1), ("fsdp", 2)]),
        ("dense", "dora", [("ddp", 1), ("fsdp", 2)]),
        (
            "moe",
            "dora",
            [("ddp", 2), ("zero2", 2)],
        ),  # it reads the base's matrices, which ZeRO-3 hides
    ],
)
def test_the_exported_adapter_gives_the_trained_logits_with_peft_alone(
    folders: Mapping[str, Path],
    tmp_path: Path,
    model: str,
    kind: str,
    spreads: list[tuple[str, int]],
) -> None:
    """Under every strategy, with the same losses."""
    first: list[float] = []
    plain_logits = alone(load_base(folders[model], torch.float32))
    for strategy, ranks in spreads:
        train = LORA.model_copy(update={"lora": KINDS[kind], "strategy": strategy})
        out = tmp_path / f"{strategy}-{ranks}"
        found = run_ranks(train_and_leave, ranks, folders[model], train, out)[0]
        first = first or found["losses"]
        assert found["losses"] == pytest.approx(first, rel=1e-5), strategy
        assert found["losses"][-1] < found["losses"][0]
        export_adapter(
            plan_fold(folders[model], out, train).trained.adapters, train, {"source": "local"}, out
        )
        plain = AutoModelForCausalLM.from_pretrained(folders[model])
        with_adapter = PeftModel.from_pretrained(plain, out / "adapter")
        assert not np.allclose(plain_logits, found["logits"], atol=1e-3)
        np.testing.assert_allclose(
            alone(with_adapter), found["logits"], rtol=1e-4, atol=1e-4, err_msg=strategy
        )


def alone(model: nn.Module) -> Values:
    """The probe's logits, each document by itself, as any user of the model gets them."""
    one = block(9)
    batch = make_batch([one])
    model.train(False)
    logits = []
    with torch.no_grad():
        for document in range(2):
            mine = batch.tokens[:, batch.documents[0] == document]
            logits.append(model(mine).logits[0])
    return torch.cat(logits).numpy()


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_adapters_begin_with_the_values_that_peft_draws(
    folders: Mapping[str, Path], model: str, precision: str, dtype: torch.dtype
) -> None:
    """Peft rounds A to the dtype of the base; the adapters themselves are in fp32."""
    train = LORA.model_copy(update={"precision": precision})
    ours = build_trainable(folders[model], train)
    load_weights(ours, folders[model], CPU, train.seed)
    theirs = dict(
        add_adapters(load_base(folders[model], dtype), train.lora, train.seed).named_parameters()
    )
    drawn = {
        name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad
    }
    assert drawn
    for name, parameter in drawn.items():
        assert parameter.dtype == theirs[name].dtype == torch.float32, name
        assert torch.equal(parameter, theirs[name]), name


@pytest.mark.parametrize(
    ("strategy", "ranks", "precision"), [("ddp", 1, "bf16"), ("fsdp", 3, "fp32")]
)
def test_magnitudes_are_the_norms_of_the_bases_rows(
    folders: Mapping[str, Path], strategy: str, ranks: int, precision: str
) -> None:
    train = LORA.model_copy(
        update={"lora": KINDS["dora"], "precision": precision, "strategy": strategy}
    )
    base = load_base(folders["dense"], torch.float32 if precision == "fp32" else torch.bfloat16)
    magnitude = "base_model.model.{}.lora_magnitude_vector.default.weight"
    expected = {
        magnitude.format(name.removesuffix(".weight")): parameter.detach()
        .float()
        .norm(dim=1)
        .numpy()
        for name, parameter in base.named_parameters()
        if name.endswith("_proj.weight")
    }
    adapted = {
        name: whole(p)
        for name, p in add_adapters(base, train.lora, 0).named_parameters()
        if "magnitude" in name
    }
    for found in (adapted, run_ranks(magnitudes, ranks, folders["dense"], train)[0]):
        assert found.keys() == expected.keys()
        for name, values in found.items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-6, err_msg=name)


def magnitudes(environ: Mapping[str, str], folder: Path, train: Train) -> dict[str, Values]:
    """What loading makes them."""
    world = World.from_env(environ, "cpu")
    with process_group(world, 60):
        model = build_trainable(folder, train)
        strategy = make_strategy(world, train, 1)
        strategy.spread(model, lambda empty: load_weights(empty, folder, world.device, train.seed))
        return {
            name: whole(parameter)
            for name, parameter in model.named_parameters()
            if "magnitude" in name
        }


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("rslora", torch.float32), ("dora", torch.float32), ("dora", torch.bfloat16)],
)
def test_at_first_nothing_changes(
    folders: Mapping[str, Path], kind: str, dtype: torch.dtype
) -> None:
    base = load_base(folders["dense"], dtype)
    before = probe_logits(base, block(9), CPU)
    after = probe_logits(add_adapters(base, KINDS[kind], seed=0), block(9), CPU)
    assert float((after - before).norm() / before.norm()) < (
        1e-6 if dtype == torch.float32 else 1e-2
    )
    if kind != "dora":
        assert torch.equal(after, before)


@pytest.mark.parametrize(("strategy", "ranks"), SPREADS[2:])
def test_frozen_parameters_stay_as_they_are(
    folders: Mapping[str, Path], tmp_path: Path, strategy: str, ranks: int
) -> None:
    globs = ("model.embed_tokens.*", "model.layers.0.*", "*.experts.*")
    train = Train(precision="bf16", lr=1e-3, strategy=strategy, freeze=globs)  # type: ignore[arg-type]
    found = run_ranks(train_and_leave, ranks, folders["moe"], train, tmp_path)[0]
    held = plan_fold(
        folders["moe"], tmp_path, train
    ).trained.saved  # refuses what is not exactly the trained
    assert held and not any(
        name.startswith("model.layers.0.") or "experts" in name for name in held
    )
    assert found["losses"][-1] < found["losses"][0]
    base = load_base(folders["moe"], torch.bfloat16).state_dict()
    for name, (kept_in, values) in found["frozen"].items():
        assert kept_in == torch.bfloat16, name
        assert np.array_equal(values, base[name].float().numpy()), name


def test_all_linear_is_what_peft_means_by_it(folders: Mapping[str, Path]) -> None:
    plain = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    theirs = get_peft_model(
        plain, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    ours = build_trainable(folders["dense"], LORA)
    assert {name for name, p in ours.named_parameters() if p.requires_grad} == {
        name for name, p in theirs.named_parameters() if p.requires_grad
    }
