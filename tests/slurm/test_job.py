"""SLURM's answers, and what if there are none: a stub of scontrol says what a real one said."""

import time
from pathlib import Path

import pytest

from pipeline_lib.core.errors import Interrupted
from pipeline_lib.slurm.job import (
    SlurmError,
    SlurmJob,
    fields_of,
    job_and_log,
    scontrol,
    seconds_of,
)

SHOWN = (
    "JobId=7 JobName=two words JobState=RUNNING RunTime=00:10:00 TimeLimit=1-00:30:00 "
    "NodeList=n[1-2] StdOut=/l/7.log"
)


def stub(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder / "scontrol"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-00:30:00", 88_200.0),
        ("00:01:04", 64.0),
        ("30:00", 1800.0),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
    ],
)
def test_times(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


def test_a_job_knows_how_long_it_may_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(tmp_path, monkeypatch, f'echo "{SHOWN}"')
    job = SlurmJob.of({"SLURM_JOB_ID": "7"})
    assert job is not None
    assert (job.fields["JobState"], job.left_s) == ("RUNNING", 88_200 - 600)
    assert fields_of(SHOWN)["JobName"] == "two words"
    assert SlurmJob.of({}) is None
    assert job_and_log({"SLURM_JOB_ID": "7"}) == "in SLURM job 7 on n[1-2]; its log: /l/7.log"
    assert job_and_log({}) is None


@pytest.mark.parametrize(
    "refusal", ["Requested operation is presently disabled", "Access/permission denied"]
)
def test_a_refusal_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    stub(tmp_path, monkeypatch, f'echo "{refusal} for job 7" >&2; exit 1')
    start_s = time.monotonic()
    with pytest.raises(SlurmError, match=refusal):
        scontrol("requeue", "7")
    assert time.monotonic() - start_s < 5


def test_a_silent_control_daemon_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = (
        'echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" '
        ">&2; exit 1"
    )
    stub(
        tmp_path,
        monkeypatch,
        f"if [ -e {tmp_path}/up ]; then echo fine; else touch {tmp_path}/up; {silent}; fi",
    )
    assert scontrol("show", "job", "7") == "fine\n"
    stub(tmp_path, monkeypatch, silent)
    with pytest.raises(Interrupted, match="SLURM did not answer for 1 s"):
        scontrol("show", "job", "7", patience_s=1)


def test_without_slurm_that_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SlurmError, match="put SLURM's programs on PATH"):
        scontrol("show", "job", "7")
    assert job_and_log({"SLURM_JOB_ID": "7"}) == "in SLURM job 7"
