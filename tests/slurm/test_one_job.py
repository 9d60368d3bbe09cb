"""The job of a training goes on with its merge and evaluation, which else queue again."""

import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.pipeline.conftest import Project
from tests.slurm.loopback import Loopback, loopback
from tests.slurm.needs import needs_slurm
from tests.slurm.project import QUICK, SlurmProject, ended, until

pytestmark = [pytest.mark.slow, pytest.mark.slurm, needs_slurm, pytest.mark.timeout(1200)]
ALL = ("--profile", "slurm", "-j", "20", *QUICK)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Loopback]:
    with loopback(nodes=2) as made:
        yield made


@pytest.fixture
def project(small: Project, tmp_path: Path) -> SlurmProject:
    """A project whose data is prepared."""
    made = SlurmProject(tmp_path / "project")
    made.take_data(small)
    return made


def submitted(output: str) -> Counter[str]:
    """How many jobs snakemake submitted, by the stage of their rule."""
    return Counter(
        re.findall(r"submitted with SLURM jobid \d+ \(log: \S*/rule_(\w+)_stage/", output)
    )


def test_what_ends_early_there_is_made_by_a_job_of_its_own(
    project: SlurmProject, slurm: Loopback
) -> None:
    """As SLURM warns the job's steps of its time limit. The training is done all the same."""
    started = project.start(*ALL)
    job = project.job()
    spec = str(project.store.spec_path(project.experiment().ref("merge").digest))
    merging = until(lambda: running("merge", spec), "the merge", project.job_log)
    merging.send_signal(signal.SIGUSR1)
    assert ended(started, project, slurm) == 0, project.said()
    assert slurm.state(job) == "COMPLETED"
    assert "a job of its own makes it" in project.job_log()
    assert submitted(project.said()) == {"train": 1, "merge": 1, "evaluate": 2}
    assert project.manifest("merge")["job"] != project.manifest("train")["job"]


def running(stage: str, spec: str) -> psutil.Process | None:
    """Return the process of `stage` with that spec that a job has started."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if command[1:4] == ["-m", "pipeline_lib", stage] and command[-1].endswith(spec):
            return process
    return None
