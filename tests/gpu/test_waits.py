"""How often the host waits for the GPU in an optimizer step: once, for the guards.

They judge the loss and the norm.
"""

import warnings
from collections.abc import Mapping

import pytest
import torch

from pipeline_lib.launch.ranks import StopRequest
from pipeline_lib.model.batch import read_batch
from pipeline_lib.train.guards import Judgement, Verdict
from pipeline_lib.train.step import Stepper
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.native import by_hand

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
STEPS = 3


def waits_of_steps(
    environ: Mapping[str, str], arena: Arena, strategy: str, verdict: Verdict
) -> list[list[str]]:
    """Where torch waited in each of some steps, by its own account."""
    found = []
    with by_hand(environ, arena, "cuda", strategy=strategy, precision="bf16") as hand:
        stepper = Stepper(hand.wrapped, hand.strategy, hand.world, StopRequest())
        batches = [read_batch(hand.reader, [block]).pinned() for block in range(2)]
        # kernels are chosen, buckets are laid
        stepper.step(batches, 1e-3, lambda *_: Judgement(verdict), False)
        for _ in range(STEPS):
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                stepper.step(batches, 1e-3, lambda *_: Judgement(verdict), False)
            torch.cuda.set_sync_debug_mode("default")
            found.append(
                [
                    f"{one.filename}:{one.lineno}"
                    for one in caught
                    if "synchroniz" in str(one.message)
                ]
            )
    return found


@pytest.mark.parametrize("verdict", [Verdict.APPLY, Verdict.SKIP])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_a_step_waits_for_the_gpu_once(arena: Arena, strategy: str, verdict: Verdict) -> None:
    for waits in run_ranks(waits_of_steps, 1, arena, strategy, verdict)[0]:
        assert len(waits) == 1, waits
        assert "train/step.py" in waits[0]
