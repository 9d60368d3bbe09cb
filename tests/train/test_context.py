"""Ranks that share blocks (Ulysses): attention, loss, validation, checkpoints as of whole ones."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.config.train import Train
from pipeline_lib.core.files import read_json, read_jsonl
from pipeline_lib.data.blocks import BlockReader
from pipeline_lib.model.attention import packed_attention
from pipeline_lib.model.batch import IGNORED, BatchShare, loss_sum, make_batch, read_batch
from pipeline_lib.model.build import build_trainable, prepare_layers
from pipeline_lib.model.context import Part
from pipeline_lib.model.probe import load_probe
from pipeline_lib.model.weights import load_weights
from pipeline_lib.plan.traffic import exchanges_of_context
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.mesh import batch_share_of
from tests.model.graphs import compile_without_kernels
from tests.ranks import run_ranks
from tests.train.conftest import BLOCK_TOKENS, Arena, make_arena
from tests.train.helpers import assert_same_result, losses, rows, train, train_until_killed
from tests.train.test_validation import write_tokenizer

CPU = torch.device("cpu")
# of documents in two blocks of 32 tokens, cut anywhere
ENDS = torch.tensor([0, 3, 16, 21, 48, 64], dtype=torch.int32)
Triple = tuple[Tensor, Tensor, Tensor]


def heads(count: int, kv_count: int, dtype: torch.dtype) -> Triple:
    """Queries, keys and values of two blocks, a token's heads adjacent as projections do it."""
    generator = torch.Generator().manual_seed(1)
    sizes = [(2, 32, number, 8) for number in (count, kv_count, kv_count)]
    made = [torch.randn(size, generator=generator).to(dtype).transpose(1, 2) for size in sizes]
    return made[0], made[1], made[2]


