"""What ranks find in their environment, whoever starts them."""

import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist

from pipeline_lib.core.errors import (
    ConfigError,
    DataError,
    DiskFull,
    Interrupted,
    PeerLost,
    PipelineError,
    TrainingError,
)
from pipeline_lib.core.files import write_json
from pipeline_lib.core.run_folder import EVENTS_NAME
from pipeline_lib.core.stage import Job
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.hosts.checks import HostNeeds
from pipeline_lib.launch import environment
from pipeline_lib.launch.allocation import Allocation, NodeRequest, allocated
from pipeline_lib.launch.environment import (
    ALLOCATOR,
    choose_interface,
    dist_environment,
    first_host,
    interface_to,
    is_sent,
    last_host,
    launch_environment,
)
from pipeline_lib.launch.outcome import explain
from pipeline_lib.launch.place import RankPlacement, srun_command
from pipeline_lib.launch.rank_report import Cause, RankReport, Reporting
from pipeline_lib.launch.stage import LaunchedAttempt
from pipeline_lib.records.plan import PlanDocument, PlannedCluster
from pipeline_lib.slurm.job import SlurmJob
from pipeline_lib.train.dist import is_lost_peer
from tests.complete import plan_document
from tests.locks import hold
from tests.train.conftest import small_disk

SLURM_TASK = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "12345",
}


RUN = Path("/store/runs/d1")
MEETING = {"PIPELINE_RENDEZVOUS": "/private/rendezvous"}


def plan(ranks: int = 2, device: str = "cpu", deterministic: bool = False) -> PlanDocument:
    cluster = {"ranks": ranks, "device": device, "cpus_per_rank": 3}
    return plan_document(cluster=cluster, chosen={"deterministic": deterministic})


def place(
    launcher: str, device: str = "cpu", nodes: int = 1, job: int | None = None
) -> RankPlacement:
    """Two ranks on each of `nodes` nodes."""
    hosts = tuple(f"n{number + 1}" for number in range(nodes))
    return RankPlacement(
        launcher, nodes, 2, 3, device, Allocation(hosts, job=SlurmJob(job, {}) if job else None)
    )


@pytest.mark.parametrize(
    ("node_list", "first", "last"),
    [
        ("n1", "n1", "n1"),
        ("n1,n2", "n1", "n2"),
        ("gpu[003-005,9],cpu1", "gpu003", "cpu1"),
        ("cpu1,gpu[003-005,9]", "cpu1", "gpu9"),
        ("gpu[003-005]", "gpu003", "gpu005"),
        ("rack[1-2]node[10-11]", "rack1node10", "rack2node11"),
        ("a-[7,9]-b", "a-7-b", "a-9-b"),
    ],
)
def test_the_first_and_the_last_host_of_a_list(node_list: str, first: str, last: str) -> None:
    assert (first_host(node_list), last_host(node_list)) == (first, last)


def test_a_task_of_srun_finds_its_place_from_slurm() -> None:
    made = dist_environment(SLURM_TASK)

    place = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
    }
    assert {name: made[name] for name in place} == place
    assert 20_000 <= int(made["MASTER_PORT"]) < 32_000
    assert (
        dist_environment({**SLURM_TASK, "SLURM_PROCID": "2"})["MASTER_PORT"] == made["MASTER_PORT"]
    )


@pytest.mark.parametrize(
    "expected",
    [
        {"SLURM_STEP_NUM_NODES": "1", "MASTER_PORT": "23456", "MASTER_ADDR": "127.0.0.1"},
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
    ],
    ids=["a port for one node", "torchrun within a job"],
)
def test_what_a_launcher_says_is_believed_before_slurm(expected: dict[str, str]) -> None:
    made = dist_environment({**SLURM_TASK, **expected})

    assert {name: made[name] for name in expected} == expected


def test_unequal_nodes_are_counted() -> None:
    assert (
        dist_environment({**SLURM_TASK, "SLURM_STEP_TASKS_PER_NODE": "4,3"})["LOCAL_WORLD_SIZE"]
        == "3"
    )


