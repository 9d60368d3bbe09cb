"""The held-out loss in training: equal in every world, without trace in the result; its effects."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from pipeline_lib.config.train import read_train
from pipeline_lib.core.files import read_jsonl
from pipeline_lib.core.run_folder import CHECKPOINTS, step_name
from pipeline_lib.data.blocks import BlockReader, documents_of
from pipeline_lib.data.documents import prompt_length
from pipeline_lib.data.shard import write_blocks
from pipeline_lib.launch.stage import warning_of_lost_best
from pipeline_lib.model.batch import make_batch, token_losses
from pipeline_lib.model.build import load_base
from pipeline_lib.model.probe import load_probe, probe_logits
from pipeline_lib.records.training import read_training
from pipeline_lib.train.checkpoint import read_state
from pipeline_lib.train.optimizer import trainable
from pipeline_lib.train.validation import Validations
from tests.ranks import run_ranks
from tests.train.conftest import BLOCK_TOKENS, VOCAB, Arena, make_arena
from tests.train.helpers import assert_same_result, load_weights, rows, train, train_until_killed


def run(arena: Arena, out: Path, ranks: int = 2, **settings: Any) -> Path:
    """Train to the end."""
    run_ranks(train, ranks, arena.job(ranks, out, **settings))
    return out


def held_out(out: Path) -> dict[int, float]:
    """The held-out loss by step, as the metrics have it."""
    return {row["step"]: row["validation_loss"] for row in rows(out) if "validation_loss" in row}


def summary(out: Path) -> dict[str, Any]:
    """What the run says of itself."""
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def model_of(arena: Arena, out: Path) -> Any:
    """A plain model with the weights that a run left."""
    model = load_base(arena.store.sealed(arena.model), torch.float32)
    left = load_weights(out)
    with torch.no_grad():
        for name, parameter in trainable(model).items():
            parameter.copy_(left[name])
    model.train(False)
    return model


def mean_loss(model: Any, reader: BlockReader) -> float:
    """Of all blocks, one by one."""
    batches = [make_batch([reader[block]]) for block in range(len(reader))]
    with torch.no_grad():
        nats = sum(float(token_losses(model, batch).sum()) for batch in batches)
    return nats / sum(batch.supervised_tokens for batch in batches)


def test_it_is_the_loss_of_the_result_in_every_world(
    arena: Arena, whole: Callable[..., Path]
) -> None:
    settings: dict[str, Any] = {"validate_every_steps": 4, "lr": 1e-2}
    one = whole(1, **settings)
    two = whole(2, strategy="ddp", micro_batch_blocks=2, **settings)
    sharded = whole(2, strategy="fsdp", **settings)
    assert list(held_out(one)) == [4, 6]
    for other in (two, sharded):
        assert held_out(other) == pytest.approx(held_out(one), rel=2e-5)
    reader = BlockReader(arena.store.sealed(arena.shard) / "validation")
    assert held_out(one)[6] == pytest.approx(mean_loss(model_of(arena, one), reader), rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_looking_changes_no_bit_of_the_result(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path, strategy: str
) -> None:
    write_tokenizer(arena)
    adapters: dict[str, Any] = {
        "method": "lora",
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.3},
        "strategy": strategy,
    }
    seen = run(arena, tmp_path / "seen", validate_every_steps=2, sample_every_steps=3, **adapters)
    assert len(held_out(seen)) == 3
    assert_same_result(seen, whole(2, **adapters))


OVERFITTING: dict[str, Any] = {
    "validate_every_steps": 2,
    "lr": 2e-2,
    "epochs": 4,
    "save_every_steps": 5,
}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_best_step_is_kept_and_is_the_result(
    arena: Arena, tmp_path: Path, strategy: str
) -> None:
    settings = {**OVERFITTING, "strategy": strategy, "keep_best": True, "keep_last": 1}
    out = run(arena, tmp_path / "out", **settings)
    course = held_out(out)
    best = min(course, key=lambda step: course[step])
    assert best < 24, "the held-out loss fell to the end: nothing is tested"
    found = summary(out)
    assert (found["best_step"], found["result_step"], found["steps"]) == (best, best, 24)
    assert found["best_validation_loss"] == course[best]
    saved = sorted(
        path.name for path in arena.job(2, out, **settings).run_dir.glob("checkpoints/step-*")
    )
    assert saved == [f"step-{best:08d}", "step-00000024"]
    model = model_of(arena, out)
    reader = BlockReader(arena.store.sealed(arena.shard) / "validation")
    assert mean_loss(model, reader) == pytest.approx(course[best], rel=1e-5)
    block, logits = load_probe(out)
    torch.testing.assert_close(
        probe_logits(model, block, torch.device("cpu")), logits, rtol=1e-4, atol=1e-4
    )


def test_a_best_step_whose_checkpoint_is_damaged_is_not_the_result_and_that_is_told(
    arena: Arena, tmp_path: Path
) -> None:
    settings = {**OVERFITTING, "keep_best": True}
    job = arena.job(2, tmp_path / "killed", replica="damaged", **settings)
    run_ranks(train_until_killed, 2, job, 23)
    saved = sorted(job.run_dir.glob("checkpoints/step-*"))
    best = read_state(saved[-1])["validations"]["best_step"]
    best_saved = job.run_dir / "checkpoints" / f"step-{best:08d}"
    assert best_saved in saved[:-1]
    next((best_saved / "weights").iterdir()).write_bytes(b"damaged")

    found = read_training(run(arena, tmp_path / "out", replica="damaged", **settings))

    assert found.best_step == best
    assert found.result_step != best
    told = warning_of_lost_best(read_train(job.spec.settings), found)
    assert told is not None
    assert f"step {best}" in told and f"the result is step {found.result_step}" in told
    kept = replace(found, result_step=best)
    assert warning_of_lost_best(read_train(job.spec.settings), kept) is None


def test_training_stops_when_nothing_is_gained_and_stays_stopped(
    arena: Arena, tmp_path: Path
) -> None:
    settings = {**OVERFITTING, "early_stop_validations": 2}
    stopped = run(arena, tmp_path / "stopped", replica="stopped", **settings)
    course = held_out(stopped)
    best = min(course, key=lambda step: course[step])
    assert list(course)[-3:] == [best, best + 2, best + 4]
    found = summary(stopped)
    assert found["stopped_early"]
    assert (found["steps"], found["result_step"], found["total_steps"]) == (best + 4, best + 4, 24)
    again = run(arena, tmp_path / "again", replica="stopped", **settings)
    assert rows(again) == rows(stopped)
    assert_same_result(again, stopped)
    run_ranks(
        train_until_killed,
        2,
        arena.job(2, tmp_path / "killed", replica="killed", **settings),
        best + 4,
    )
    resumed = run(arena, tmp_path / "resumed", replica="killed", **settings)
    assert held_out(resumed) == course
    assert_same_result(resumed, stopped)


def test_a_validation_that_is_not_finite_is_no_gain() -> None:
    course = Validations()
    for step, loss in [(1, 3.0), (2, None), (3, 2.0), (4, 2.0), (5, None)]:
        course.add({"step": step, "validation_loss": loss})
    assert (course.best_step, course.best_loss, course.without_gain, course.last_step) == (
        3,
        2.0,
        2,
        5,
    )


def write_tokenizer(arena: Arena) -> None:
    """A tokenizer for the model: token n is the word wn."""
    tokenizer = Tokenizer(
        WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(arena.store.sealed(arena.model) / "tokenizer.json"))


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """What the plain model says after `prompt`, token by token."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(
                int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
    return tokens[len(prompt) :]


