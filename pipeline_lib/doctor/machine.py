"""The machine without its GPUs: cores, memory, shared memory, limits, and the speed of the disk. Sizes in bytes."""

import os
import resource
import shutil
import time
import uuid
from io import FileIO
from pathlib import Path

import psutil

from pipeline_lib.doctor.facts import Section

CGROUP = Path("/sys/fs/cgroup")
WRITE_BYTES = 512 << 20
CHUNK_BYTES = 8 << 20
PATIENCE_S = 2.0  # for writing, and again for reading


def processors() -> Section:
    """Cores, and how many of them this process may use."""
    found: Section = {"cores": os.cpu_count() or 1, "allowed": len(os.sched_getaffinity(0))}
    quota = _read(CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        found["cgroup_limit"] = int(quota[0]) / int(quota[1])
    found["load_1_min"] = round(os.getloadavg()[0], 1)
    return found


def memory() -> Section:
    """Host memory, and the limit that a container or a batch job sets."""
    now = psutil.virtual_memory()
    found: Section = {"total_bytes": now.total, "available_bytes": now.available}
    limit = _read(CGROUP / "memory.max").strip()
    if limit.isdigit():
        found["cgroup_limit_bytes"] = int(limit)
    return found


def _read(path: Path) -> str:
    """A kernel's file, empty where there is none: older systems have no cgroup v2."""
    try:
        return path.read_text()
    except OSError:
        return ""


def limits() -> Section:
    """Shared memory, through which ranks and NCCL exchange data, and open files."""
    shared = shutil.disk_usage("/dev/shm")  # noqa: S108 - the device, not a temporary file of ours
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"shm_bytes": shared.total, "shm_free_bytes": shared.free, "open_files": soft, "open_files_most": hard}


def disk(store: Path) -> Section:
    """Where the store is or will be: free space, and bytes a second written (up to fsync) and read. Raises OSError."""
    folder = next(path for path in (store.absolute(), *store.absolute().parents) if path.is_dir())
    usage = shutil.disk_usage(folder)
    found: Section = {"folder": str(folder), "free_bytes": usage.free, "total_bytes": usage.total}
    probe = folder / f".doctor-{uuid.uuid4().hex}"
    with probe.open("x+b", buffering=0) as file:
        probe.unlink()  # at once: a probe that takes too long is killed, and its half a gigabyte goes with it
        found["tried_with_bytes"], found["write_bytes_per_s"] = _write(file, min(WRITE_BYTES, usage.free // 10))
        found["read_bytes_per_s"] = _read_back(file)
    return found


def _write(file: FileIO, most_bytes: int) -> tuple[int, float]:
    """Bytes written within PATIENCE_S, and how many a second, the fsync of each chunk counted."""
    chunk, written, start_s = os.urandom(CHUNK_BYTES), 0, time.monotonic()
    while written < max(most_bytes, CHUNK_BYTES) and time.monotonic() - start_s < PATIENCE_S:
        written += file.write(chunk)
        os.fsync(file.fileno())
    return written, written / (time.monotonic() - start_s)


def _read_back(file: FileIO) -> float:
    """Bytes a second, from the disk: the system is asked to forget what it has of the file."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    read, start_s = 0, time.monotonic()
    while (chunk := file.read(CHUNK_BYTES)) and time.monotonic() - start_s < PATIENCE_S:
        read += len(chunk)
    return read / max(time.monotonic() - start_s, 1e-9)
