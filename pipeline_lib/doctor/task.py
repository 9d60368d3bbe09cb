"""One of the doctor's tasks on several nodes, started by srun or agents; it reports as it goes.

There is one per rank. A task that fails reports the failure and exits normally, since the results
of the others are still wanted.
"""

import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.text import shortened
from pipeline_lib.doctor.exchange import (
    MEET_S,
    ExchangeRank,
    clock_offsets,
    gpu_at_work,
    measure_all,
    measure_pairs,
)
from pipeline_lib.doctor.messages import lines_of
from pipeline_lib.doctor.node_facts import node_facts
from pipeline_lib.doctor.probes import log_nccl, logged_transports
from pipeline_lib.launch.environment import (
    HOST_VARIABLE,
    INTERFACE_VARIABLES,
    PLACE_IN_WORLD,
    choose_interface,
    dist_environment,
)
from pipeline_lib.launch.heartbeat import host_of
from pipeline_lib.launch.rendezvous import Rendezvous
from pipeline_lib.slurm.job import SlurmError, node_address

OPERATION_S = 60.0  # timeout of a send or collective

Tell = Callable[[dict[str, Any]], None]


def run_task(
    environ: MutableMapping[str, str],
    share: Path,
    token: str,
    device: str,
    say: Callable[[str], None],
) -> None:
    """Measure the node, as its first task, then measure with the other tasks.

    `environ` is modified for torch.
    """
    is_slurm = HOST_VARIABLE not in environ
    # of another launcher in the submitting environment: SLURM decides
    if is_slurm:
        for name in PLACE_IN_WORLD:
            environ.pop(name, None)
    placed = dist_environment(environ)
    rank = int(placed["RANK"])
    node = host_of(environ)
    numbers = iter(range(1_000_000))

    def tell(message: dict[str, Any]) -> None:
        for line in lines_of(str(rank), next(numbers), {"node": node, "rank": rank, **message}):
            say(line)

    try:
        if placed["LOCAL_RANK"] == "0":
            job = environ["SLURM_JOB_ID"] if is_slurm else ""
            number = environ["SLURM_NODEID"] if is_slurm else placed["GROUP_RANK"]
            tell({"job": job, "number": int(number)})
            tell({"facts": node_facts(share, token, environ)})
        _meet_others(environ, placed, device, tell)
    except (
        PipelineError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # torch raises RuntimeErrors
        tell({"failed": shortened((str(error).strip() or repr(error)).splitlines()[0], 300)})


def _meet_others(
    environ: MutableMapping[str, str], placed: Mapping[str, str], device: str, tell: Tell
) -> None:
    rank = int(placed["RANK"])
    local_rank = int(placed["LOCAL_RANK"])
    address = placed["MASTER_ADDR"]
    world = int(placed["WORLD_SIZE"])
    if HOST_VARIABLE not in environ:
        with suppress(SlurmError):
            address = node_address(address)  # the node's name may be unknown to other nodes
    choose_interface(environ, address)
    rendezvous = Rendezvous.from_env({**placed, **environ, "MASTER_ADDR": address})
    store = rendezvous.store(rank, world, MEET_S, waits=False)
    leaders = tuple(range(0, world, int(placed["LOCAL_WORLD_SIZE"])))
    here = ExchangeRank(rank, world, leaders, torch.device("cpu"), store)
    if device == "cuda" and _has_each_a_gpu(here, local_rank, tell):
        here = replace(here, device=torch.device("cuda", local_rank))
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        if here.device.type == "cuda":
            torch.cuda.set_device(here.device)
            log_nccl(environ, folder)
        _measure(here, tell)
        if here.leads:
            interface = environ.get(INTERFACE_VARIABLES[1], "").removeprefix("=")
            tell({"interface": interface, "transports": logged_transports(folder)})
    if here.device.type == "cuda":
        tell({"local_rank": local_rank, "gpu": gpu_at_work(here.device)})
    here.leave()


def _has_each_a_gpu(here: ExchangeRank, local_rank: int, tell: Tell) -> bool:
    has_gpu = torch.cuda.is_available() and local_rank < torch.cuda.device_count()
    if not has_gpu:
        tell({"no_gpu": local_rank, "sees": torch.cuda.device_count()})
    here.store.add("can", int(has_gpu))
    here.meet("devices", here.world)
    return int(here.store.add("can", 0)) == here.world


def _measure(here: ExchangeRank, tell: Tell) -> None:
    """Measure the clocks, the pairs of nodes, and all ranks at once."""
    here.meet("start", here.world)
    if here.leads:
        tell({"device": here.device.type})
        for node, ahead_s in clock_offsets(here).items():
            tell({"clock": node, "ahead_s": ahead_s})
    backend = "cpu:gloo,cuda:nccl" if here.device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=OPERATION_S)
    dist.init_process_group(
        backend, store=here.store, rank=here.rank, world_size=here.world, timeout=timeout
    )
    if here.leads:
        measure_pairs(here, tell)
    here.meet("pairs", here.world, MEET_S + 10 * len(here.leaders))
    if here.world > 1:
        measure_all(here, tell)
    dist.destroy_process_group()
