"""Which machines a training on several nodes uses without SLURM: the user's list of hosts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.slurm.site import Site

SOURCE = "the hosts (`hosts` in the site file, or PIPELINE_HOSTS)"
# As an argument of ssh: a name of an ssh config, an address, or USER@HOST; never an option.
_NAME = re.compile(r"[A-Za-z0-9_\[:][A-Za-z0-9_.:@%\[\]-]*")
_HOSTFILE_LINE = re.compile(
    r"(?P<name>\S+)(?:\s+slots\s*=\s*(?P<slots>\d+))?(?:\s+max_slots\s*=\s*\d+)?"
)


@dataclass(frozen=True)
class Host:
    """A machine as ssh knows it, and how many GPUs a hostfile gives it."""

    name: str
    slots: int | None = None


def hosts_of(site: Site) -> tuple[Host, ...]:
    """Return the hosts of the site in order; none if it names none.

    Raises ConfigError with all problems.
    """
    return read_hosts(site.hosts, SOURCE)


def read_hosts(given: str | Sequence[str], source: str) -> tuple[Host, ...]:
    """Return the hosts that are `given` as names, as text with commas, or as a hostfile's path.

    Raises ConfigError with all problems; `source` says where they were given.
    """
    if isinstance(given, str) and "/" in given:
        hosts, problems = _from_hostfile(Path(given).expanduser())
    else:
        names = given.split(",") if isinstance(given, str) else given
        hosts = [Host(name.strip()) for name in names if name.strip()]
        problems = []
    for host in hosts:
        if not _NAME.fullmatch(host.name):
            text = f"{host.name!r} is no name or address of a host"
            problems.append(f"{text}; user, port and key belong in ~/.ssh/config")
    names = [host.name for host in hosts]
    problems += [
        f"{name} is listed more than once" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    if problems:
        raise ConfigError(source, problems)
    return tuple(hosts)


def _from_hostfile(path: Path) -> tuple[list[Host], list[str]]:
    """Read a DeepSpeed or Open MPI hostfile: `gpu1 slots=8` a line, `#` begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        return [], [f"{path} cannot be read: {error}"]
    hosts, problems = [], []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if found := _HOSTFILE_LINE.fullmatch(text):
            hosts.append(Host(found["name"], int(found["slots"]) if found["slots"] else None))
        else:
            problems.append(f"{path}, line {number}: {text!r} is not like `gpu1 slots=8`")
    return hosts, problems
