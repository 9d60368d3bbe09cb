"""Measurements of several ranks: within a node, between pairs of nodes, and over all ranks."""

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipeline_lib.doctor.facts import Section, Unmeasured
from pipeline_lib.doctor.gpus import clocks
from pipeline_lib.launch.rendezvous import Rendezvous
from pipeline_lib.model.gpu import why_no_kernels

# Measurements within a node: bandwidth of collectives in a small process group, and the GPU under
# load.
#
# Bus bandwidth is the rate in bytes/s over the slowest link: the bytes that a rank holds, divided
# by the time, times 2(n-1)/n for an all-reduce and (n-1)/n for an all-gather, as nccl-tests defines
# it (its doc/PERFORMANCE.md).

SIZES_BYTES = {"cuda": (1 << 20, 16 << 20, 256 << 20), "cpu": (64 << 10, 1 << 20, 16 << 20)}
PATIENCE_S = 0.4  # per size and collective
TIMEOUT_S = 15
WORK_SIZE = 8192


def torch_facts() -> Section:
    """Return what torch was built for, and the GPUs that it sees."""
    found: Section = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "none: a build for the CPU",
        "gpus": torch.cuda.device_count(),
        "cuda_works": torch.cuda.is_available(),
    }
    if torch.cuda.is_available():
        nccl: Any = torch.cuda.nccl
        found["nccl"] = ".".join(map(str, nccl.version()))
        if reason := why_no_kernels():
            found["no_kernels"] = reason
    return found


