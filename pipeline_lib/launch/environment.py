"""The environment of the ranks: what every launcher hands down, and what SLURM's variables mean."""

import io
import json
import pickle
import random
import re
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NoReturn

import psutil

# The flight recorder of torch: which exchange hung, and who was not in it.
#
# NCCL's watchdog leaves a file for each rank that saw a timeout. It is a pickle of plain values, written by C++, and is
# read as such: a pickle that names anything to be imported or called is refused. Read from what gloo's recorder, which
# shares the format, writes; with NCCL, on GPUs, it has not been run.

FLIGHT = "flight"
_PREFIX = "rank_"  # torch appends the rank's number
_MAX_BYTES = 1 << 28
# What unpickling and looking into broken bytes raise.
_BROKEN = (pickle.UnpicklingError, ValueError, EOFError, LookupError, TypeError, AttributeError, OverflowError, OSError)


@dataclass(frozen=True)
class Hang:
    """An exchange that some ranks were in and that did not end; `absent` were not in it, `unheard` left no record."""

    exchange: str
    number: int
    group: str
    joined: tuple[int, ...]
    absent: tuple[int, ...]
    unheard: tuple[int, ...]

    def __str__(self) -> str:
        """`all_reduce number 812 of default_pg did not end: rank 3 did not join it`."""
        what = f"{self.exchange} number {self.number} of {self.group} did not end"
        whom = [f"{_ranks(self.absent)} did not join it"] if self.absent else []
        whom += [f"{_ranks(self.unheard)} left no record"] if self.unheard else []
        return f"{what}: {', '.join(whom) or 'all ranks had joined it'}"


def _ranks(numbers: tuple[int, ...]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse: plain values need nothing that would have to be imported."""
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a record holds plain values only")


def recorder_environment(run_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What turns the recorder on, and has it write below `run_dir`, as far as `environ` does not say otherwise.

    Each setting has an older name too: torch takes the first that is set, and the user's is to be the one.
    """
    made: dict[str, str] = {}
    for names, value in (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), str(run_dir / FLIGHT / _PREFIX)),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    ):
        if not any(name in environ for name in names):
            made |= dict.fromkeys(names, value)
    return made


def read_record(data: bytes) -> dict[str, Any]:
    """The record in `data`. Raises UnpicklingError and its like for what is none; runs nothing."""
    record = _PlainUnpickler(io.BytesIO(data)).load()  # noqa: S301 - it refuses all but plain values
    if not isinstance(record, dict) or not isinstance(record.get("entries"), list):
        raise pickle.UnpicklingError("it is no record of exchanges")
    return record


def find_hang(run_dir: Path, ranks: int) -> Hang | None:
    """The first exchange that did not end, by the records of the run in `run_dir`; None without one."""
    records = {}
    for rank in range(ranks):
        path = run_dir / FLIGHT / f"{_PREFIX}{rank}"
        with suppress(*_BROKEN):
            if path.stat().st_size <= _MAX_BYTES:
                records[rank] = read_record(path.read_bytes())
    hangs = []
    for group in {name for record in records.values() for name in _groups(record)}:
        with suppress(*_BROKEN):
            if found := _hang_of(group, records, ranks):
                hangs.append(found)
    return min(hangs, default=(0, None), key=lambda found: found[0])[1]


def _groups(record: Mapping[str, Any]) -> set[str]:
    with suppress(*_BROKEN):
        return {str(entry["process_group"][0]) for entry in record["entries"]}
    return set()


def _hang_of(group: str, records: Mapping[int, Mapping[str, Any]], ranks: int) -> tuple[int, Hang] | None:
    """The first exchange of `group` that did not end, and when it was begun."""
    made = {
        rank: {
            int(entry["collective_seq_id"]): entry
            for entry in record["entries"]
            if str(entry["process_group"][0]) == group and not entry["is_p2p"]
        }
        for rank, record in records.items()
    }
    hung = [number for of_rank in made.values() for number, entry in of_rank.items() if not _has_ended(entry)]
    if not hung:
        return None
    number = min(hung)
    joined = tuple(rank for rank in sorted(made) if number in made[rank])
    entry = made[joined[0]][number]
    members = _members(group, records, ranks)
    absent = tuple(rank for rank in members if rank in made and max(made[rank], default=0) < number)
    unheard = tuple(rank for rank in members if rank not in records)
    exchange = str(entry["profiling_name"]).rpartition(":")[2]
    name = str(entry["process_group"][1]) or group
    return int(entry["time_created_ns"]), Hang(exchange, number, name, joined, absent, unheard)


def _has_ended(entry: Mapping[str, Any]) -> bool:
    return entry["state"] == "completed" or bool(entry["retired"])


def _members(group: str, records: Mapping[int, Mapping[str, Any]], ranks: int) -> list[int]:
    """The ranks of `group`; all of the world where no record says."""
    for record in records.values():
        with suppress(*_BROKEN):
            return sorted(int(rank) for rank in json.loads(record["pg_config"][group]["ranks"]))
    return list(range(ranks))


# The environment of the ranks: what every launcher hands down, and what SLURM's variables mean.

