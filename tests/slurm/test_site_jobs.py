"""What the site file says reaches the jobs, and what of it may be secret is nowhere to be read."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.conftest import kill_tree
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


OPTIONS = """\
exclude: n1
sbatch: [--nice=7]
gpu_sbatch: ['--mail-type=END,FAIL']
cpu_sbatch: [--mail-type=NONE]
"""


@pytest.mark.timeout(1200)
def test_options_of_the_site_and_of_the_user_reach_the_job_and_leave_it_its_warning(
    slurm: Loopback, tmp_path: Path
) -> None:
    """The job asks for three minutes, in which it cannot be done: it is warned, saves, and ends before."""
    project = SlurmProject(tmp_path / "project", "{cpu_ranks: 1, runtime_minutes: 3}")
    project.edit("epochs: 2", "epochs: 400")
    site = tmp_path / "site.yaml"
    site.write_text(OPTIONS)
    project.environment |= {"PIPELINE_SITE": str(site)}
    given = ("--set-resources", "train_stage:slurm_extra=--mail-user=nobody@localhost", "shard_stage:mem_mb=9000")
    started = project.start(*project.command[:-1], *given, "--", project.command[-1])
    try:
        job = project.job()
        told = slurm.call("scontrol", "show", "job", str(job))
        project.wait_for_event("run.requeued")
    finally:
        slurm.end_jobs()
        kill_tree(started)
    shown = dict(re.findall(r"(\S+?)=(\S*)", told))
    wanted = {"ExcNodeList": "n1", "Nice": "7", "MailType": "END,FAIL", "MailUser": "nobody@localhost"}
    assert {name: shown.get(name) for name in wanted} == wanted
    [launched], [requeued] = (project.events(name) for name in ("run.launched", "run.requeued"))
    assert requeued["step"] > 0
    assert requeued["at"] - launched["at"] < 170, "it was warned, and not ended at its limit"


def test_the_preflight_asks_with_the_same_options(slurm: Loopback, tmp_path: Path) -> None:
    project = SlurmProject(tmp_path / "project", "{cpu_ranks: 1}")
    site = tmp_path / "site.yaml"
    project.environment |= {"PIPELINE_SITE": str(site)}
    for text, given, word in (
        ("reservation: nowhere", "", "`reservation` in the site file"),
        ("exclude: n99", "", "`exclude` in the site file"),
        ("gpu_sbatch: [--licenses=none]", "", "--licenses=none"),
        ("", "--licenses=none", "--licenses=none"),
    ):
        site.write_text(f"{text}\n")
        options = ("--set-resources", f"train_stage:slurm_extra={given}") if given else ()
        refused = project.snakemake("--profile", "slurm", *options, "--", "train", check=False)
        assert refused.returncode == 2, refused.stdout
        assert "SLURM would refuse the job: " in refused.stdout
        assert word in refused.stdout
    assert slurm.call("squeue", "--noheader").strip() == ""


def test_a_job_sees_what_the_site_wants_and_shows_nobody_its_secrets(slurm: Loopback, tmp_path: Path) -> None:
    project, seen = SlurmProject(tmp_path / "project", "{cpu_ranks: 1}"), tmp_path / "seen"
    seen.mkdir()
    site = tmp_path / "site.yaml"
    site.write_text(SITE.format(seen=seen, token=TOKEN))
    project.environment |= {"PIPELINE_SITE": str(site), "HOME": str(tmp_path / "home")}
    tokenized = project.store.pointer(project.experiment().ref("tokenize")).relative_to(project.root)

    output = project.snakemake("--profile", "slurm", *QUICK, "--printshellcmds", "--verbose", str(tokenized)).stdout

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
