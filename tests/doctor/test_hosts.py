"""The doctor on hosts without a scheduler: two machines joined by ssh over a slow cable."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.load import load_config
from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.errors import ConfigError, PipelineError
from pipeline_lib.core.store import Store
from pipeline_lib.doctor.hosts import HostsExamination, place_of
from pipeline_lib.doctor.node_advice import to_set, together
from pipeline_lib.doctor.nodes import Findings
from pipeline_lib.doctor.nodes_report import nodes_report
from pipeline_lib.hosts.facts import HostFacts, HostGpu, facts_of_this_host
from pipeline_lib.hosts.listing import Host, read_hosts
from pipeline_lib.launch.allocation import HERE
from pipeline_lib.launch.place import HostOrder, ProbeArguments, RankArguments, RankPlacement
from pipeline_lib.plan.one_node import compare_with_one_node
from pipeline_lib.slurm.site import Site
from tests.hosts.machines import Machine, machines
from tests.hosts.needs import needs_machines
from tests.processes import wait_for

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600
DOCTOR = (sys.executable, "-m", "pipeline_lib", "doctor", "--hosts")
TASK = "-m pipeline_lib probe node"
LINK_MBIT = 200
CONFIG = """\
experiment: doctor
model: {source: %s}
data: {train: [{source: pydoc}]}
tokenize: {max_tokens: 256}
shard: {block_tokens: 256}
cluster: {nodes: 2, %s}
train: {strategy: ddp, global_batch_tokens: 512}
"""


def written(folder: Path, model: str = "tiny", cluster: str = "cpu_ranks: 1") -> Path:
    path = folder / "config.yaml"
    path.write_text(CONFIG % (model, cluster))
    return path


# Without other machines: arguments, orders, arithmetic.


def refused(folder: Path, *options: str, **variables: str) -> str:
    """What the command says as it refuses its arguments."""
    environ = {
        "PATH": str(folder),
        "HOME": str(folder),
        "PIPELINE_STORE": str(folder / "store"),
        **variables,
    }
    command = [sys.executable, "-m", "pipeline_lib", "doctor", *options]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert not (folder / "store").exists()
    return done.stderr


@pytest.mark.parametrize("option", [("--profile", "slurm"), ("--nodes", "2"), ("--ranks", "2")])
def test_other_ways_to_choose_machines_are_refused_beside_hosts(
    tmp_path: Path, option: tuple[str, str]
) -> None:
    said = refused(tmp_path, "--hosts", "a,b", *option)

    assert said.startswith(
        f"error: doctor --hosts: 1 problem\n  - cannot be combined with {option[0]}"
    )


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        (["--hosts"], {}, "needs two hosts or more, and has none"),
        (["--hosts", "a"], {}, "needs two hosts or more, and has a:"),
        (["--hosts"], {"PIPELINE_HOSTS": "a"}, "needs two hosts or more, and has a:"),
        (["--hosts", "a,a"], {}, "doctor --hosts: 1 problem\n  - a is listed more than once"),
        (
            ["--hosts", "a,-oProxyCommand=x"],
            {},
            "'-oProxyCommand=x' is no name or address of a host",
        ),
    ],
)
def test_lists_that_name_no_two_hosts_are_refused(
    tmp_path: Path, options: list[str], variables: dict[str, str], words: str
) -> None:
    assert words in refused(tmp_path, *options, **variables)


def test_a_config_after_the_bare_option_is_no_host(tmp_path: Path) -> None:
    said = refused(tmp_path, "--hosts", str(tmp_path / "absent.yaml"), PIPELINE_HOSTS="a,b")

    assert "absent.yaml" in said
    assert "is no name or address" not in said


def test_hosts_are_names_or_a_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("a slots=2\nb slots=2\n")

    assert read_hosts("a, b", "here") == (Host("a"), Host("b"))
    assert read_hosts(str(tmp_path / "hostfile"), "here") == (Host("a", 2), Host("b", 2))


RANK = RankArguments("/s/spec.json", "/s/plan", "/s/out", 1, "lock", None)
PROBE = ProbeArguments("/s", ".hosts-7", "cpu")
PLACE = RankPlacement("spawn", 2, 2, 1, "cpu")


def order(program: RankArguments | ProbeArguments, tmp_path: Path) -> dict[str, Any]:
    """What an agent receives."""
    environ = {
        "PIPELINE_SITE": "",
        "HOME": str(tmp_path),
        "NCCL_DEBUG": "INFO",
        "MASTER_PORT": "20001",
        "TOKEN": "x",
    }
    common = HostOrder.common(PLACE, environ, tmp_path, program)
    own = {"node_rank": 1, "host": "b", "interface": "eth0"}
    return dict(json.loads(json.dumps({**common, **own})))


@pytest.mark.parametrize("program", [RANK, PROBE])
def test_an_order_names_its_program_by_settings(
    tmp_path: Path, program: RankArguments | ProbeArguments
) -> None:
    made = HostOrder.from_json(order(program, tmp_path), lambda name: name != "MASTER_PORT")

    assert made.program == program
    assert made.environ == {"NCCL_DEBUG": "INFO"}
    command = made.command()
    assert command[1:4] == ["-m", "pipeline_lib", "node"]
    assert command[command.index("--") + 1 :] == program.to_list()
    assert str(made.program.mark) in command


@pytest.mark.parametrize(
    "program",
    [
        {"name": "sh", "store": "/s", "token": "t", "device": "cpu"},
        {"name": "probe", "store": "/s", "token": "t", "device": "cpu", "command": "reboot"},
        {"store": "/s", "token": "t", "device": "cpu"},
        "probe",
    ],
)
def test_an_agent_starts_no_other_program(tmp_path: Path, program: Any) -> None:
    with pytest.raises(PipelineError, match="the order to start ranks"):
        HostOrder.from_json({**order(PROBE, tmp_path), "program": program}, lambda _: True)


def test_without_a_config_all_gpus_that_each_host_has_take_part(tmp_path: Path) -> None:
    here = facts_of_this_host([], "", "")
    of_gpus = [
        HostFacts(**{**vars(here), "gpus": (HostGpu("H100", "570.1"),) * count}) for count in (8, 4)
    ]
    without = HostFacts(**{**vars(here), "gpus": ()})

    found = place_of(None, dict(zip("ab", of_gpus, strict=True)), HERE)
    assert (found.nodes, found.ranks_per_node, found.device) == (2, 4, "cuda")
    found = place_of(None, {"a": of_gpus[0], "b": without}, HERE)
    assert (found.ranks_per_node, found.device) == (1, "cpu")
    found = place_of(Cluster(nodes=2, cpu_ranks=3), {"a": of_gpus[0], "b": of_gpus[0]}, HERE)
    assert (found.ranks_per_node, found.device) == (3, "cpu")


def test_the_report_of_hosts_does_not_speak_of_slurm() -> None:
    between = {"between nodes": {"interface": "eth1"}, "versions": {"python": "3.11"}}
    found = Findings(
        2, nodes={"a": between, "b": between}, numbers={0: "a", 1: "b"}, said=["b: no torch"]
    )
    report = nodes_report(found, together(found), "one node alone would be faster")

    assert "job" not in report
    assert "SLURM" not in report
    assert "the hosts say:\n      b: no torch" in report
    assert "one node alone would be faster\nwhat is wrong" in report
    assert any(
        "`interface: eth1` in the site file, or PIPELINE_INTERFACE" in line
        for line in to_set(found)
    )


def compared(path: Path, gbit_s: float, nodes: int = 2) -> str:
    config = load_config(path, ["cluster.internode_gbit_s=1"])
    return compare_with_one_node(config, nodes, gbit_s, Store(path.parent / "store"))


def test_one_node_is_said_to_be_faster_than_a_slow_network_only(tmp_path: Path) -> None:
    config = written(tmp_path)

    assert compared(config, 0.01).startswith("one node alone would be ")
    assert "on all 2 at 0.01 Gbit/s" in compared(config, 0.01)
    assert "set cluster.nodes: 1" in compared(config, 0.01)
    assert compared(config, 10).startswith("all 2 nodes are 1.")


@pytest.mark.parametrize(
    ("model", "cluster", "nodes", "words"),
    [
        (
            "huggingface, name: nobody/nothing",
            "cpu_ranks: 1",
            2,
            "the sizes of nobody/nothing are not known here",
        ),
        ("tiny", "gpus_per_node: 1", 2, "set cluster.gpu"),
        ("tiny", "cpu_ranks: 1", 3, "on 3 nodes, train.global_batch_tokens"),
    ],
)
def test_what_keeps_the_comparison_from_being_made_is_said(
    tmp_path: Path, model: str, cluster: str, nodes: int, words: str
) -> None:
    said = compared(written(tmp_path, model, cluster), 1, nodes)

    assert said.startswith("whether one node alone would be faster cannot be told: ")
    assert words in said


@pytest.mark.slow
def test_the_tasks_run_under_an_agent_of_this_machine(tmp_path: Path) -> None:
    """Two ranks of one node: a store that their launcher has, and no nodes to measure between."""
    store, said = Store(tmp_path / "store"), list[str]()
    examination = HostsExamination(
        [Host("localhost")], Cluster(cpu_ranks=2), store, Site(), os.environ
    )
    found = examination.findings(said.append)

    assert found.failures == {}
    assert found.numbers == {0: "localhost"}
    assert found.nodes["localhost"]["store"]["reads_and_writes"] is True
    assert found.pairs == []
    assert sorted(found.all_reduce) == [64 << 10, 1 << 20, 16 << 20]
    assert found.sent_gbit_s is None
    assert "doctor: measuring on localhost" in said
    assert list(store.root.glob(".hosts-*")) == []


@needs_machines
@pytest.mark.slow
def test_a_host_alone_needs_no_network(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; from tests.doctor.test_hosts import *; store = "
        f"Store(Path({str(tmp_path)!r}) / 'store'); host = HostsExamination([Host('localhost')], "
        "Cluster(cpu_ranks=2), store, Site(), os.environ); print(host.findings(lambda _: "
        "None).numbers)"
    )
    offline = [
        "unshare",
        "--net",
        "sh",
        "-c",
        'ip link set lo up && exec "$@"',
        "sh",
        sys.executable,
        "-c",
        code,
    ]
    assert (
        subprocess.run(offline, cwd=ROOT, check=True, text=True, capture_output=True).stdout
        == "{0: 'localhost'}\n"
    )


# On two machines, with a cable of LINK_MBIT between them.


class Doctor:
    """The command on m1 of `pair`, in a folder that both share."""

    def __init__(self, pair: list[Machine], folder: Path) -> None:
        """For machines that are on."""
        self.pair, self.folder, self.store = pair, folder, folder / "store"
        self._environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT)}
        self._environ |= {"PIPELINE_STORE": str(self.store)}

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run it to its end; return its exit code, and what it says."""
        done = self.pair[0].run(
            *DOCTOR,
            *arguments,
            cwd=self.folder,
            environ=self._environ,
            check=False,
            timeout_s=DEADLINE_S,
        )
        return done.returncode, done.stdout

    @contextmanager
    def measuring(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Have it running during the block, once both machines run tasks; it writes to `said`."""
        started = self.pair[0].start(
            *DOCTOR, "m1,m2", cwd=self.folder, environ=self._environ, log=self._log
        )
        try:
            wait_for(
                lambda: all(machine.processes(TASK) for machine in self.pair),
                "the tasks on both hosts",
            )
            yield started
        finally:
            for process in self.pair[0].processes(" ".join(DOCTOR[1:])):
                process.kill()
            started.wait(DEADLINE_S)

    @property
    def _log(self) -> Path:
        return self.folder / "doctor.log"

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def is_gone(self) -> bool:
        """Whether it and all that it has started have ended, on both machines."""
        return not any(machine.processes("pipeline_lib") for machine in self.pair)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    with machines(tmp_path_factory.mktemp("machines"), 2) as made:
        made[1].limit(LINK_MBIT)
        yield made


@pytest.fixture
def doctor(pair: list[Machine], tmp_path: Path) -> Doctor:
    return Doctor(pair, tmp_path)


@pytest.mark.measures
@pytest.mark.slow
@pytest.mark.root
@needs_machines
def test_it_measures_between_hosts_and_says_that_one_is_faster(
    doctor: Doctor, tmp_path: Path
) -> None:
    path = tmp_path / "doctor.json"
    code, said = doctor.run("m1,m2", "--json", str(path), str(written(tmp_path)))

    assert code == 0, said
    content = json.loads(path.read_text())
    facts = content["facts"]
    assert sorted(facts["nodes"]) == ["m1", "m2"]
    assert facts["failures"] == {}
    assert facts["unseen"] == []
    [pair] = facts["pairs"]
    # A busy machine fills no cable; bytes taken for bits would be 8 times off.
    for rate in (pair["there"], pair["back"]):
        assert LINK_MBIT / 4 < rate * 8 / 1e6 < LINK_MBIT * 1.15
    [setting] = [line for line in said.splitlines() if "cluster.internode_gbit_s: " in line]
    assert LINK_MBIT / 4 < float(setting.split()[2]) * 1000 < LINK_MBIT * 1.15
    assert content["one_node"].startswith("one node alone would be ")
    assert content["one_node"] in said
    assert abs(facts["clocks"]["m2"]) < 1
    assert doctor.is_gone
    assert list(doctor.store.glob(".hosts-*")) == []


@pytest.mark.measures
@pytest.mark.slow
@pytest.mark.root
@needs_machines
def test_without_a_config_the_bandwidth_is_said_and_no_more(doctor: Doctor) -> None:
    code, said = doctor.run("m1,m2")

    assert code == 0, said
    assert re.search(r"cluster\.internode_gbit_s: 0\.[12]", said)
    assert "interface between the nodes: eth0" in said
    assert "one node" not in said


@pytest.mark.slow
@pytest.mark.root
@needs_machines
def test_all_problems_of_all_hosts_are_said_before_anything_is_measured(
    doctor: Doctor, tmp_path: Path
) -> None:
    config = written(tmp_path, cluster="gpus_per_node: 1, gpu: h100")
    code, said = doctor.run("m1,m2,m9", str(config))

    assert code == 2
    assert "error: the hosts: 3 problems" in said
    assert "m9: ssh: " in said
    for host in ("m1", "m2"):
        assert (
            f"{host}: it has no GPUs (nvidia-smi shows none), and cluster.gpus_per_node is 1"
            in said
        )
    assert "measur" not in said
    assert doctor.is_gone


@pytest.mark.slow
@pytest.mark.root
@needs_machines
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, 128 + signal.SIGKILL)],
)
def test_nothing_is_left_on_any_host(doctor: Doctor, number: signal.Signals, code: int) -> None:
    with doctor.measuring() as started:
        [process] = doctor.pair[0].processes(" ".join(DOCTOR[1:]))
        process.send_signal(number)
        assert started.wait(DEADLINE_S) in (code, -number)
    wait_for(lambda: doctor.is_gone, "the end of all processes on both hosts")
    assert number == signal.SIGKILL or list(doctor.store.glob(".hosts-*")) == []


@pytest.mark.slow
@pytest.mark.root
@needs_machines
def test_a_host_that_is_lost_while_it_measures_is_named_first(doctor: Doctor) -> None:
    with doctor.measuring() as started:
        [agent] = doctor.pair[1].processes("-m pipeline_lib agent")
        agent.kill()
        assert started.wait(DEADLINE_S) in (0, 75)
    wait_for(lambda: doctor.is_gone, "the end of all processes on both hosts")
    problems = re.findall(r"^  (?:- )?(m\d: .*)", doctor.said, re.MULTILINE)
    assert problems[0].startswith("m2: its agent was killed"), doctor.said


def test_hosts_of_one_machine_are_refused(tmp_path: Path) -> None:
    examination = HostsExamination(
        [Host("localhost"), Host("127.0.0.1")], None, Store(tmp_path / "store"), Site(), os.environ
    )

    with pytest.raises(
        ConfigError, match=r"localhost and 127\.0\.0\.1 are one machine: list each machine once"
    ):
        examination.findings(lambda _: None)
    assert list((tmp_path / "store").glob(".hosts-*")) == []
