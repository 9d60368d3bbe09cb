"""Removing what may go from a store, beside jobs that begin and end meanwhile.

Experiments go first, so that a snakemake that wants them writes them anew, which is detected. Then
each directory goes under its lock: the pointer first, then the directory is renamed to a hidden
name, and only then are files deleted. Specs go last: without them the same command, after a kill,
could not tell what in runs/ belongs to this store.
"""

import os
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pipeline_lib.core.errors import IntegrityError, Interrupted, PipelineError
from pipeline_lib.core.files import remove_dir, sweep
from pipeline_lib.core.lock import locked
from pipeline_lib.status.catalog import Catalog, changed_at
from pipeline_lib.upkeep.garbage import Garbage
from pipeline_lib.upkeep.inventory import EXPERIMENTS, Leftover, Made, RunFolder, folders_in
from pipeline_lib.upkeep.live import sweeps
from pipeline_lib.upkeep.needs import Needs

LINKS = ("report.html", "model")


@dataclass
class Meanwhile:
    """The experiments frozen since `garbage` was found, with removed ones frozen again.

    Those to be removed that were frozen again count.
    """

    garbage: Garbage
    _names: frozenset[str] = frozenset()
    _wanted: frozenset[str] = frozenset()

    def wanted(self) -> frozenset[str]:
        """Return the digests and run folders that they need by now.

        Raises IntegrityError if one cannot be read.
        """
        store = self.garbage.inventory.store
        try:
            frozen = os.listdir(store.root / EXPERIMENTS)  # noqa: PTH208 - for each directory
        except FileNotFoundError:
            frozen = []
        visible = {name for name in frozen if name.endswith(".json") and not name.startswith(".")}
        names = visible - self._expected
        if names == self._names:
            return self._wanted
        needs = Needs(self.garbage.inventory)
        for experiment in Catalog(store).experiments(all_of_them=True):
            if experiment.path.name in names:
                needs.add_experiment(experiment)
        if needs.problems:
            raise IntegrityError(
                "a new experiment cannot be read, so nothing more was removed:\n"
                + "\n".join(needs.problems)
            )
        self._names = frozenset(names)
        self._wanted = frozenset(needs.digests | needs.runs)
        return self._wanted

    @cached_property
    def _expected(self) -> frozenset[str]:
        going = {experiment.path for experiment in self.garbage.experiments}
        return frozenset(
            one.path.name for one in self.garbage.inventory.experiments if one.path not in going
        )


@dataclass(frozen=True)
class Removal:
    """The removal of `garbage`, and its outcome.

    `left` are items that came into use meanwhile, `failed` those that could not be removed.
    """

    garbage: Garbage
    results: Path
    removed: list[Made | RunFolder | Leftover] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Remove everything that is not needed by now."""
        self.forget()
        self.remove()

    def forget(self) -> None:
        """Remove frozen experiments, except those frozen again since, and sweeps left empty."""
        for experiment in self.garbage.experiments:
            if changed_at(experiment.path) == experiment.frozen_at:
                self._unlink(experiment.path)
        for path, experiments in sweeps(self.garbage.inventory.store.root):
            if experiments and not any(os.path.lexists(one) for one in experiments):
                self._unlink(path)

    def remove(self) -> None:
        """Remove what was not asked for since `garbage` was found."""
        garbage = self.garbage
        inventory = self.garbage.inventory
        for one in garbage.made:
            self._remove(one, inventory.lock_of(one.ref.digest))
        for run in garbage.runs:
            self._remove(run, run.name)
        for leftover in garbage.leftovers:
            lock = inventory.lock_of(leftover.digest) if leftover.digest else None
            self._remove(leftover, lock)
        self._drop_links()
        for path in garbage.pointers:
            if path.name.partition(".")[0] not in self._meanwhile.wanted():
                self._unlink(path)
        still_there: set[str] = set()
        for run in garbage.runs:
            if os.path.lexists(run.path):
                still_there |= run.names
        for leftover in garbage.leftovers:
            if leftover.digest and os.path.lexists(leftover.path):
                still_there.add(leftover.digest)
        for path in garbage.specs:
            if not inventory.names_of(path.stem) & (self._meanwhile.wanted() | still_there):
                self._unlink(path)

    def raise_failed(self) -> None:
        """Raise PipelineError listing what could not be removed, if there is anything."""
        if self.failed:
            items = "\n".join(f"  - {line}" for line in self.failed)
            raise PipelineError(f"these could not be removed:\n{items}")

    @cached_property
    def _meanwhile(self) -> Meanwhile:
        return Meanwhile(self.garbage)

    def _remove(self, what: Made | RunFolder | Leftover, lock: str | None) -> None:
        """Remove `what`, unless its lock is taken or an experiment needs it by now.

        Debris without a stage's name needs no lock (None).
        """
        names = what.names if isinstance(what, RunFolder) else {what.path.name}
        path = self.garbage.inventory.store.lock_path(lock) if lock is not None else None
        try:
            with locked(path, _refuse) if path else nullcontext():
                if {*names, lock} & self._meanwhile.wanted():
                    self.left.append(
                        f"{what.path}: an experiment that was started meanwhile needs it"
                    )
                elif os.path.lexists(what.path):
                    _delete(what.path)
                    self.removed.append(what)
        except Interrupted as busy:
            self.left.append(str(busy))
        except OSError as error:
            self.failed.append(f"{error.filename or what.path}: {error.strerror or error}")

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self.failed.append(f"{path}: {error.strerror or error}")

    def _drop_links(self) -> None:
        root = self.garbage.inventory.store.root.resolve()
        for folder in folders_in(self.results):
            for name in LINKS:
                link = folder / name
                if link.is_symlink() and not link.exists() and link.resolve().is_relative_to(root):
                    self._unlink(link)
                    with suppress(OSError):  # holds something of the user's
                        folder.rmdir()


def _delete(path: Path) -> None:
    """Delete what is at `path`, after the pointer and the page that refer to it."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    for suffix in (".ok", ".html"):
        path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)
    remove_dir(path)
    sweep(path.parent, path.name)
    for left in path.parent.glob(f".*{path.name}-*"):
        raise PermissionError(13, "you may not delete all of it; its owner can", str(left))


def _refuse(text: str) -> None:
    raise Interrupted(text)
