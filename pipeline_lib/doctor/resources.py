"""The machine without its GPUs: cores, memory, shared memory, limits, and disk speed.

Sizes are in bytes.
"""

import os
import resource
import shutil
import time
import uuid
from pathlib import Path

import psutil

from pipeline_lib.doctor.facts import Section

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
    """Return a kernel file's text; empty if missing, since older systems have no cgroup v2."""
    try:
        return path.read_text()
    except OSError:
        return ""


def limits() -> Section:
    """Return the size of shared memory, by which ranks exchange data, and the open files limit.

    NCCL uses this memory too.
    """
    shared = shutil.disk_usage("/dev/shm")  # noqa: S108 - the device, not a temporary file
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "shm_bytes": shared.total,
        "shm_free_bytes": shared.free,
        "open_files": soft,
        "open_files_most": hard,
    }


def disk(store: Path) -> Section:
    """Return the store's free space, and its write (including fsync) and read speed in bytes/s.

    Raise OSError. If the store does not exist yet, its nearest existing parent is measured.
    """
    folder = existing_folder(store)
    usage = shutil.disk_usage(folder)
    found: Section = {"folder": str(folder), "free_bytes": usage.free, "total_bytes": usage.total}
    probe = folder / f".doctor-{uuid.uuid4().hex}"
    with probe.open("x+b", buffering=0) as file:
        # immediately, so that the space is freed even if the probe is killed at its deadline
        probe.unlink()
        most_bytes = max(min(WRITE_BYTES, usage.free // 10), CHUNK_BYTES)
        chunk = os.urandom(CHUNK_BYTES)
        written = 0
        start_s = time.monotonic()
        while written < most_bytes and time.monotonic() - start_s < PATIENCE_S:
            written += file.write(chunk)
            os.fsync(file.fileno())
        found["tried_with_bytes"] = written
        found["write_bytes_per_s"] = written / (time.monotonic() - start_s)
        # asks the kernel to drop its cached pages
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        read = 0
        start_s = time.monotonic()
        while (chunk := file.read(CHUNK_BYTES)) and time.monotonic() - start_s < PATIENCE_S:
            read += len(chunk)
        found["read_bytes_per_s"] = read / max(time.monotonic() - start_s, 1e-9)
    return found


def existing_folder(path: Path) -> Path:
    """Return the folder `path`, or its nearest parent that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
