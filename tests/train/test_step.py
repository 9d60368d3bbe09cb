"""When the host reads what the device has computed: it waits there, and a GPU soon has nothing to do."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.overrides import TorchFunctionMode

from pipeline_lib.launch.ranks import StopRequest
from pipeline_lib.model.batch import read_batch
from pipeline_lib.train.guards import Judgement, Verdict
from pipeline_lib.train.step import Stepper
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.native import by_hand

READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__")


class Reads(TorchFunctionMode):
    """Notes which file reads values of tensors, and when the model is run.

    Attention as CPUs have it reads lengths in every layer, which is not noted.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(called, "__name__", "")
        reader = Path(sys._getframe(1).f_code.co_filename).name
        if name in READS and reader != "attention.py":
            self.seen.append(reader)
        if name == "embedding":
            self.seen.append("forward")
        return called(*args, **(kwargs or {}))


def reads_of_a_step(environ: Mapping[str, str], arena: Arena, strategy: str) -> list[str]:
    with by_hand(environ, arena, strategy=strategy) as hand:
        stepper = Stepper(hand.wrapped, hand.strategy, hand.world, StopRequest())
        batches = [read_batch(hand.reader, [2 * block + hand.world.rank]) for block in range(2)]
        with Reads() as reads:
            stepper.step(batches, 1e-3, lambda *_: Judgement(Verdict.APPLY), False)
        seen: list[str] = reads.seen
        return seen


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_a_step_waits_for_its_device_once_and_late(arena: Arena, strategy: str) -> None:
    """What the hosts exchange among themselves (dist.py) is theirs, and the device is in its forward pass by then."""
    for seen in run_ranks(reads_of_a_step, 2, arena, strategy).values():
        assert seen == ["forward", "dist.py", "forward", "step.py"]
