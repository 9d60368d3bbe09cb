"""The doctor looks at this machine for real, and says of made-up ones what is wrong with them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.cli.main import parser
from pipeline_lib.doctor import probes, resources, software
from pipeline_lib.doctor.advice import advice
from pipeline_lib.doctor.facts import UNMEASURED, Facts, Unmeasured, measured
from pipeline_lib.doctor.gpus import links
from pipeline_lib.doctor.report import report

ROOT = Path(__file__).parents[2]
TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-47\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""
NCCL_LOG = """\
gpu1:812:901 [0] NCCL INFO Channel 00/24 :    0   1
gpu1:812:901 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
gpu1:813:902 [1] NCCL INFO Channel 01/0 : 1[d] -> 0[c] via SHM/direct/direct
gpu1:813:902 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
gpu1:813:902 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [receive] via NET/IB/3/GDRDMA
"""


def healthy() -> Facts:
    """A node of two GPUs that has nothing wrong."""
    gpu = {"name": "NVIDIA H100 80GB HBM3", "power_limit_w": 700.0, "power_limit_default_w": 700.0}
    at_work = {
        "sm_clock_mhz": 1755,
        "sm_clock_most_mhz": 1980,
        "temperature_c": 60,
        "slowed_down": [],
    }
    return {
        "versions": {"python": "3.12.3"},
        "out of range": {},
        "processors": {"cores": 96, "allowed": 96},
        "limits": {"shm_bytes": 64 << 30, "open_files": 65536, "open_files_most": 65536},
        "GPUs": {"driver": "570.86", "0": gpu, "1": dict(gpu)},
        "torch": {"version": "2.11.0+cu128", "cuda": "12.8", "gpus": 2, "cuda_works": True},
        "links": {"0-1": "NV18"},
        "disk": {"folder": "/data", "write_bytes_per_s": 2e9},
        "run": {"ranks": 2, "device": "cuda"},
        "exchange": {
            "transports": ["P2P/CUMEM"],
            "gpus_at_work": {"0": at_work, "1": dict(at_work)},
        },
    }


def test_nothing_is_said_of_a_healthy_machine() -> None:
    assert advice(healthy()) == []


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("limits", {"shm_bytes": 64 << 20}, ["is 67 MB", "--shm-size=8g"]),
        ("limits", {"open_files": 1024}, ["1024 files", "ulimit -n 65536"]),
        (
            "exchange",
            {"transports": ["NET/Socket/0"]},
            ["sockets between GPUs", "NCCL_P2P_DISABLE"],
        ),
        ("exchange", {"transports": ["SHM/direct"]}, ["host memory although the GPUs have NVLink"]),
        ("processors", {"cgroup_limit": 1.5}, ["1.5 of the machine's 96 cores for 2 ranks"]),
        ("disk", {"write_bytes_per_s": 40e6}, ["/data is written at 40 MB/s", "PIPELINE_STORE"]),
        (
            "torch",
            {"cuda_works": False, "cuda": "none: a build for the CPU"},
            ["2 GPUs, but torch 2.11.0+cu128 is a"],
        ),
        ("torch", {"cuda_works": False}, ["built for CUDA 12.8, cannot use them", "driver 570.86"]),
        (
            "torch",
            {"no_kernels": "there is no C compiler (gcc)"},
            ["cannot be compiled", "no C compiler (gcc);"],
        ),
        (
            "out of range",
            {"transformers": "4.57.0, wanted >=5.17,<6"},
            ["transformers is 4.57.0, wanted >=5.17,<6"],
        ),
    ],
)
def test_every_rule_says_what_is_wrong_and_what_to_set(
    section: str, change: dict[str, Any], words: list[str]
) -> None:
    facts = healthy()
    facts[section] |= change
    [said] = advice(facts)

    assert all(word in said for word in words), said


def test_a_gpu_that_is_slowed_down_or_locked_is_named() -> None:
    facts = healthy()
    facts["exchange"]["gpus_at_work"]["1"]["slowed_down"] = ["too hot (hardware)"]
    facts["exchange"]["gpus_at_work"]["0"]["sm_clock_mhz"] = 900
    facts["GPUs"]["1"]["power_limit_w"] = 400.0

    low, hot, power = advice(facts)
    assert low.startswith("GPU 0 works at 900 of 1980 MHz")
    assert hot.startswith("GPU 1 is slowed down: too hot (hardware), at 60 °C")
    assert power.startswith("GPU 1 may take 400 W of the usual 700 W")


def test_what_could_not_be_measured_is_not_judged() -> None:
    facts = {name: {UNMEASURED: "it hung"} for name in healthy()}

    assert advice(facts) == []
    assert report(facts, []).count("could not be measured because") == len(facts)


def test_links_and_transports_are_read_from_what_programs_say(tmp_path: Path) -> None:
    assert links(TOPOLOGY) == {"0-1": "NV18", "0-2": "SYS", "1-2": "PHB"}
    assert links("") == {}
    environ: dict[str, str] = {}
    probes.log_nccl(environ, str(tmp_path))
    Path(environ["NCCL_DEBUG_FILE"].replace("%p", "812")).write_text(NCCL_LOG)
    used = ["NET/IB/3/GDRDMA", "NET/Socket/0", "P2P/CUMEM/read", "SHM/direct/direct"]
    assert probes.logged_transports(str(tmp_path)) == used


def test_variables_are_shown_without_secrets() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "WANDB_API_KEY": "abc",
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": "x",
        "HF_TOKEN": "hf_a",
    }

    assert software.variables(environ) == {"NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7"}


def test_a_disk_probe_leaves_nothing_even_if_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it writes has no name, so that the system takes it back when the process ends."""
    seen: list[list[Path]] = []
    monkeypatch.setattr(resources, "WRITE_BYTES", resources.CHUNK_BYTES)
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(list(tmp_path.iterdir())))
    found = resources.disk(tmp_path / "store")

    assert seen == [[]]
    assert found["write_bytes_per_s"] > 0
    assert found["read_bytes_per_s"] > 0