def exchange(environ: Mapping[str, str], device_kind: str) -> Section:
    """Join the group of `environ`; return bytes/s by collective and size, and GPUs under load."""
    rank = int(environ["RANK"])
    world = int(environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if device_kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found: Section = {}
    if world > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = Rendezvous.from_env(environ).store(rank, world, TIMEOUT_S)
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        for one in collectives(device):
            found[f"{one.kind}.{one.size_bytes}"] = one.bus_bytes / one.seconds
        dist.destroy_process_group()
    if device.type == "cuda":
        found["gpu"] = gpu_at_work(device)
    return found


@dataclass(frozen=True)
class Collective:
    """A collective of KINDS that took `seconds` over `ranks` ranks, with `size_bytes` each.

    Each rank has these bytes at the end.
    """

    kind: str
    size_bytes: int
    ranks: int
    seconds: float

    @property
    def rounds(self) -> int:
        """The passes over the data: an all-reduce is a reduce-scatter and an all-gather."""
        return 2 if self.kind == "all_reduce" else 1

    @property
    def bus_bytes(self) -> float:
        """The bytes that cross the slowest link."""
        return self.size_bytes * self.rounds * (self.ranks - 1) / self.ranks


KINDS = ("all_reduce", "all_gather", "all_to_all")


def collectives(
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    patience_s: float = PATIENCE_S,
    kinds: Collection[str] = KINDS,
) -> list[Collective]:
    """Measure collectives at each size for up to `patience_s`; all ranks of `group` call it."""
    ranks = dist.get_world_size(group)
    found = []
    for size_bytes in SIZES_BYTES[device.type]:
        values = torch.zeros(size_bytes // 4, device=device)
        part = torch.zeros(size_bytes // 4 // ranks, device=device)
        parts = torch.empty(ranks * len(part), device=device)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, values, group=group),
            "all_gather": partial(dist.all_gather, list(parts.chunk(ranks)), part, group=group),
            "all_to_all": partial(dist.all_to_all_single, parts, values[: len(parts)], group=group),
        }
        for kind in kinds:
            seconds = duration_s(calls[kind], device, group, patience_s)
            found.append(Collective(kind, size_bytes, ranks, seconds))
    return found


def duration_s(
    collective: Callable[[], object],
    device: torch.device,
    group: dist.ProcessGroup | None,
    patience_s: float,
) -> float:
    """Return the mean seconds of the calls within `patience_s`, as many on each rank."""
    collective()
    one_s = timed(collective, 1, device)
    agreed = torch.tensor([one_s], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    times = max(1, min(50, int(patience_s / max(agreed.item(), 1e-6))))
    return timed(collective, times, device) / times


def timed(work: Callable[[], object], times: int, device: torch.device) -> float:
    """Return the seconds of `times` calls of `work`, including the work they queue on `device`."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    for _ in range(times):
        work()
    if is_cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_s


def gpu_at_work(device: torch.device) -> Section:
    """Return the operations per second of bf16 matrix products, and the GPU's clocks meanwhile."""
    a = torch.randn(WORK_SIZE, WORK_SIZE, device=device, dtype=torch.bfloat16)
    b = torch.randn(WORK_SIZE, WORK_SIZE, device=device, dtype=torch.bfloat16)
    one_s = min(timed(lambda: a @ b, 5, device) / 5 for _ in range(3))
    found: Section = {"bf16_flops": 2 * WORK_SIZE**3 / one_s}
    # queue a second of work, which runs while the clocks are read
    for _ in range(int(1.0 / one_s)):
        a @ b
    time.sleep(0.6)
    with suppress(Unmeasured):
        found |= clocks(str(torch.cuda.get_device_properties(device).uuid))
    torch.cuda.synchronize(device)
    return found


# Measurements between nodes: each pair of nodes, then all ranks at once. The first rank of each
# node, its leader, acts for it. The ranks meet in a store on the first rank with timeouts, so that
# none waits forever for a missing one.

PAIR_S = 0.2  # the shortest transfer that counts as a measurement
PAIR_SIZES_BYTES = {
    "cuda": tuple(4**k << 18 for k in range(6)),
    "cpu": tuple(4**k << 18 for k in range(4)),
}
PINGS = 20
MEET_S = 90.0  # the slowest node may still test its disk, and a cold file server loads torch slowly
ALL_S = 30.0
PAIR_PATIENCE_S = 0.3


@dataclass(frozen=True)
class ExchangeRank:
    """This rank, the leader of each node, and the store where all ranks meet."""

    rank: int
    world: int
    leaders: tuple[int, ...]
    device: torch.device
    store: Any  # a torch.distributed.Store

    @property
    def leads(self) -> bool:
        """Whether this rank is its node's leader."""
        return self.rank in self.leaders

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return max(number for number, leader in enumerate(self.leaders) if leader <= self.rank)

    def meet(self, what: str, count: int, timeout_s: float = MEET_S) -> None:
        """Wait until `count` ranks have arrived. Raise the store's timeout error if they do not."""
        if self.store.add(what, 1) == count:
            self.store.set(f"{what} all", "1")
        self.store.wait([f"{what} all"], timedelta(seconds=timeout_s))

    def leave(self) -> None:
        """Sign off from the store. The first rank, which hosts it, waits for the others."""
        deadline_s = time.monotonic() + MEET_S
        self.store.add("gone", 1)
        while (
            self.rank == 0
            and self.store.add("gone", 0) < self.world
            and time.monotonic() < deadline_s
        ):
            time.sleep(0.05)


def rounds_of(nodes: int) -> list[list[tuple[int, int]]]:
    """Return every pair of `nodes` once, in rounds of disjoint pairs (the circle method)."""
    seats = list(range(nodes))
    if nodes % 2:
        seats.append(-1)  # a node paired with it pauses
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if min(a, b) >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def clock_offsets(place: ExchangeRank) -> dict[int, float]:
    """Return each node's clock lead over the first node in seconds; only to the first rank."""
    found: dict[int, float] = {}
    for number, leader in enumerate(place.leaders[1:], start=1):
        if place.rank == leader:
            place.store.wait([f"clock? {number}"], timedelta(seconds=MEET_S))
            place.store.set(f"clock {number}", repr(time.time()))
        elif place.rank == 0:
            asked_s = time.time()
            place.store.set(f"clock? {number}", "1")
            answer_s = float(place.store.get(f"clock {number}"))
            found[number] = answer_s - (asked_s + time.time()) / 2
    return found


def measure_pairs(place: ExchangeRank, tell: Callable[[dict[str, Any]], None]) -> None:
    """Measure all pairs of nodes; called by the leaders.

    The leader with the lower number reports the result.
    """
    for number, pairs in enumerate(rounds_of(len(place.leaders))):
        for low, high in pairs:
            if place.node == low:
                tell({"pair": [low, high], **_as_first(place, place.leaders[high])})
            elif place.node == high:
                _as_second(place, place.leaders[low])
        place.meet(f"round {number}", len(place.leaders))


def _as_first(place: ExchangeRank, other: int) -> dict[str, float]:
    """Measure the link to the rank `other`: bytes/s in both directions, and the one-way latency."""
    word = torch.zeros(1, device=place.device)

    def echo() -> None:
        _swap(word, word, other)
        word.item()  # wait for the GPU: NCCL calls only queue the transfer

    echo()  # establishes the connection
    latency_s = timed(echo, PINGS, place.device) / PINGS / 2
    there_s = back_s = 0.0
    sizes_bytes = PAIR_SIZES_BYTES[place.device.type]
    for size_bytes in sizes_bytes:
        values = torch.zeros(size_bytes // 4, device=place.device)
        there_s = timed(partial(_swap, values, word, other), 1, place.device)
        back_s = timed(partial(_swap, word, values, other), 1, place.device)
        enough = there_s + back_s > 2 * PAIR_S or size_bytes == sizes_bytes[-1]
        dist.send(torch.full_like(word, float(enough)), other)
        if enough:
            break
    return {"there": size_bytes / there_s, "back": size_bytes / back_s, "latency_s": latency_s}


def _as_second(place: ExchangeRank, other: int) -> None:
    # In the same order as _as_first.
    word = torch.zeros(1, device=place.device)
    for _ in range(PINGS + 1):
        dist.recv(word, other)
        dist.send(word, other)
    for size_bytes in PAIR_SIZES_BYTES[place.device.type]:
        values = torch.zeros(size_bytes // 4, device=place.device)
        dist.recv(values, other)
        dist.send(word, other)
        dist.recv(word, other)
        dist.send(values, other)
        dist.recv(word, other)
        if word.item():
            break


def _swap(sent: torch.Tensor, received: torch.Tensor, other: int) -> None:
    dist.send(sent, other)
    dist.recv(received, other)


def measure_all(place: ExchangeRank, tell: Callable[[dict[str, Any]], None]) -> None:
    """Measure all-reduce over all ranks, by rising size while ALL_S allows; rank 0 reports."""
    spent_s = 0.0
    for size_bytes in SIZES_BYTES[place.device.type]:
        values = torch.zeros(size_bytes // 4, device=place.device)
        call = partial(dist.all_reduce, values)
        mine_s = duration_s(call, place.device, None, PAIR_PATIENCE_S)
        slowest = torch.tensor([mine_s], device=place.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        one_s = float(slowest.item())
        if place.rank == 0:
            one = Collective("all_reduce", size_bytes, place.world, one_s)
            tell({"all": size_bytes, "seconds": one_s, "bus_bytes_per_s": one.bus_bytes / one_s})
        spent_s += 3 * one_s
        # the next size is 16 times as large and runs about three times
        if spent_s + 3 * 16 * one_s > ALL_S:
            break
