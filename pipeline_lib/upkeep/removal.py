"""Removes what `gc` found, beside jobs that begin and end meanwhile.

First the experiments, so that a snakemake that wants them back writes them anew, and is seen to have done so. Then each
directory under its lock: the pointer first, then the directory gets a hidden name, and only then are files deleted.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline_lib.base.errors import IntegrityError, Interrupted, PipelineError
from pipeline_lib.base.fsio import remove_dir, sweep
from pipeline_lib.base.lock import locked
from pipeline_lib.status.catalog import Catalog
from pipeline_lib.status.tail import changed_at
from pipeline_lib.upkeep.gc import Garbage
from pipeline_lib.upkeep.inventory import EXPERIMENTS, Leftover, Made, RunFolder, folders_in
from pipeline_lib.upkeep.live import sweeps
from pipeline_lib.upkeep.needs import Needs

LINKS = ("report.html", "model")


@dataclass
class Removal:
    """The removing of `garbage`. `left` are those that somebody began to use meanwhile, `failed` those that resist."""

    garbage: Garbage
    results: Path
    bytes: int = 0
    count: int = 0
    left: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    _expected: set[str] = field(default_factory=set)
    _new: set[str] = field(default_factory=set)
    _wanted: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Remove everything that nobody wants by now."""
        self.forget()
        self.remove()

    def remove(self) -> None:
        """Remove what was not asked for again since `forget`."""
        for one in self.garbage.made:
            self._remove(one.path, self.garbage.inventory.lock_of(one.ref.digest), one)
        for run in self.garbage.runs:
            self._remove(run.path, run.name, run)
        for leftover in self.garbage.leftovers:
            lock = self.garbage.inventory.lock_of(leftover.digest) if leftover.digest else None
            self._remove(leftover.path, lock, leftover)
        for path in (*self.garbage.pointers, *self.garbage.specs):
            if path.name.partition(".")[0] not in self._wanted_meanwhile():
                self._unlink(path)
        self._drop_links()

    def raise_failed(self) -> None:
        """Raise PipelineError with what could not be removed, if there is something."""
        if self.failed:
            raise PipelineError("\n".join(["these could not be removed:", *(f"  - {line}" for line in self.failed)]))

    def forget(self) -> None:
        """Remove the frozen experiments and sweeps; whatever of them is there later was asked for again."""
        self._expected = self._frozen_names() - {experiment.path.name for experiment in self.garbage.experiments}
        for experiment in self.garbage.experiments:
            if changed_at(experiment.path) == experiment.frozen_at:
                self._unlink(experiment.path)
        for path, experiments in sweeps(self.garbage.inventory.store.root):
            if experiments and not any(os.path.lexists(one) for one in experiments):
                self._unlink(path)

    def _remove(self, path: Path, lock: str | None, what: Made | RunFolder | Leftover) -> None:
        """Remove a directory, or a file that was left, if it can be had and nobody wants it by now."""
        try:
            with self._lock(lock):
                if {path.name, lock} & self._wanted_meanwhile():
                    self.left.append(f"{path}: an experiment that was frozen meanwhile needs it")
                elif os.path.lexists(path):
                    _delete(path)
                    self.bytes += what.bytes
                    self.count += 1
        except Interrupted as busy:
            self.left.append(str(busy))
        except OSError as error:
            self.failed.append(f"{error.filename or path}: {error.strerror or error}")

    @contextmanager
    def _lock(self, name: str | None) -> Iterator[None]:
        """Hold the lock `name`, or raise Interrupted at once; debris without a name of a stage needs none."""
        if name is None:
            yield
            return
        with locked(self.garbage.inventory.store.lock_path(name), _refuse):
            yield

    def _wanted_meanwhile(self) -> set[str]:
        """Digests and run folders of experiments that were frozen since the first look."""
        new = self._frozen_names() - self._expected
        if new == self._new:
            return self._wanted
        catalog = Catalog(self.garbage.inventory.store)
        needs = Needs(self.garbage.inventory)
        for experiment in catalog.experiments(all_of_them=True):
            if experiment.path.name in new:
                needs.add_experiment(experiment)
        if needs.problems:
            raise IntegrityError("a new experiment cannot be read, so the rest stays:\n" + "\n".join(needs.problems))
        self._new, self._wanted = new, needs.digests | needs.runs
        return self._wanted

    def _frozen_names(self) -> set[str]:
        with suppress(FileNotFoundError):
            names = os.listdir(self.garbage.inventory.store.root / EXPERIMENTS)  # noqa: PTH208 - for each directory
            return {name for name in names if name.endswith(".json") and not name.startswith(".")}
        return set()

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self.failed.append(f"{path}: {error.strerror or error}")

    def _drop_links(self) -> None:
        """The links to results that lead nowhere now; a folder that holds nothing else goes too."""
        root = self.garbage.inventory.store.root.resolve()
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
