"""The memory of this host."""

from contextlib import suppress
from pathlib import Path

import psutil


def host_free_bytes() -> int:
    """Return the bytes free in the system, or in this process's container or job if fewer.

    Of a cgroup, inactive file cache counts as free.
    """
    free_bytes = [psutil.virtual_memory().available]
    names: list[Path] = []
    with suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        names = [Path(line.removeprefix("0::/")) for line in lines if line.startswith("0::/")]
    for folder in [
        Path("/sys/fs/cgroup") / path for name in names for path in (name, *name.parents)
    ]:
        with suppress(OSError, ValueError):  # without a limit it reads `max`
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free_bytes.append(max(0, limit - used + int(stat.get("inactive_file", 0))))
    return min(free_bytes)
