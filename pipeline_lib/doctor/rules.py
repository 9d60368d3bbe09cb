"""What is wrong with a machine, in words, and what to set: one function for each rule, over the facts."""

from pipeline_lib.doctor.facts import UNMEASURED, Facts, Section

SHM_BYTES = 1 << 30
SLOW_DISK_BYTES_PER_S = 100e6
LOW_CLOCK = 0.6
OPEN_FILES = 4096


def advice(facts: Facts) -> list[str]:
    """What every rule has to say, in the order of the report; nothing where all is well."""
    of_gpus = (torch_without_cuda, no_kernels, low_clocks, slow_transport)
    rules = (wrong_versions, *of_gpus, small_shm, few_cpus, slow_disk, few_files)
    return [text for rule in rules for text in rule(facts)]


def _section(facts: Facts, name: str) -> Section:
    """A section that was measured, else an empty one."""
    section = facts.get(name, {})
    return {} if UNMEASURED in section else section


def _gpus(facts: Facts) -> dict[str, Section]:
    return {name: gpu for name, gpu in _section(facts, "GPUs").items() if isinstance(gpu, dict)}


def wrong_versions(facts: Facts) -> list[str]:
    """Packages outside the range that the project takes."""
    return [
        f"{package} is {what}; run `make` in the project, which installs what constraints.txt names"
        for package, what in _section(facts, "out of range").items()
    ]


def torch_without_cuda(facts: Facts) -> list[str]:
    """GPUs that torch cannot use."""
    torch, gpus = _section(facts, "torch"), _gpus(facts)
    if not gpus or not torch or torch["cuda_works"]:
        return []
    count = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"
    if torch["cuda"].startswith("none"):
        return [f"there are {count}, but torch {torch['version']} is a build for the CPU; install its CUDA build"]
    driver = _section(facts, "GPUs").get("driver", "?")
    return [
        f"there are {count}, but torch, built for CUDA {torch['cuda']}, cannot use them; check CUDA_VISIBLE_DEVICES,"
        f" and that driver {driver} is new enough for that CUDA (else install a torch for an older one)"
    ]


def no_kernels(facts: Facts) -> list[str]:
    """GPUs for which Triton cannot make kernels."""
    torch = _section(facts, "torch")
    if not torch.get("cuda_works") or not torch.get("no_kernels"):
        return []
    return [
        f"layers cannot be compiled for the GPUs, which costs speed and memory: {torch['no_kernels']};"
        " install gcc and python3-dev (in a container: an image with development files)"
    ]


def low_clocks(facts: Facts) -> list[str]:
    """GPUs that run slowly while they work."""
    found = []
    for name, gpu in _section(facts, "exchange").get("gpus_at_work", {}).items():
        if reasons := gpu.get("slowed_down"):
            found.append(
                f"GPU {name} is slowed down: {', '.join(reasons)}, at {gpu['temperature_c']} °C; have its cooling and"
                " power supply checked, and leave this node out meanwhile"
            )
        elif gpu.get("sm_clock_most_mhz") and gpu["sm_clock_mhz"] < LOW_CLOCK * gpu["sm_clock_most_mhz"]:
            found.append(
                f"GPU {name} works at {gpu['sm_clock_mhz']} of {gpu['sm_clock_most_mhz']} MHz; see whether its clock is"
                " locked (`nvidia-smi -q -d CLOCK`, undone by `nvidia-smi -rgc`) or its power limit lowered"
            )
    for name, gpu in _gpus(facts).items():
        limit, usual = gpu.get("power_limit_w"), gpu.get("power_limit_default_w")
        if limit and usual and limit < 0.9 * usual:
            found.append(
                f"GPU {name} may take {limit:.0f} W of the usual {usual:.0f} W; an administrator can raise it with"
                f" `nvidia-smi -pl {usual:.0f}`"
            )
    return found


def slow_transport(facts: Facts) -> list[str]:
    """NCCL over sockets, or through host memory, between GPUs of one machine."""
    used = _section(facts, "exchange").get("transports", [])
    if any(name.startswith("NET/Socket") for name in used):
        return [
            "NCCL sends over sockets between GPUs of this machine; unset NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and"
            " NCCL_NET, and in a container allow shared memory (`--ipc=host`)"
        ]
    links = set(_section(facts, "links").values())
    if any(name.startswith("SHM") for name in used) and any(link.startswith("NV") for link in links):
        return [
            "NCCL sends through host memory although the GPUs have NVLink; unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL,"
            " and let the container see all GPUs of the node"
        ]
    return []


def small_shm(facts: Facts) -> list[str]:
    """Too little shared memory for NCCL and for data workers."""
    size_bytes = _section(facts, "limits").get("shm_bytes", SHM_BYTES)
    if size_bytes >= SHM_BYTES:
        return []
    return [
        f"shared memory, /dev/shm, is {size_bytes / 1e6:.0f} MB, at least {SHM_BYTES / 1e9:.1f} GB are wanted; start"
        " the container with `--shm-size=8g` or `--ipc=host`, or `mount -o remount,size=8G /dev/shm`"
    ]


def few_cpus(facts: Facts) -> list[str]:
    """Fewer cores than ranks."""
    processors, ranks = _section(facts, "processors"), _section(facts, "run").get("ranks", 0)
    if not processors:
        return []
    cores = min(processors["allowed"], processors.get("cgroup_limit", processors["allowed"]))
    if cores >= ranks:
        return []
    return [
        f"{ranks} ranks share {cores:g} of the machine's {processors['cores']} cores; ask for more"
        " (cluster.cpus_per_rank, the container's --cpus), or lower cluster.cpu_ranks"
    ]


def slow_disk(facts: Facts) -> list[str]:
    """A store whose disk would hold up checkpoints."""
    disk = _section(facts, "disk")
    speed = disk.get("write_bytes_per_s", SLOW_DISK_BYTES_PER_S)
    if speed >= SLOW_DISK_BYTES_PER_S:
        return []
    return [
        f"{disk['folder']} is written at {speed / 1e6:.0f} MB/s, so a checkpoint of 10 GB takes"
        f" {10e9 / speed / 60:.0f} min; set PIPELINE_STORE to a faster disk, or raise train.save_every_steps"
    ]


def few_files(facts: Facts) -> list[str]:
    """A limit on open files that many ranks and shards reach."""
    limits = _section(facts, "limits")
    if limits.get("open_files", OPEN_FILES) >= OPEN_FILES:
        return []
    return [f"{limits['open_files']} files may be open at a time; `ulimit -n {limits['open_files_most']}` raises it"]