# What a launcher sets for each rank: left over from an outer one, it would be taken for ours.
PLACE_IN_WORLD = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)
LOOPBACK = "127.0.0.1"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
PORTS = (20_000, 32_000)  # below the range that Linux gives to outgoing connections


def launch_environment(
    environ: Mapping[str, str], plan: Mapping[str, Any], run_dir: Path, master: str = LOOPBACK
) -> dict[str, str]:
    """All of `environ`, without another launcher's traces, and with what ranks of this plan need.

    What the user has set stays: NCCL's variables, threads, the allocator. Rank 0 will be reached at `master`.
    """
    cluster = plan["cluster"]
    made = {key: value for key, value in environ.items() if key not in PLACE_IN_WORLD}
    made |= {"MASTER_ADDR": master, "MASTER_PORT": str(free_port())}
    made.setdefault("OMP_NUM_THREADS", str(cluster["cpus_per_rank"]))
    if cluster["ranks"] == 1:  # accelerate and deepspeed start a single rank without telling it its place
        made |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    if cluster["device"] == "cuda":
        made |= recorder_environment(run_dir, made)
    if cluster["device"] == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in made:
        made.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if plan["chosen"]["deterministic"]:
        made.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        made.setdefault("NCCL_NVLS_ENABLE", "0")  # sums made in a switch: nothing says in which order
    return made


def free_port() -> int:
    """A TCP port of this machine that nobody uses now."""
    while True:
        port = random.randint(*PORTS)  # noqa: S311 - chance, not secrecy
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port


def dist_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK and its like, as torch wants them, from what the launcher set: SLURM has names of its own.

    Raises nothing: what is missing stays missing, and World.from_env says so.
    """
    made = dict(environ)
    if "RANK" not in environ and "SLURM_PROCID" in environ:
        made |= _from_slurm(environ)
    if "LOCAL_WORLD_SIZE" not in made and "LOCAL_SIZE" in made:  # deepspeed's name for it
        made["LOCAL_WORLD_SIZE"] = made["LOCAL_SIZE"]
    if made.get("MASTER_ADDR", LOOPBACK) != LOOPBACK or made.get("LOCAL_WORLD_SIZE") != made.get("WORLD_SIZE"):
        choose_interface(made, made.get("MASTER_ADDR", LOOPBACK))
    return made


def choose_interface(environ: MutableMapping[str, str], address: str) -> None:
    """Of several nodes: exchange on the network that leads to rank 0 at `address`, unless the user names another.

    Left alone, gloo takes the address of the host's name, which may lead nowhere, and NCCL the first that it finds.
    Rank 0's own node may take its name for itself (127.0.1.1, as Debian has it): it asks for the way to the last node.
    """
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST"))
    found = interface_to(address) or (interface_to(last_host(nodes)) if nodes else None)
    for name in INTERFACE_VARIABLES:
        if found and not environ.get(name):
            # NCCL takes a bare name for the beginning of names: `ens1` is `ens10f0` too.
            environ[name] = f"={found}" if name.startswith("NCCL") else found


def interface_to(address: str) -> str | None:
    """The network interface that packets to `address` leave by; None if that cannot be told.

    None as well if they stay on this machine, unless `address` itself says so: others cannot answer there.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, entries in psutil.net_if_addrs().items():
        addresses = [entry.address.partition("%")[0] for entry in entries]
        if own in addresses:
            return None if any(map(_is_loopback, addresses)) and not _is_loopback(address) else name
    return None


def _is_loopback(address: str) -> bool:
    """Whether `address` means the machine that asks, wherever that is. Names of hosts do not."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """The place of a task of srun. The launcher has chosen where rank 0 is met; without one the job names a port."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ["SLURM_NTASKS"])
    nodes = int(environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1")))
    place = {
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "WORLD_SIZE": tasks,
        "LOCAL_WORLD_SIZE": str(_tasks_of_node(environ, int(tasks), nodes)),
    }
    if "MASTER_PORT" not in environ:
        node_list = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", LOOPBACK))
        low, high = PORTS
        place["MASTER_ADDR"] = first_host(node_list) if nodes > 1 else LOOPBACK
        place["MASTER_PORT"] = str(low + int(environ["SLURM_JOB_ID"]) % (high - low))
    return place


def _tasks_of_node(environ: Mapping[str, str], tasks: int, nodes: int) -> int:
    """Tasks of this node, from a list such as `4(x2),3`; evenly spread ones without it."""
    counts: list[int] = []
    for entry in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry):
            counts += [int(found[1])] * int(found[2] or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else tasks // nodes


def first_host(node_list: str) -> str:
    """The first name of a SLURM host list: `gpu[003-005,9],cpu1` gives `gpu003`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", _entries(node_list)[0])


def last_host(node_list: str) -> str:
    """The last name of a SLURM host list: `cpu1,gpu[003-005,9]` gives `gpu9`."""
    return re.sub(r"\[[^\]]*?(\w+)\]", r"\1", _entries(node_list)[-1])


def _entries(node_list: str) -> list[str]:
    """`gpu[003-005,9],cpu1` in two parts."""
    return re.split(r",(?![^\[]*\])", node_list)
