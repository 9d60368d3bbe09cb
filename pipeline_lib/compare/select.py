"""Which experiments are meant by what somebody typed.

A name means the newest config that was frozen under it; `*` and `?` stand for parts of names. The first characters
of a report's digest, or of the file that froze the experiment, tell two configs of one name apart. A config file
means its experiment, or all those of its sweep. `STORE:NAME` looks in another store.
"""

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import ConfigError
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import Experiment, open_experiments
from pipeline_lib.status.catalog import LAST_PART, Catalog, Frozen, unreadable
from pipeline_lib.status.rest import shown
from pipeline_lib.status.tail import json_object

MAX_COMPARED = 20
MIN_DIGEST_CHARS = 4
SHOWN_NAMES = 8  # of a store, in a message
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Subject:
    """An experiment to compare: its config, with or without defaults, and the digests of its parts."""

    store: Store
    name: str
    config: Mapping[str, Any]
    parts: Mapping[str, str]

    @staticmethod
    def of(experiment: Experiment, store: Store) -> "Subject":
        """A compiled experiment."""
        parts = {part: spec.digest for part, spec in experiment.specs.items()}
        return Subject(store, experiment.name, experiment.config.model_dump(mode="json"), parts)

    @property
    def key(self) -> tuple[Path, str]:
        """The same for what is the same experiment in the same store."""
        return self.store.root.resolve(), self.parts[LAST_PART]


def select(texts: Sequence[str], store: Store) -> list[Subject]:
    """The experiments that `texts` name, in their order, each once. Raises ConfigError if they are not 2 to 20."""
    catalogs: dict[Path, Catalog] = {}
    found: dict[tuple[Path, str], Subject] = {}
    for text in texts:
        for subject in _meant_by(text, store, catalogs):
            found.setdefault(subject.key, subject)
    if not 2 <= len(found) <= MAX_COMPARED:
        alike = "; two runs of one config differ in train.replica, or lie in two stores" if len(texts) > 1 else ""
        many = f"at most {MAX_COMPARED} are compared; name those that matter"
        few = f"there have to be two that are not the same{alike}"
        raise ConfigError("compare", [f"{_count(len(found))}; {few if len(found) < 2 else many}"])
    return list(found.values())


def _count(number: int) -> str:
    return "1 experiment was named" if number == 1 else f"{number} experiments were named"


def _meant_by(text: str, store: Store, catalogs: dict[Path, Catalog]) -> list[Subject]:
    if text.endswith(_SUFFIXES) and Path(text).is_file():
        return [Subject.of(experiment, store) for experiment in open_experiments(Path(text), store)]
    folder, colon, name = text.rpartition(":")
    if colon and not Path(folder).is_dir():
        raise ConfigError("compare", [f"{shown(text)}: {shown(folder)!r} is no folder; write STORE:NAME"])
    there = Store(Path(folder)) if colon else store
    catalog = catalogs.setdefault(there.root, Catalog(there))
    return [_subject(frozen, there) for frozen in _in_catalog(name, catalog)]


def _in_catalog(name: str, catalog: Catalog) -> list[Frozen]:
    """The frozen experiments that `name` means. Raises ConfigError where it means none, or no single one."""
    every = catalog.experiments(all_of_them=True)
    newest: dict[str, Frozen] = {}
    for frozen in every:
        newest.setdefault(frozen.name, frozen)
    if name in newest:
        return [newest[name]]
    if "*" in name or "?" in name:
        found = [newest[known] for known in sorted(newest) if newest[known].parts and fnmatchcase(known, name)]
    else:
        found = _by_digest(name, every)
    if not found:
        raise ConfigError(str(catalog.folder), [_unknown(name, newest)])
    return found


def _by_digest(text: str, every: Iterable[Frozen]) -> list[Frozen]:
    """The one experiment whose report or frozen file begins with `text`; none if `text` is no digest."""
    if len(text) < MIN_DIGEST_CHARS or set(text) - set(string.hexdigits.lower()):
        return []
    named = (frozen for frozen in every if frozen.parts)
    found = [one for one in named if one.path.stem.startswith(text) or one.parts[LAST_PART].startswith(text)]
    reports = {one.parts[LAST_PART]: one for one in reversed(found)}  # the newest of one report
    if len(reports) > 1:
        meant = ", ".join(f"{shown(one.name)} ({digest})" for digest, one in sorted(reports.items())[:SHOWN_NAMES])
        raise ConfigError("compare", [f"{text}: begins several digests: {meant}"])
    return list(reports.values())


def _unknown(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    if close := get_close_matches(name, names, n=1):
        return f"{shown(name)}: no experiment of that name; did you mean {shown(close[0])!r}?"
    some = ", ".join(map(shown, names[:SHOWN_NAMES])) + (", ..." if len(names) > SHOWN_NAMES else "")
    return f"{shown(name)}: no experiment of that name, and no config file; known: {some or 'none'}"


def _subject(frozen: Frozen, store: Store) -> Subject:
    if not frozen.parts:
        raise unreadable(frozen)
    config = json_object(frozen.path).get("config")
    return Subject(store, frozen.name, config if isinstance(config, dict) else {}, frozen.parts)
