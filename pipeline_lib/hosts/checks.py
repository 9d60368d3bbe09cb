"""The checks of all hosts before any spending: every problem at once, within seconds."""

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline_lib.config.schema import Cluster
from pipeline_lib.core import units
from pipeline_lib.core.units import from_gigabytes, gigabytes
from pipeline_lib.hosts.facts import HostFacts
from pipeline_lib.plan.gpus import find_gpu

CLOCK_S = 5.0  # less does no harm: no time of one host is compared with one of another
LEAST_TEMPORARY_BYTES = 500_000_000  # for what torch compiles and Python's temporary files
_TOKEN, _OLD_S = ".hosts-", 86_400.0
SEEN_S = 10.0  # an NFS client may cache a folder's listing for this long


@contextmanager
def token_in(folders: Sequence[Path]) -> Iterator[str]:
    """Yield a new file's name in each of `folders` that contains it; remove answers at the end."""
    token = f"{_TOKEN}{uuid.uuid4().hex}"
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_old_tokens(folder)
        (folder / token).write_text(token, encoding="utf-8")
    try:
        yield token
    finally:
        for folder in folders:
            for path in folder.glob(f"{token}*"):
                path.unlink(missing_ok=True)


def _remove_old_tokens(folder: Path) -> None:
    """Remove what a killed check has left behind."""
    for path in folder.glob(f"{_TOKEN}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _OLD_S:
                path.unlink()


def unseen_answers(folder: Path, token: str, hosts: Sequence[str]) -> list[str]:
    """Return the hosts of `hosts` whose file beside `token` is not visible here within SEEN_S."""
    deadline_s = time.monotonic() + SEEN_S
    while True:
        seen = {path.name.removeprefix(f"{token}.") for path in folder.glob(f"{token}.*")}
        missing = [host for host in hosts if host not in seen]
        if not missing or time.monotonic() > deadline_s:
            return missing
        time.sleep(0.2)


@dataclass(frozen=True)
class HostNeeds:
    """What each host needs: `gpu` is part of its GPUs' name; 0 `memory_gb` asks for nothing."""

    gpus_per_node: int
    gpu: str | None
    memory_gb: int

    @staticmethod
    def by(cluster: Cluster) -> "HostNeeds":
        """Return what a config's cluster wants of each node."""
        return HostNeeds(cluster.gpus_per_node, cluster.gpu_name, cluster.memory_gb or 0)


def problems_of_hosts(
    facts: Mapping[str, HostFacts], clocks: Mapping[str, float], wanted: HostNeeds
) -> list[str]:
    """Return what is wrong with each host alone and with all together.

    `clocks` has the seconds each is ahead.
    """
    problems = []
    for host, found in facts.items():
        problems += [f"{host}: {text}" for text in _alone(found, wanted)]
    problems += _same_machine(facts)
    for what, values in _compared(facts).items():
        problems += _differences(what, values)
    for host, ahead_s in clocks.items():
        if abs(ahead_s) > CLOCK_S:
            way = "ahead of" if ahead_s > 0 else "behind"
            clock = f"its clock is {abs(ahead_s):.0f} s {way} this machine's"
            remedy = "start a time service there (chrony or systemd-timesyncd)"
            problems.append(f"{host}: {clock}; {remedy}")
    return problems


def _alone(found: HostFacts, wanted: HostNeeds) -> Iterator[str]:
    for folder, reason in found.folders.items():
        if reason:
            yield (
                f"{folder} is not shared: {reason}; all hosts need one folder for the store and "
                "the runs, at the same path (docs/two-machines.md has the lines for NFS)"
            )
    if len(found.gpus) < wanted.gpus_per_node:
        count = "no GPUs (nvidia-smi shows none)"
        if found.gpus:
            count = units.count(len(found.gpus), "GPUs")
        yield f"it has {count}, and cluster.gpus_per_node is {wanted.gpus_per_node}"
    if wanted.gpus_per_node and wanted.gpu:
        for name in sorted({gpu.name for gpu in found.gpus}):
            if _is_another(wanted.gpu, name):
                yield f"its GPUs are {name}, and cluster.gpu is {wanted.gpu}"
    if found.memory_available_bytes < from_gigabytes(wanted.memory_gb):
        free = gigabytes(found.memory_available_bytes)
        yield (
            f"{free} of its {gigabytes(found.memory_bytes)} of memory are free, and "
            f"cluster.memory_gb is {wanted.memory_gb}: end what else runs there, or lower it"
        )
    if found.temporary_free_bytes < LEAST_TEMPORARY_BYTES:
        yield (
            f"{found.temporary_folder} has {gigabytes(found.temporary_free_bytes)} free, and"
            f" {gigabytes(LEAST_TEMPORARY_BYTES)} are needed for temporary files: free some, or "
            "set TMPDIR there"
        )


def _is_another(wanted: str, name: str) -> bool:
    """Return whether the driver's `name` is another model than `wanted`; False if unknown."""
    return find_gpu(wanted) is not None and find_gpu(name) not in (None, find_gpu(wanted))


def _same_machine(facts: Mapping[str, HostFacts]) -> Iterator[str]:
    by_machine: dict[str, list[str]] = {}
    for host, found in facts.items():
        by_machine.setdefault(found.machine, []).append(host)
    for names in by_machine.values():
        if len(names) > 1:
            yield f"{' and '.join(names)} are one machine: list each machine once"


def _compared(facts: Mapping[str, HostFacts]) -> dict[str, dict[str, str]]:
    """Return the values that have to be equal, by what they are and by host."""
    packages = set[str]()
    for found in facts.values():
        packages.update(found.packages)

    def of_each(read: Callable[[HostFacts], str]) -> dict[str, str]:
        return {host: read(found) for host, found in facts.items()}

    compared = {
        "this project's code": of_each(lambda found: found.code),
        "Python": of_each(lambda found: found.python),
    }
    for name in sorted(packages):
        compared[name] = of_each(partial(_version, name))
    if any(found.gpus for found in facts.values()):
        compared["the kind of GPU"] = of_each(_gpu_kinds)
        compared["the branch of the GPU driver"] = of_each(_driver_branch)
    return compared


def _version(package: str, found: HostFacts) -> str:
    return found.packages.get(package, "not installed")


def _gpu_kinds(found: HostFacts) -> str:
    return ", ".join(sorted({gpu.name for gpu in found.gpus})) or "none"


def _driver_branch(found: HostFacts) -> str:
    """Return the branch of a driver's version, `570` of `570.124.06`: its releases work together."""
    return found.gpus[0].driver.partition(".")[0] if found.gpus else "none"


def _differences(what: str, values: Mapping[str, str]) -> Iterator[str]:
    counts = Counter(values.values())
    if len(counts) > 1:
        parts = []
        for value, _ in counts.most_common():
            hosts = [host for host, its in values.items() if its == value]
            parts.append(f"{value} on {', '.join(hosts)}")
        yield f"{what} differs: {'; '.join(parts)}"
