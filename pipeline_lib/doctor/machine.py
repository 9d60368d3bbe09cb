"""The facts of this machine, and advice on its problems."""

import importlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from pipeline_lib.core.errors import BUG, PipelineError
from pipeline_lib.core.text import redact, shortened
from pipeline_lib.core.units import count
from pipeline_lib.launch.environment import PLACE_IN_WORLD, dist_environment, private_rendezvous, rank_environments

# Facts: measured values by section and name; a section that could not be measured has the reason instead.

Section = dict[str, Any]
Facts = dict[str, Section]
UNMEASURED = "could not be measured because"


class Unmeasured(PipelineError):
    """A probe's failure to measure, with the reason as its text."""


def measured(probe: Callable[[], Section]) -> Section:
    """Return the result of `probe`, or the reason why it failed under the key UNMEASURED."""
    try:
        return probe()
    except (Unmeasured, OSError, ValueError) as error:
        return {UNMEASURED: redact(str(error)) or type(error).__name__}


# GPUs as the driver reports them (NVML), and their connections (`nvidia-smi topo -m`).

# Throttle reasons that indicate a problem; an idle GPU, or one at its power cap under load, is normal.
WRONG_REASONS = {0x08: "hardware slowdown", 0x20: "too hot (software)", 0x40: "too hot (hardware)", 0x80: "power brake"}


@contextmanager
def _nvml() -> Iterator[Any]:
    """Yield the initialized NVML. Raise Unmeasured if it is missing, or if a call in the block fails."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        raise Unmeasured("nvidia-ml-py is not installed") from error
    try:
        nvml.nvmlInit()
        yield nvml
    except nvml.NVMLError as error:
        raise Unmeasured(f"NVML says: {error}") from error


def gpus() -> Section:
    """Return each GPU by number (name, memory, capability, power limit, clocks), and the driver's version.

    Numbers are the driver's. Values that a driver does not report are missing. Raise Unmeasured without NVML or a
    driver.
    """
    with _nvml() as nvml:
        found: Section = {"driver": _text(nvml.nvmlSystemGetDriverVersion())}
        for number in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(number)
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            gpu: Section = {"name": _text(nvml.nvmlDeviceGetName(handle)), "capability": f"{major}.{minor}"}
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            gpu |= {"memory_bytes": int(memory.total), "memory_used_bytes": int(memory.used)}
            with suppress(nvml.NVMLError):
                gpu["power_limit_w"] = nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
            with suppress(nvml.NVMLError):
                gpu["power_limit_default_w"] = nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000
            with suppress(nvml.NVMLError):
                gpu["sm_clock_most_mhz"] = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
            found[str(number)] = gpu
    return found


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def clocks(uuid: str) -> Section:
    """Return the current clock, power and problematic slowdowns of the GPU with torch's `uuid`. Raise Unmeasured."""
    with _nvml() as nvml:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return {
            "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "sm_clock_most_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "slowed_down": [text for bit, text in WRONG_REASONS.items() if reasons & bit],
        }


def links(topology: str) -> dict[str, str]:
    """Return the connection of each pair of GPUs in the output of `nvidia-smi topo -m`, like `{"0-1": "NV18"}`.

    NV# means # NVLinks; PIX, PXB, PHB, NODE and SYS are PCIe connections, from near to far.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s+\S", line)]
    table = {row[0]: row[1:] for row in rows if "X" in row}
    names = list(table)
    return {
        f"{first.removeprefix('GPU')}-{second.removeprefix('GPU')}": table[first][column]
        for row, first in enumerate(names)
        for column, second in enumerate(names)
        if row < column < len(table[first])
    }


# The machine without its GPUs: cores, memory, shared memory, limits, and disk speed. Sizes are in bytes.

CGROUP = Path("/sys/fs/cgroup")
WRITE_BYTES = 512 << 20
CHUNK_BYTES = 8 << 20
PATIENCE_S = 2.0  # each for writing and for reading


def processors() -> Section:
    """Return the number of cores, the number that this process may use, and the load."""
    found: Section = {"cores": os.cpu_count() or 1, "allowed": len(os.sched_getaffinity(0))}
    quota = _read(CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        found["cgroup_limit"] = int(quota[0]) / int(quota[1])
    found["load_1_min"] = round(os.getloadavg()[0], 1)
    return found


def memory() -> Section:
    """Return the host memory, and the limit of a container or batch job."""
    now = psutil.virtual_memory()
    found: Section = {"total_bytes": now.total, "available_bytes": now.available}
    limit = _read(CGROUP / "memory.max").strip()
    if limit.isdigit():
        found["cgroup_limit_bytes"] = int(limit)
    return found


def _read(path: Path) -> str:
    """Return a kernel file's text; empty if there is none, since older systems have no cgroup v2."""
    try:
        return path.read_text()
    except OSError:
        return ""


