"""Advice: texts on what is wrong, and what to set, from the facts.

A section that was not measured is not judged.
"""

from collections import defaultdict
from collections.abc import Iterator

from pipeline_lib.core.units import count
from pipeline_lib.doctor.facts import UNMEASURED, Facts, Section

SHM_BYTES = 1 << 30
SLOW_DISK_BYTES_PER_S = 100e6
LOW_CLOCK = 0.6
OPEN_FILES = 4096


def advice(facts: Facts) -> list[str]:
    """Return what is wrong, in the order of the report; [] if nothing is wrong."""
    known: Facts = {name: section for name, section in facts.items() if UNMEASURED not in section}
    facts = defaultdict(dict, known)
    wrong = []
    for package, what in facts["out of range"].items():
        remedy = "run `make` in the project, which installs what constraints.txt names"
        wrong.append(f"{package} is {what}; {remedy}")
    wrong += _torch_advice(facts)
    wrong += _clock_advice(facts)
    wrong += _transport_advice(facts)
    wrong += _host_advice(facts)
    return wrong


def _gpus(facts: Facts) -> dict[str, Section]:
    return {name: gpu for name, gpu in facts["GPUs"].items() if isinstance(gpu, dict)}


def _torch_advice(facts: Facts) -> Iterator[str]:
    torch = facts["torch"]
    gpus = _gpus(facts)
    if torch.get("cuda_works") and torch.get("no_kernels"):
        yield (
            "layers cannot be compiled for the GPUs, which costs speed and memory: "
            f"{torch['no_kernels']};"
            " install gcc and python3-dev (in a container: an image with development files)"
        )
    if not gpus or not torch or torch["cuda_works"]:
        return
    these = count(len(gpus), "GPUs")
    if torch["cuda"].startswith("none"):
        yield (
            f"there are {these}, but torch {torch['version']} is a build for the CPU; install "
            "its CUDA build"
        )
    else:
        yield (
            f"there are {these}, but torch, built for CUDA {torch['cuda']}, cannot use them; check "
            f"CUDA_VISIBLE_DEVICES, and that driver {facts['GPUs'].get('driver', '?')} is new "
            "enough for that CUDA (else install a torch for an older one)"
        )


def _clock_advice(facts: Facts) -> Iterator[str]:
    for name, gpu in facts["exchange"].get("gpus_at_work", {}).items():
        most_mhz = gpu.get("sm_clock_most_mhz")
        if reasons := gpu.get("slowed_down"):
            yield (
                f"GPU {name} is slowed down: {', '.join(reasons)}, at {gpu['temperature_c']} °C; "
                "have its cooling and power supply checked, and leave this node out meanwhile"
            )
        elif most_mhz and gpu["sm_clock_mhz"] < LOW_CLOCK * most_mhz:
            yield (
                f"GPU {name} works at {gpu['sm_clock_mhz']} of {most_mhz} MHz; see "
                "whether its clock is locked (`nvidia-smi -q -d CLOCK`, undone by `nvidia-smi "
                "-rgc`) or its power limit lowered"
            )
    for name, gpu in _gpus(facts).items():
        limit = gpu.get("power_limit_w")
        usual = gpu.get("power_limit_default_w")
        if limit and usual and limit < 0.9 * usual:
            yield (
                f"GPU {name} may take {limit:.0f} W of the usual {usual:.0f} W; an administrator "
                f"can raise it with `nvidia-smi -pl {usual:.0f}`"
            )


def _transport_advice(facts: Facts) -> Iterator[str]:
    used = facts["exchange"].get("transports", [])
    has_nvlink = any(link.startswith("NV") for link in facts["links"].values())
    if any(name.startswith("NET/Socket") for name in used):
        yield (
            "NCCL sends over sockets between GPUs of this machine; unset NCCL_P2P_DISABLE, "
            "NCCL_SHM_DISABLE and NCCL_NET, and in a container allow shared memory (`--ipc=host`)"
        )
    elif has_nvlink and any(name.startswith("SHM") for name in used):
        yield (
            "NCCL sends through host memory although the GPUs have NVLink; unset NCCL_P2P_DISABLE "
            "and NCCL_P2P_LEVEL, and let the container see all GPUs of the node"
        )


def _host_advice(facts: Facts) -> Iterator[str]:
    limits = facts["limits"]
    processors = facts["processors"]
    disk = facts["disk"]
    if (size_bytes := limits.get("shm_bytes", SHM_BYTES)) < SHM_BYTES:
        yield (
            f"shared memory, /dev/shm, is {size_bytes / 1e6:.0f} MB, at least "
            f"{SHM_BYTES / 1e9:.1f} GB are wanted; start the container with `--shm-size=8g` or "
            "`--ipc=host`, or `mount -o remount,size=8G /dev/shm`"
        )
    if processors:
        cores = min(processors["allowed"], processors.get("cgroup_limit", processors["allowed"]))
        if cores < (ranks := facts["run"].get("ranks", 0)):
            yield (
                f"{cores:g} of the machine's {processors['cores']} cores for "
                f"{count(ranks, 'ranks')}; ask for more"
                " (cluster.cpus_per_rank, the container's --cpus), or lower cluster.cpu_ranks"
            )
    if (speed := disk.get("write_bytes_per_s", SLOW_DISK_BYTES_PER_S)) < SLOW_DISK_BYTES_PER_S:
        yield (
            f"{disk['folder']} is written at {speed / 1e6:.0f} MB/s, so a checkpoint of 10 GB takes"
            f" {10e9 / speed / 60:.0f} min; set PIPELINE_STORE to a faster disk, or use"
            " train.save_every_steps: auto and raise train.guards.rollback_every_steps"
        )
    if (files := limits.get("open_files", OPEN_FILES)) < OPEN_FILES:
        yield (
            f"{files} files may be open at a time; `ulimit -n {limits['open_files_most']}` "
            "raises it"
        )