def test_nothing_of_an_outer_launcher_is_handed_down_and_all_else_is() -> None:
    own = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    made = launch_environment({"RANK": "3", "WORLD_SIZE": "9", **own}, plan(), MEETING)

    assert own.items() <= made.items()
    assert made["OMP_NUM_THREADS"] == "3"
    assert not {"RANK", "WORLD_SIZE", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"} & set(made)


def test_ranks_on_cpus_return_large_blocks_unless_the_user_chose() -> None:
    made = launch_environment({"MALLOC_MMAP_THRESHOLD_": "7"}, plan(), MEETING)

    assert (made["MALLOC_MMAP_THRESHOLD_"], made["MALLOC_TRIM_THRESHOLD_"]) == ("7", "67108864")
    assert not ALLOCATOR.keys() & launch_environment({}, plan(device="cuda"), MEETING).keys()
    assert all(is_sent(name) for name in ALLOCATOR)  # ranks on other hosts need as much


def test_gpus_get_the_allocator_and_determinism_its_workspace_unless_the_user_chose() -> None:
    made = launch_environment({}, plan(device="cuda", deterministic=True), MEETING)

    assert made["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert (made["CUBLAS_WORKSPACE_CONFIG"], made["NCCL_NVLS_ENABLE"]) == (":4096:8", "0")
    chosen = {"OMP_NUM_THREADS": "7", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    made = launch_environment(chosen, plan(device="cuda"), MEETING)
    assert chosen.items() <= made.items()
    assert "PYTORCH_ALLOC_CONF" not in made


def test_on_several_nodes_a_rank_takes_the_network_that_leads_to_rank_0() -> None:
    two = {**SLURM_TASK, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "20001"}

    assert interface_to("127.0.0.1") == "lo"
    assert dist_environment({**two, **master})["GLOO_SOCKET_IFNAME"] == "lo"
    assert dist_environment({**two, **master})["NCCL_SOCKET_IFNAME"] == "=lo"
    assert (
        dist_environment({**two, **master, "NCCL_SOCKET_IFNAME": "^ib"})["NCCL_SOCKET_IFNAME"]
        == "^ib"
    )


def test_on_one_machine_ranks_listen_on_its_loopback_interface_alone() -> None:
    one = {"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0", **MEETING}
    of_the_cluster = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}

    made = dist_environment({**one, **of_the_cluster})
    assert (made["GLOO_SOCKET_IFNAME"], made["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")


def test_a_name_that_leads_a_node_to_itself_is_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts names a machine 127.0.1.1: `lo` would cut off rank 0's node."""
    resolve, names = socket.getaddrinfo, {"gpu07": "127.0.1.1", "gpu08": "127.0.1.1"}
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: resolve(names.get(host, host), *rest, **more),
    )

    assert interface_to("gpu07") is None
    # nodes that are all on this machine are named by such addresses
    assert interface_to("127.0.1.1") == "lo"
    assert interface_to("localhost") == "lo"
    made = dist_environment({**SLURM_TASK, "MASTER_ADDR": "gpu07", "MASTER_PORT": "20001"})
    assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & set(made)


def test_rank_0s_node_takes_the_network_that_leads_to_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = {"gpu08": "ib0"}  # as gpu07 sees it, whose own name leads nowhere
    monkeypatch.setattr(environment, "interface_to", ways.get)

    made = dist_environment({**SLURM_TASK, "MASTER_ADDR": "gpu07", "MASTER_PORT": "20001"})
    assert (made["NCCL_SOCKET_IFNAME"], made["GLOO_SOCKET_IFNAME"]) == ("=ib0", "ib0")
    environ = {**SLURM_TASK, "NCCL_SOCKET_IFNAME": "^ib", "GLOO_SOCKET_IFNAME": ""}
    choose_interface(environ, "gpu07")
    assert (environ["NCCL_SOCKET_IFNAME"], environ["GLOO_SOCKET_IFNAME"]) == ("^ib", "ib0")


def test_an_address_that_leads_nowhere_leaves_the_choice_to_nccl() -> None:
    assert interface_to("no.such.host.invalid") is None


def options(command: list[str]) -> dict[str, str]:
    """Those of srun with their values."""
    own = command[1 : command.index(sys.executable)]
    return {
        name: value
        for name, value in pairwise(own)
        if name.startswith("--") and not value.startswith("--")
    }


def test_srun_starts_a_task_for_each_rank_on_each_node() -> None:
    """`srun --pty` binds its task, and our srun would bind all ranks to that one's CPUs."""
    outer = (
        "TRES_PER_TASK",
        "CPUS_PER_GPU",
        "CPU_BIND",
        "CPU_BIND_LIST",
        "CPU_BIND_TYPE",
        "CPU_BIND_VERBOSE",
    )
    environ = {"SLURM_JOB_ID": "1", **{f"SLURM_{name}": "of another task" for name in outer}}
    command = srun_command(place("srun", "cuda", nodes=2, job=1), environ, ["rank", "--spec", "x"])

    chosen = options(command)
    assert (chosen["--nodes"], chosen["--ntasks"], chosen["--ntasks-per-node"]) == ("2", "4", "2")
    assert (chosen["--cpus-per-task"], chosen["--gres"], chosen["--nodelist"]) == (
        "3",
        "gpu:2",
        "n1,n2",
    )
    assert "--kill-on-bad-exit=1" in command
    assert command[-5:] == ["-m", "pipeline_lib", "rank", "--spec", "x"]
    assert environ == {"SLURM_JOB_ID": "1"}


def test_within_a_job_spawn_has_a_program_on_each_node() -> None:
    environ = {"SLURM_JOB_ID": "1", "MASTER_PORT": "20001", "MASTER_ADDR": "10.0.0.1"}
    command = srun_command(place("spawn", nodes=2, job=1), environ, ["rank", "--spec", "x"])

    chosen = options(command)
    assert (chosen["--nodes"], chosen["--ntasks"], chosen["--ntasks-per-node"]) == ("2", "2", "1")
    assert chosen["--cpus-per-task"] == "6"
    assert command[command.index("node") + 1 :][-4:] == ["--", "rank", "--spec", "x"]


def cluster(launcher: str, nodes: int = 1) -> PlannedCluster:
    return PlannedCluster(
        nodes=nodes,
        ranks=2 * nodes,
        device="cpu",
        launcher=launcher,
        cpus_per_rank=1,
        max_requeues=0,
    )


def take(launcher: str, nodes: int, environ: dict[str, str], tmp_path: Path) -> Allocation:
    wanted = HostNeeds(gpus_per_node=0, gpu=None, memory_gb=0)
    request = NodeRequest(nodes, launcher, wanted, timeout_s=10.0, start_timeout_s=10.0)
    with allocated(request, Store(tmp_path / "store"), environ, print) as found:
        return found


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "1", "PATH": "/nowhere"}])
def test_auto_is_spawn_outside_of_a_job(environ: dict[str, str], tmp_path: Path) -> None:
    allocation = take("auto", 1, environ, tmp_path)
    assert allocation.is_this_machine
    assert RankPlacement.of(cluster("auto"), allocation).launcher == "spawn"


