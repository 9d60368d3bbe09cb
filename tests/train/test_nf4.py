"""Training adapters on a 4-bit base: equal under every strategy, compiled, resumed bitwise.

It is also the same when recomputed.
"""

import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.core.run_folder import WEIGHTS
from pipeline_lib.model.weights import quantized_linears
from tests.model.graphs import compile_without_kernels
from tests.ranks import run_ranks
from tests.train.conftest import VOCAB, Arena, make_arena
from tests.train.helpers import assert_same_result, losses, tensor_shapes, train, train_until_killed
from tests.train.native import by_hand
from tests.train.test_layers import counted, gradients, kept_bytes, loss_of, prepared

NF4: dict[str, Any] = {"method": "lora", "lr": 1e-2, "lora": {"rank": 4, "alpha": 8, "base": "nf4"}}
PLAIN: dict[str, Any] = {**NF4, "lora": {"rank": 4, "alpha": 8}}


def widen(arena: Arena) -> Arena:
    """The same data, with a model whose inputs are multiples of 64."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3Config(**sizes, **heads, tie_word_embeddings=True, max_position_embeddings=128)
    folder = arena.store.sealed(arena.model)
    shutil.rmtree(folder)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return arena


@pytest.fixture
def wide(arena: Arena) -> Arena:
    return widen(arena)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """What training leaves that nothing interrupts, once for each number of ranks and settings."""

    @functools.cache
    def train_once(ranks: int, **settings: Any) -> Path:
        root = tmp_path_factory.mktemp("trained")
        run_ranks(train, ranks, widen(make_arena(root)).job(ranks, root / "out", **NF4, **settings))
        return root / "out"

    return train_once


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {"strategy": "fsdp"}),
        (2, {"strategy": "ddp"}),
        (2, {"strategy": "fsdp"}),
        (3, {"strategy": "fsdp", "reshard": False}),
        (4, {"strategy": "hsdp", "shard_ranks": 2}),
    ],
)
def test_every_strategy_has_the_losses_of_one_rank(
    trained: Callable[..., Path], ranks: int, settings: dict[str, Any]
) -> None:
    expected = losses(trained(1, strategy="ddp"))
    assert losses(trained(ranks, **settings)) == pytest.approx(expected, rel=2e-5)


def test_the_losses_are_not_those_of_an_unquantized_base_but_near(
    trained: Callable[..., Path], tmp_path: Path
) -> None:
    run_ranks(
        train, 1, widen(make_arena(tmp_path)).job(1, tmp_path / "out", **PLAIN, strategy="ddp")
    )
    plain, found = losses(tmp_path / "out"), losses(trained(1, strategy="ddp"))
    assert found != plain
    assert found == pytest.approx(plain, rel=2e-2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_half_precision_is_near_the_fp32_curve(
    trained: Callable[..., Path], strategy: str, precision: str
) -> None:
    """FSDP2's mixed precision leaves the bytes alone."""
    found = losses(trained(2, strategy=strategy, precision=precision))
    assert found == pytest.approx(losses(trained(1, strategy="ddp")), rel=3e-2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_run_resumes_bitwise(
    trained: Callable[..., Path], tmp_path: Path, strategy: str
) -> None:
    arena = widen(make_arena(tmp_path))
    settings = {**NF4, "strategy": strategy, "save_every_steps": 2}
    run_ranks(train_until_killed, 2, arena.job(2, tmp_path / "killed", **settings), 4)
    job = arena.job(2, tmp_path / "resumed", **settings)
    assert job.resume_from is not None
    run_ranks(train, 2, job)
    assert_same_result(tmp_path / "resumed", trained(2, strategy=strategy, save_every_steps=2))


def test_checkpoints_hold_the_adapters_alone(trained: Callable[..., Path]) -> None:
    out = trained(2, strategy="fsdp", save_every_steps=2)
    names = set(tensor_shapes(out / WEIGHTS))
    assert len(names) == 2 * 7 * 2
    assert all(".lora_" in name for name in names)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_recomputed_layers_give_the_same_bits(wide: Arena, recompute: str, targets: Any) -> None:
    settings = {**NF4, "lora": {**NF4["lora"], "targets": targets}}
    plain = gradients(prepared(wide, **settings), wide)
    found = gradients(prepared(wide, recompute=recompute, **settings), wide)
    assert found.keys() == plain.keys() != set()
    assert [name for name in plain if not torch.equal(found[name], plain[name])] == []


def test_selective_computes_no_product_again_and_keeps_less(wide: Arena) -> None:
    counts = {}
    for how in ("none", "selective", "full"):
        loss = loss_of(prepared(wide, recompute=how, **NF4), wide)
        with counted() as products:
            loss.backward()  # type: ignore[no-untyped-call]
        counts[how] = products.count
    assert counts["selective"] == counts["none"]
    kept = {
        how: kept_bytes(prepared(wide, recompute=how, **NF4), wide)
        for how in ("none", "selective", "full")
    }
    assert kept["full"] < kept["selective"] < kept["none"]


def test_no_more_is_kept_for_the_backward_pass_than_with_an_unquantized_base(wide: Arena) -> None:
    """No dequantized weight among it: a layer's have 0.5 MB in fp32."""
    assert (
        kept_bytes(prepared(wide, **NF4), wide) < kept_bytes(prepared(wide, **PLAIN), wide) + 50_000
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_layers_give_the_same_up_to_rounding(
    wide: Arena, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_without_kernels(monkeypatch)
    plain = gradients(prepared(wide, **NF4), wide)
    found = gradients(prepared(wide, compile=True, recompute=recompute, **NF4), wide)
    for name in plain:
        assert float((found[name] - plain[name]).abs().max()) <= 1e-4 * float(
            plain[name].abs().max()
        )


def test_quantization_adds_no_graph_to_compiled_layers(
    wide: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are two: the first layer's input needs no gradient."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for settings in (PLAIN, NF4):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = prepared(wide, compile=True, **settings)
        model(
            input_ids=torch.zeros(1, 8, dtype=torch.int64), use_cache=False
        ).logits.sum().backward()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
        assert not torch._dynamo.utils.counters["graph_break"]


def held_by_hand(
    environ: Mapping[str, str], arena: Arena, settings: dict[str, Any]
) -> tuple[int, int, list[bytes]]:
    """This rank's bytes of quantized weights and of all its state, and the base's bits later."""
    with by_hand(environ, arena, **settings) as hand:
        for step in range(2):
            hand.step(step)
        linears = quantized_linears(hand.wrapped)
        local = [
            part.to_local() if hasattr(part, "to_local") else part
            for one, _ in linears
            for part in one.parts
        ]
        names = {
            name
            for name, parameter in hand.wrapped.named_parameters()
            if not parameter.is_floating_point()
        }
        assert names.isdisjoint(hand.strategy.parameters)
        state: dict[str, Tensor] = hand.state()
        return (
            sum(part.nbytes for part in local),
            len(state),
            [bytes(part.numpy().tobytes()) for part in local],
        )


def test_a_rank_holds_its_part_of_four_bits(wide: Arena) -> None:
    values = 2 * (128 * 128 + 2 * 128 * 64 + 128 * 128 + 3 * 128 * 192)
    whole = run_ranks(held_by_hand, 1, wide, {**NF4, "strategy": "ddp"})[0]
    parts = run_ranks(held_by_hand, 2, wide, {**NF4, "strategy": "fsdp"})
    assert whole[0] == pytest.approx((0.5 + 1 / 64 + 4 / 16384) * values, rel=1e-3)
    assert {part[0] for part in parts.values()} == {whole[0] // 2}
    assert parts[0][1] == whole[1]
