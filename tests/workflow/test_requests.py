"""What stages take of one machine: as many run at a time as have GPUs of their own."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline_lib.workflow.requests import Requests, SbatchOptions
from tests.workflow.test_invocation import CONFIG, FakeWorkflow, invoked


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    lines = "".join(f"echo '{number}, GPU-{number}'\n" for number in range(4))
    program.write_text("#!/bin/sh\n" + lines)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)


def requests(
    folder: Path, cluster: str, environ: dict[str, str], is_local: bool = True
) -> Requests:
    text = CONFIG.replace("{cpu_ranks: 1}", cluster)
    invocation = invoked(folder, text, FakeWorkflow(cores=16, local_exec=is_local), [])
    nothing = SimpleNamespace(default_resources=None, overwrite_resources={})
    return Requests(invocation, SbatchOptions(nothing), environ)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("gpus", "visible", "threads"),
    [
        (1, None, 4),
        (2, None, 8),
        (4, None, 16),
        (8, None, 16),  # more than there are, which is refused elsewhere
        (1, "0,1", 8),
        (1, "3", 16),
    ],
)
def test_a_training_has_the_share_of_cores_of_its_gpus(
    tmp_path: Path, gpus: int, visible: str | None, threads: int
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    asked = requests(tmp_path, f"{{gpus_per_node: {gpus}, gpu: h200}}", environ)
    experiment = asked._dag.experiment
    assert asked.training_threads(experiment.ref("train").digest) == threads
    evaluation = experiment.ref("evaluate").digest
    assert asked.gpus("evaluate", evaluation) == 1
    assert asked.threads("load", evaluation) == (
        4 if visible is None else 16 // len(visible.split(","))
    )


@pytest.mark.usefixtures("four_gpus")
def test_a_job_of_a_cluster_takes_no_gpus_of_this_machine(tmp_path: Path) -> None:
    cluster = "{gpus_per_node: 2, gpu: h200}"
    asked = requests(tmp_path, cluster, {}, is_local=False)
    experiment = asked._dag.experiment
    assert asked.gpus("evaluate", experiment.ref("evaluate").digest) == 0
    training = experiment.ref("train").digest
    assert asked.training_threads(training) == experiment.config.cluster.cpus_per_node
