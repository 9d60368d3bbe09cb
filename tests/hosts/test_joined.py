"""A training on hosts that join without keys: platform variables, killed snakemake, bad secret."""

from pathlib import Path

import pytest

from tests.hosts.machines import Machine, wait_until
from tests.hosts.needs import needs_machines
from tests.hosts.project import HostsProject
from tests.pipeline.conftest import BIN

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_machines, pytest.mark.timeout(1200)]
PORT = 29400
SECRET = "correct horse battery staple"  # noqa: S105 - of these tests


def test_the_variables_of_a_platform_are_enough_and_a_killed_training_goes_on(
    project: HostsProject, pair: list[Machine], tmp_path: Path
) -> None:
    project.take_small_steps(epochs=1)
    pair[1].limit(10)  # so that a step takes 0.2 s, and the training is killed long before its end
    project.environment |= {
        "MASTER_ADDR": pair[0].address,
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": "2",
    }
    project.environment |= {"PIPELINE_JOIN_SECRET": SECRET, "NODE_RANK": "0", "PIPELINE_HOSTS": ""}
    log = tmp_path / "join.log"
    environ = {**project.environment, "NODE_RANK": "1"}
    join = pair[1].start(
        str(BIN / "python"),
        "-m",
        "pipeline_lib",
        "join",
        cwd=project.root,
        log=log,
        environ=environ,
    )
    project.start_training()
    project.wait_for_step(5)
    for process in project.snakemakes():
        process.kill()
    wait_until(
        lambda: not project.ranks(pair[0]) and not project.ranks(pair[1]), "no rank survives", 30
    )
    pair[1].mend()
    project.finish_training()

    assert join.wait(60) == 0
    assert "the training is done" in log.read_text()
    assert project.events("run.launched")[0]["nodes"] == ["m1", pair[1].address]
    assert project.events("run.resumed")
    assert SECRET not in log.read_text() + project.job_log() + project.said()


def test_who_does_not_know_the_secret_stays_outside(
    project: HostsProject, pair: list[Machine], tmp_path: Path
) -> None:
    project.environment |= {
        "PIPELINE_JOIN_PORT": str(PORT),
        "PIPELINE_JOIN_SECRET": SECRET,
        "PIPELINE_HOSTS": "",
    }
    project.edit("save_every_steps: 3", "save_every_steps: 3, start_timeout_s: 20")
    started = project.start_training()
    done = pair[1].run(
        *(str(BIN / "python"), "-m", "pipeline_lib", "join", f"m1:{PORT}", "--wait", "60"),
        cwd=project.root,
        environ={**project.environment, "PIPELINE_JOIN_SECRET": SECRET.upper()},
        check=False,
        timeout_s=60,
    )

    assert done.returncode == 2
    assert "the secrets differ" in done.stdout
    assert started.wait(90) != 0
    assert (
        f"a client at {pair[1].address} does not have the secret of this training"
        in project.job_log()
    )
    assert "0 of 1 host joined at port 29400 within 20 s" in project.job_log()
