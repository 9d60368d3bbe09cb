"""One training on two machines, as a new user starts it, and how it is refused if impossible."""

import pytest

from tests.hosts.machines import Machine
from tests.hosts.needs import needs_faketime, needs_machines
from tests.hosts.project import HostsProject
from tests.listeners import listeners
from tests.slurm.project import until

pytestmark = [pytest.mark.root, needs_machines, pytest.mark.timeout(1200)]


def test_two_machines_train_by_one_command(project: HostsProject, pair: list[Machine]) -> None:
    """While they train, they listen for each other on the addresses between them alone."""
    project.take_small_steps(epochs=2)  # so many that the training goes on while it is looked at
    started = project.start_training()
    until(lambda: project.steps_done() != [], "a step", project.said)
    for machine in pair:
        addresses = {address for address, _ in listeners(machine.processes("pipeline_lib"))}
        assert addresses == {machine.address}
    assert started.wait(180) == 0, project.said()
    output = project.said()

    assert f"on m1 and m2 (eth0, {pair[0].address})" in output
    assert project.events("run.launched")[0]["nodes"] == ["m1", "m2"]
    assert "m1: step 120/120" in project.job_log()
    project.wait_until_gone()


def test_all_problems_of_all_hosts_are_told_before_anything_is_spent(
    project: HostsProject, pair: list[Machine]
) -> None:
    """m2 has another folder for the store, and there are no m3 and m4; no data is read."""
    project.edit("nodes: 2", "nodes: 4")
    project.environment["PIPELINE_HOSTS"] = "m1,m2,m3,m4"
    pair[1].mount_private(project.store.root, size_mb=1)
    try:
        done = project.snakemake("train", check=False)
    finally:
        pair[1].run("umount", str(project.store.root), cwd=project.root.parent)

    assert done.returncode != 0
    assert "3 problems" in done.stdout
    assert f"m2: {project.store.root} is not shared: it is not the same folder there" in done.stdout
    assert "m3: ssh: Could not resolve hostname m3" in done.stdout
    assert not (project.root / "logs" / "plan").exists()


@needs_faketime
def test_a_host_of_another_version_or_without_room_is_refused(
    project: HostsProject, pair: list[Machine]
) -> None:
    """m2 has other code at the same path, a full /tmp, and a clock that is an hour ahead."""
    code = project.root / "pipeline_lib" / "core"
    private = project.root.parent / "other_code"
    pair[1].run(
        "sh",
        "-c",
        f"cp -r {code} {private} && echo '# other' >> {private}/units.py",
        cwd=project.root,
    )
    pair[1].run("mount", "--bind", str(private), str(code), cwd=project.root)
    pair[1].shift_clock(3600)
    try:
        done = project.snakemake("train", check=False)
    finally:
        pair[1].run("umount", str(code), cwd=project.root.parent)
        pair[1].shift_clock(0)

    assert done.returncode != 0
    assert "this project's code differs: " in done.stdout
    assert "m2: its clock is 3600 s ahead of this machine's" in done.stdout
