"""Jobs of an earlier snakemake: which of them are waited for, and which never begin.

No SLURM is needed.
"""

from pathlib import Path

import pytest

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.slurm import queue
from pipeline_lib.slurm.queue import QueuedJob, wait_for_jobs

DIGEST = "0123456789abcdef"
HERE = Path("/work/a")
# As SLURM writes them, one for each form; JobArrayTaskLimit and the like are of versions without
# names for quotas.
QUOTAS = [
    "QOSMaxJobsPerUserLimit",
    "QOSMaxGRESPerUser",
    "QOSGrpNodeLimit",
    "QOSGrpGRES",
    "AssocMaxJobsLimit",
]
QUOTAS += ["AssocGrpCPUMinutesLimit", "MaxGRESPerAccount", "JobArrayTaskLimit", "QOSResourceLimit"]
STUCK = [
    "PartitionTimeLimit",
    "PartitionNodeLimit",
    "AssocMaxWallDurationPerJobLimit",
    "QOSMaxGRESPerJob",
]
STUCK += [
    "QOSMaxCpuPerNode",
    "MaxMemPerLimit",
    "JobHeldUser",
    "DependencyNeverSatisfied",
    "InvalidAccount",
]
STUCK += ["BadConstraints"]


def waiting(monkeypatch: pytest.MonkeyPatch, reason: str) -> list[str]:
    """What is said of a job that waits for `reason`, and is gone when it is asked for again."""
    job = QueuedJob(
        "12", "PENDING", reason, "N/A", str(HERE), f"rule_train_stage_wildcards_{DIGEST}"
    )
    answers = iter([[job], []])
    monkeypatch.setattr(queue, "queued_jobs", lambda: next(answers))
    monkeypatch.setattr(queue, "_POLL_S", 0.0)
    said: list[str] = []
    wait_for_jobs({DIGEST: "train demo"}, HERE, said.append)
    return said


@pytest.mark.parametrize("reason", QUOTAS)
def test_a_job_that_waits_for_a_quota_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    assert waiting(monkeypatch, reason) == [
        f"waiting for SLURM job 12, PENDING ({reason}), of an earlier snakemake: train demo; a "
        "quota is used up, and the job starts when other jobs have ended",
        "the jobs of the earlier snakemake have ended",
    ]


@pytest.mark.parametrize(
    "reason", ["Resources", "Priority", "Dependency", "BeginTime", "ReqNodeNotAvail"]
)
def test_nothing_more_is_said_of_a_job_whose_turn_comes(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    assert waiting(monkeypatch, reason)[0].endswith(
        f"PENDING ({reason}), of an earlier snakemake: train demo"
    )


@pytest.mark.parametrize("reason", STUCK)
def test_a_job_that_asks_for_what_it_never_gets_is_refused(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"it will not start by itself \({reason}\): `scontrol release 12` or"
    ):
        waiting(monkeypatch, reason)
