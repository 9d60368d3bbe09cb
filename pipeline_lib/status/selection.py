"""The experiments that a user means by what was typed, for every command that takes several.

A name means its newest config, or where a result is wanted its newest finished one; `*` and `?`
match parts of names. A prefix of a report's digest, or of the name of the file that froze the
experiment, tells two configs of one name apart. A config file means its experiment, or all
experiments of its sweep. `STORE:NAME` looks in another store.
"""

import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from pipeline_lib.config.compile import Experiment
from pipeline_lib.config.dag import Dag
from pipeline_lib.core.errors import ConfigError, IntegrityError
from pipeline_lib.core.store import Store
from pipeline_lib.core.text import did_you_mean
from pipeline_lib.status.at_rest import LOGS, shown
from pipeline_lib.status.catalog import (
    LAST_PART,
    Catalog,
    Frozen,
    Sweeps,
    by_name,
    newest_with,
    said_of_newer,
    unreadable,
)

MIN_DIGEST_CHARS = 4
SHOWN_NAMES = 8  # per store, in a message
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class SelectedExperiment:
    """An experiment that was named, in the store of `catalog`; `dag` is its named config file's.

    Unless it `has_begun`, snakemake has not frozen it, and there is no file at the path of
    `frozen`. `newer` is a newer config of the name that was typed, if that is passed over for not
    being finished.
    """

    catalog: Catalog
    frozen: Frozen
    dag: Dag | None = None
    has_begun: bool = True
    newer: Frozen | None = None

    @property
    def compiled(self) -> Experiment | None:
        """The experiment as `dag` has it; None without one."""
        return self.of(self.dag) if self.dag is not None else None

    def of(self, dag: Dag) -> Experiment:
        """Return this experiment of `dag`, which has it."""
        key = self.frozen.name, self.frozen.parts[LAST_PART]
        return next(one for one in dag.experiments if (one.name, one.ref(LAST_PART).digest) == key)


