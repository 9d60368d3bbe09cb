"""The host memory of a real training on CPUs, against the plan and what a job would ask for."""

from pathlib import Path

import pytest

from benchmarks.host_memory import Case, MemoryGroup, NoMemoryGroup, measure


@pytest.mark.slow
def test_a_training_under_its_limit_peaks_where_the_plan_says(tmp_path: Path) -> None:
    try:
        with MemoryGroup():
            pass
    except NoMemoryGroup as error:
        pytest.skip(str(error))
    found = measure(tmp_path, Case("19M", 1, "ddp"))
    log = next(tmp_path.glob("*.log")).read_text(errors="replace")
    assert found.code == 0, log[-3000:]
    assert found.held_bytes == pytest.approx(found.predicted_bytes, rel=0.1)
