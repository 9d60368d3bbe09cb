import os
import sys
import time
from pathlib import Path

import pytest

from pipeline_lib.slurm.queue import QueuedJob, of_digest, queued_jobs
from tests.status.stubs import stub_squeue

LINES = """\
12|PENDING|Resources|2026-11-22T07:30:00|/work/a|rule_train_stage_wildcards_0123456789abcdef
11|RUNNING|None|2026-11-22T06:10:00|/work/a|rule_train_stage_wildcards_0123456789abcdef
13_4|PENDING|Priority|N/A|/work/b|rule_shard_stage_wildcards_fedcba9876543210
14|RUNNING|None|2026-11-22T06:10:00|/home/else|a | comment | of somebody
15|RUNNING|None|2026-11-22T06:10:00|/home/else|(null)
16|RUNNING
slurm_load_jobs: something odd
"""


def test_jobs_with_a_comment_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub_squeue(tmp_path, monkeypatch, LINES)

    jobs = queued_jobs() or []

    assert [(job.id, job.shown) for job in jobs] == [
        ("12", "PENDING (Resources)"),
        ("11", "RUNNING"),
        ("13_4", "PENDING (Priority)"),
        ("14", "RUNNING"),
    ]
    assert jobs[3].comment == "a | comment | of somebody"
    assert jobs[0].start == "2026-11-22T07:30:00"
    assert [job.id for job in of_digest(jobs, "0123456789abcdef")] == ["11", "12"]
    assert of_digest(jobs, "aaaaaaaaaaaaaaaa") == []


@pytest.mark.parametrize(
    ("lines", "exit_code", "jobs"), [("", 0, []), (LINES, 1, None)], ids=["empty", "fails"]
)
def test_an_empty_queue_is_not_no_answer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: str,
    exit_code: int,
    jobs: list[QueuedJob] | None,
) -> None:
    stub_squeue(tmp_path, monkeypatch, lines, exit_code)

    assert queued_jobs() == jobs


def test_without_squeue_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert queued_jobs() is None


def test_squeue_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "squeue"
    script.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    start_s = time.monotonic()

    assert queued_jobs(timeout_s=0.5) is None
    assert time.monotonic() - start_s < 5
