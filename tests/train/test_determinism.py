"""`train.deterministic` reaches torch in the ranks.

What it is for is tested on GPUs (tests/gpu/test_native.py).
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from pipeline_lib.train.rank import RankJob
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import losses, train


def is_deterministic_after(environ: Mapping[str, str], job: RankJob) -> bool:
    train(environ, job)
    return torch.are_deterministic_algorithms_enabled()


def test_ranks_take_deterministic_algorithms_if_told_to(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path
) -> None:
    job = arena.job(1, tmp_path / "out", strategy="ddp", deterministic=True)
    assert run_ranks(is_deterministic_after, 1, job) == {0: True}
    assert losses(job.out) == losses(whole(1, strategy="ddp"))