@pytest.mark.parametrize("launcher", ["auto", "spawn"])
def test_srun_needs_a_job_and_several_nodes_a_job_or_hosts(launcher: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cluster.nodes: 2 nodes train as a SLURM job.*PIPELINE_HOSTS=NAME,NAME"
    ):
        take(launcher, 2, {}, tmp_path)
    with pytest.raises(ConfigError, match="srun works only in a SLURM job"):
        take("srun", 1, {}, tmp_path)


LOST = "rank 0 lost a peer (closed)"
KILLED = "rank 1 was killed by SIGKILL (out of memory?); nothing was saved yet"
SILENT = "rank 1 ended without a word, as one that is killed (out of memory?)"


@pytest.mark.parametrize(
    ("errors", "launcher", "exit_code", "rank", "message", "code"),
    [
        ([PeerLost(LOST)], "spawn", -9, 1, KILLED, 75),
        ([PeerLost(LOST)], "srun", 137, None, KILLED, 75),
        ([PeerLost(LOST)], "srun", 75, None, SILENT, 75),
        ([PeerLost(LOST)], "srun", 143, None, SILENT, 75),
        ([PeerLost("in other words")], "srun", 143, None, SILENT, 75),  # words decide nothing
        ([Interrupted(LOST)], "srun", 143, None, f"rank 0: {LOST}", 75),  # an agreed stop
        ([PipelineError(LOST), TypeError(LOST)], "srun", 1, None, f"rank 0: {LOST}", 1),
        (
            [PeerLost(LOST), DataError("other model"), TypeError()],
            "srun",
            1,
            None,
            "rank 1: other model",
            65,
        ),
        (
            [PeerLost(LOST)],
            "srun",
            -9,
            None,
            "srun was killed by SIGKILL, and its ranks with it",
            75,
        ),
        (
            [TypeError("no"), TypeError("no")],
            "srun",
            1,
            None,
            "rank 0: TypeError: no; its traceback is above",
            1,
        ),
        ([], "srun", 2, None, "srun ended with code 2; its output is above", 2),
    ],
)
def test_the_most_telling_of_what_ranks_leave_is_told(
    tmp_path: Path,
    errors: list[BaseException],
    launcher: str,
    exit_code: int,
    rank: int | None,
    message: str,
    code: int,
) -> None:
    for number, error in enumerate(errors):
        with pytest.raises(type(error)), Reporting(tmp_path, number):
            raise error
    found = explain(launcher, exit_code, rank, max(2, len(errors)), tmp_path)

    assert str(found).startswith(message)
    assert found.exit_code == code


