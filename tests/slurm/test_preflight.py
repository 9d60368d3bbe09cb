"""Trainings that cannot be started, by what a machine shows: tests/pipeline/test_bad_input.py has a real one."""

import pytest

from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.slurm import cluster
from pipeline_lib.slurm.cluster import refuse_here
from pipeline_lib.slurm.job import can_start_tasks


@pytest.mark.parametrize("shown", [0, 1, 2, None], ids=["none", "one", "enough", "no answer"])
def test_gpus_are_counted_where_the_ranks_will_be(monkeypatch: pytest.MonkeyPatch, shown: int | None) -> None:
    monkeypatch.setattr(cluster, "_visible_gpus", lambda: shown)
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
    with pytest.raises(ConfigError, match="launcher: srun works only in a SLURM job"):
        refuse_here(Cluster(launcher="srun"), is_job=False)
    with pytest.raises(ConfigError, match="nodes: 2 nodes train as a SLURM job"):
        refuse_here(Cluster(nodes=2, internode_gbit_s=1), is_job=False)
    refuse_here(Cluster(nodes=2, internode_gbit_s=1, launcher="srun"), is_job=True)


def test_a_job_without_srun_is_none() -> None:
    assert not can_start_tasks({"SLURM_JOB_ID": "7", "PATH": "/nowhere"})
    assert not can_start_tasks({"PATH": "/usr/bin"})


def test_torch_counts() -> None:
    import torch

    assert cluster._visible_gpus() == torch.cuda.device_count()
