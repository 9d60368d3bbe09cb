"""A model with experts: its router loss is transformers', however blocks are spread."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from pipeline_lib.config.train import Lora, Train
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.data.blocks import Block
from pipeline_lib.launch.ranks import StopRequest
from pipeline_lib.model import experts as experts_module
from pipeline_lib.model.batch import Batch, empty_block, loss_sums, make_batch
from pipeline_lib.model.build import build_trainable, load_base, prepare_layers
from pipeline_lib.model.experts import GROUPED
from pipeline_lib.model.lora import add_adapters
from pipeline_lib.model.weights import load_weights
from pipeline_lib.train.deepspeed import Zero
from pipeline_lib.train.dist import World, process_group, sum_over_ranks
from pipeline_lib.train.mesh import batch_share_of
from pipeline_lib.train.optimizer import trainable
from pipeline_lib.train.step import Stepper
from pipeline_lib.train.strategies import make_strategy
from tests.ranks import run_ranks
from tests.train.loading import SIZES, write_random

EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS["norm_topk_prob"] = True  # as the published models have it
LENGTH, WEIGHT, STEPS = 16, 0.1, 3
TRAIN = Train(precision="fp32", router_aux_loss=WEIGHT)
USED = (16, 9, 12, 5, 16, 11, 7)  # tokens of each block; the rest is padding


def small_moe(**sizes: Any) -> Qwen3MoeForCausalLM:
    """A small Qwen3-MoE; its second layer has no experts."""
    sizes = {
        **SIZES,
        **EXPERTS,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
        **sizes,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("moe"), small_moe(), torch.float32)


def make_blocks() -> list[Block]:
    random = np.random.default_rng(5)
    blocks = []
    for used in USED:
        documents = np.where(np.arange(LENGTH) < used, 0, -1).astype(np.int32)
        supervised = (np.arange(LENGTH) >= used // 2) & (documents == 0)
        blocks.append(Block(random.integers(3, 60, LENGTH).astype(np.int32), supervised, documents))
    return blocks


def loaded(folder: Path, train: Train = TRAIN) -> nn.Module:
    model = build_trainable(folder, train)
    prepare_layers(model, train)
    load_weights(model, folder, torch.device("cpu"), train.seed)
    return model


def gradients(model: nn.Module, batches: list[Batch]) -> dict[str, Tensor]:
    """Of the mean token loss and the mean router loss over `batches`."""
    supervised = sum(b.supervised_tokens for b in batches)
    tokens = sum(b.real_tokens for b in batches)
    for batch in batches:
        of_tokens, of_routers = loss_sums(model, batch)
        (of_tokens / supervised + of_routers / tokens).backward()  # type: ignore[no-untyped-call]
    return {
        name: parameter.grad
        for name, parameter in trainable(model).items()
        if parameter.grad is not None
    }


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        scale = float(expected[name].abs().max()) + 1e-6
        assert float((gradient - expected[name]).abs().max()) < 1e-4 * scale, name


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Tensor]:
    """The gradients of transformers' own losses, a block at a time, its padding masked."""
    plain = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    )
    blocks = make_blocks()
    supervised = sum(int(block.supervised[1:].sum()) for block in blocks)
    for block, used in zip(blocks, USED, strict=True):
        tokens = torch.from_numpy(block.tokens.astype(np.int64))[None]
        labels = torch.where(torch.from_numpy(block.supervised)[None], tokens, -100)
        mask = torch.from_numpy((block.documents == 0).astype(np.int64))[None]
        plain.router_aux_loss_coef = 0.0  # type: ignore[assignment]
        said = plain(tokens, attention_mask=mask, labels=labels, output_router_logits=True)
        of_tokens = said.loss * int(block.supervised[1:].sum()) / supervised
        (of_tokens + WEIGHT * said.aux_loss * used / sum(USED)).backward()
    return {
        name: parameter.grad
        for name, parameter in plain.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("blocks_at_once", [1, 3])
def test_gradients_are_those_of_transformers_losses(
    folder: Path, reference: Mapping[str, Tensor], blocks_at_once: int
) -> None:
    # a block of padding has no say, though it is routed
    blocks = [*make_blocks(), empty_block(LENGTH)]
    batches = [
        make_batch(blocks[start : start + blocks_at_once])
        for start in range(0, len(blocks), blocks_at_once)
    ]
    assert_close(gradients(loaded(folder), batches), reference)


def test_without_a_weight_there_is_no_router_loss(
    folder: Path, reference: Mapping[str, Tensor]
) -> None:
    batch = make_batch(make_blocks())
    without = loss_sums(loaded(folder, TRAIN.model_copy(update={"router_aux_loss": 0.0})), batch)
    with_it = loss_sums(loaded(folder), batch)
    assert without[1].item() == 0.0 and not without[1].requires_grad
    assert with_it[1].item() > 0.0
    assert without[0].item() == with_it[0].item()
    with torch.no_grad():
        assert loss_sums(loaded(folder), batch)[1].item() == 0.0


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_layers_have_the_same_router_loss(
    folder: Path, reference: Mapping[str, Tensor], recompute: str
) -> None:
    model = loaded(folder, TRAIN.model_copy(update={"recompute": recompute}))
    assert_close(gradients(model, [make_batch(make_blocks())]), reference)


def test_adapters_feel_the_router_loss(folder: Path) -> None:
    train = TRAIN.model_copy(update={"method": "lora", "lora": Lora(rank=4)})
    batch = make_batch(make_blocks())
    found = gradients(loaded(folder, train), [batch])
    without = gradients(loaded(folder, train.model_copy(update={"router_aux_loss": 0.0})), [batch])
    assert not any("mlp" in name or "gate" in name for name in found)
    assert not torch.equal(
        *(
            each["base_model.model.model.layers.1.self_attn.q_proj.lora_B.default.weight"]
            for each in (found, without)
        )
    )


def losses_and_norms(
    environ: Mapping[str, str], folder: Path, train: Train, device: str = "cpu"
) -> list[tuple[float, float]]:
    """The loss and the gradient norm of a few steps over the same blocks, spread over the ranks."""
    world = World.from_env(environ, device)
    torch.set_num_threads(1)
    with process_group(world, 60):
        share = batch_share_of(world, train)
        each = -(-len(USED) // share.groups)
        blocks = [*make_blocks(), *[empty_block(LENGTH)] * (each * share.groups - len(USED))]
        batches = [share.of(make_batch([block])) for block in blocks[share.group :: share.groups]]
        strategy = make_strategy(world, train, len(batches))
        wrapped = strategy.spread(
            build_trainable(folder, train),
            lambda model: load_weights(model, folder, world.device, train.seed),
        )
        stepper = Stepper(wrapped, strategy, world, StopRequest())
        counts = [sum(b.supervised_tokens for b in batches), sum(b.real_tokens for b in batches)]
        supervised, tokens = sum_over_ranks([float(count) for count in counts], world.device)
        found = []
        for _ in range(STEPS):
            mine = stepper.accumulate(batches, lambda: (supervised, tokens))
            norm = float(strategy.grad_norm())
            strategy.update(1e-3, norm)
            found.append((sum_over_ranks([float(mine)], world.device)[0] / supervised, norm))
        return found


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[tuple[float, float]]:
    """One rank, and nothing spread."""
    found: list[tuple[float, float]] = run_ranks(losses_and_norms, 1, folder, TRAIN)[0]
    return found


def test_a_step_has_the_gradient_of_transformers_losses(
    alone: list[tuple[float, float]], reference: Mapping[str, Tensor]
) -> None:
    """The routers' is a mean over all tokens, the answers' over the supervised ones."""
    norm = torch.stack([gradient.square().sum() for gradient in reference.values()]).sum().sqrt()
    assert alone[0][1] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize(
    ("strategy", "ranks", "parts"),
    [("ddp", 4, 1), ("fsdp", 2, 1), ("zero2", 2, 1), ("ddp", 4, 4), ("fsdp", 4, 2)],
)
def test_every_spread_trains_alike(
    folder: Path, alone: list[tuple[float, float]], strategy: str, ranks: int, parts: int
) -> None:
    """Ranks without a token for an expert, and one with a block of padding only, are among them."""
    train = TRAIN.model_copy(update={"strategy": strategy, "context_ranks": parts})
    for found in run_ranks(losses_and_norms, ranks, folder, train).values():
        assert np.array(found) == pytest.approx(np.array(alone), rel=1e-5)


def steps_and_kept_experts(
    environ: Mapping[str, str], folder: Path, train: Train
) -> tuple[list[tuple[float, float]], list[tuple[int, int]]]:
    """`losses_and_norms`, and how many gathered experts were used and remain, per backward.

    It is counted before each backward pass.
    """
    used: list[Any] = []
    weak_reference: Any = StorageWeakRef
    counts: list[tuple[int, int]] = []
    forward, backward = vars(experts_module)["grouped_mm_experts_forward"], Zero.backward

    def watched(experts: Any, *arguments: Any) -> Any:
        used.extend(
            weak_reference(weight.untyped_storage())
            for weight in (experts.gate_up_proj, experts.down_proj)
        )
        return forward(experts, *arguments)

    def counted(strategy: Zero, loss: Tensor) -> None:
        counts.append((len(used), sum(not storage.expired() for storage in used)))
        backward(strategy, loss)
        used.clear()  # with those of layers that were computed again

    vars(experts_module)["grouped_mm_experts_forward"] = watched  # in a process of its own
    Zero.backward = counted  # type: ignore[method-assign,assignment]
    return losses_and_norms(environ, folder, train), counts


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_zero3_lets_go_of_experts_between_the_passes(
    folder: Path, alone: list[tuple[float, float]], tmp_path: Path, recompute: str
) -> None:
    """And has their gradients all the same.

    Two layers with two matrices each: as if they were too large to keep.
    """
    sizes = (
        "max_live_parameters",
        "max_reuse_distance",
        "prefetch_bucket_size",
        "param_persistence_threshold",
    )
    write_json(tmp_path / "ds.json", {"zero_optimization": {f"stage3_{size}": 0 for size in sizes}})
    settings = {
        "strategy": "zero3",
        "recompute": recompute,
        "deepspeed_json": str(tmp_path / "ds.json"),
    }
    for found, counts in run_ranks(
        steps_and_kept_experts, 2, folder, TRAIN.model_copy(update=settings)
    ).values():
        assert np.array(found) == pytest.approx(np.array(alone), rel=1e-5)
        assert set(counts) == {(4, 0)}


def test_experts_compute_in_the_precision_of_autocast(folder: Path) -> None:
    experts = loaded(folder).model.layers[0].mlp.experts  # type: ignore[union-attr,index]
    hidden = torch.randn(7, SIZES["hidden_size"])
    chosen = torch.randint(0, EXPERTS["num_experts"], (7, 2))
    weights = torch.rand(7, 2)
    exact = experts(hidden, chosen, weights)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = experts(hidden.bfloat16(), chosen, weights.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert float((rounded.float() - exact).norm() / exact.norm()) == pytest.approx(4e-3, rel=0.9)
    rounded.sum().backward()
    assert experts.down_proj.grad.dtype == torch.float32


def test_a_saved_config_does_not_know_of_it(folder: Path, tmp_path: Path) -> None:
    load_base(folder, torch.float32).save_pretrained(tmp_path)
    assert GROUPED not in (tmp_path / "config.json").read_text()
    assert read_json(tmp_path / "config.json")["architectures"] == ["Qwen3MoeForCausalLM"]


def test_targets_that_experts_have_are_refused(folder: Path) -> None:
    with pytest.raises(
        DataError, match="no linear for adapters called up_proj; it has q_proj, .* routers get none"
    ):
        add_adapters(load_base(folder, torch.float32), Lora(targets=("q_proj", "up_proj")), seed=0)
