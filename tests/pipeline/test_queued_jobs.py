"""A queued job computes what its own config says, whatever else is run from the store."""

from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.dag import FROZEN_VARIABLE, Dag
from pipeline_lib.config.schema import Shard
from pipeline_lib.core.errors import DataError
from tests.pipeline.conftest import Project

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def submitted(project: Project, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, str]]:
    """What jobs of the config, frozen by a run of its first stage, read, and its targets.

    The targets are by part.
    """
    project.snakemake("download")
    monkeypatch.chdir(project.root)
    frozen = Dag.open(project.config, project.store).frozen_path
    assert frozen.exists()
    return frozen, {part: project.target(part) for part in ("tokenize", "shard")}


def job(project: Project, frozen: Path, target: str, check: bool = True) -> Any:
    """Run `target` as an executor's job does: by another snakemake, which reads what was frozen."""
    project.environment[FROZEN_VARIABLE] = str(frozen)
    try:
        return project.snakemake(
            "--mode", "subprocess", "--cores", "2", "--nolock", "--", target, check=check
        )
    finally:
        del project.environment[FROZEN_VARIABLE]


def test_a_queued_job_keeps_the_settings_that_are_in_no_digest(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.edit(", shards: 2", "")
    generous, targets = submitted(project, monkeypatch)
    project.edit("max_dropped_fraction: 0.2", "max_dropped_fraction: 0.0")
    project.edit("block_tokens: 128", "block_tokens: 128, shards: 3")
    strict, same_targets = submitted(project, monkeypatch)
    assert generous != strict
    assert targets == same_targets

    refused = job(project, strict, targets["tokenize"], check=False)
    assert refused.returncode != 0
    assert f"exit code: {DataError.exit_code}" in refused.stdout
    assert "tokenize.max_dropped_fraction" in refused.stdout
    project.edit("shards: 3", "shards: 5")
    submitted(project, monkeypatch)

    job(project, generous, targets["tokenize"])
    job(project, generous, targets["shard"])
    folder = project.store.sealed(project.experiment().ref("shard"))
    assert len(list((folder / "train").glob("shard-*.safetensors"))) == Shard().shards

    spec = project.store.spec_path(Path(targets["tokenize"]).stem)
    where = '{"max_dropped_fraction": 0.0}'
    late = project.run(
        "python",
        "-m",
        "pipeline_lib",
        "tokenize",
        "--spec",
        str(spec),
        "--where",
        where,
        check=False,
    )
    assert late.returncode == DataError.exit_code
    assert "made by a run with other limits" in late.stdout
    assert "tokenize.max_dropped_fraction" in late.stdout
