"""What is wrong with hosts, told from their facts; and who the hosts are."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.hosts.checks import HostNeeds, problems_of_hosts, token_in, unseen_answers
from pipeline_lib.hosts.facts import HostFacts, HostGpu, facts_of_this_host
from pipeline_lib.hosts.link import connect, is_this_machine
from pipeline_lib.hosts.listing import Host, hosts_of
from pipeline_lib.launch.environment import is_sent
from pipeline_lib.slurm.site import Site

A100 = HostGpu("NVIDIA A100-SXM4-80GB", "570.124.06")
ON_GPUS = HostNeeds(gpus_per_node=2, gpu="a100 80gb", memory_gb=64)
GOOD = HostFacts(
    machine="one",
    python="3.12.4",
    code="0123456789ab",
    packages={"torch": "2.11.0+cu130"},
    gpus=(A100, A100),
    memory_bytes=128_000_000_000,
    memory_available_bytes=120_000_000_000,
    temporary_folder="/tmp",  # noqa: S108 - a name
    temporary_free_bytes=9_000_000_000,
    clock_s=0.0,
    folders={"/share/store": ""},
    addresses={"eth0": ("10.0.0.1",)},
)
OTHER = replace(GOOD, machine="two", addresses={"eth0": ("10.0.0.2",)})


def problems(second: HostFacts, ahead_s: float = 0.0) -> list[str]:
    return problems_of_hosts(
        {"gpu1": GOOD, "gpu2": second}, {"gpu1": 0.0, "gpu2": ahead_s}, ON_GPUS
    )


def test_equal_hosts_have_no_problem() -> None:
    assert problems(OTHER, ahead_s=2.0) == []
    newer = replace(A100, driver="570.86.15")  # of the same branch
    assert problems(replace(OTHER, gpus=(newer, newer))) == []


@pytest.mark.parametrize(
    ("second", "wanted"),
    [
        (replace(OTHER, machine="one"), "gpu1 and gpu2 are one machine"),
        (replace(OTHER, python="3.11.2"), "Python differs: 3.12.4 on gpu1; 3.11.2 on gpu2"),
        (replace(OTHER, packages={}), "torch differs: 2.11.0+cu130 on gpu1; not installed on gpu2"),
        (replace(OTHER, code="ba9876543210"), "this project's code differs"),
        (replace(OTHER, gpus=(A100,)), "gpu2: it has 1 GPU, and cluster.gpus_per_node is 2"),
        (replace(OTHER, gpus=()), "gpu2: it has no GPUs (nvidia-smi shows none)"),
        (
            replace(OTHER, gpus=(replace(A100, name="NVIDIA H200"),) * 2),
            "gpu2: its GPUs are NVIDIA H200, and cluster.gpu",
        ),
        (
            replace(OTHER, gpus=(replace(A100, driver="550.90"),) * 2),
            "GPU driver differs: 570 on gpu1; 550 on",
        ),
        (
            replace(OTHER, memory_available_bytes=20_000_000_000),
            "gpu2: 20.00 GB of its 128.00 GB of memory are free",
        ),
        (replace(OTHER, temporary_free_bytes=1_000), "gpu2: /tmp has"),
        (
            replace(OTHER, folders={"/share/store": "it does not exist there"}),
            "gpu2: /share/store is not shared",
        ),
    ],
)
def test_each_difference_and_lack_is_told(second: HostFacts, wanted: str) -> None:
    assert any(wanted in problem for problem in problems(second)), problems(second)


def test_a_clock_that_is_off_is_told() -> None:
    assert "gpu2: its clock is 90 s behind" in problems(OTHER, ahead_s=-90.0)[0]


def test_facts_come_back_as_they_were_sent(tmp_path: Path) -> None:
    with token_in([tmp_path]) as token:
        found = facts_of_this_host([tmp_path], token, "here")
        assert unseen_answers(tmp_path, token, ["here"]) == []
    assert HostFacts.from_json(found.to_json()) == found
    assert found.folders == {str(tmp_path): ""}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_the_token_is_not_the_same(tmp_path: Path) -> None:
    found = facts_of_this_host([tmp_path, tmp_path / "none"], ".hosts-x", "here")
    assert list(found.folders.values()) == [
        "it is not the same folder there",
        "it does not exist there",
    ]


def test_hosts_come_from_a_list_a_text_or_a_hostfile(tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(
        "# ours\ngpu1 slots=8\n\ngpu2 slots=4 max_slots=8  # the old one\nuser@10.0.0.3\n"
    )
    assert hosts_of(Site(hosts=("gpu1", "10.0.0.2"))) == (Host("gpu1"), Host("10.0.0.2"))
    assert hosts_of(Site(hosts="gpu1, gpu2")) == (Host("gpu1"), Host("gpu2"))
    assert hosts_of(Site(hosts=str(hostfile))) == (
        Host("gpu1", 8),
        Host("gpu2", 4),
        Host("user@10.0.0.3"),
    )
    assert hosts_of(Site()) == ()


def test_all_that_is_wrong_with_a_list_is_told(tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("gpu1 slots=eight\n-oProxyCommand=x\ngpu2\ngpu2\n")
    with pytest.raises(ConfigError) as raised:
        hosts_of(Site(hosts=str(hostfile)))
    text = str(raised.value)
    assert "line 1: 'gpu1 slots=eight'" in text
    assert "'-oProxyCommand=x' is no name" in text
    assert "gpu2 is listed more than once" in text
    with pytest.raises(ConfigError, match="no-hostfile cannot be read"):
        hosts_of(Site(hosts=str(tmp_path / "no-hostfile")))


def test_the_environment_goes_before_the_site_file(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("hosts: [gpu1, gpu2]\ninterface: ib0\n")
    given = {"PIPELINE_SITE": str(site)}
    assert hosts_of(Site.load(given)) == (Host("gpu1"), Host("gpu2"))
    assert hosts_of(Site.load({**given, "PIPELINE_HOSTS": "gpu3,gpu4"})) == (
        Host("gpu3"),
        Host("gpu4"),
    )
    assert Site.load({**given, "PIPELINE_INTERFACE": "eth1"}).interface == "eth1"


def test_neither_paths_nor_secrets_go_to_other_hosts() -> None:
    assert all(
        map(
            is_sent,
            (
                "NCCL_DEBUG",
                "OMP_NUM_THREADS",
                "PYTORCH_ALLOC_CONF",
                "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            ),
        )
    )
    assert not any(
        map(
            is_sent,
            ("PATH", "LD_PRELOAD", "PYTHONPATH", "HF_TOKEN", "WANDB_API_KEY", "XNCCL_DEBUG"),
        )
    )


def test_this_machine_is_known_by_name_and_address() -> None:
    assert is_this_machine("localhost")
    assert not is_this_machine("192.0.2.77")
    assert not is_this_machine("user@localhost")


def test_a_machine_without_ssh_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="gpu2: ssh cannot be run .*install openssh-client"):
        connect("gpu2", ())
