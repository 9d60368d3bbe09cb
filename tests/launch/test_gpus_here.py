"""GPUs that a config leaves idle, or does not name, are reported where users can act."""

import os
from pathlib import Path

import pytest

from pipeline_lib.config.schema import Cluster
from pipeline_lib.launch.allocation import idle_gpus


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose driver shows two."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 570.1'\necho 'NVIDIA H200, 570.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("two_gpus")
def test_idle_gpus_are_told_of_with_what_to_set() -> None:
    [warning] = idle_gpus(Cluster())
    assert (warning.kind, warning.key) == ("warning", "cluster.gpus_per_node")
    assert warning.numbers == {"gpus": 2}
    assert "{gpus_per_node: 2, gpu: NVIDIA H200}" in warning.sentence
    Cluster.model_validate({"gpus_per_node": 2, "gpu": "NVIDIA H200"})


@pytest.mark.usefixtures("two_gpus")
def test_gpus_without_a_name_are_told_of() -> None:
    [warning] = idle_gpus(Cluster(gpus_per_node=2))
    assert (warning.kind, warning.key) == ("warning", "cluster.gpu")
    assert warning.sentence.endswith("set gpu: NVIDIA H200")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    "cluster", [{"gpus_per_node": 0}, {"cpu_ranks": 1}, {"gpus_per_node": 1, "gpu": "h200"}]
)
def test_a_config_that_says_what_it_wants_is_not_warned_of(cluster: dict[str, object]) -> None:
    assert list(idle_gpus(Cluster.model_validate(cluster))) == []


def test_a_machine_without_gpus_is_not_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(idle_gpus(Cluster())) == []
