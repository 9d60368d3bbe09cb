"""Times of a store that another machine's clock has set: what is sealed is judged by digests."""

import os
import time
from pathlib import Path

import pytest

from tests.pipeline.conftest import Project, executed, sealed_times, wait_until

pytestmark = pytest.mark.usefixtures("forked_processes")

HOUR_S = 3600.0


def set_ahead(pointers: list[Path]) -> None:
    """As from machines whose clocks are ahead, the first one's the furthest."""
    for hours, pointer in enumerate(reversed(pointers), start=1):
        stamp_s = time.time() + hours * HOUR_S
        os.utime(pointer, (stamp_s, stamp_s))


def pointers_of(project: Project) -> list[Path]:
    parts = project.experiment().specs
    return [project.store.pointer(spec.ref) for spec in parts.values()]


def test_a_finished_store_from_a_machine_ahead_is_finished(small: Project, tmp_path: Path) -> None:
    project = small.copy_to(tmp_path / "project")
    before = sealed_times(project)
    set_ahead(pointers_of(project))
    assert executed(project.snakemake("-n").stdout) == []
    assert "Nothing to be done" in project.snakemake().stdout

    project.store.pointer(project.experiment().ref("merge")).unlink()
    assert set(executed(project.snakemake().stdout)) == {"merge", "evaluate", "report"}
    assert "Nothing to be done" in project.snakemake().stdout
    assert sealed_times(project) == before


def test_inputs_that_come_from_the_future_meanwhile_fail_no_stage(
    small: Project, tmp_path: Path
) -> None:
    """As when another snakemake, on a machine ahead, finds the same model and data."""
    project = small.copy_to(tmp_path / "project")
    project.forget_training()
    ref = project.experiment().ref("train")
    process = project.start(project.target("train"))
    wait_until((project.root / "runs").exists, process, "the training")
    set_ahead([path for path in pointers_of(project) if path.exists()])
    assert process.wait(600) == 0, (project.root / "started.log").read_text()
    assert project.store.pointer(ref).exists()