def attended(inputs: Triple, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of query, key and value for a weighted sum of it."""
    query, key, value = leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    module = torch.nn.Identity()
    output, _ = packed_attention(
        module, query, key, value, None, cu_seq_lens_q=ENDS, max_length_q=27, **options
    )
    weights = torch.linspace(-1, 1, 32 * 8).view(1, 32, 1, 8)
    if "part" in options:
        weights = weights.chunk(options["part"].count, dim=1)[options["part"].number]
    gradients = torch.autograd.grad((output.float() * weights).sum(), leaves)
    return output.detach(), list(gradients)


CASES = [(2, 8, 8), (2, 8, 2), (4, 8, 2), (4, 4, 1)]  # ranks, heads, KV heads
DTYPES = [torch.float32, torch.bfloat16]
Attended = dict[tuple[int, int, torch.dtype], dict[str, Any]]  # by heads, KV heads and dtype


def attended_in_parts(environ: Mapping[str, str]) -> Attended:
    """What this rank has of output and gradients, in the cases of as many ranks."""
    world, found = World.from_env(environ, "cpu"), {}
    with process_group(world, 60):
        part = batch_share_of(world, Train(context_ranks=world.size)).part
        assert part is not None
        for ranks, count, kv_count in CASES:
            for dtype in DTYPES if ranks == world.size else []:
                query, key, value = (
                    tensor.chunk(part.count, dim=2)[part.number]
                    for tensor in heads(count, kv_count, dtype)
                )
                output, gradients = attended((query, key, value), part=part)
                mine = {
                    "output": output.float().numpy(),
                    "gradients": [each.float().numpy() for each in gradients],
                }
                found[count, kv_count, dtype] = mine
    return found


@pytest.fixture(scope="module")
def in_parts() -> dict[int, dict[int, Attended]]:
    """By the number of ranks, and rank."""
    return {ranks: run_ranks(attended_in_parts, ranks) for ranks in (2, 4)}


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("ranks", "count", "kv_count"), CASES)
def test_attention_in_parts_has_the_same_bits(
    in_parts: dict[int, dict[int, Attended]],
    ranks: int,
    count: int,
    kv_count: int,
    dtype: torch.dtype,
) -> None:
    """Gradients of keys and values of a head of several ranks are added in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank has: with more, the kernel adds up in another order
    output, gradients = attended(heads(count, kv_count, dtype))
    torch.set_num_threads(threads)
    found = [in_parts[ranks][rank][count, kv_count, dtype] for rank in range(ranks)]

    assert np.array_equal(
        np.concatenate([each["output"] for each in found], axis=1), output.float().numpy()
    )
    for number, expected in enumerate(gradients):
        whole = np.concatenate([each["gradients"][number] for each in found], axis=2)
        if number == 0 or kv_count >= ranks:
            assert np.array_equal(whole, expected.float().numpy())
        else:
            tolerance = 1e-6 if dtype == torch.float32 else 2e-2
            np.testing.assert_allclose(
                whole, expected.float().numpy(), rtol=tolerance, atol=tolerance
            )


def test_parts_of_blocks_are_cut_after_targets_are_made(arena: Arena) -> None:
    """The last token of a part still predicts the next part's first; nothing counts twice."""
    reader = BlockReader(arena.store.sealed(arena.shard) / "train")
    shares = [BatchShare(rank // 2, 2, Part(rank % 2, 2, "of no process")) for rank in range(4)]
    found = [list(share.batches(reader, np.arange(8), 2)) for share in shares]
    crossing = 0
    for first, second in ((0, 1), (2, 3)):
        for left, right in zip(found[first], found[second], strict=True):
            tokens, targets = (
                torch.cat([getattr(left, n), getattr(right, n)], dim=1)
                for n in ("tokens", "targets")
            )
            assert tokens.shape == (2, BLOCK_TOKENS)
            known = targets[:, :-1] != IGNORED
            assert torch.equal(targets[:, :-1][known], tokens[:, 1:][known])
            crossing += int((left.targets[:, -1] != IGNORED).sum())
            assert torch.equal(left.cu_seq_lens, right.cu_seq_lens)
            assert (
                left.predicted.tolist()
                == (left.targets.flatten() != IGNORED).nonzero().flatten().tolist()
            )
            assert right.squared_lengths == 0
    assert crossing
    whole = [read_batch(reader, [number]) for number in range(8)]
    for name in ("supervised_tokens", "real_tokens", "squared_lengths"):
        in_parts = sum(getattr(batch, name) for mine in found for batch in mine)
        assert in_parts == sum(getattr(batch, name) for batch in whole), name


def layers_in_parts(
    environ: Mapping[str, str], arena: Arena, variants: list[dict[str, Any]]
) -> list[tuple[list[float], int]]:
    """Of each variant of `train`: two blocks' loss, gradient norms, and the bytes exchanged."""
    exchange, exchanged = dist.all_to_all_single, 0

    def counted(received: Tensor, parts: Tensor, **options: Any) -> Any:
        nonlocal exchanged
        exchanged += parts.nbytes
        return exchange(received, parts, **options)

    vars(dist)["all_to_all_single"] = counted  # in a process of its own
    compile_without_kernels(pytest.MonkeyPatch())
    world = World.from_env(environ, "cpu")
    torch.set_num_threads(1)
    found = []
    with process_group(world, 60):
        share = batch_share_of(world, Train(context_ranks=world.size))
        folder = arena.store.sealed(arena.model)
        reader = BlockReader(arena.store.sealed(arena.shard) / "train")
        for variant in variants:
            settings = Train.model_validate({"precision": "fp32", **variant})
            model = build_trainable(folder, settings)
            prepare_layers(model, settings)
            load_weights(model, folder, world.device, settings.seed)
            with torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bf16"):
                loss = loss_sum(model, share.of(make_batch([reader[0], reader[1]])))
            loss.backward()  # type: ignore[no-untyped-call]
            sums = [
                loss.detach(),
                *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
            ]
            for each in sums:
                dist.all_reduce(each)
            found.append(([float(each.norm()) for each in sums], exchanged))
            exchanged = 0
    return found


EAGER = 4  # of these: compiling takes time
VARIANTS: list[dict[str, Any]] = [
    *({"recompute": recompute} for recompute in ("none", "selective", "full")),
    {"precision": "bf16", "recompute": "full"},
    {"compile": True, "recompute": "full"},
    {"compile": True, "recompute": "selective"},
    {"method": "lora", "lora": {"rank": 4}, "compile": True, "recompute": "full"},
]


@pytest.fixture(scope="module")
def of_whole_blocks(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Arena, list[tuple[list[float], int]]]:
    """An arena, and what one rank finds there."""
    arena = make_arena(tmp_path_factory.mktemp("layers"))
    return arena, run_ranks(layers_in_parts, 1, arena, VARIANTS, timeout_s=500.0)[0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("ranks", "count"), [(2, len(VARIANTS)), (4, EAGER)])
def test_layers_of_every_kind_work_in_parts(
    of_whole_blocks: tuple[Arena, list[tuple[list[float], int]]], ranks: int, count: int
) -> None:
    """And exchange what the plan says."""
    arena, whole = of_whole_blocks
    geometry = read_geometry(arena.store.sealed(arena.model))
    parts = run_ranks(layers_in_parts, ranks, arena, VARIANTS[:count], timeout_s=500.0)[0]
    for variant, (found, exchanged), (expected, _) in zip(
        VARIANTS[:count], parts, whole[:count], strict=True
    ):
        tolerance = 2e-2 if variant.get("precision") == "bf16" else 1e-5
        assert found == pytest.approx(expected, rel=tolerance), variant
        planned = Train.model_validate({"precision": "fp32", "context_ranks": ranks, **variant})
        tokens = 2 * BLOCK_TOKENS // ranks
        exchanges = exchanges_of_context(geometry, planned, tokens)
        assert exchanged == sum(
            one.payload_bytes for one in exchanges if one.kind == "all-to-all"
        ), variant


def test_checks_between_steps_are_those_of_whole_blocks(arena: Arena, tmp_path: Path) -> None:
    """The held-out loss, answers to prompts in any part, and logits to prove the export by."""
    write_tokenizer(arena)
    settings: dict[str, Any] = {"sample_every_steps": 3, "validate_every_steps": 3, "lr": 1e-2}
    outs = {}
    for ranks, parts in ((2, 1), (2, 2), (4, 2)):
        out = tmp_path / f"{ranks}-{parts}"
        run_ranks(
            train, ranks, arena.job(ranks, out, context_ranks=parts, replica=out.name, **settings)
        )
        outs[ranks, parts] = out
    expected = outs.pop((2, 1))
    for out in outs.values():
        assert losses(out) == pytest.approx(losses(expected), rel=2e-5)
        held_out = [row["validation_loss"] for row in rows(out) if "validation_loss" in row]
        assert held_out == pytest.approx(
            [row["validation_loss"] for row in rows(expected) if "validation_loss" in row]
        )
        assert read_jsonl(out / "samples.jsonl") == read_jsonl(expected / "samples.jsonl")
        assert logits_of(out) == pytest.approx(logits_of(expected), abs=1e-3)
        for key in ("tokens", "supervised_tokens"):
            assert read_json(out / "summary.json")[key] == read_json(expected / "summary.json")[key]


def logits_of(out: Path) -> Any:
    return load_probe(out)[1].numpy()


def test_resume_on_the_same_mesh_is_bitwise(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path
) -> None:
    placement: dict[str, Any] = {"strategy": "fsdp", "context_ranks": 2, "epochs": 2}
    run_ranks(
        train_until_killed, 4, arena.job(4, tmp_path / "killed", save_every_steps=2, **placement), 5
    )
    job = arena.job(4, tmp_path / "resumed", save_every_steps=2, **placement)
    assert job.resume_from is not None
    run_ranks(train, 4, job)
    assert_same_result(tmp_path / "resumed", whole(4, **placement))


@pytest.mark.slow
def test_a_run_may_visit_every_mesh(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path
) -> None:
    meshes: list[dict[str, Any]] = [
        {"strategy": "ddp", "ranks": 2, "context_ranks": 2},
        {"strategy": "fsdp", "ranks": 4, "context_ranks": 2},
        {"strategy": "hsdp", "ranks": 4, "context_ranks": 2, "shard_ranks": 2},
        {"strategy": "hsdp", "ranks": 4, "context_ranks": 4, "shard_ranks": 2},
        {"strategy": "fsdp", "ranks": 4, "context_ranks": 4},
        {"strategy": "ddp", "ranks": 1, "context_ranks": 1},
    ]
    for number, placement in enumerate(meshes):
        ranks, out = placement.pop("ranks"), tmp_path / str(number)
        job = arena.job(ranks, out, epochs=2, until_step=2 * number + 2, **placement)
        assert (job.resume_from is None) == (number == 0)
        run_ranks(train, ranks, job)
    assert [row["step"] for row in rows(out)] == list(range(1, 13))
    assert losses(out) == pytest.approx(losses(whole(1, epochs=2)), rel=2e-5)
