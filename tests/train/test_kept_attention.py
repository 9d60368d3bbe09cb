"""At each resume another number of layers may keep attention's results: no bit changes.

It holds on several ranks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline_lib.model import attention, recompute
from pipeline_lib.train.rank import RankJob
from tests.model.graphs import use_torch_for_graphs
from tests.ranks import run_ranks
from tests.train.conftest import Arena, make_arena
from tests.train.helpers import assert_same_result, train

LAYERS, RANKS = 2, 2  # layers of the arena's model
MICRO_BATCHES = 1 + 2  # of each rank: one that is tried before the first step, and those of a step


def train_as_on_a_gpu(environ: Mapping[str, str], job: RankJob) -> int:
    """Train as if all documents were long; how often backward passes recomputed attention."""
    repeated = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "KEPT_FROM", 1)
        use_torch_for_graphs(patch)
        run = attention._run

        def counted(graph: Any, *others: Any) -> None:
            nonlocal repeated
            repeated += graph[0] == "forward" and torch._C._current_graph_task_id() != -1
            run(graph, *others)

        patch.setattr(attention, "_run", counted)
        train(environ, job)
    return repeated


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "zero3"])
def test_a_resume_may_keep_the_attention_of_another_number_of_layers(
    arena: Arena, tmp_path: Path, strategy: str
) -> None:
    trained: dict[str, Any] = {
        "strategy": strategy,
        "precision": "bf16",
        "micro_batch_blocks": 1,
        "max_steps": 3,
    }
    plain = make_arena(tmp_path / "plain").job(RANKS, tmp_path / "plain" / "out", **trained)
    assert set(run_ranks(train_as_on_a_gpu, RANKS, plain).values()) == {0}
    for step, (kept, repeated) in enumerate((("auto", 0), (0, LAYERS), (1, LAYERS - 1)), start=1):
        settings: dict[str, Any] = {
            "recompute": "full",
            "kept_attention_layers": kept,
            "until_step": step,
        }
        job = arena.job(RANKS, tmp_path / "moved", **trained, **settings)
        assert (job.resume_from is None) == (step == 1)
        assert set(run_ranks(train_as_on_a_gpu, RANKS, job).values()) == {repeated * MICRO_BATCHES}
    assert_same_result(tmp_path / "moved", plain.out)
