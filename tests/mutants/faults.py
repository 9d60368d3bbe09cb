"""The kept list of plausible faults, faults.toml, and what may be wrong with it."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("faults.toml")


class ListError(Exception):
    """The list does not fit the tree any more; the message says where."""


@dataclass(frozen=True)
class Fault:
    """A change in `file` that `tests` must notice, or that is `equivalent` for the reason."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""

    @property
    def name(self) -> str:
        """The file and the description."""
        return f"{self.file}: {self.what}"


def read_faults(path: Path = LIST) -> list[Fault]:
    """Return the faults of the list. Raises ListError if it does not read."""
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
        return [Fault(**{**row, "tests": tuple(row.get("tests", ()))}) for row in rows]
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ListError(f"{path}: {error}") from error


def problems(faults: Iterable[Fault], root: Path = ROOT) -> list[str]:
    """Return what is wrong with `faults`, a line for each."""
    found = []
    for fault in faults:
        path = root / fault.file
        times = path.read_text(encoding="utf-8").count(fault.old) if path.is_file() else 0
        if times != 1:
            found.append(
                f"{fault.name}: its old text occurs {times} times in the file instead of once"
            )
        if fault.old == fault.new:
            found.append(f"{fault.name}: changes nothing")
        if bool(fault.tests) == bool(fault.equivalent):
            found.append(f"{fault.name}: needs either tests or the reason why it is equivalent")
        for test in fault.tests:
            if not (root / test.partition("::")[0]).is_file():
                found.append(f"{fault.name}: there is no {test}")
    return found