def test_held_out_prompts_are_answered_greedily_and_alike_under_every_strategy(
    arena: Arena, tmp_path: Path
) -> None:
    write_tokenizer(arena)
    settings: dict[str, Any] = {"sample_every_steps": 3, "lr": 1e-2}
    ddp = run(arena, tmp_path / "ddp", strategy="ddp", replica="ddp", **settings)
    fsdp = run(arena, tmp_path / "fsdp", strategy="fsdp", replica="fsdp", **settings)
    answers = read_jsonl(ddp / "samples.jsonl")
    assert answers == read_jsonl(fsdp / "samples.jsonl")
    assert [row["step"] for row in answers] == [3, 3, 6, 6]
    model = model_of(arena, ddp)
    reader = BlockReader(arena.store.sealed(arena.shard) / "validation")
    for document, row in zip(list(documents_of(reader[0]))[:2], answers[2:], strict=True):
        prompt = document.tokens[: prompt_length(document)].tolist()
        assert row["prompt"] == " ".join(f"w{token}" for token in prompt)
        assert row["reference"] == " ".join(
            f"w{token}" for token in document.tokens[len(prompt) :].tolist()
        )
        said = greedy(model, prompt, BLOCK_TOKENS - len(prompt))
        assert row["answer"] == " ".join(f"w{token}" for token in said)


@pytest.mark.parametrize("local_sgd_steps", [1, 4])
def test_by_epoch_a_run_is_saved_and_validated_after_the_last_step_of_each(
    arena: Arena, tmp_path: Path, local_sgd_steps: int
) -> None:
    """An epoch has 22 blocks, 6 steps; with local SGD, the turn comes with the next averaging."""
    settings: dict[str, Any] = {
        "save_every_steps": "epoch",
        "validate_every_steps": "epoch",
        "epochs": 3,
    }
    settings |= {"strategy": "ddp", "keep_last": 9, "local_sgd_steps": local_sgd_steps}
    out = run(arena, tmp_path / "out", **settings)
    after = [6, 12, 18] if local_sgd_steps == 1 else [8, 12, 18]
    assert list(held_out(out)) == after
    folder = arena.job(2, tmp_path / "again", **settings).run_dir / CHECKPOINTS
    assert sorted(path.name for path in folder.iterdir()) == [step_name(step) for step in after]


def test_a_run_by_epoch_that_was_killed_comes_to_the_same(arena: Arena, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "save_every_steps": "epoch",
        "validate_every_steps": "epoch",
        "epochs": 2,
    }
    whole = run(make_arena(tmp_path / "other"), tmp_path / "whole", **settings)
    run_ranks(train_until_killed, 2, arena.job(2, tmp_path / "killed", **settings), 8)
    job = arena.job(2, tmp_path / "resumed", **settings)
    assert job.resume_from is not None and job.resume_from.name == step_name(6)
    resumed = run(arena, tmp_path / "resumed", **settings)
    assert_same_result(resumed, whole)
    assert held_out(resumed) == held_out(whole) and list(held_out(whole)) == [6, 12]


def test_without_held_out_blocks_a_training_block_proves_the_export(
    arena: Arena, tmp_path: Path
) -> None:
    folder = arena.store.sealed(arena.shard) / "validation"
    shutil.rmtree(folder)
    write_blocks(folder, [], BLOCK_TOKENS, 1)
    out = run(arena, tmp_path / "out")
    assert held_out(out) == {} and summary(out)["best_validation_loss"] is None
    block, logits = load_probe(out)
    assert set(block.tokens.tolist()) <= {
        0,
        *BlockReader(folder.parent / "train")[0].tokens.tolist(),
    }
    again = probe_logits(model_of(arena, out), block, torch.device("cpu"))
    torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)
