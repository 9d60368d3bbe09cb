"""The process group: identity of ranks, timeouts, detection of lost peers, and reductions."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from pipeline_lib.core.errors import CONTINUES, PeerLost, TrainingError
from pipeline_lib.core.events import EventName
from pipeline_lib.core.text import shortened
from pipeline_lib.launch.rendezvous import Rendezvous

LET_GO_S = 0.3
# description of a group whose ranks wait for disks: its timeout is never changed
PATIENT = "patient"
# Activities in which a rank may take much longer than its peers: it reads or writes a whole model
# by itself.
LOADING, LEAVING = "loading", "leaving the result"
# Messages of errors for a rank that died or does not answer, where the errors have no type of their
# own. Sources: gloo/transport/tcp with the text of a socket's errno, gloo/rendezvous, and
# c10d/{ProcessGroupGloo,Work}.cpp.
GLOO_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection timed out",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "Connect timeout",
    "Wait timeout",
    "timed out connecting",
    "Gloo connectFullMesh failed",
    "monitoredBarrier",
    "Operation timed out!",
)
# From c10d/{ProcessGroupNCCL,NCCLUtils}.cpp, in a DistBackendError.
NCCL_LOST_PEER = (
    "collective operation timeout",
    "timed out in blocking wait",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "remote process exited",
)
NO_PEERS_FAULT = (
    "gai error: -2",
)  # socket errors that no peer causes: a host name that does not exist


@dataclass(frozen=True)
class World:
    """This process among its peers.

    `device` holds its tensors, `local_size` is the number of ranks on a machine.
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device
    local_size: int = 1
    rendezvous: Rendezvous = Rendezvous()

    @staticmethod
    def from_env(environ: Mapping[str, str], device_kind: str) -> "World":
        """Read RANK, LOCAL_RANK and WORLD_SIZE, which the launcher sets.

        Raises TrainingError without them.
        """
        try:
            rank = int(environ["RANK"])
            local_rank = int(environ["LOCAL_RANK"])
            size = int(environ["WORLD_SIZE"])
        except KeyError as error:
            raise TrainingError(
                f"{error} is not set: a rank is started by `python -m pipeline_lib train`"
            ) from error
        device = torch.device("cuda", local_rank) if device_kind == "cuda" else torch.device("cpu")
        local_size = int(environ.get("LOCAL_WORLD_SIZE", size))
        return World(rank, local_rank, size, device, local_size, Rendezvous.from_env(environ))

    @property
    def is_first(self) -> bool:
        """Return whether this is the rank that prints and writes for all."""
        return self.rank == 0


@contextlib.contextmanager
def process_group(world: World, timeout_s: float) -> Iterator[None]:
    """Join the process group. Raises PeerLost if a peer dies or does not answer within `timeout_s`.

    That is the timeout of the start; `Timeouts` sets another one for the steps. Raises
    TrainingError if the rank's GPU does not exist, or the launcher has not said where the ranks
    meet.
    """
    if world.device.type == "cuda":
        if world.local_rank >= torch.cuda.device_count():
            raise TrainingError(
                f"cluster.gpus_per_node: rank {world.rank} wants GPU {world.local_rank}, and this "
                "machine shows "
                f"{torch.cuda.device_count()}; lower it, or set it to 0 to train on the CPU"
            )
        torch.cuda.set_device(world.device)
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    try:
        store = _store_of(world, timeout_s)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
        )
        yield
    except RuntimeError as error:  # DistError is a subclass, and gloo raises it plain
        if not is_lost_peer(error):
            raise
        reason = shortened(str(error).strip().splitlines()[0], 200)
        raise PeerLost(f"rank {world.rank} lost a peer ({reason}); {CONTINUES}") from error
    finally:
        if dist.is_initialized() and sys.exc_info()[0] is None:
            # Gloo's threads release exchanged tensors a moment later, and need the GIL for it.
            # Destroying the group holds the GIL and waits for these threads: too early, it
            # deadlocks.
            time.sleep(LET_GO_S)
            dist.destroy_process_group()


def _store_of(world: World, timeout_s: float) -> Any:
    """Return the torch.distributed.Store where the ranks meet; a single rank has its own."""
    if world.size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    return world.rendezvous.store(world.rank, world.size, timeout_s)


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether torch raised `error` because another rank has died or does not answer."""
    text = str(error)
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return not any(part in text for part in NO_PEERS_FAULT)
    known = NCCL_LOST_PEER if isinstance(error, dist.DistBackendError) else GLOO_LOST_PEER
    return any(part in text for part in known)


class Timeouts:
    """An observer that sets how long ranks wait for each other: long at first, short between steps.

    It includes groups that torch and DeepSpeed make for themselves, which otherwise have torch's
    default timeout. Tested with gloo; not tested with NCCL, whose groups take the timeout when an
    exchange begins.
    """

    def __init__(self, start_s: float, step_s: float) -> None:
        """Use `start_s` from `run.start` on and while a rank loads or ends, else `step_s`."""
        self._start_s, self._step_s, self._now_s = start_s, step_s, 0.0

    def observe(self, name: str, fields: dict[str, Any]) -> None:
        """Change the timeout at the events that call for it."""
        timeout_s = self._now_s
        if name == EventName.STEP_END:
            timeout_s = self._step_s
        elif name == EventName.RUN_START or (
            name == EventName.RANK_DOING and fields["what"] in (LOADING, LEAVING)
        ):
            timeout_s = self._start_s
        if timeout_s == self._now_s:
            return
        self._now_s = timeout_s
        for group in list(distributed_c10d._world.pg_map):
            if group.group_desc != PATIENT:
                distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Return the element-wise sum of `values` over all ranks in float64, exact up to 2**53."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def gather_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the texts of all ranks of `group` (default: all), by rank; without groups only ours.

    They travel as bytes: torch's own exchange of objects unpickles what a peer sends.
    """
    if not dist.is_initialized():
        return [text]
    own = torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).copy())
    ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(own)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(own)] = own
    texts = [torch.zeros_like(padded) for _ in range(ranks)]
    dist.all_gather(texts, padded, group=group)
    return [
        bytes(gathered[: int(size)].numpy()).decode()
        for gathered, size in zip(texts, sizes, strict=True)
    ]


def placed(values: Sequence[float], world: World) -> list[float]:
    """Return `values` at this rank's place in a list for all ranks, and zeros at the others.

    The sum over the ranks then holds the values of each, rank by rank, to the last bit. All have as
    many values.
    """
    count = len(values)
    slots = [0.0] * (count * world.size)
    slots[world.rank * count : (world.rank + 1) * count] = values
    return slots


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean of the float64 `value` over all ranks, on its device; the host does not wait.

    `value` itself becomes the sum. The mean of equal fp32 values is exactly that value, for any
    number of ranks.
    """
    dist.all_reduce(value)
    # for a plain number a GPU would multiply by 1 / n
    return value / torch.full_like(value, dist.get_world_size())