@dataclass
class Selector:
    """A selector of experiments in `store`, unless a text names another one.

    A config file is compiled once. With `wants_finished`, a name means its newest config that is
    finished, if there is one.
    """

    store: Store
    wants_finished: bool = False
    _catalogs: dict[Path, Catalog] = field(default_factory=dict)
    _dags: dict[str, Dag] = field(default_factory=dict)
    _sweeps: dict[Path, Sweeps] = field(default_factory=dict)

    def catalog(self, store: Store) -> Catalog:
        """Return the catalog of `store`."""
        return self._catalogs.setdefault(store.root, Catalog(store))

    def chosen(self, texts: Sequence[str], all_of_them: bool = False) -> list[SelectedExperiment]:
        """Return the experiments that `texts` name, in order, once; `all_of_them` adds older.

        Without `texts`, return all of the store. Raise ConfigError for a text that names none.
        """
        catalog = self.catalog(self.store)
        if not texts:
            every = catalog.experiments(all_of_them)
            return [SelectedExperiment(catalog, frozen) for frozen in every]
        found: dict[tuple[Path, str], SelectedExperiment] = {}
        for text in texts:
            for one in self._meant_by(text, all_of_them):
                found.setdefault((one.catalog.folder.resolve(), one.frozen.path.name), one)
        return list(found.values())

    def opened(self, one: SelectedExperiment) -> tuple[Dag, Experiment]:
        """Return the experiment, and the sweep of its latest request if that was one.

        Raise IntegrityError or Unreadable if it cannot be read.
        """
        if one.dag is not None:
            return one.dag, one.of(one.dag)
        if not one.frozen.parts:
            raise unreadable(one.frozen)
        if one.catalog.folder not in self._sweeps:
            self._sweeps[one.catalog.folder] = Sweeps(one.catalog, LOGS, [])
        path = self._sweeps[one.catalog.folder].latest_of(one.frozen) or one.frozen.path
        try:
            dag = self._thawed(path, one.catalog.store)
        except IntegrityError:  # another experiment of the sweep was removed, or is damaged
            dag = self._thawed(one.frozen.path, one.catalog.store)
        return dag, one.of(dag)

    def _thawed(self, path: Path, store: Store) -> Dag:
        dag = self._dags[str(path)] = self._dags.get(str(path)) or Dag.thaw(path, store)
        return dag

    def _meant_by(self, text: str, all_of_them: bool) -> list[SelectedExperiment]:
        if text.endswith(_SUFFIXES) and Path(text).is_file():
            return self._of_config(text)
        folder, colon, name = text.rpartition(":")
        if colon and not Path(folder).is_dir():
            raise ConfigError(shown(text), [f"{shown(folder)!r} is not a folder; write STORE:NAME"])
        catalog = self.catalog(Store(Path(folder)) if colon else self.store)
        return self._in_catalog(name, catalog, all_of_them)

    def _in_catalog(
        self, text: str, catalog: Catalog, all_of_them: bool
    ) -> list[SelectedExperiment]:
        """Return what `text` means in `catalog`.

        Raise ConfigError if it means nothing, or several by digest.
        """
        every = catalog.experiments(all_of_them=True)
        known = by_name(every)
        names = [text] if text in known else []
        if not names and ("*" in text or "?" in text):
            readable = [name for name in sorted(known) if known[name][0].parts]
            names = [name for name in readable if fnmatchcase(name, text)]
        found = []
        for name in names:
            if all_of_them:
                found += [SelectedExperiment(catalog, one) for one in known[name]]
            else:
                found.append(self._named(known[name], catalog))
        if not found:
            found = [SelectedExperiment(catalog, one) for one in _by_digest(text, every)]
        if not found:
            raise _unknown(text, sorted(known), catalog)
        return found

    def _named(self, configs: Sequence[Frozen], catalog: Catalog) -> SelectedExperiment:
        """Return what the name of `configs`, newest first, means."""
        newest = configs[0]
        if self.wants_finished:
            meant = newest_with(LAST_PART, configs, catalog.store)
            if meant is not newest:
                return SelectedExperiment(catalog, meant, newer=newest)
        return SelectedExperiment(catalog, newest)

    def _of_config(self, text: str) -> list[SelectedExperiment]:
        if text not in self._dags:
            self._dags[text] = Dag.open(Path(text), self.store)
        dag = self._dags[text]
        catalog = self.catalog(self.store)
        found = []
        known: dict[tuple[str, str | None], Frozen] = {}
        for one in catalog.experiments(all_of_them=True):  # newest first
            known.setdefault((one.name, one.parts.get(LAST_PART)), one)
        for experiment in dag.experiments:
            parts = {part: spec.digest for part, spec in experiment.specs.items()}
            frozen = known.get((experiment.name, parts[LAST_PART]))
            has_begun = frozen is not None
            if frozen is None:
                frozen = Frozen(experiment.name, catalog.folder / experiment.name, 0.0, parts)
            found.append(SelectedExperiment(catalog, frozen, dag, has_begun))
        return found


def notes_on(chosen: Iterable[SelectedExperiment]) -> list[str]:
    """Return a line for each name that stands for an older config than its newest."""
    return [shown(said_of_newer(one.frozen, one.newer)) for one in chosen if one.newer is not None]


def _unknown(text: str, known: Sequence[str], catalog: Catalog) -> ConfigError:
    problem = f"{shown(text)}: no experiment of that name"
    if close := did_you_mean(text, known):
        return ConfigError(str(catalog.folder), [problem + shown(close)])
    some = ", ".join(map(shown, known[:SHOWN_NAMES])) or "none"
    if len(known) > SHOWN_NAMES:
        some += ", ..."
    return ConfigError(str(catalog.folder), [f"{problem}, and no config file; known: {some}"])


def _by_digest(text: str, every: Iterable[Frozen]) -> list[Frozen]:
    """Return the experiment whose report or frozen file begins with the digest `text`, or [].

    Raise ConfigError if there are several.
    """
    if len(text) < MIN_DIGEST_CHARS or set(text) - set(string.hexdigits.lower()):
        return []
    reports: dict[str, Frozen] = {}  # the newest per report
    for one in every:
        if not one.parts:
            continue
        digest = one.parts[LAST_PART]
        if one.path.stem.startswith(text) or digest.startswith(text):
            reports.setdefault(digest, one)
    if len(reports) > 1:
        some = sorted(reports.items())[:SHOWN_NAMES]
        meant = ", ".join(f"{shown(one.name)} ({digest})" for digest, one in some)
        raise ConfigError(text, [f"several digests begin with this: {meant}"])
    return list(reports.values())
