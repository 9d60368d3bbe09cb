"""Real calibrations of this machine, from the command line, and when something ends early."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline_lib.calibrate.links import group_of_node, link_rates, sent_by_node
from pipeline_lib.calibrate.run import Calibration, launched_environment, local_environments
from pipeline_lib.config.load import load_config
from pipeline_lib.config.schema import Cluster
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.store import Store
from pipeline_lib.doctor.exchange import Collective
from pipeline_lib.launch.environment import ALLOCATOR
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.known import geometry_of, workload_of
from pipeline_lib.plan.machine import End, Ranks
from pipeline_lib.plan.measured import read_measured
from pipeline_lib.plan.traffic import Exchange, Kind, duration_of
from pipeline_lib.plan.workload import assumed_workload
from pipeline_lib.train.dist import World, process_group
from tests.processes import free_port, wait_for
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config" / "config.yaml"
KEYS = {
    *(
        "schema",
        "measured_at",
        "host",
        "gpu",
        "gpu_memory_bytes",
        "ranks",
        "nodes",
        "torch",
        "model",
        "precision",
    ),
    *("rates", "parts"),
}
RATES = {"matmul_flop_s", "attention_flop_s", "memory_bytes_s", "host_bytes_s", "disk_bytes_s"}


def start(
    tmp_path: Path, *arguments: str, changes: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    """`calibrate` for the demo's model on CPU ranks, also where there are GPUs."""
    environ = {**os.environ, "PIPELINE_STORE": str(tmp_path / "store"), "CUDA_VISIBLE_DEVICES": ""}
    environ |= {"PYTHONPATH": str(ROOT), **(changes or {})}
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline_lib", "calibrate", str(CONFIG), *arguments],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Where tests run in the background of a shell, children ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def output_of(process: "subprocess.Popen[str]") -> str:
    """What it printed, once it has ended well."""
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    return said


