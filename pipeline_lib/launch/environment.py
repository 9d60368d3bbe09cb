"""The environment of the ranks: what every launcher hands down, and what SLURM's variables mean."""

import random
import re
import socket
from collections.abc import Mapping, MutableMapping
from ipaddress import ip_address

import psutil

from pipeline_lib.plan.document import PlanDocument, known

# What a launcher sets for each rank: left over from an outer one, it would be taken for ours.
PLACE_IN_WORLD = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)
LOOPBACK = "127.0.0.1"
HOST_VARIABLE = "PIPELINE_HOST"  # the name of this host in the user's list
NODE_VARIABLE = "NODE_RANK"
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
# Variables that go to other hosts: settings of libraries that have to be equal on all ranks. Neither paths nor secrets.
_SETTINGS = re.compile(
    r"(NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|CUBLAS|CUDNN|UCX|FI|NVSHMEM|TRITON|TOKENIZERS)_\w+|MALLOC_(MMAP|TRIM)_THRESHOLD_|CUDA_LAUNCH_BLOCKING|HF_HUB_OFFLINE"
)
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_BETWEEN_ENTRIES = re.compile(r",(?![^\[]*\])")  # of a SLURM host list: not the comma in `gpu[003-005,9],cpu1`
PORTS = (20_000, 32_000)  # below the range that Linux gives to outgoing connections


# For ranks on CPUs. glibc serves blocks of up to 32 MiB from its heap once one of that size was freed, and what lies
# between those in use stays taken: 0.9 of 3.4 GB of two ranks that shard 55M parameters (benchmarks/RESULTS.md). With a
# fixed limit, larger blocks go back at once. A step takes 6 to 7 % longer, and 14 to 23 % with 1 MiB. The limit
# for trimming replaces the one that glibc would otherwise adapt: how much at the end of the heap is kept.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}


def allocator_settings(environ: Mapping[str, str], is_gpu: bool) -> dict[str, str]:
    """Return the settings of memory allocators that ranks get. Those that `environ` has stay as they are."""
    wanted = ALLOCATOR
    if is_gpu:
        wanted = {} if "PYTORCH_CUDA_ALLOC_CONF" in environ else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return {name: environ.get(name, value) for name, value in wanted.items()}


def is_sent(name: str) -> bool:
    """Return whether the variable `name` goes to other hosts: where rank 0 is met, and settings of libraries."""
    return name in RENDEZVOUS or _SETTINGS.fullmatch(name) is not None


def launch_environment(
    environ: Mapping[str, str], plan: PlanDocument, master: str = LOOPBACK, port: int | None = None
) -> dict[str, str]:
    """Return `environ` for the ranks of this plan: without what another launcher left, and with what they need.

    What the user has set stays: NCCL's variables, threads, the allocator. Rank 0 will be reached at `master` and
    `port`; without a port, a free one of this machine is chosen.
    """
    cluster = plan.cluster
    made = {key: value for key, value in environ.items() if key not in PLACE_IN_WORLD}
    made |= {"MASTER_ADDR": master, "MASTER_PORT": str(port or free_port())}
    made.setdefault("OMP_NUM_THREADS", str(known(cluster.cpus_per_rank)))
    if cluster.ranks == 1:  # accelerate and deepspeed start a single rank without telling it its place
        made |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    made |= allocator_settings(made, cluster.is_gpu)
    if plan.chosen.deterministic:
        made.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        made.setdefault("NCCL_NVLS_ENABLE", "0")  # sums made in a switch: nothing says in which order
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
    """Return `environ` with RANK and its like as torch wants them; SLURM and DeepSpeed have names of their own.

    With several nodes, the network interfaces are chosen too. What is missing stays missing: World.from_env says so.
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
    """Set the network interfaces of gloo and NCCL to the one that leads to rank 0 at `address`, unless they are set.

    Left alone, gloo takes the address of the host's name, which may lead nowhere, and NCCL the first that it finds.
    Rank 0's own node may resolve its name to itself (127.0.1.1 on Debian): there it is the one to the last node.
    """
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST"))
    found = interface_to(address) or (interface_to(last_host(nodes)) if nodes else None)
    for name in INTERFACE_VARIABLES:
        if found and not environ.get(name):
            # NCCL takes a bare name for the beginning of names: `ens1` is `ens10f0` too.
            environ[name] = f"={found}" if name.startswith("NCCL") else found


def interface_to(address: str) -> str | None:
    """Return the network interface by which packets to `address` leave; None if it cannot be found.

    Also None if they stay on this machine although `address` is no loopback address: others cannot answer there.
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
    """Return whether `address` is a loopback address or `localhost`. Other names are not resolved."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the place of a task of srun. Where no launcher has chosen rank 0's port, the job's number gives one."""
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