@pytest.mark.parametrize("ranks", ["-1", "0", "two"])
def test_a_number_of_ranks_is_positive(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["doctor", "--ranks", ranks])
    assert (
        f"argument --ranks: {ranks!r} is not a whole number of at least 1"
        in capsys.readouterr().err
    )


def test_a_probe_that_hangs_or_fails_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def reason(code: str, timeout_s: float = 90) -> str:
        (tmp_path / "pipeline_lib.py").write_text(code)
        return str(measured(lambda: probes.probe("gpus", os.environ, timeout_s))[UNMEASURED])

    start_s = time.monotonic()
    assert reason("import time; time.sleep(100)", 1) == "it took longer than 1 s"
    assert time.monotonic() - start_s < 60
    failure = "raise SystemExit('the driver is gone; token=hf_abcdefghijklm')"
    assert reason(failure).startswith("the driver is gone; token=***")
    assert reason("print('no json')") == "the probe gave no answer"


def test_a_missing_program_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unmeasured, match=r"nvidia-smi topo -m: .*No such file"):
        probes.topology(5)


def test_it_examines_this_machine(tmp_path: Path) -> None:
    written = tmp_path / "doctor.json"
    environ = {
        **os.environ,
        "PIPELINE_STORE": str(tmp_path / "store"),
        "HF_TOKEN": "hf_canarycanarycanary",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pipeline_lib", "doctor", "--ranks", "2", "--json", str(written)],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )

    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    assert "canary" not in done.stdout + written.read_text()
    facts = json.loads(written.read_text())["facts"]
    took_too_long = [
        name for name, section in facts.items() if "longer" in section.get(UNMEASURED, "")
    ]
    if "disk" not in took_too_long:
        assert facts["disk"]["write_bytes_per_s"] > 0
    if "torch" not in took_too_long:
        assert facts["versions"]["torch"] == facts["torch"]["version"]
    if "exchange" not in took_too_long and facts["run"]["device"] == "cpu":
        assert facts["exchange"]["all_reduce.1048576"] > 0
        assert facts["exchange"]["all_gather.1048576"] > 0
        assert facts["exchange"]["all_to_all.1048576"] > 0