@pytest.mark.parametrize("first_to_fail", [1, 0])
def test_the_first_to_fail_was_killed_and_another_that_was_silent_was_waited_for(
    tmp_path: Path, first_to_fail: int
) -> None:
    """On a busy machine a rank may miss its signs and go on all the same."""
    for rank, heard_s in ((0, 1000.0), (1, 988.0)):
        sign = {"rank": rank, "host": "n1", "pid": 7, "step": 0, "doing": "starting"}
        path = tmp_path / "heartbeats" / f"rank-{rank}.json"
        path.parent.mkdir(exist_ok=True)
        write_json(path, {**sign, "every_s": 5.0, "for_s": 0.0})
        os.utime(path, (heard_s, heard_s))
    told = str(explain("spawn", -signal.SIGKILL, first_to_fail, 2, tmp_path))
    if first_to_fail == 1:
        assert told.startswith("rank 1 on n1 was killed by SIGKILL (out of memory?); ")
    else:
        assert told.startswith("rank 1 on n1 was last heard 12 s before the others, starting")


def test_a_report_from_before_there_were_causes_is_read() -> None:
    old = {"rank": 1, "exit_code": 70, "message": "gave up", "has_diverged": True}
    assert RankReport.from_json(old) == RankReport(1, 70, "gave up", Cause.ERROR)
    assert RankReport.from_json({"rank": 1, "exi": 70}) is None


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (
            RuntimeError(
                "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:20001"
            ),
            True,
        ),
        (
            RuntimeError(
                "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms for recv "
                "operation"
            ),
            True,
        ),
        (
            dist.DistBackendError(
                "NCCL error in: NCCLUtils.cpp:77, remote process exited or a network error"
            ),
            True,
        ),
        (
            dist.DistBackendError(
                "[Rank 0] Watchdog caught collective operation timeout: ran for 6 ms"
            ),
            True,
        ),
        (dist.DistStoreError("wait timeout after 30000ms, keys: /default_pg/0//cpu//0/0"), True),
        (dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."), True),
        (RuntimeError("torch.compile: a worker aborted"), False),
        (RuntimeError("the request ended with a timeout"), False),
        (
            dist.DistBackendError(
                "NCCL error in: NCCLUtils.cpp:77, invalid usage; the operation was aborted"
            ),
            False,
        ),
        (
            dist.DistNetworkError(
                "The IPv4 network addresses of (no, 20001) cannot be retrieved (gai error: -2)"
            ),
            False,
        ),
    ],
)
def test_a_lost_peer_is_known_by_type_or_by_what_its_library_says(
    error: RuntimeError, is_lost: bool
) -> None:
    assert is_lost_peer(error) == is_lost


class Diverging(LaunchedAttempt):
    """An attempt whose ranks say that the numbers went wrong."""

    def _start(self, environ: Mapping[str, str]) -> None:
        raise TrainingError("the loss is not finite")


def test_an_error_is_told_though_there_is_no_room_for_its_event(tmp_path: Path) -> None:
    (tmp_path / EVENTS_NAME).symlink_to("/dev/full")
    store, lock = Store(tmp_path / "store"), hold(tmp_path / "lock")
    job = Job(Spec("train", 1, {}), store, {}, tmp_path / "out", print, lock)
    place = RankPlacement(launcher="srun", nodes=1, ranks_per_node=1, cpus_per_rank=1, device="cpu")
    with pytest.raises(TrainingError, match="the loss is not finite"):
        Diverging(job, tmp_path, plan_document(), place, tmp_path, 1, None).run({})


@pytest.mark.root
def test_where_a_report_finds_no_room_the_rank_says_it_itself(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "run", "size=1m") as disk:
        with suppress(OSError):
            (disk / "rest").write_bytes(bytes(2_000_000))
        with pytest.raises(DiskFull, match="no room for step 9"), Reporting(disk, 3):
            raise DiskFull("no room for step 9")
        assert "error: rank 3: no room for step 9" in capfd.readouterr().err
        told = str(explain("spawn", 74, 3, 4, disk))
    assert told.startswith(
        "rank 3 ended with code 74, as where the disk is full or a file cannot be written; its "
        "output"
    )
