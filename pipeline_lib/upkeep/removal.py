"""Removes what `gc` found, beside jobs that begin and end meanwhile.

First the experiments, so that a snakemake that wants them back writes them anew, and is seen to have done so. Then each
directory under its lock: the pointer first, then the directory gets a hidden name, and only then are files deleted.
The specs go last: without them the same command, after a kill, would not know what in runs/ is of this store.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pipeline_lib.base.errors import IntegrityError, Interrupted, PipelineError
from pipeline_lib.base.fsio import remove_dir, sweep
from pipeline_lib.base.lock import locked
from pipeline_lib.status.catalog import Catalog
from pipeline_lib.status.tail import changed_at
from pipeline_lib.upkeep.gc import Garbage
from pipeline_lib.upkeep.inventory import EXPERIMENTS, Inventory, Leftover, Made, RunFolder, folders_in
from pipeline_lib.upkeep.live import sweeps
from pipeline_lib.upkeep.needs import Needs

LINKS = ("report.html", "model")


@dataclass
class Meanwhile:
    """The experiments that were frozen since the look that found `garbage`, or anew though they were to go."""

    garbage: Garbage
    _names: frozenset[str] = frozenset()
    _wanted: frozenset[str] = frozenset()

    def wanted(self) -> frozenset[str]:
        """The digests and run folders that they need by now. Raises IntegrityError."""
        names = self._frozen() - self._expected
        if names != self._names:
            self._names, self._wanted = names, self._needed_by(names)
        return self._wanted

    @cached_property
    def _expected(self) -> frozenset[str]:
        going = {experiment.path for experiment in self.garbage.experiments}
        return frozenset(one.path.name for one in self.garbage.inventory.experiments if one.path not in going)

    def _frozen(self) -> frozenset[str]:
        try:
            names = os.listdir(self.garbage.inventory.store.root / EXPERIMENTS)  # noqa: PTH208 - for each directory
        except FileNotFoundError:
            return frozenset()
        return frozenset(name for name in names if name.endswith(".json") and not name.startswith("."))

    def _needed_by(self, names: frozenset[str]) -> frozenset[str]:
        needs = Needs(self.garbage.inventory)
        for experiment in Catalog(self.garbage.inventory.store).experiments(all_of_them=True):
            if experiment.path.name in names:
                needs.add_experiment(experiment)
        if needs.problems:
            raise IntegrityError("a new experiment cannot be read, so the rest stays:\n" + "\n".join(needs.problems))
        return frozenset(needs.digests | needs.runs)


@dataclass(frozen=True)
class Removal:
    """The removing of `garbage`, and what came of it.

    `left` are those that somebody began to use meanwhile, `failed` those that resist.
    """

    garbage: Garbage
    results: Path
    removed: list[Made | RunFolder | Leftover] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Of all that was removed."""
        return sum(one.bytes for one in self.removed)

    def run(self) -> None:
        """Remove everything that nobody wants by now."""
        self.forget()
        self.remove()

    def forget(self) -> None:
        """Remove the frozen experiments and sweeps; whatever of them is there later was asked for again."""
        for experiment in self.garbage.experiments:
            if changed_at(experiment.path) == experiment.frozen_at:
                self._unlink(experiment.path)
        for path, experiments in sweeps(self._inventory.store.root):
            if experiments and not any(os.path.lexists(one) for one in experiments):
                self._unlink(path)

    def remove(self) -> None:
        """Remove what was not asked for since `garbage` was found."""
        for one in self.garbage.made:
            self._remove(one, self._inventory.lock_of(one.ref.digest))
        for run in self.garbage.runs:
            self._remove(run, run.name)
        for leftover in self.garbage.leftovers:
            self._remove(leftover, self._inventory.lock_of(leftover.digest) if leftover.digest else None)
        self._drop_links()
        for path in self.garbage.pointers:
            if path.name.partition(".")[0] not in self._meanwhile.wanted():
                self._unlink(path)
        still_there = self._names_in_runs()
        for path in self.garbage.specs:
            if not self._inventory.names_of(path.stem) & (self._meanwhile.wanted() | still_there):
                self._unlink(path)

    def raise_failed(self) -> None:
        """Raise PipelineError with what could not be removed, if there is something."""
        if self.failed:
            raise PipelineError("\n".join(["these could not be removed:", *(f"  - {line}" for line in self.failed)]))

    @property
    def _inventory(self) -> Inventory:
        return self.garbage.inventory

    @cached_property
    def _meanwhile(self) -> Meanwhile:
        return Meanwhile(self.garbage)

    def _remove(self, what: Made | RunFolder | Leftover, lock: str | None) -> None:
        """Remove a directory, or a file that was left, if it can be had and nobody wants it by now."""
        names = what.names if isinstance(what, RunFolder) else {what.path.name}
        try:
            with self._lock(lock):
                if {*names, lock} & self._meanwhile.wanted():
                    self.left.append(f"{what.path}: an experiment that was frozen meanwhile needs it")
                elif os.path.lexists(what.path):
                    _delete(what.path)
                    self.removed.append(what)
        except Interrupted as busy:
            self.left.append(str(busy))
        except OSError as error:
            self.failed.append(f"{error.filename or what.path}: {error.strerror or error}")

    def _names_in_runs(self) -> set[str]:
        """Of what was to go from runs/ and is still there."""
        runs = {name for run in self.garbage.runs if os.path.lexists(run.path) for name in run.names}
        return runs | {left.digest for left in self.garbage.leftovers if left.digest and os.path.lexists(left.path)}

    @contextmanager
    def _lock(self, name: str | None) -> Iterator[None]:
        """Hold the lock `name`, or raise Interrupted at once; debris without a name of a stage needs none."""
        if name is None:
            yield
            return
        with locked(self._inventory.store.lock_path(name), _refuse):
            yield

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self.failed.append(f"{path}: {error.strerror or error}")

    def _drop_links(self) -> None:
        """The links to results that lead nowhere now; a folder that holds nothing else goes too."""
        root = self._inventory.store.root.resolve()
        for link in [folder / name for folder in folders_in(self.results) for name in LINKS]:
            if link.is_symlink() and not link.exists() and link.resolve().is_relative_to(root):
                self._unlink(link)
                with suppress(OSError):  # holds something of the user's
                    link.parent.rmdir()


def _delete(path: Path) -> None:
    """Delete what is at `path`, after all that says that it is there."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for suffix in (".ok", ".html"):
        path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)
    remove_dir(path)
    sweep(path.parent, path.name)
    for left in path.parent.glob(f".*{path.name}-*"):
        raise PermissionError(13, "not all of it can be deleted; its owner can", str(left))


def _refuse(text: str) -> None:
    raise Interrupted(text)