def ranks_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The processes that measure."""
    found = []
    for child in psutil.Process(process.pid).children():
        try:
            if "measure" in child.cmdline():
                found.append(child)
        except psutil.Error:  # it has ended meanwhile
            continue
    return found


def check(found: dict[str, Any], rates: set[str]) -> None:
    """It is what the plan reads, and nothing in it is empty."""
    assert set(found) == KEYS
    assert set(found["rates"]) == rates
    assert all(0 < rate["low"] <= rate["value"] <= rate["high"] for rate in found["rates"].values())
    read = read_measured(found)
    assert read.precision == "fp32"
    assert read.gpu is None
    layer = next(part for part in read.parts if part.part == "layer")
    assert layer.variant == "ddp/full/none"
    assert layer.shape == (2048, 128, 384, 4, 2, 32, 0, 0, 0)
    assert layer.document_tokens == assumed_workload(load_config(CONFIG)).document_tokens
    assert layer.supervised_fraction == pytest.approx(0.5, abs=0.05)
    assert layer.backward.device_s(1024) > 0
    assert layer.forward.host_s + layer.backward.host_s > 0


@pytest.mark.measures
def test_it_measures_two_ranks_of_this_machine(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    out = tmp_path / "here" / "cluster.json"
    said = output_of(start(tmp_path, "--ranks", "2", "--out", str(out)))
    found = json.loads(out.read_text())
    check(found, RATES | {"in_node_bytes_s", "in_node_latency_s"})
    assert (found["schema"], found["ranks"], found["nodes"], found["model"]) == (1, 2, 1, "tiny")
    assert found["host"] == "2 CPU ranks of 1 thread"
    assert {part["variant"] for part in found["parts"]} <= {
        *("ddp/full/none", "fsdp/full/none", "fsdp/full/full", "ddp/full/full")
    }
    assert f"cluster: {{measured: {out}}}" in said
    assert "products of a layer" in said and "FLOP/s" in said
    assert f"  git add -- {out} && git commit -m Calibration -- {out}\n" in said
    assert list(out.parent.iterdir()) == [out]
    as_of_a_gpu = {**found, "gpu": "AMD Instinct MI300X", "gpu_memory_bytes": 192 * 10**9}
    machine = machine_of(Cluster(gpus_per_node=2), "fp32", read_measured(as_of_a_gpu))
    assert machine is not None, (
        "what calibrate measures is enough to plan for a GPU outside the catalogue"
    )
    assert 0 < machine.speeds().pointwise_bytes_s < machine.speeds().memory_bytes_s


@pytest.mark.measures
@pytest.mark.slow
def test_two_nodes_that_a_launcher_started_measure_what_is_between_them(tmp_path: Path) -> None:
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    outs = [tmp_path / "first.json", tmp_path / "second.json"]
    processes = [
        start(tmp_path, "--out", str(out), changes={**place, "RANK": str(rank)})
        for rank, out in enumerate(outs)
    ]
    said = [output_of(process) for process in processes]
    found = json.loads(outs[0].read_text())
    check(found, RATES | {"between_bytes_s", "between_latency_s"})
    assert (found["ranks"], found["nodes"], found["host"]) == (
        2,
        2,
        "2 nodes of 1 CPU rank of 1 thread",
    )
    assert "sent between nodes" in said[0]
    besides_the_load = re.sub(
        r"^warning: .* processes are at work on this machine, .*\n", "", said[1]
    )
    assert besides_the_load == ""
    assert not outs[1].exists()


def measure_links(environ: Mapping[str, str]) -> dict[str, list[float]]:
    world = World.from_env({**environ, "LOCAL_WORLD_SIZE": "2"}, "cpu")
    with process_group(world, 60):
        return link_rates(world, group_of_node(world))


def test_nodes_of_two_ranks_have_links_of_both_kinds() -> None:
    found = run_ranks(measure_links, 4)
    for rates in found.values():
        assert set(rates) == {
            "in_node_bytes_s",
            "in_node_latency_s",
            "between_bytes_s",
            "between_latency_s",
        }
        assert all(value > 0 for values in rates.values() for value in values)


def test_what_a_node_sends_is_counted_as_the_plan_does() -> None:
    """Else the plan would charge an exchange for more than the rate was measured with."""
    ranks, nodes, size_bytes = 8, 2, 1000
    machine = machine_of(
        Cluster(nodes=nodes, gpus_per_node=4, gpu="h100", internode_gbit_s=8), "bf16", None
    )
    assert machine is not None
    placed = Ranks(ranks, ranks // nodes)
    kinds: dict[str, Kind] = {"all_reduce": "all-reduce", "all_gather": "all-gather"}
    for kind, name in kinds.items():
        exchange = Exchange("x", "update", name, "all", size_bytes, 1, False, False)
        planned = duration_of(exchange, Train(), placed, machine.speeds(), End.EXPECTED)
        assert sent_by_node(Collective(kind, size_bytes, ranks, 1.0), nodes) == planned.sent_bytes


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_it_with_its_name(tmp_path: Path) -> None:
    out = tmp_path / "cluster.json"
    process = start(tmp_path, "--ranks", "2", "--out", str(out))
    wait_for(lambda: len(ranks_of(process)) == 2, "the start of the ranks")
    ranks = ranks_of(process)
    time.sleep(1)
    ranks[1].kill()
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 1
    assert re.search(r"error: calibrate: .*process 1 was ended by signal 9; .*doctor", said), said
    assert not out.exists()
    assert not psutil.wait_procs(ranks, timeout=60)[1]


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    process = start(tmp_path, "--ranks", "2")
    wait_for(lambda: len(ranks_of(process)) == 2, "the start of the ranks")
    ranks = ranks_of(process)
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(ranks, timeout=120)[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_is_stopped_leaves_nothing_behind_and_says_so(
    tmp_path: Path, number: signal.Signals
) -> None:
    out, folders = tmp_path / "cluster.json", tmp_path / "tmp"
    folders.mkdir()
    process = start(tmp_path, "--ranks", "2", "--out", str(out), changes={"TMPDIR": str(folders)})
    wait_for(lambda: len(ranks_of(process)) == 2, "the start of the ranks")
    assert list(folders.glob("calibrate-*"))
    ranks = ranks_of(process)
    process.send_signal(number)
    said, _ = process.communicate(timeout=400)
    assert (process.returncode, said.splitlines()[-1]) == (130, "stopped; nothing was written")
    assert list(folders.iterdir()) == []
    assert not out.exists()
    assert not psutil.wait_procs(ranks, timeout=60)[1]


@pytest.fixture
def calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calibration:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config, store = load_config(CONFIG), Store(tmp_path / "store")
    return Calibration.of(
        config, geometry_of(config, store), workload_of(config, store), 2, store.root, os.environ
    )


def test_ranks_on_cpus_have_the_allocator_of_the_training(calibration: Calibration) -> None:
    assert len(calibration.environs) == 2
    assert all(ALLOCATOR.items() <= environ.items() for environ in calibration.environs)


@pytest.mark.measures
def test_it_is_given_up_after_its_deadline(calibration: Calibration) -> None:
    start_s = time.monotonic()
    with pytest.raises(
        PipelineError, match=r"a rank did not measure: it took longer than 1 s; .*doctor"
    ):
        replace(calibration, deadline_s=1.0).measure(lambda _: None)
    assert time.monotonic() - start_s < 6
    alive = [
        child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE
    ]
    assert not [child for child in alive if "measure" in child.cmdline()]


def test_only_a_launcher_of_several_ranks_gives_a_process_its_place() -> None:
    batch_script = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "16",
        "SLURM_JOB_ID": "7",
        "SLURM_LOCALID": "0",
    }
    task = {**batch_script, "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "16"}
    task |= {
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
        "SLURM_STEP_NODELIST": "gpu[1-2]",
    }
    torchrun = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    assert launched_environment({}) is None
    assert launched_environment(batch_script) is None
    assert launched_environment({**torchrun, "RANK": "0", "WORLD_SIZE": "1"}) is None
    alone = launched_environment(torchrun)
    assert alone is not None
    assert alone == {**torchrun, "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    placed = launched_environment(task)
    assert placed is not None
    wanted = {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu1",
    }
    assert placed.items() >= wanted.items()


def test_what_the_user_set_reaches_the_ranks() -> None:
    environs = local_environments(
        {"NCCL_NVLS_ENABLE": "0", "RANK": "5", "TORCHELASTIC_RUN_ID": "x"}, 2
    )
    assert [environ["RANK"] for environ in environs] == ["0", "1"]
    assert all(
        environ["NCCL_NVLS_ENABLE"] == "0" and "TORCHELASTIC_RUN_ID" not in environ
        for environ in environs
    )
