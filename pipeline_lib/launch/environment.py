"""The environment of the ranks: what every launcher hands down, and what SLURM's variables mean."""

import fcntl
import os
import random
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import psutil

from pipeline_lib.core.user_cache import UserCache, is_own
from pipeline_lib.records.plan import PlanDocument

# where the ranks of one machine meet, instead of at an address
RENDEZVOUS_FILE = "PIPELINE_RENDEZVOUS"
NODE_VARIABLE = "NODE_RANK"
# What a launcher sets for each rank or node: left over from an outer one, it would be taken for
# ours.
PLACE_IN_WORLD = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    NODE_VARIABLE,
    RENDEZVOUS_FILE,
)
LOOPBACK = "127.0.0.1"
HOST_VARIABLE = "PIPELINE_HOST"  # the name of this host in the user's list
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
# Variables that go to other hosts: settings of libraries that have to be equal on all ranks.
# Neither paths nor secrets.
_SETTINGS = re.compile(
    r"(NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|CUBLAS|CUDNN|UCX|FI|NVSHMEM|TRITON|TOKENIZERS)_\w+|MALLOC_(MMAP|TRIM)_THRESHOLD_|CUDA_LAUNCH_BLOCKING|HF_HUB_OFFLINE"
)
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
INTERFACE_VARIABLES = (GLOO_INTERFACE, NCCL_INTERFACE)
# of a SLURM host list: not the comma in `gpu[003-005,9],cpu1`
_BETWEEN_ENTRIES = re.compile(r",(?![^\[]*\])")
_RANKS_FOLDER = "pipeline-ranks-"
_USED = "used"  # the file in such a folder that its users lock
_BEING_MADE_S = 60.0  # a younger folder may not be locked yet
PORTS = (20_000, 32_000)  # below the range that Linux gives to outgoing connections


# For ranks on CPUs. glibc serves blocks of up to 32 MiB from its heap once one of that size was
# freed, and what lies between those in use stays taken: 0.9 of 3.4 GB of two ranks that shard 55M
# parameters (benchmarks/RESULTS.md). With a fixed limit, larger blocks go back at once. A step
# takes 6 to 7 % longer, and 14 to 23 % with 1 MiB. The limit for trimming replaces the one that
# glibc would otherwise adapt: how much at the end of the heap is kept.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}


