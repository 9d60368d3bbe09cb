"""Which experiments are kept, and what these and live work need of a store."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from pipeline_lib.base.errors import ConfigError, IntegrityError
from pipeline_lib.base.spec import Spec
from pipeline_lib.config.compile import run_digest
from pipeline_lib.status.catalog import Frozen
from pipeline_lib.status.rest import shown
from pipeline_lib.upkeep.inventory import Inventory


def named(experiments: Sequence[Frozen], names: Iterable[str], where: str) -> list[Frozen]:
    """The frozen experiments that `names` mean: names, patterns of them (`lr-*`), or what `ls NAME` shows as frozen.

    Raises ConfigError, of `where`, for one that means none, with the nearest name.
    """
    found: dict[Path, Frozen] = {}
    problems = []
    for name in names:
        exact = [one for one in experiments if name in (one.name, one.path.stem)]
        meant = exact or [one for one in experiments if fnmatchcase(one.name, name)]
        found |= {one.path: one for one in meant}
        if not meant:
            known = sorted({one.name for one in experiments})
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {shown(', '.join(known[:10])) or 'none'}"
            problems.append(f"{name!r}: no experiment of that name; {hint}")
    if problems:
        raise ConfigError(where, problems)
    return list(found.values())


def unmatched(experiments: Sequence[Frozen], names: Iterable[str]) -> list[str]:
    """The patterns among `names` that match no experiment; a plain name is none."""
    patterns = [name for name in names if set("*?[") & set(name)]
    return [pattern for pattern in patterns if not any(fnmatchcase(one.name, pattern) for one in experiments)]


@dataclass
class Needs:
    """Digests of stage instances that are needed, and names of run folders."""

    inventory: Inventory
    digests: set[str] = field(default_factory=set)
    runs: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    _downloads: set[str] = field(default_factory=set)

    def add_experiment(self, experiment: Frozen) -> None:
        """All parts of an experiment. What of it cannot be read is among `problems` afterwards."""
        if not experiment.parts:
            self.problems.append(experiment.unreadable or f"{experiment.path}: not a frozen experiment")
        for part, digest in experiment.parts.items():
            try:
                self._add(self.inventory.spec(digest))
            except IntegrityError as error:
                self.problems.append(f"{part} of {experiment.name!r}: {error}")

    def add_digest(self, digest: str) -> None:
        """A stage instance or run that is worked on, with all that it is made from, as far as that is known."""
        waiting = [digest]
        while waiting:
            current = waiting.pop()
            if current in self.digests and current in self.runs:
                continue
            self.digests.add(current)
            self.runs.add(current)
            try:
                spec = self.inventory.spec(current)
                self._add(spec)
            except IntegrityError:
                continue
            waiting += [ref.digest for ref in spec.inputs.values()]

    def _add(self, spec: Spec) -> None:
        self.digests.add(spec.digest)
        self.runs.add(run_digest(spec) if spec.stage == "train" else spec.digest)
        if spec.stage == "download" and spec.digest not in self._downloads:
            self.digests |= self._bases(spec.digest)
            self._downloads.add(spec.digest)

    def _bases(self, download: str) -> set[str]:
        """Directories of the store that a local model or data path leads into, as `results/NAME/model` does.

        Only the frozen spec tells where the content lies: a manifest names no paths. Raises IntegrityError.
        """
        root = self.inventory.store.root.resolve()
        found: set[str] = set()
        for value in self.inventory.frozen_spec(download).where.values():
            try:
                inside = Path(str(value)).resolve().relative_to(root).parts
            except (ValueError, OSError, RuntimeError):  # elsewhere, or no path at all
                continue
            found.update(inside[1:2])
        return found
