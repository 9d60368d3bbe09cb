"""What the doctor makes of several nodes, without a cluster: tests/slurm/test_doctor.py has one."""

import os
import random
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.doctor.exchange import rounds_of
from pipeline_lib.doctor.facts import UNMEASURED, Facts
from pipeline_lib.doctor.messages import Inbox, lines_of
from pipeline_lib.doctor.node_advice import to_set, together
from pipeline_lib.doctor.nodes import Findings, Pair
from pipeline_lib.doctor.nodes_report import nodes_report
from pipeline_lib.doctor.srun_job import SrunJob, outside_of_jobs
from pipeline_lib.hosts.checks import token_in

ROOT = Path(__file__).parents[2]
GBIT = 1e9 / 8


def node(**changes: dict[str, Any]) -> Facts:
    """A healthy node, with `changes` to its sections."""
    facts: Facts = {
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "memory": {"total_bytes": 512 * 10**9},
        "limits": {"shm_bytes": 64 << 30, "open_files": 65536, "open_files_most": 65536},
        "GPUs": {"driver": "570.86", "0": {"name": "H100"}},
        "torch": {"version": "2.13.0", "cuda": "12.8", "gpus": 1, "cuda_works": True},
        "store": {"folder": "/data", "reads_and_writes": True},
        "network": {"host": "x", "ib0": {"address": "10.0.0.1", "mbit_per_s": 10_000, "mtu": 4092}},
        "between nodes": {"interface": "ib0"},
    }
    return {
        name: {**section, **changes.get(name.replace(" ", "_"), {})}
        for name, section in facts.items()
    }


def findings(count: int, **changes: Any) -> Findings:
    """Of `count` healthy nodes n1, n2, ... whose pairs all have 9.4 Gbit/s."""
    names = [f"n{number + 1}" for number in range(count)]
    found = Findings(
        count, job="7", nodes={name: node() for name in names}, numbers=dict(enumerate(names))
    )
    found.pairs = [Pair(a, b, 9.4 * GBIT, 9.5 * GBIT, 2e-5) for a, b in combinations(names, 2)]
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def slow(found: Findings, *pairs: tuple[str, str]) -> Findings:
    """The same with 2.1 Gbit/s back between `pairs`."""
    found.pairs = [
        Pair(one.first, one.second, one.there, 2.1 * GBIT, one.latency_s)
        if (one.first, one.second) in pairs
        else one
        for one in found.pairs
    ]
    return found


def test_nothing_is_said_of_healthy_nodes() -> None:
    assert together(findings(4)) == []


def test_a_slow_pair_is_named() -> None:
    [said] = together(slow(findings(8), ("n3", "n7")))

    assert said.startswith("n3 <-> n7: 2.1 Gbit/s, the median of the pairs is 9.4")


@pytest.mark.parametrize("count", [3, 4, 8])
def test_the_node_whose_link_is_slow_is_named(count: int) -> None:
    own = [("n1", "n2"), *(("n2", f"n{number}") for number in range(3, count + 1))]
    said = together(slow(findings(count), *own))

    assert len(said) == count
    assert said[-1].startswith("n2: all of its pairs are slow, so it is its own link")


def test_one_pair_is_compared_with_its_other_direction_and_with_its_interface() -> None:
    [said] = together(slow(findings(2), ("n1", "n2")))
    assert said.startswith("n2 -> n1: 2.1 Gbit/s, and 9.4 the other way")
    [said] = together(findings(2, pairs=[Pair("n1", "n2", GBIT, GBIT, 1e-3)]))
    assert said.startswith("the best pairs send 1 Gbit/s through interfaces of 10 Gbit/s")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"GPUs": {"driver": "550.54"}},
            "GPUs driver: 570.86 on n1, n2; 550.54 on n3; ask for nodes of one kind",
        ),
        (
            {"versions": {"torch": "2.12.0"}},
            "versions torch: 2.13.0 on n1, n2; 2.12.0 on n3; run the same environment",
        ),
        (
            {"memory": {"total_bytes": 256 * 10**9}},
            "n3 has 256 GB of host memory, where others have 512 GB",
        ),
        ({"limits": {"shm_bytes": 64 << 20}}, "limits shm_bytes: "),
        (
            {"store": {UNMEASURED: "/data/.t: No such file or directory"}},
            "n3 cannot use the store: /data/.t: No such",
        ),
    ],
)
def test_a_node_that_differs_is_named(changes: dict[str, Any], words: str) -> None:
    found = findings(3)
    found.nodes["n3"] = node(**changes)

    assert together(found)[0].startswith(words)


def test_other_clocks_code_and_folders_are_named() -> None:
    found = findings(3, clocks={"n2": -3.25, "n3": 0.01}, unseen=["n3"])
    found.nodes["n2"]["code"] = {"pipeline_lib": "other"}
    unseen, code, clock = together(found)

    assert unseen.startswith("n3 wrote into the store, and it is not seen here")
    assert code.startswith("n2: pipeline_lib is not the one of this machine")
    assert clock.startswith("the clock of n2 is 3.2 s behind that of n1")