def allocator_settings(environ: Mapping[str, str], is_gpu: bool) -> dict[str, str]:
    """Return the settings of memory allocators that ranks get.

    Those that `environ` has stay as they are.
    """
    wanted = ALLOCATOR
    if is_gpu:
        wanted = {}
        if "PYTORCH_CUDA_ALLOC_CONF" not in environ:
            wanted["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return {name: environ.get(name, value) for name, value in wanted.items()}


def is_sent(name: str) -> bool:
    """Return whether other hosts get the variable `name`: rank 0's address, library settings."""
    return name in RENDEZVOUS or _SETTINGS.fullmatch(name) is not None


@contextmanager
def private_rendezvous() -> Iterator[dict[str, str]]:
    """Yield the variable by which one machine's ranks meet: a file in a folder only for this user.

    Before, remove such folders that killed launchers left.
    """
    with tempfile.TemporaryDirectory(prefix=_RANKS_FOLDER) as name:
        folder = Path(name)
        use = mark_used(folder)
        try:
            _remove_abandoned(folder)
            yield {RENDEZVOUS_FILE: str(folder / "rendezvous")}
        finally:
            os.close(use)


def mark_used(folder: Path) -> int:
    """Mark `folder` as used until the returned descriptor is closed or this process ends."""
    descriptor = os.open(folder / _USED, os.O_RDONLY | os.O_CREAT, 0o600)
    with suppress(OSError):  # the file system has no such locks: then nothing is removed either
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def _remove_abandoned(own: Path) -> None:
    """Remove the rank folders beside `own` that are old, this user's, and used by no process."""
    created_s = own.stat().st_mtime
    for folder in own.parent.glob(f"{_RANKS_FOLDER}*"):
        with suppress(OSError):  # removed meanwhile, in use, or another user's
            status = folder.stat()
            if status.st_uid != os.geteuid() or created_s - status.st_mtime < _BEING_MADE_S:
                continue
            # older versions made none: theirs stay
            descriptor = os.open(folder / _USED, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def launch_environment(
    environ: Mapping[str, str], plan: PlanDocument, rendezvous: Mapping[str, str]
) -> dict[str, str]:
    """Return `environ` for this plan's ranks: with what they need, without another launcher's.

    What the user has set stays: NCCL's variables, threads, the allocator. `rendezvous` says where
    the ranks meet.
    """
    cluster = plan.cluster
    made = {key: value for key, value in environ.items() if key not in PLACE_IN_WORLD}
    made |= rendezvous
    made.setdefault("OMP_NUM_THREADS", str(cluster.cpus_per_rank))
    made |= allocator_settings(made, cluster.is_gpu)
    # it listens on a port of this machine, for anyone, to report the state
    made.setdefault("NCCL_RAS_ENABLE", "0")
    if plan.chosen.deterministic:
        made.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # sums made in a switch: nothing says in which order
        made.setdefault("NCCL_NVLS_ENABLE", "0")
    return made


# By default torch's compiler shares a folder of all users, $TMPDIR/torchinductor_USER, takes it
# whoever made it, and unpickles what lies there.
COMPILE_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def compile_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the folders for what torch and Triton compile, where only this user may write.

    Those that `environ` names are taken if they are the user's own.
    """
    cache = UserCache.from_env(environ)
    made = {}
    for variable, name in COMPILE_CACHES.items():
        own = cache.within(name)
        if is_own(chosen := environ.get(variable, "")):
            made[variable] = chosen
        elif own.is_private:
            made[variable] = str(own.folder)
        else:
            made[variable] = tempfile.mkdtemp(prefix=f"pipeline-{name}-")
    return made


def free_port() -> int:
    """Return a TCP port of this machine that nobody uses now."""
    while True:
        port = random.randint(*PORTS)  # noqa: S311 - chance, not secrecy
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port


def dist_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with RANK and its like as torch wants them; SLURM has names of its own.

    The network interfaces are chosen too: ranks that are all on this machine listen on its loopback
    interface alone, whatever the user has set for runs on several. What is missing stays missing:
    World.from_env says so.
    """
    made = dict(environ)
    if "RANK" not in environ and "SLURM_PROCID" in environ:
        made |= _from_slurm(environ)
    address = made.get("MASTER_ADDR", LOOPBACK)
    is_one_machine = address == LOOPBACK and made.get("LOCAL_WORLD_SIZE") == made.get("WORLD_SIZE")
    if is_one_machine:
        for name in INTERFACE_VARIABLES:
            made.pop(name, None)
    choose_interface(made, address)
    return made


def rank_environments(
    environ: Mapping[str, str], ranks_per_node: int, nodes: int = 1, node: int = 0
) -> list[dict[str, str]]:
    """Return the environments of the ranks of node number `node`: `environ` and their places."""
    environ = {"NCCL_RAS_ENABLE": "0", **environ}  # as in launch_environment
    world = str(nodes * ranks_per_node)
    on_node = str(ranks_per_node)
    common = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": on_node, "GROUP_RANK": str(node)}
    of_ranks = []
    for local in range(ranks_per_node):
        own = {"RANK": str(node * ranks_per_node + local), "LOCAL_RANK": str(local)}
        of_ranks.append({**environ, **common, **own})
    return of_ranks


def choose_interface(environ: MutableMapping[str, str], address: str) -> None:
    """Set the network interfaces of gloo and NCCL, unless set, to the one to rank 0 at `address`.

    Left alone, gloo takes the address of the host's name, which may lead nowhere, and NCCL the
    first that it finds. Rank 0's own node may resolve its name to itself (127.0.1.1 on Debian):
    there it is the one to the last node.
    """
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST"))
    found = interface_to(address) or (interface_to(last_host(nodes)) if nodes else None)
    for name in INTERFACE_VARIABLES:
        if found and not environ.get(name):
            # NCCL takes a bare name for the beginning of names: `ens1` is `ens10f0` too.
            environ[name] = f"={found}" if name.startswith("NCCL") else found


def interface_to(address: str) -> str | None:
    """Return the network interface by which packets to `address` leave; None if it cannot be found.

    Also None if they stay on this machine although `address` is no loopback address: others cannot
    answer there.
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
            return None if any(map(is_loopback, addresses)) and not is_loopback(address) else name
    return None


def is_loopback(address: str) -> bool:
    """Return whether `address` is a loopback address or `localhost`.

    Other names are not resolved.
    """
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the place of a task of srun.

    Where no launcher has chosen rank 0's port, the job's number gives one.
    """
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", environ["SLURM_NTASKS"]))
    nodes = int(environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1")))
    node = int(environ.get("SLURM_NODEID", "0"))
    counts: list[int] = []
    for entry in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):  # such as `4(x2),3`
        if found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry):
            counts += [int(found[1])] * int(found[2] or 1)
    place = {
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": str(counts[node] if node < len(counts) else tasks // nodes),
    }
    if "MASTER_PORT" not in environ:
        node_list = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", LOOPBACK))
        low, high = PORTS
        place["MASTER_ADDR"] = first_host(node_list) if nodes > 1 else LOOPBACK
        place["MASTER_PORT"] = str(low + int(environ["SLURM_JOB_ID"]) % (high - low))
    return place


def first_host(node_list: str) -> str:
    """Return the first name of a SLURM host list: `gpu[003-005,9],cpu1` gives `gpu003`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", _BETWEEN_ENTRIES.split(node_list)[0])


def last_host(node_list: str) -> str:
    """Return the last name of a SLURM host list: `cpu1,gpu[003-005,9]` gives `gpu9`."""
    return re.sub(r"\[[^\]]*?(\w+)\]", r"\1", _BETWEEN_ENTRIES.split(node_list)[-1])
