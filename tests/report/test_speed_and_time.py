"""The speed and the time of one run are the same figures wherever they are shown."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.compare.comparison import measured
from pipeline_lib.compare.read import Known
from pipeline_lib.compare.subjects import Subject
from pipeline_lib.records.training import Step, read_training
from pipeline_lib.report.stage import summary_of
from pipeline_lib.status.progress import finished_numbers
from tests.complete import record
from tests.ranks import run_ranks
from tests.report.fakes import World, facts_of
from tests.train.conftest import Arena, arena
from tests.train.helpers import rows, train, train_until_killed

__all__ = ["arena"]


def test_status_report_summary_and_comparison_agree(
    arena: Arena, world: World, tmp_path: Path
) -> None:
    """After two attempts."""
    settings: dict[str, Any] = {"save_every_steps": 2, "validate_every_steps": 2, "epochs": 2}
    job = arena.job(2, tmp_path / "out", **settings)
    run_ranks(train_until_killed, 2, job, 5)
    run_ranks(train, 2, replace(arena.job(2, job.out, **settings), attempt=2))
    found = rows(job.out)
    assert [row["attempt"] for row in found] == [1] * 4 + [2] * 8
    steps = [record(Step, row) for row in found]
    facts = replace(
        facts_of(world),
        steps=steps,
        training=read_training(job.out),
    )
    compared = measured(Known(subject=Subject(job.store, "it", {}, {}), steps=steps))
    finished = finished_numbers(job.out)
    speeds = sorted(row["tokens_per_s"] for row in found)
    assert (
        facts.tokens_per_s
        == compared.tokens_per_s
        == finished.tokens_per_s
        == (speeds[5] + speeds[6]) / 2
    )
    assert summary_of(facts)["train"]["tokens_per_s"] == round((speeds[5] + speeds[6]) / 2)
    time_s = found[3]["elapsed_s"] + found[-1]["elapsed_s"]
    assert facts.training_time_s == compared.training_time_s == finished.elapsed_s == time_s
    assert summary_of(facts)["train"]["train_s"] == pytest.approx(time_s)
