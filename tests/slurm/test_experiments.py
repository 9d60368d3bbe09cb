"""Sweeps and rehearsals as jobs: what is shared is made once, and a failure stops no other."""

import re
import shlex
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.conftest import BIN, Project
from tests.slurm.loopback import Loopback, loopback
from tests.slurm.needs import needs_slurm
from tests.slurm.project import DEADLINE_S, QUICK, SlurmProject, plan_here, train_here
from tests.train.helpers import digest_of, load_weights

pytestmark = [pytest.mark.slow, pytest.mark.slurm, needs_slurm, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Loopback]:
    with loopback(nodes=2) as made:
        yield made


@pytest.mark.usefixtures("slurm")
def test_a_sweep_on_two_nodes_keeps_going_and_lists_what_failed(
    small: Project, tmp_path: Path
) -> None:
    """Plan and report run here, the rest in jobs; weights are those of two ranks of one machine."""
    project = SlurmProject(tmp_path / "project")
    for stage in ("download", "tokenize"):
        shutil.copytree(small.store.root / stage, project.store.root / stage)
    project.config.write_text(
        f"{project.config.read_text()}sweep: {{train.lr: [4.0e-3, 1.0e+30]}}\n"
    )
    done = project.snakemake("--profile", "slurm", "-j", "20", *QUICK, check=False)
    assert done.returncode == 1
    submitted = Counter(
        re.findall(r"submitted with SLURM jobid \d+ \(log: \S*/rule_(\w+)_stage/", done.stdout)
    )
    # the merge and the tuned model's evaluation are made by the job of their training
    assert submitted == {"shard": 1, "train": 2, "evaluate": 1}
    said = "".join(path.read_text() for path in project.root.glob("logs/train/*.log"))
    assert re.findall(r"---- (\w+) in the job of the training, on n\d", said) == [
        "merge",
        "evaluate",
    ]
    assert "2 experiments: 1 done, 1 failed" in done.stdout
    assert re.search(r"small-lr=1e30 +failed: train", done.stdout)
    last = done.stdout[done.stdout.rindex("error: 1 job failed\n") :]
    assert "- small-lr=1e30: train (" in last
    assert re.search(r"logs/slurm/rule_train_stage/\w+/\d+\.log", last)
    assert "WorkflowError" not in last
    assert (project.root / "results" / "small-lr=0.004" / "report.html").exists()
    assert list((project.root / "results" / "small-lr=0.004" / "model").glob("*.safetensors"))
    alone = Project(tmp_path / "alone")
    alone.take_data(small)
    alone.set_cluster("{cpu_ranks: 2}")
    plan_here(alone)
    trained = load_weights(project.store.sealed(alone.experiment().ref("train")))
    assert digest_of(trained) == train_here(alone, tmp_path / "here")


def test_a_rehearsal_on_two_nodes(slurm: Loopback, small: Project, tmp_path: Path) -> None:
    """Three jobs of the training's size: to step 1, on to step 2, and a look at the outcome."""
    project = SlurmProject(tmp_path / "project")
    project.take_data(small)
    output = project.snakemake("--profile", "slurm", *QUICK, "rehearse").stdout
    submitted = [
        line for line in output.splitlines() if "has been submitted with SLURM jobid" in line
    ]
    assert sum("rule_train_stage" in line for line in submitted) == 2
    assert "GPU-hours" in output or "hours" in output
    launched, resumed = project.events("run.launched"), project.events("run.resumed")
    assert [event["nodes"] for event in launched] == [["n1", "n2"]] * 2
    assert [event["step"] for event in resumed] == [1]
    assert slurm.call("squeue", "--noheader") == ""


def test_all_of_it_in_one_job_of_the_user_s_own(slurm: Loopback, tmp_path: Path) -> None:
    """Where no process may stay on a login node: ranks are tasks on both nodes, with no new job."""
    project, log = SlurmProject(tmp_path / "project"), tmp_path / "own.log"
    path = shlex.quote(project.environment["PATH"])
    script = f"cd {shlex.quote(str(project.root))} && PATH={path} exec {BIN / 'snakemake'}"
    job = slurm.submit(script, log, "--nodes=2", "--cpus-per-task=2", "--time=10")
    assert slurm.wait(job, DEADLINE_S) == "COMPLETED", log.read_text()
    [launched] = project.events("run.launched")
    assert (launched["nodes"], launched["job"], launched["launcher"]) == (["n1", "n2"], job, "srun")
    assert (project.root / "results" / "small" / "report.html").exists()
    assert "submitted with SLURM jobid" not in log.read_text()
