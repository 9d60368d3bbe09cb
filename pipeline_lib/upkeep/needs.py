"""Selecting experiments by name, and what they and live work need from a store."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pipeline_lib.config.spec_settings import WHERE_KEYS
from pipeline_lib.core.errors import ConfigError, IntegrityError
from pipeline_lib.core.store import Spec
from pipeline_lib.core.text import did_you_mean
from pipeline_lib.status.at_rest import shown
from pipeline_lib.status.catalog import Frozen, json_object
from pipeline_lib.upkeep.inventory import Inventory, run_name


def named(experiments: Sequence[Frozen], names: Iterable[str], where: str) -> list[Frozen]:
    """Return the frozen experiments that match `names`.

    These are names, patterns (`lr-*`), or what `ls NAME` shows as frozen. Raises ConfigError, with
    `where` as its place, for a name that matches none, with the nearest name.
    """
    found: dict[Path, Frozen] = {}
    problems = []
    for name in names:
        exact = [one for one in experiments if name in (one.name, one.path.stem)]
        meant = exact or [one for one in experiments if fnmatchcase(one.name, name)]
        found |= {one.path: one for one in meant}
        if not meant:
            known = sorted({one.name for one in experiments})
            hint = did_you_mean(name, known) or f"; known: {shown(', '.join(known[:10])) or 'none'}"
            problems.append(f"{name!r}: no experiment of that name{hint}")
    if problems:
        raise ConfigError(where, problems)
    return list(found.values())


def unmatched(experiments: Sequence[Frozen], names: Iterable[str]) -> list[str]:
    """Return the patterns among `names` that match no experiment; a plain name is not a pattern."""
    without_match = []
    for name in names:
        is_pattern = bool(set("*?[") & set(name))
        if is_pattern and not any(fnmatchcase(one.name, name) for one in experiments):
            without_match.append(name)
    return without_match


@dataclass
class Needs:
    """The needed digests of stage instances, and names of run folders."""

    inventory: Inventory
    digests: set[str] = field(default_factory=set)
    runs: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    _downloads: set[str] = field(default_factory=set)

    def add_experiment(self, experiment: Frozen) -> None:
        """Add all parts of an experiment; what cannot be read is added to `problems`."""
        if not experiment.parts:
            self.problems.append(
                experiment.unreadable or f"{experiment.path}: not a valid experiment file"
            )
        for path in _paths_of_sources(json_object(experiment.path).get("config")):
            self._add_path(path)
        for part, digest in experiment.parts.items():
            try:
                spec = self.inventory.spec(digest)
                self._add(spec)
                if spec.stage == "download":
                    self._add_before(spec)
            except IntegrityError as error:
                self.problems.append(f"{part} of {experiment.name!r}: {error}")

    def add_digest(self, digest: str) -> None:
        """Add a stage instance or run in work, with all known things that it is made from."""
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

    def _add_before(self, spec: Spec) -> None:
        """Add all that `spec` is made from: of a download, the experiments that it goes on from.

        Raises IntegrityError.
        """
        for ref in spec.inputs.values():
            if ref.digest not in self.digests:
                before = self.inventory.spec(ref.digest)
                self._add(before)
                self._add_before(before)

    def _add(self, spec: Spec) -> None:
        self.digests.add(spec.digest)
        self.runs.add(run_name(spec))
        if spec.stage != "download" or spec.digest in self._downloads:
            return
        # Live work is known by its spec alone. A manifest contains no paths.
        for value in self.inventory.frozen_spec(spec.digest).where.values():
            self._add_path(str(value))
        self._downloads.add(spec.digest)

    def _add_path(self, path: str) -> None:
        """Add what a local model or data path leads to in this store, as `results/NAME/model`."""
        with suppress(ValueError, OSError, RuntimeError):  # elsewhere, or no path at all
            root = self.inventory.store.root.resolve()
            below_root = Path(path).resolve().relative_to(root)
            self.digests.update(below_root.parts[1:2])


def _paths_of_sources(config: Any) -> Iterator[str]:
    """Yield the local paths in a frozen config, which may be damaged.

    Specs have them too, but another clone with other paths to the same content writes its own to
    the same specs.
    """
    sections = [config] if isinstance(config, dict) else []
    while sections:
        section = sections.pop()
        for key, value in section.items():
            if key in WHERE_KEYS and isinstance(value, str):
                yield value
            of_key = value if isinstance(value, list) else [value]
            sections += [one for one in of_key if isinstance(one, dict)]
