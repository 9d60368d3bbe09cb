"""A step on several ranks is that of one batch; they agree on what is said, and wait seldom."""

import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pipeline_lib.config.train import Guards
from pipeline_lib.launch.ranks import StopRequest
from pipeline_lib.model.batch import loss_sum, read_batch
from pipeline_lib.train.guards import Judgement, Verdict, Window, judge
from pipeline_lib.train.step import Stepper
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.native import by_hand, same

READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__")


class Reads(TorchFunctionMode):
    """Notes which file reads values of tensors, and when the model is run.

    Attention as CPUs have it reads lengths in every layer, which is not noted.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, called: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
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
    """What hosts exchange (dist.py) is theirs; the device is in its forward pass by then."""
    for seen in run_ranks(reads_of_a_step, 2, arena, strategy).values():
        assert seen == ["forward", "dist.py", "forward", "step.py"]


def two_steps(environ: Mapping[str, str], arena: Arena) -> dict[str, Any]:
    """Two refused steps of two micro-batches: results, judgements, plain torch's loss and norm.

    Only in the first does rank 1 have something to say: a signal came, a save failed, another is
    due.
    """
    with by_hand(environ, arena, strategy="ddp") as hand:
        stop, judged = StopRequest(), []
        stepper = Stepper(hand.wrapped, hand.strategy, hand.world, stop)

        def refuse(loss: float, grad_norm: float, supervised_tokens: int) -> Judgement:
            judged.append((loss, grad_norm, supervised_tokens))
            return Judgement(Verdict.SKIP)

        batches = [read_batch(hand.reader, [block]) for block in range(4)]
        mine = batches[2 * hand.world.rank :][:2]
        stop.signal_number = signal.SIGTERM * hand.world.rank
        speaks = hand.world.rank == 1
        readings = [10.0 + hand.world.rank]
        first = stepper.step(
            mine, 1e-3, refuse, save_failed=speaks, save_due=speaks, readings=readings
        )
        stop.signal_number = 0
        second = stepper.step(mine, 1e-3, refuse, save_failed=False)

        plain: Any = hand.wrapped.module
        total = torch.stack([loss_sum(plain, batch) for batch in batches]).sum()
        loss = total / sum(batch.supervised_tokens for batch in batches)
        gradients = torch.autograd.grad(loss, [p for p in plain.parameters() if p.requires_grad])
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        counts = [(batch.supervised_tokens, batch.real_tokens) for batch in batches]
        return {
            "results": (first, second),
            "judged": judged,
            "plain": (float(loss), float(norm)),
            "counts": counts,
        }


def test_a_step_is_that_of_one_batch_and_the_ranks_agree_on_it(arena: Arena) -> None:
    found = run_ranks(two_steps, 2, arena)
    for rank in range(2):
        first, second = found[rank]["results"]
        counts = found[rank]["counts"]
        supervised, tokens = (sum(each) for each in zip(*counts, strict=True))
        assert len({count for count, _ in counts}) > 1, (
            "micro-batches of one size hide a wrong divisor"
        )
        loss, norm = found[rank]["plain"]
        assert (first.loss, first.grad_norm) == pytest.approx((loss, norm), rel=1e-5)
        assert found[rank]["judged"] == [
            (each.loss, each.grad_norm, supervised) for each in (first, second)
        ]
        assert (first.supervised_tokens, first.tokens) == (supervised, tokens)
        assert (first.stop_agreed, first.save_failed, first.save_due) == (True, True, True)
        assert (second.stop_agreed, second.save_failed, second.save_due) == (False, False, False)
        assert first.readings == (10.0, 11.0)
        assert (second.loss, second.grad_norm) == pytest.approx(
            (first.loss, first.grad_norm), rel=1e-6
        )


def overflow(environ: Mapping[str, str], arena: Arena) -> tuple[list[Verdict], list[float], bool]:
    """fp16 steps from far too large a loss scale on: verdicts, scales, if refusals kept bits.

    No refused step may change a bit.
    """
    with by_hand(environ, arena, precision="fp16", strategy="ddp") as hand:
        hand.strategy.load_own_state(
            {"loss_scale": torch.tensor([2.0**30, 0.0], dtype=torch.float64)}
        )
        stepper = Stepper(hand.wrapped, hand.strategy, hand.world, StopRequest())
        before, verdicts, scales, is_kept = hand.state(), list[Verdict](), list[float](), True
        while Verdict.APPLY not in verdicts and len(verdicts) < 20:
            is_kept = is_kept and same(hand.state(), before)
            accepts = partial(judge, Window(Guards()), True, 1)
            result = stepper.step([read_batch(hand.reader, [0])], 1e-3, accepts, False)
            verdicts.append(result.judgement.verdict)
            scales.append(float(hand.strategy.own_state()["loss_scale"][0]))
        return verdicts, scales, is_kept and not same(hand.state(), before)


def test_an_overflow_of_fp16_lowers_the_loss_scale_until_a_step_is_accepted(arena: Arena) -> None:
    verdicts, scales, is_kept = run_ranks(overflow, 1, arena)[0]
    overflows = len(verdicts) - 1
    assert verdicts == [Verdict.OVERFLOW] * overflows + [Verdict.APPLY]
    assert overflows >= 1
    assert scales == [2.0 ** (29 - number) for number in range(overflows)] + [
        2.0 ** (30 - overflows)
    ]
    assert is_kept
