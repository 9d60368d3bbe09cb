"""Guards, validation, samples and checkpoints beside the training on real GPUs.

Skipped where there are none.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline_lib.core.files import read_jsonl
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import digest_of, load_weights, losses, rows, train, train_until_killed
from tests.train.poison import INF_GRADIENT, NAN_LOSS, Poison, train_poisoned
from tests.train.test_validation import held_out, summary, write_tokenizer

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU"),
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")
LOOKING: dict[str, Any] = {"validate_every_steps": 2, "sample_every_steps": 3, "keep_best": True}


def run(arena: Arena, out: Path, ranks: int = 1, **settings: Any) -> Path:
    run_ranks(train, ranks, arena.job(ranks, out, device="cuda", **settings))
    return out


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_looking_changes_no_bit_of_the_training(
    arena: Arena, tmp_path: Path, precision: str
) -> None:
    write_tokenizer(arena)
    settings: dict[str, Any] = {"precision": precision, "deterministic": True}
    plain = run(arena, tmp_path / "plain", replica="plain", **settings)
    seen = run(arena, tmp_path / "seen", replica="seen", **settings, **LOOKING)
    assert losses(seen) == losses(plain)
    assert list(held_out(seen)) == [2, 4, 6]
    assert summary(seen)["result_step"] == summary(seen)["best_step"]
    assert len(read_jsonl(seen / "samples.jsonl")) == 4


def test_a_killed_run_resumes_from_a_checkpoint_that_was_written_beside_it(
    arena: Arena, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"save_every_steps": 2, "epochs": 2, "deterministic": True}
    whole = run(arena, tmp_path / "whole", replica="whole", **settings)
    run_ranks(
        train_until_killed,
        1,
        arena.job(1, tmp_path / "killed", device="cuda", replica="killed", **settings),
        7,
    )
    resumed = run(arena, tmp_path / "resumed", replica="killed", **settings)
    assert digest_of(load_weights(resumed)) == digest_of(load_weights(whole))


@two_gpus
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bad_steps_on_one_gpu_change_no_bit_and_take_the_run_back(
    arena: Arena, tmp_path: Path, strategy: str
) -> None:
    settings: dict[str, Any] = {"strategy": strategy, "epochs": 2}
    settings["guards"] = {"max_skips": 1, "rollback_every_steps": 3}
    job = arena.job(2, tmp_path / "out", device="cuda", **settings)
    courses = run_ranks(train_poisoned, 2, job, Poison({8: NAN_LOSS, 9: INF_GRADIENT}))
    for course in courses.values():
        assert course.digests[9] == course.digests[8]
        assert course.digests[10] == course.digests[7]
    marked = {row["step"]: row["verdict"] for row in rows(tmp_path / "out") if "verdict" in row}
    assert marked == {7: "undone", 8: "skip", 9: "roll_back"}