def limits() -> Section:
    """Return the size of shared memory, through which ranks and NCCL exchange data, and the limit of open files."""
    shared = shutil.disk_usage("/dev/shm")  # noqa: S108 - the device, not a temporary file
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"shm_bytes": shared.total, "shm_free_bytes": shared.free, "open_files": soft, "open_files_most": hard}


def disk(store: Path) -> Section:
    """Return the store's free space, and its write (including fsync) and read speed in bytes/s. Raise OSError.

    If the store does not exist yet, its nearest existing parent is measured.
    """
    folder = existing_folder(store)
    usage = shutil.disk_usage(folder)
    found: Section = {"folder": str(folder), "free_bytes": usage.free, "total_bytes": usage.total}
    probe = folder / f".doctor-{uuid.uuid4().hex}"
    with probe.open("x+b", buffering=0) as file:
        probe.unlink()  # immediately, so that the space is freed even if the probe is killed at its deadline
        most_bytes = max(min(WRITE_BYTES, usage.free // 10), CHUNK_BYTES)
        chunk, written, start_s = os.urandom(CHUNK_BYTES), 0, time.monotonic()
        while written < most_bytes and time.monotonic() - start_s < PATIENCE_S:
            written += file.write(chunk)
            os.fsync(file.fileno())
        found["tried_with_bytes"] = written
        found["write_bytes_per_s"] = written / (time.monotonic() - start_s)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # asks the kernel to drop its cached pages
        file.seek(0)
        read, start_s = 0, time.monotonic()
        while (chunk := file.read(CHUNK_BYTES)) and time.monotonic() - start_s < PATIENCE_S:
            read += len(chunk)
        found["read_bytes_per_s"] = read / max(time.monotonic() - start_s, 1e-9)
    return found


def existing_folder(path: Path) -> Path:
    """Return the folder `path`, or its nearest parent that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


# Versions of installed packages, and environment variables that affect a run.

PROJECT = "qwen3-pipeline"
PACKAGES = ("torch", "transformers", "peft", "deepspeed", "accelerate", "snakemake", "dvc", "nvidia-ml-py")
# Only these variables are shown, since any other may hold a secret.
VARIABLES = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|NVSHMEM|TORCH_SYMM_MEM|OMP|MKL|CUBLAS|PYTORCH)_[A-Z_]+|CUDA_(VISIBLE_DEVICES|HOME)"
    r"|SLURM_(JOB_ID|JOB_NODELIST|JOB_PARTITION|NNODES|NTASKS|NTASKS_PER_NODE|CPUS_PER_TASK|GPUS|GPUS_ON_NODE|PROCID"
    r"|LOCALID|JOB_END_TIME|MEM_PER_NODE)"
)


def versions() -> Section:
    """Return the versions of Python, the system and the relevant packages, by name."""
    installed = {package: _version(package) or "not installed" for package in PACKAGES}
    return {"python": platform.python_version(), "system": platform.platform(), **installed}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def out_of_range() -> Section:
    """Return packages whose installed version is outside the project's range, with that range. Raise Unmeasured."""
    try:
        wanted = importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise Unmeasured(f"{PROJECT} itself is not installed by pip") from error
    found: Section = {}
    for requirement in map(Requirement, wanted):
        if requirement.marker is None:  # else it belongs to an extra
            version = _version(requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                found[requirement.name] = f"{version or 'not installed'}, wanted {requirement.specifier}"
    return found


def variables(environ: Mapping[str, str]) -> Section:
    """Return the relevant variables of `environ`, with secrets redacted."""
    return {name: redact(value) for name, value in sorted(environ.items()) if VARIABLES.fullmatch(name)}


# Probes run in separate processes, so that a driver or network that hangs costs a deadline and not the report.

_VIA = re.compile(r"\] -> \d+\[[0-9a-f]+\].* via ([A-Za-z0-9/]+)")


def probe(name: str, environ: Mapping[str, str], timeout_s: float, *arguments: str) -> Section:
    """Return the output of `python -m pipeline_lib probe NAME`. Raise Unmeasured."""
    return run_children(["probe", name, *arguments], [environ], timeout_s)[0]


def run_children(arguments: Sequence[str], environs: Sequence[Mapping[str, str]], timeout_s: float) -> list[Section]:
    """Return the JSON objects that `python -m pipeline_lib ARGUMENTS` prints last, one for each of `environs`.

    Each runs in its own process, and all are killed before this returns. Raise Unmeasured after `timeout_s`, or with
    the reason of the first process that failed.
    """
    command = [sys.executable, "-m", "pipeline_lib", *arguments]
    deadline_s = time.monotonic() + max(timeout_s, 0.1)
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        outputs = [Path(folder) / str(number) for number in range(len(environs))]
        try:
            for environ, output in zip(environs, outputs, strict=True):
                with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
                    processes.append(
                        subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=err)
                    )
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    break
                if time.monotonic() > deadline_s:
                    raise Unmeasured(f"it took longer than {timeout_s:.0f} s")
                time.sleep(0.02)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1)  # no longer: it may hang in the kernel, as on a dead file server
        # Killed processes come first, since the others may have failed because of them.
        for code, output in sorted((code, output) for code, output in zip(codes, outputs, strict=True) if code):
            raise Unmeasured(_why_it_failed(code, output.with_suffix(".err")))
        return [_last_json(output) for output in outputs]


def _why_it_failed(code: int, errors: Path) -> str:
    """Return the signal that ended a process, else its last line of errors, without the note added for bugs."""
    if code < 0:
        return f"process {errors.stem} was ended by signal {-code}"
    lines = [line.strip() for line in errors.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith(BUG)]
    return shortened(lines[-1].removeprefix("error: "), 300) if lines else "it failed"


def _last_json(output: Path) -> Section:
    lines = output.read_text(errors="replace").splitlines()
    try:
        return dict(json.loads(lines[-1]))
    except (IndexError, ValueError) as error:
        raise Unmeasured("the probe gave no answer") from error


def exchange(environ: Mapping[str, str], device: str, ranks: int, timeout_s: float) -> Section:
    """Return bandwidths between `ranks` ranks of this machine, each GPU under load, and NCCL's transports.

    Raise Unmeasured if a rank fails or the deadline passes.
    """
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder, private_rendezvous() as rendezvous:
        common = {name: value for name, value in environ.items() if name not in PLACE_IN_WORLD}
        common |= {**rendezvous, "OMP_NUM_THREADS": "1"}
        log_nccl(common, folder)
        environs = [dist_environment(made) for made in rank_environments(common, ranks)]
        answers = run_children(["probe", "exchange", "--device", device], environs, timeout_s)
        used = logged_transports(folder)
    found: Section = {"ranks": ranks, "device": device, **{k: v for k, v in answers[0].items() if k != "gpu"}}
    if device == "cuda":
        found["transports"] = used
        found["gpus_at_work"] = {str(rank): answer["gpu"] for rank, answer in enumerate(answers)}
    return found


def log_nccl(environ: MutableMapping[str, str], folder: str) -> None:
    """Set `environ` so that NCCL writes what it uses into files of `folder`, one for each process."""
    environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=f"{folder}/nccl.%p")
    environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,P2P,SHM,NET")


