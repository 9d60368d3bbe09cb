"""With accounting `snakemake --profile slurm` says before a job what SLURM would refuse, and sacct can be asked."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.accounting import ACCOUNT
from tests.slurm.loopback import Loopback, loopback
from tests.slurm.needs import needs_accounting
from tests.slurm.project import QUICK, SlurmProject
from tests.slurm.settings import CLUSTER

pytestmark = [pytest.mark.slurm, needs_accounting, pytest.mark.timeout(400)]
NO_ACCOUNT = "Invalid account or account/partition combination specified"
SET_ACCOUNT = "; set `account` in the site file, or PIPELINE_SLURM_ACCOUNT"


@pytest.fixture(scope="module")
def slurm() -> Iterator[Loopback]:
    with loopback(nodes=1, accounting=True) as made:
        yield made


@pytest.fixture
def project(slurm: Loopback, tmp_path: Path) -> SlurmProject:
    made = SlurmProject(tmp_path / "project", "{cpu_ranks: 2}")
    made.environment["XDG_CONFIG_HOME"] = str(tmp_path / "xdg")  # nothing of the site that the tests run at
    return made


@pytest.fixture
def nobody_s(slurm: Loopback) -> Iterator[None]:
    """Root belongs to no account meanwhile, so that there is none to take where none is named."""
    of_root = ["user", "root", f"account={ACCOUNT}", f"cluster={CLUSTER}"]
    slurm.call("sacctmgr", "--immediate", "delete", "user", "name=root", f"account={ACCOUNT}", f"cluster={CLUSTER}")
    try:
        yield
    finally:
        slurm.call("sacctmgr", "--immediate", "add", *of_root)


def refused(project: SlurmProject, **variables: str) -> str:
    """The only message of a call that submits nothing."""
    project.environment.update(variables)
    done = project.snakemake("--profile", "slurm", *QUICK, check=False)
    assert done.returncode == 2, done.stdout
    assert "has been submitted" not in done.stdout
    assert "Traceback" not in done.stdout
    assert done.stdout.count("SLURM would refuse the job") == 1, done.stdout
    return done.stdout


@pytest.mark.usefixtures("nobody_s")
def test_who_has_no_account_is_told_to_name_one(project: SlurmProject) -> None:
    assert f"{NO_ACCOUNT}{SET_ACCOUNT}" in refused(project)


def test_an_unknown_account_is_named_before_a_job(project: SlurmProject) -> None:
    assert f"{NO_ACCOUNT}{SET_ACCOUNT}" in refused(project, PIPELINE_SLURM_ACCOUNT="nosuch")


def test_an_unknown_qos_is_named_before_a_job(project: SlurmProject) -> None:
    said = refused(project, PIPELINE_SLURM_ACCOUNT=ACCOUNT, PIPELINE_SLURM_QOS="nosuch")
    assert "Invalid qos specification; set `qos` in the site file, or PIPELINE_SLURM_QOS" in said


def test_with_an_account_jobs_run_and_sacct_is_asked_what_became_of_them(
    slurm: Loopback, project: SlurmProject
) -> None:
    project.environment["PIPELINE_SLURM_ACCOUNT"] = ACCOUNT
    tokenized = project.store.pointer(project.experiment().ref("tokenize")).relative_to(project.root)
    asked = ("--slurm-status-command", "sacct", "--verbose")
    output = project.snakemake("--profile", "slurm", *QUICK, *asked, str(tokenized)).stdout
    assert output.count("has been submitted with SLURM jobid") == 1
    assert "sacct -X" in output
    assert "'squeue'" not in output
    shown = ["--noheader", "--parsable2", "--allocations", "--allusers", "--format=State,Account"]
    assert f"COMPLETED|{ACCOUNT}" in slurm.call("sacct", *shown).splitlines()
