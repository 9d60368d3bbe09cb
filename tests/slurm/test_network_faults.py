"""F18: the network between two nodes is cut while they train, and comes back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.conftest import Project
from tests.slurm.loopback import Loopback, loopback
from tests.slurm.needs import needs_namespaces
from tests.slurm.project import SlurmProject, completed

pytestmark = [pytest.mark.slow, pytest.mark.slurm, needs_namespaces, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Loopback]:
    with loopback(nodes=2, namespaces=True, slurmd_timeout_s=300) as made:
        yield made


def test_f18_a_cut_link_ends_the_attempt_and_the_next_is_bitwise(
    slurm: Loopback, small: Project, tmp_path: Path
) -> None:
    """Nodes have names and addresses of their own, and SLURM gives up the silent one long after the ranks did."""
    project = SlurmProject(tmp_path / "project")
    project.take_data(small)
    project.edit("save_every_steps: 3", "save_every_steps: 10, timeout_s: 10")
    project.take_small_steps(epochs=4)
    other = project.copy_to(tmp_path / "undisturbed")
    other.edit("nodes: 2, cpu_ranks: 1", "nodes: 1, cpu_ranks: 2")
    started = project.start_training()
    project.wait_for_step(15)
    slurm.limit_link("n2", "down")
    project.wait_for_event("run.requeued")  # srun would wait for n2 as long as SLURM does
    slurm.limit_link("n2", "up")
    completed(started, project, slurm, 300)
    other.snakemake(other.target("train"))
    assert project.trained_weights() == other.trained_weights()
    requeued = project.events("run.requeued")[0]  # a second attempt may begin before the link is up, and is queued too
    assert "look at the network between n1, n2" in requeued["reason"]  # neither rank was silent: both could write
    assert project.events("run.resumed")
