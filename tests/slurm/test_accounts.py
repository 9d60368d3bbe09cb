"""With accounting `snakemake --profile slurm` foresees refusals by SLURM; sacct can be asked.

It says them before a job.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.slurm.can_start import refuse_jobs
from pipeline_lib.slurm.cluster import read_groups
from pipeline_lib.slurm.request import JobRequest
from pipeline_lib.slurm.site import Site
from tests.slurm.accounting import ACCOUNT
from tests.slurm.loopback import Loopback, loopback
from tests.slurm.needs import needs_accounting
from tests.slurm.project import QUICK, SlurmProject

pytestmark = [pytest.mark.slow, pytest.mark.slurm, needs_accounting, pytest.mark.timeout(1200)]
NO_ACCOUNT = "Invalid account or account/partition combination specified"
SET_ACCOUNT = "; set `account` in the site file, or PIPELINE_SLURM_ACCOUNT"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Loopback]:
    with loopback(nodes=1, accounting=True) as made:
        yield made


@pytest.fixture
def project(slurm: Loopback, tmp_path: Path) -> SlurmProject:
    made = SlurmProject(tmp_path / "project", "{cpu_ranks: 2}")
    # nothing of the site that the tests run at
    made.environment["XDG_CONFIG_HOME"] = str(tmp_path / "xdg")
    return made


def test_who_has_no_account_is_told_to_name_one(project: SlurmProject, tmp_path: Path) -> None:
    """Root always has one, so here the real sbatch is called by a user who has none."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sbatch").write_text(
        f'#!/bin/sh\ncd / && exec runuser -u nobody -- {shutil.which("sbatch")} "$@"\n'
    )
    (programs / "sbatch").chmod(0o755)
    project.environment["PATH"] = f"{programs}:{project.environment['PATH']}"
    done = project.snakemake("--profile", "slurm", *QUICK, check=False)
    assert done.returncode == 2, done.stdout
    assert "has been submitted" not in done.stdout
    assert "Traceback" not in done.stdout
    assert done.stdout.count("SLURM would refuse the job") == 1, done.stdout
    assert f"{NO_ACCOUNT}{SET_ACCOUNT}" in done.stdout


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("site", "said"),
    [
        (Site(account="nosuch"), f"{NO_ACCOUNT}{SET_ACCOUNT}"),
        (
            Site(account=ACCOUNT, qos="nosuch"),
            "Invalid qos specification; set `qos` in the site file, or PIPELINE_SLURM_QOS",
        ),
    ],
    ids=["account", "qos"],
)
def test_what_is_unknown_is_named_before_a_job(site: Site, said: str) -> None:
    with pytest.raises(ConfigError, match=f"SLURM would refuse the job: {re.escape(said)}"):
        refuse_jobs(site, JobRequest(1, 2, 1, 0, 1000, 60, 30), read_groups())


def test_with_an_account_jobs_run_and_sacct_is_asked_what_became_of_them(
    slurm: Loopback, project: SlurmProject
) -> None:
    project.environment["PIPELINE_SLURM_ACCOUNT"] = ACCOUNT
    tokenized = project.store.pointer(project.experiment().ref("tokenize")).relative_to(
        project.root
    )
    asked = ("--slurm-status-command", "sacct", "--verbose")
    output = project.snakemake("--profile", "slurm", *QUICK, *asked, str(tokenized)).stdout
    assert output.count("has been submitted with SLURM jobid") == 1
    assert "command=sacct" in output
    assert "command=squeue" not in output
    shown = ["--noheader", "--parsable2", "--allocations", "--allusers", "--format=State,Account"]
    assert f"COMPLETED|{ACCOUNT}" in slurm.call("sacct", *shown).splitlines()
