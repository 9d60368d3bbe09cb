"""Two machines, and a project on their shared disk whose data is ready."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.machines import Machine, machines
from tests.hosts.project import HostsProject
from tests.pipeline.conftest import Project, small

__all__ = ["small"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    with machines(tmp_path_factory.mktemp("machines"), 2) as made:
        yield made


@pytest.fixture
def project(pair: list[Machine], small: Project, tmp_path: Path) -> Iterator[HostsProject]:
    """A project to train in, of which nothing runs any more in the end."""
    made = HostsProject(tmp_path / "project", pair)
    made.take_data(small)
    yield made
    for machine in pair:
        for process in machine.processes("pipeline_lib") + machine.processes("snakemake"):
            process.kill()
