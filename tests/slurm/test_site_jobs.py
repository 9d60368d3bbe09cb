"""What the site file says reaches the jobs, and what of it may be secret is nowhere to be read.

That its options reach the training's job, test_faults.py sees.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.slurm.can_start import refuse_jobs
from pipeline_lib.slurm.cluster import read_groups
from pipeline_lib.slurm.request import JobRequest
from pipeline_lib.slurm.site import Site
from tests.slurm.loopback import Loopback, loopback
from tests.slurm.needs import needs_slurm
from tests.slurm.project import QUICK, SlurmProject

pytestmark = [pytest.mark.slow, pytest.mark.slurm, needs_slurm, pytest.mark.timeout(1200)]
TOKEN = "hf_abcdefghijklmnopqrstuvwxyz0"  # noqa: S105 - nobody's
SITE = """\
setup:
  - 'export FROM_SETUP=${{HOME}}/x'
  - '# a comment'
  - 'env > {seen}/environment; ps -eww -o args > {seen}/commands'
  - 'scontrol write batch_script $SLURM_JOB_ID {seen}/script'
environment: {{SITE_TOKEN: {token}}}
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Loopback]:
    with loopback(nodes=2) as made:
        yield made


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("reservation: nowhere", "`reservation` in the site file"),
        ("exclude: n99", "`exclude` in the site file"),
        ("gpu_sbatch: [--licenses=none]", "--licenses=none"),
    ],
)
def test_options_of_the_site_are_tried_before_a_job(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(f"{text}\n")
    with pytest.raises(ConfigError) as caught:
        refuse_jobs(
            Site.load({"PIPELINE_SITE": str(path)}),
            JobRequest(1, 1, 1, 0, 1000, 60, 30),
            read_groups(),
        )
    assert "SLURM would refuse the job: " in str(caught.value)
    assert word in str(caught.value)


def test_so_are_those_of_the_user(slurm: Loopback, tmp_path: Path) -> None:
    project = SlurmProject(tmp_path / "project", "{cpu_ranks: 1}")
    given = ("--set-resources", "train_stage:slurm_extra=--licenses=none")
    refused = project.snakemake("--profile", "slurm", *given, "--", "train", check=False)
    assert refused.returncode == 2, refused.stdout
    assert "SLURM would refuse the job: " in refused.stdout
    assert "--licenses=none" in refused.stdout
    assert slurm.call("squeue", "--noheader").strip() == ""


def test_a_job_sees_what_the_site_wants_and_shows_nobody_its_secrets(
    slurm: Loopback, tmp_path: Path
) -> None:
    project, seen = SlurmProject(tmp_path / "project", "{cpu_ranks: 1}"), tmp_path / "seen"
    seen.mkdir()
    site = tmp_path / "site.yaml"
    site.write_text(SITE.format(seen=seen, token=TOKEN))
    project.environment |= {"PIPELINE_SITE": str(site), "HOME": str(tmp_path / "home")}
    tokenized = project.store.pointer(project.experiment().ref("tokenize")).relative_to(
        project.root
    )

    output = project.snakemake(
        "--profile", "slurm", *QUICK, "--printshellcmds", "--verbose", str(tokenized)
    ).stdout

    assert output.count("has been submitted with SLURM jobid") == 1
    variables = (seen / "environment").read_text().splitlines()
    assert f"FROM_SETUP={tmp_path}/home/x" in variables
    assert f"SITE_TOKEN={TOKEN}" in variables
    commands, script = (seen / "commands").read_text(), (seen / "script").read_text()
    assert "tokenize --spec" in commands
    assert "snakemake" in script
    assert TOKEN not in output + commands + script
    made = [*project.root.rglob("*"), *slurm.folder.rglob("*")]
    logs = [path for path in made if path.is_file() and not path.is_symlink()]
    assert list((project.root / "logs" / "slurm").rglob("*.log"))
    assert [path for path in logs if TOKEN.encode() in path.read_bytes()] == []
