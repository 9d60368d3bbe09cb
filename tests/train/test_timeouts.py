"""How long ranks wait for each other: long at the start, short in steps, and as disks need to save.

Gloo only: there is no GPU here to see NCCL's watchdog take a changed timeout.
"""

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline_lib.train.dist import LOADING, PATIENT, Timeouts
from tests.ranks import run_ranks

START_S, STEP_S, LATE_S = 60.0, 1.5, 4.0


def joined(environ: dict[str, str]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """A group that the timeouts are set for, one that keeps its own, besides the one of all."""
    os.environ.update(environ)
    dist.init_process_group("gloo", timeout=timedelta(seconds=START_S))
    return dist.new_group(), dist.new_group(timeout=timedelta(seconds=START_S), group_desc=PATIENT)


def wait_for_the_late(
    environ: dict[str, str], which: int, events: list[tuple[str, dict[str, Any]]], start_s: float
) -> float | None:
    """How long rank 0 waited before it gave up; None if rank 1, which is late, was waited for."""
    groups = (None, *joined(environ))
    timeouts = Timeouts(start_s, STEP_S)
    dist.all_reduce(torch.ones(1))
    for name, fields in events:
        timeouts.observe(name, fields)
    begun_s = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(LATE_S)
    try:
        dist.all_reduce(torch.ones(1), group=groups[which])
    except RuntimeError:
        return time.monotonic() - begun_s
    return None


def waited(
    which: int, *events: tuple[str, dict[str, Any]], start_s: float = START_S
) -> float | None:
    answer: float | None = run_ranks(wait_for_the_late, 2, which, list(events), start_s)[0]
    return answer


def test_after_a_step_the_wait_is_short() -> None:
    for which in (0, 1):
        gave_up_s = waited(which, ("step.end", {}))
        assert gave_up_s is not None
        assert STEP_S - 0.5 < gave_up_s < LATE_S - 0.5


def test_groups_that_torch_made_while_the_model_was_spread_wait_no_longer() -> None:
    """Their own time is torch's half an hour."""
    gave_up_s = waited(1, ("run.start", {}), start_s=STEP_S)
    assert gave_up_s is not None
    assert STEP_S - 0.5 < gave_up_s < LATE_S - 0.5


@pytest.mark.slow
def test_at_the_start_while_loading_and_for_disks_it_is_long() -> None:
    assert waited(0) is None
    assert waited(0, ("step.end", {}), ("rank.doing", {"what": LOADING})) is None
    assert waited(2, ("step.end", {})) is None
