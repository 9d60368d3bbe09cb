"""Trainings that cannot start, by what a machine shows: test_bad_input.py has a real one."""

from pathlib import Path

import pytest

from pipeline_lib.cli.main import parser
from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.slurm import can_start
from pipeline_lib.slurm.can_start import refuse_here
from pipeline_lib.slurm.job import can_start_tasks


@pytest.mark.parametrize("shown", [0, 1, 2, None], ids=["none", "one", "enough", "no answer"])
def test_gpus_are_counted_where_the_ranks_will_be(
    monkeypatch: pytest.MonkeyPatch, shown: int | None
) -> None:
    monkeypatch.setattr(can_start, "_visible_gpus", lambda: shown)
    wanted = Cluster(gpus_per_node=2, gpu="h100")
    refuse_here(wanted, is_job=True)
    refuse_here(Cluster(), is_job=False)
    if shown in (2, None):
        refuse_here(wanted, is_job=False)
        return
    lower = "lower it to 0 to train on the CPU, or train" if shown == 0 else "lower it, or train"
    problem = f"2 GPUs configured, and this machine has {shown}; {lower} as a SLURM job"
    with pytest.raises(ConfigError, match=problem):
        refuse_here(wanted, is_job=False)


def test_tasks_start_within_a_job_only() -> None:
    remedy = (
        "launcher: srun works only in a SLURM job, .*: snakemake --profile slurm; or set it to auto"
    )
    with pytest.raises(ConfigError, match=remedy):
        refuse_here(Cluster(launcher="srun"), is_job=False)
    with pytest.raises(ConfigError, match="nodes: 2 nodes train as a SLURM job"):
        refuse_here(Cluster(nodes=2, internode_gbit_s=1), is_job=False)
    refuse_here(Cluster(nodes=2, internode_gbit_s=1, launcher="srun"), is_job=True)


@pytest.mark.parametrize(
    ("launcher", "programs", "is_job", "is_warned"),
    [
        ("srun", (), False, True),
        ("srun", ("srun",), False, True),  # as in a container: nothing submits a job
        ("srun", ("sbatch",), False, False),
        ("srun", ("srun",), True, False),
        ("srun", (), True, True),
        ("auto", (), False, False),
        ("spawn", (), False, False),
    ],
)
def test_check_warns_of_srun_where_no_job_can_be_submitted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: str,
    programs: tuple[str, ...],
    is_job: bool,
    is_warned: bool,
) -> None:
    config = tmp_path / "my.yaml"
    config.write_text(
        "experiment: demo\nmodel: {source: tiny}\ndata: {train: [{source: pydoc, max_rows: 50}]}\n"
        f"tokenize: {{max_tokens: 128}}\nshard: {{block_tokens: 128}}\ncluster: {{launcher: "
        f"{launcher}}}\n"
    )
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name in programs:
        (bin_folder / name).symlink_to("/bin/true")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(bin_folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if is_job:
        monkeypatch.setenv("SLURM_JOB_ID", "7")

    arguments = parser().parse_args(["check", str(config)])
    arguments.command(arguments)

    said = capsys.readouterr().out
    warned = [
        line for line in said.splitlines() if "warning: cluster.launcher: srun works only" in line
    ]
    assert len(warned) == is_warned
    assert all("snakemake --profile slurm; or set it to auto" in line for line in warned)


def test_a_job_without_srun_is_none() -> None:
    assert not can_start_tasks({"SLURM_JOB_ID": "7", "PATH": "/nowhere"})
    assert not can_start_tasks({"PATH": "/usr/bin"})


def test_torch_counts() -> None:
    import torch

    assert can_start._visible_gpus() == torch.cuda.device_count()