def test_nodes_that_say_nothing_and_pairs_that_do_not_answer_are_named() -> None:
    found = findings(3, said=["n3: task 2: Killed"])
    del found.numbers[2], found.nodes["n3"]
    found.pairs = []
    silent, slurm, pairs = together(found)

    assert silent == "1 of 3 nodes told nothing at all"
    assert slurm.endswith("n3: task 2: Killed")
    assert pairs.startswith("no exchange between n1 <-> n2: ")
    assert "?" in nodes_report(findings(3, pairs=findings(3).pairs[1:]), [])


def test_sockets_beside_infiniband_are_named() -> None:
    port = {"mlx5_0 port 1": "4: ACTIVE, 400 Gb/sec (4X NDR)"}
    found = findings(2)
    found.nodes["n1"] = node(network=port, between_nodes={"transports": ["NET/Socket/0"]})

    words = "n1: NCCL sends through TCP sockets, although mlx5_0 port 1"
    assert any(text.startswith(words) for text in together(found))


def test_what_to_set_is_what_a_node_sends() -> None:
    found = findings(2, all_reduce={16 << 20: {"seconds": 0.0134, "bus_bytes_per_s": 1.25e9}})

    assert to_set(found)[0].startswith("cluster.internode_gbit_s: 10 ")
    assert "NCCL_SOCKET_IFNAME=ib0" in to_set(found)[1]
    assert "all-reduce of 16.8 MB over all ranks (cpu): 10 Gbit/s on the bus" in nodes_report(
        found, []
    )


@pytest.mark.parametrize("nodes", range(1, 10))
def test_all_pairs_meet_once_and_nobody_is_in_two_at_a_time(nodes: int) -> None:
    rounds = rounds_of(nodes)

    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(nodes), 2))
    assert all(len({end for pair in pairs for end in pair}) == 2 * len(pairs) for pairs in rounds)


def test_messages_survive_lines_of_many_tasks_in_any_order() -> None:
    messages = [{"rank": rank, "text": '"ä" \\' * 300} for rank in range(3)]
    lines = [
        line for rank, message in enumerate(messages) for line in lines_of(str(rank), 0, message)
    ]
    random.Random(1).shuffle(lines)
    inbox = Inbox()
    got = [
        message for line in [*lines, "@doctor [1, 2", "a warning"] if (message := inbox.take(line))
    ]

    assert sorted(got, key=lambda message: int(message["rank"])) == messages
    assert max(map(len, lines)) < 1024


def test_a_job_around_us_does_not_make_srun_a_step_of_it() -> None:
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "2",
        "SRUN_DEBUG": "3",
        "SLURM_CONF": "/etc/x",
        "PATH": "/bin",
    }

    assert outside_of_jobs(environ) == {"SLURM_CONF": "/etc/x", "PATH": "/bin"}
    assert outside_of_jobs({"SLURM_PARTITION": "gpu"}) == {"SLURM_PARTITION": "gpu"}


def test_how_the_tasks_ended_is_waited_for_and_the_job_not_cancelled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Srun closes what the tasks printed a moment before it tells how they ended."""
    ended = "srun: error: n1: task 0: Exited with exit code 3"
    programs = {
        "srun": f"exec >&-\nsleep 0.5\necho '{ended}' >&2",
        "scancel": f"touch {tmp_path}/cancelled",
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    with SrunJob([], [], os.environ, tmp_path) as job:
        assert list(job.lines(30, 30, print)) == []
    assert job.reasons() == ["n1: task 0: Exited with exit code 3"]
    assert not (tmp_path / "cancelled").exists()


def test_the_store_is_left_as_it_was(tmp_path: Path) -> None:
    with token_in([tmp_path]) as token:
        (tmp_path / f"{token}.n1").write_text(token)
        assert (tmp_path / token).read_text() == token

    assert list(tmp_path.iterdir()) == []


def test_a_login_node_needs_no_torch() -> None:
    code = (
        "import sys, pipeline_lib.doctor.nodes, pipeline_lib.doctor.nodes_report; print('torch' "
        "in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--profile", "slurm", "--ranks", "2"], "error: doctor --ranks: 1 problem"),
        (["--nodes", "2"], "error: doctor --nodes: 1 problem"),
        (
            ["--profile", "slurm"],
            "there is no SLURM here: srun, scancel, squeue, sinfo not on PATH",
        ),
    ],
)
def test_what_cannot_be_examined_is_refused(tmp_path: Path, options: list[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline_lib", "doctor", *options],
        cwd=ROOT,
        env={"PATH": str(tmp_path), "PIPELINE_STORE": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 2
    assert words in done.stderr


def test_what_another_launcher_has_left_is_no_place_of_a_task(tmp_path: Path) -> None:
    """The one task of a job, with none to meet; not its node's first, so it looks no further."""
    left = {"MASTER_PORT": "29500", "RANK": "3", "MASTER_ADDR": "elsewhere", "WORLD_SIZE": "4"}
    task = {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_JOB_ID": "7",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pipeline_lib",
            "probe",
            "node",
            "--store",
            str(tmp_path),
            "--token",
            "token",
        ],
        cwd=ROOT,
        env={"PATH": str(tmp_path), "HOME": str(tmp_path), "SLURMD_NODENAME": "n1", **task, **left},
        capture_output=True,
        text=True,
        timeout=600,
    )
    inbox = Inbox()
    told = [message for line in done.stdout.splitlines() if (message := inbox.take(line))]

    assert done.returncode == 0, done.stderr
    assert {"node": "n1", "rank": 0, "device": "cpu"} in told
    assert not any("failed" in message for message in told)