def logged_transports(folder: str) -> list[str]:
    """Return the transports in NCCL's logs in `folder`: `P2P/CUMEM`, `SHM/direct`, `NET/Socket/0`, `NET/IB/0`."""
    logs = (path.read_text(errors="replace") for path in Path(folder).glob("nccl.*"))
    return sorted({transport for log in logs for transport in _VIA.findall(log)})


def topology(timeout_s: float) -> dict[str, Any]:
    """Return the connections of the GPUs from nvidia-smi. Raise Unmeasured."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=max(timeout_s, 0.1), check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unmeasured(f"nvidia-smi topo -m: {error}") from error
    return dict(links(done.stdout))


# Advice: texts on what is wrong, and what to set, from the facts. A section that was not measured is not judged.

SHM_BYTES = 1 << 30
SLOW_DISK_BYTES_PER_S = 100e6
LOW_CLOCK = 0.6
OPEN_FILES = 4096


def advice(facts: Facts) -> list[str]:
    """Return what is wrong, in the order of the report; [] if nothing is wrong."""
    facts = defaultdict(dict, {name: section for name, section in facts.items() if UNMEASURED not in section})
    versions = [
        f"{package} is {what}; run `make` in the project, which installs what constraints.txt names"
        for package, what in facts["out of range"].items()
    ]
    return [*versions, *_torch_advice(facts), *_clock_advice(facts), *_transport_advice(facts), *_host_advice(facts)]


def _gpus(facts: Facts) -> dict[str, Section]:
    return {name: gpu for name, gpu in facts["GPUs"].items() if isinstance(gpu, dict)}


def _torch_advice(facts: Facts) -> Iterator[str]:
    torch, gpus = facts["torch"], _gpus(facts)
    if torch.get("cuda_works") and torch.get("no_kernels"):
        yield (
            f"layers cannot be compiled for the GPUs, which costs speed and memory: {torch['no_kernels']};"
            " install gcc and python3-dev (in a container: an image with development files)"
        )
    if not gpus or not torch or torch["cuda_works"]:
        return
    count = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"
    if torch["cuda"].startswith("none"):
        yield f"there are {count}, but torch {torch['version']} is a build for the CPU; install its CUDA build"
    else:
        yield (
            f"there are {count}, but torch, built for CUDA {torch['cuda']}, cannot use them; check"
            f" CUDA_VISIBLE_DEVICES, and that driver {facts['GPUs'].get('driver', '?')} is new enough for that CUDA"
            " (else install a torch for an older one)"
        )


def _clock_advice(facts: Facts) -> Iterator[str]:
    for name, gpu in facts["exchange"].get("gpus_at_work", {}).items():
        if reasons := gpu.get("slowed_down"):
            yield (
                f"GPU {name} is slowed down: {', '.join(reasons)}, at {gpu['temperature_c']} °C; have its cooling and"
                " power supply checked, and leave this node out meanwhile"
            )
        elif gpu.get("sm_clock_most_mhz") and gpu["sm_clock_mhz"] < LOW_CLOCK * gpu["sm_clock_most_mhz"]:
            yield (
                f"GPU {name} works at {gpu['sm_clock_mhz']} of {gpu['sm_clock_most_mhz']} MHz; see whether its clock is"
                " locked (`nvidia-smi -q -d CLOCK`, undone by `nvidia-smi -rgc`) or its power limit lowered"
            )
    for name, gpu in _gpus(facts).items():
        limit, usual = gpu.get("power_limit_w"), gpu.get("power_limit_default_w")
        if limit and usual and limit < 0.9 * usual:
            yield (
                f"GPU {name} may take {limit:.0f} W of the usual {usual:.0f} W; an administrator can raise it with"
                f" `nvidia-smi -pl {usual:.0f}`"
            )


def _transport_advice(facts: Facts) -> Iterator[str]:
    used, links = facts["exchange"].get("transports", []), facts["links"].values()
    if any(name.startswith("NET/Socket") for name in used):
        yield (
            "NCCL sends over sockets between GPUs of this machine; unset NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and"
            " NCCL_NET, and in a container allow shared memory (`--ipc=host`)"
        )
    elif any(name.startswith("SHM") for name in used) and any(link.startswith("NV") for link in links):
        yield (
            "NCCL sends through host memory although the GPUs have NVLink; unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL,"
            " and let the container see all GPUs of the node"
        )


def _host_advice(facts: Facts) -> Iterator[str]:
    limits, processors, disk = facts["limits"], facts["processors"], facts["disk"]
    if (size_bytes := limits.get("shm_bytes", SHM_BYTES)) < SHM_BYTES:
        yield (
            f"shared memory, /dev/shm, is {size_bytes / 1e6:.0f} MB, at least {SHM_BYTES / 1e9:.1f} GB are wanted;"
            " start the container with `--shm-size=8g` or `--ipc=host`, or `mount -o remount,size=8G /dev/shm`"
        )
    if processors:
        cores = min(processors["allowed"], processors.get("cgroup_limit", processors["allowed"]))
        if cores < (ranks := facts["run"].get("ranks", 0)):
            yield (
                f"{cores:g} of the machine's {processors['cores']} cores for {count(ranks, 'ranks')}; ask for more"
                " (cluster.cpus_per_rank, the container's --cpus), or lower cluster.cpu_ranks"
            )
    if (speed := disk.get("write_bytes_per_s", SLOW_DISK_BYTES_PER_S)) < SLOW_DISK_BYTES_PER_S:
        yield (
            f"{disk['folder']} is written at {speed / 1e6:.0f} MB/s, so a checkpoint of 10 GB takes"
            f" {10e9 / speed / 60:.0f} min; set PIPELINE_STORE to a faster disk, or use"
            " train.save_every_steps: auto and raise train.guards.rollback_every_steps"
        )
    if (files := limits.get("open_files", OPEN_FILES)) < OPEN_FILES:
        yield f"{files} files may be open at a time; `ulimit -n {limits['open_files_most']}` raises it"


# The examination of this machine: within BUDGET_S, each part with its own deadline.

BUDGET_S = 28.0
CPU_RANKS = 2

Within = Callable[[float], float]


def deadline(budget_s: float) -> Within:
    """Return a function that limits the seconds of a part to what is left of `budget_s`."""
    end_s = time.monotonic() + budget_s
    return lambda most_s: min(most_s, end_s - time.monotonic())


def measure_machine(store: Path, environ: Mapping[str, str], within: Within, say: Callable[[str], None]) -> Facts:
    """Return the facts that one process can measure about its machine and the disk of `store`."""
    facts: Facts = {
        "versions": versions(),
        "out of range": measured(out_of_range),
        "variables": variables(environ),
        "processors": measured(processors),
        "memory": measured(memory),
        "limits": measured(limits),
    }
    say("doctor: looking at the GPUs and at the disk")
    facts["GPUs"] = measured(lambda: probe("gpus", environ, within(5)))
    facts["torch"] = measured(lambda: probe("torch", environ, within(12)))
    if facts["torch"].get("gpus", 0) < 2:
        facts["links"] = {UNMEASURED: "there are fewer than two GPUs"}
    else:
        facts["links"] = measured(lambda: topology(within(4)))
    facts["disk"] = measured(lambda: probe("disk", environ, within(10), "--store", str(store.absolute())))
    return facts


def examine(store: Path, ranks: int | None, environ: Mapping[str, str], say: Callable[[str], None]) -> Facts:
    """Return all facts of this machine, the disk of `store` and `ranks` ranks (None: one for each GPU).

    The sections are in the order of the report.
    """
    within = deadline(BUDGET_S)
    facts = measure_machine(store, environ, within, say)
    gpus = facts["torch"].get("gpus", 0) if facts["torch"].get("cuda_works") else 0
    device = "cuda" if gpus else "cpu"
    ranks = min(ranks or gpus, gpus) if gpus else ranks or CPU_RANKS
    facts["run"] = {"ranks": ranks, "device": device}
    say(f"doctor: {ranks} ranks exchange data")
    facts["exchange"] = measured(lambda: exchange(environ, device, ranks, within(18)))
    return facts
