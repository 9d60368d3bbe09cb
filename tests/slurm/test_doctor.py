"""The doctor on real SLURM nodes: what it measures between them, and that its job ends with it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import wait_for
from tests.slurm.loopback import Loopback, loopback
from tests.slurm.needs import needs_slurm

pytestmark = [pytest.mark.slow, pytest.mark.slurm, needs_slurm]
ROOT = Path(__file__).parents[2]
DEADLINE_S = 800
CONFIG = """\
experiment: doctor
model: {source: tiny}
data: {train: [{source: pydoc}]}
tokenize: {max_tokens: 256}
shard: {block_tokens: 256}
cluster: {nodes: %d, gpus_per_node: %d}
train: {strategy: ddp, global_batch_tokens: %d}
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Loopback]:
    with loopback(nodes=2) as made:
        yield made


@pytest.fixture(autouse=True)
def no_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the site that the tests happen to run at."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pipeline_lib", "doctor", "--profile", "slurm", *arguments]


def doctor(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )


def examined(written: Path, *arguments: str) -> tuple[str, dict[str, Any], list[str]]:
    """What it says, its facts and what it finds wrong."""
    done = doctor("--json", str(written), *arguments)
    assert done.returncode == 0, done.stdout
    content = json.loads(written.read_text())
    return done.stdout, content["facts"], content["wrong"]


def queue(slurm: Loopback) -> str:
    return slurm.call("squeue", "--noheader", "--format=%j").strip()


def config(folder: Path, nodes: int, gpus: int) -> str:
    path = folder / "config.yaml"
    path.write_text(CONFIG % (nodes, gpus, nodes * gpus * 1024))
    return str(path)


def test_it_looks_at_nodes_and_measures_between_them(slurm: Loopback, tmp_path: Path) -> None:
    """GPUs that torch does not see are named, and CPUs measured."""
    written = tmp_path / "written"
    written.mkdir()
    said, facts, wrong = examined(written / "doctor.json", config(tmp_path, 2, 2))

    assert sorted(facts["nodes"]) == ["n1", "n2"]
    unseen = [f"GPU {number} was asked for, and torch sees 0" for number in range(2)]
    assert facts["failures"] == {"n1": unseen, "n2": unseen}
    for found in facts["nodes"].values():
        assert found["versions"]["python"] == sys.version.split()[0]
        assert found["store"]["reads_and_writes"] is True
        assert found["disk"]["folder"] == str(tmp_path)
        assert found["code"]["pipeline_lib"]
    [pair] = facts["pairs"]
    assert min(pair["there"], pair["back"], pair["latency_s"]) > 0
    assert list(facts["all_reduce"]) == [str(size) for size in (64 << 10, 1 << 20, 16 << 20)]
    assert abs(facts["clocks"]["n2"]) < 1
    assert "cluster.internode_gbit_s: " in said
    assert "NCCL_SOCKET_IFNAME=lo" in said
    assert facts["device"] == "cpu"
    assert {f"n1, n2: {text}" for text in unseen} <= set(wrong)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "written"]
    assert queue(slurm) == ""


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("PIPELINE_SLURM_PARTITION", "partition 'gpuu' does not exist"),
        ("PIPELINE_SLURM_CONSTRAINT", "Invalid feature specification"),
    ],
)
def test_what_the_site_does_not_have_is_refused_before(
    slurm: Loopback, variable: str, words: str
) -> None:
    done = doctor(**{variable: "gpuu"})

    assert done.returncode == 2
    assert words in done.stdout
    assert variable in done.stdout


def test_more_gpus_than_a_node_has_are_refused_before(slurm: Loopback, tmp_path: Path) -> None:
    done = doctor(config(tmp_path, 2, 5))

    assert done.returncode == 2
    assert "cluster.gpus_per_node: 5 GPUs" in done.stdout


def test_a_job_that_ends_at_once_is_said_with_srun_s_words(slurm: Loopback, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("setup: ['echo no module named cuda >&2', 'exit 3']\n")
    done = doctor(PIPELINE_SITE=str(site))

    assert done.returncode == 69
    assert "the job on the nodes told nothing" in done.stdout
    assert "Exited with exit code 3" in done.stdout
    assert "no module named cuda" in done.stdout


def test_it_gives_up_waiting_and_leaves_nothing_in_the_queue(
    slurm: Loopback, tmp_path: Path
) -> None:
    job = slurm.submit("sleep 300", tmp_path / "job.log", "--nodes=2", "--exclusive")
    try:
        slurm.wait_for(job, "RUNNING", 30)
        done = doctor("--timeout", "4")
        assert done.returncode == 69, done.stdout
        assert "waits in the queue: Resources" in done.stdout
        assert "--timeout SECONDS" in done.stdout
        wait_for(lambda: queue(slurm) == "job.sh", "the end of the doctor's job")
    finally:
        slurm.call("scancel", str(job))


@pytest.mark.parametrize(
    ("number", "setup"),
    [(signal.SIGINT, "true"), (signal.SIGTERM, "sleep 300")],
    ids=["while it measures", "before"],
)
def test_a_signal_cancels_the_job(
    slurm: Loopback, tmp_path: Path, number: signal.Signals, setup: str
) -> None:
    site, path = tmp_path / "site.yaml", tmp_path / "said"
    site.write_text(f"setup: ['{setup}']\n")

    def has_begun() -> bool:
        if setup == "true":
            return "runs on" in path.read_text()
        return "RUNNING" in slurm.call("squeue", "--noheader", "--format=%T")

    with path.open("w+") as said:
        process = subprocess.Popen(
            command(),
            cwd=ROOT,
            env={**os.environ, "PIPELINE_SITE": str(site)},
            stdout=said,
            stderr=said,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            wait_for(has_begun, "the start of the job")
            process.send_signal(number)
            assert process.wait(60) == 130
        finally:
            process.kill()
            process.wait()
    assert "stopped; nothing is left running" in path.read_text()
    wait_for(lambda: queue(slurm) == "", "the end of the job")
    assert list(tmp_path.glob(".hosts-*")) == []
