"""The experiments to compare, as they are named: each with its config and the digests of its parts."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.config.compile import Experiment
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.halving import last_decisions
from pipeline_lib.core.errors import ConfigError, IntegrityError, Unreadable
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import (
    Store,
)
from pipeline_lib.status.catalog import LAST_PART, json_object, unreadable
from pipeline_lib.status.selection import SelectedExperiment, Selector, notes_on

MAX_COMPARED = 20


@dataclass(frozen=True)
class Stop:
    """Why a sweep's rung stopped a training: held-out loss after `step` (or None) and reason."""

    step: int
    loss: float | None
    why: str


def stop_of(dag: Dag, experiment: Experiment) -> Stop | None:
    """Return why the sweep `dag` stopped the training of `experiment`; None if it did not.

    Raise IntegrityError or Unreadable if a decision cannot be read.
    """
    decided = last_decisions(dag.decisions()).get(experiment.ref("train").digest)
    if decided is None or decided[1].goes_on:
        return None
    rung, judged = decided
    return Stop(rung.step, judged.loss, judged.failure or judged.why)


@dataclass(frozen=True)
class Subject:
    """An experiment to compare: its config, with or without defaults, and the digests of its parts.

    `stop` says that its sweep stopped it.
    """

    store: Store
    name: str
    config: Mapping[str, Any]
    parts: Mapping[str, str]
    stop: Stop | None = None

    @staticmethod
    def of(experiment: Experiment, dag: Dag) -> "Subject":
        """Return the subject of an experiment of `dag`.

        Raise IntegrityError or Unreadable as `stop_of`.
        """
        parts = {part: spec.digest for part, spec in experiment.specs.items()}
        config = experiment.config.model_dump(mode="json")
        return Subject(dag.store, experiment.name, config, parts, stop_of(dag, experiment))

    @staticmethod
    def chosen(one: SelectedExperiment, selector: Selector) -> "Subject":
        """Return the subject of an experiment that was named.

        Raise IntegrityError or Unreadable if it is not read.
        """
        if one.dag is not None:
            return Subject.of(one.of(one.dag), one.dag)
        if not one.frozen.parts:
            raise unreadable(one.frozen)
        config = json_object(one.frozen.path).get("config")
        stop = None
        with suppress(IntegrityError, Unreadable):  # also of an older version of the code
            dag, experiment = selector.opened(one)
            stop = stop_of(dag, experiment)
        known = config if isinstance(config, dict) else {}
        return Subject(one.catalog.store, one.frozen.name, known, one.frozen.parts, stop)

    @property
    def key(self) -> tuple[Path, str]:
        """A key that is equal for the same experiment in the same store."""
        return self.store.root.resolve(), self.parts[LAST_PART]


def select(texts: Sequence[str], store: Store, say: Say = lambda _: None) -> list[Subject]:
    """Return the experiments that `texts` name, in order, once; raise ConfigError if not 2 to 20.

    `say` is told of each name that stands for an older config than its newest.
    """
    selector = Selector(store, wants_finished=True)
    chosen = selector.chosen(texts)
    for note in notes_on(chosen):
        say(note)
    found: dict[tuple[Path, str], Subject] = {}
    for one in chosen:
        subject = Subject.chosen(one, selector)
        found.setdefault(subject.key, subject)
    if not 2 <= len(found) <= MAX_COMPARED:
        problem = f"at most {MAX_COMPARED} can be compared"
        if len(found) < 2:
            problem = "name at least two different ones"
            if len(texts) > 1:
                problem += (
                    "; two runs of one config need different values of train.replica, or two stores"
                )
        number = f"{len(found)} experiments were named"
        if len(found) == 1:
            number = "1 experiment was named"
        raise ConfigError("compare", [f"{number}; {problem}"])
    return list(found.values())
