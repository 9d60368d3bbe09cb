"""The process group: how ranks find each other, agree, and die together."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from pipeline_lib.core.errors import CONTINUES, PeerLost, TrainingError
from pipeline_lib.core.text import shortened

_PR_SET_PDEATHSIG = 1
LET_GO_S = 0.3
PATIENT = "patient"  # describes a group whose ranks wait for disks: its timeout stays as it is
# Between two steps, what may take a rank much longer than its peers: it reads or writes a whole model by itself.
LOADING, LEAVING = "loading", "leaving the result"
# What libraries say when another rank has died or does not answer, where their errors have no type of their own.
# Of gloo/transport/tcp with the errno's text of a socket, of gloo/rendezvous, and of c10d/{ProcessGroupGloo,Work}.cpp.
GLOO_LOST_PEER = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection timed out"),
    *("Timed out waiting", "Application timeout caused pair closure", "Connect timeout", "Wait timeout"),
    *("timed out connecting", "Gloo connectFullMesh failed", "monitoredBarrier", "Operation timed out!"),
)
# Of c10d/{ProcessGroupNCCL,NCCLUtils}.cpp, in a DistBackendError.
NCCL_LOST_PEER = (
    *("collective operation timeout", "timed out in blocking wait", "NCCL communicator was aborted"),
    *("ncclRemoteError", "remote process exited"),
)
# Errors of sockets that no peer has to do with: a port that is taken or not allowed, a host that has no such name.
NO_PEERS_FAULT = ("The server socket has failed", "EADDRINUSE", "gai error: -2")


@dataclass(frozen=True)
class World:
    """This process among its peers. `device` is where its tensors live, `local_size` how many ranks a machine has."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    local_size: int = 1

    @staticmethod
    def from_env(environ: Mapping[str, str], device_kind: str) -> "World":
        """Read RANK, LOCAL_RANK and WORLD_SIZE, which torchrun sets. Raises TrainingError without them."""
        try:
            rank, local_rank, size = (int(environ[key]) for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        except KeyError as error:
            raise TrainingError(f"{error} is not set: a rank is started by `python -m pipeline_lib train`") from error
        device = torch.device("cuda", local_rank) if device_kind == "cuda" else torch.device("cpu")
        return World(rank, local_rank, size, device, int(environ.get("LOCAL_WORLD_SIZE", size)))

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0


def die_with_parent() -> None:
    """Ask Linux to kill this process when its launcher dies, so that no orphan trains on without a lock."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # it died before we asked
            os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def process_group(world: World, timeout_s: float) -> Iterator[None]:
    """Join the process group; a peer that does not answer within `timeout_s` ends the run with PeerLost.

    That is the time for the start; `Timeouts` sets another for the steps.
    """
    if world.device.type == "cuda":
        if world.local_rank >= torch.cuda.device_count():
            raise TrainingError(
                f"cluster.gpus_per_node: rank {world.rank} wants GPU {world.local_rank}, and this machine shows "
                f"{torch.cuda.device_count()}; lower it, or set it to 0 to train on the CPU"
            )
        torch.cuda.set_device(world.device)
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        yield
    except RuntimeError as error:  # DistError is one, and gloo raises it plain
        if not is_lost_peer(error):
            raise
        reason = shortened(str(error).strip().splitlines()[0], 200)
        raise PeerLost(f"rank {world.rank} lost a peer ({reason}); {CONTINUES}") from error
    finally:
        if dist.is_initialized() and sys.exc_info()[0] is None:
            # Gloo's threads let go of what they exchanged a moment later, and need the interpreter for it. Who ends the
            # group holds the interpreter and waits for these threads: too soon, and both wait for ever.
            time.sleep(LET_GO_S)
            dist.destroy_process_group()


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether torch raised `error` since another rank has died or does not answer."""
    text = str(error)
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return not any(part in text for part in NO_PEERS_FAULT)
    known = NCCL_LOST_PEER if isinstance(error, dist.DistBackendError) else GLOO_LOST_PEER
    return any(part in text for part in known)


class Timeouts:
    """An observer that sets how long the ranks wait for each other: long at the start, short between steps.

    Also of groups that torch and DeepSpeed made for themselves, which else wait for as long as torch thinks fit.
    Seen to work for gloo; for NCCL, whose groups take the time when an exchange begins, it has not been run.
    """

    def __init__(self, start_s: float, step_s: float) -> None:
        """`start_s` from `run.start` on, and where a rank loads or leaves its result; `step_s` after each step."""
        self._start_s, self._step_s, self._now_s = start_s, step_s, 0.0

    def observe(self, name: str, fields: dict[str, Any]) -> None:
        """Change them where the events of the run say so."""
        if name == "step.end":
            self._set(self._step_s)
        elif name == "run.start" or (name == "rank.doing" and fields["what"] in (LOADING, LEAVING)):
            self._set(self._start_s)

    def _set(self, timeout_s: float) -> None:
        if timeout_s == self._now_s:
            return
        self._now_s = timeout_s
        for group in list(distributed_c10d._world.pg_map):
            if group.group_desc != PATIENT:
                distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Element-wise sum of `values` over all ranks, in float64: exact for counts up to 2**53."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of the float64 `value` of every rank, on its device; the host does not wait for it.

    Of equal values that were fp32 it is that very value, for any number of ranks.
    """
    dist.all_reduce(value)
    return value / torch.full_like(value, dist.get_world_size())  # by a plain number a GPU would multiply by 1 / n
