"""What became of the experiments of a sweep: one line each, the best first."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.base.manifest import MANIFEST_NAME
from pipeline_lib.base.spec import Spec
from pipeline_lib.base.stage import Say
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import Experiment
from pipeline_lib.config.dag import Dag
from pipeline_lib.publish import units
from pipeline_lib.publish.facts import read_one
from pipeline_lib.publish.results import Evaluation, Training

LOGS = Path("logs")
_BEGUN = "begun"  # a file beside the logs, for the clock that stamps them: it may be a file server's
_DONE, _FAILED, _OPEN = "done", "failed", "not done"


@dataclass(frozen=True)
class Outcome:
    """How one experiment ended; `log` is that of the stage that it did not get past. Losses are in nats per token."""

    name: str
    state: str
    stage: str | None = None
    log: Path | None = None
    final_loss: float | None = None
    eval_loss: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """Its line of the table."""
        state = f"{self.state}: {self.stage}" if self.stage else self.state
        where = str(self.log) if self.log else ""
        return self.name, state, units.real(self.final_loss), units.real(self.eval_loss), where


def outcomes(
    experiments: Iterable[Experiment], store: Store, since_s: float = math.inf, logs: Path = LOGS
) -> list[Outcome]:
    """That of each, the best held-out loss first, then those that failed, then those with something left to do.

    One has failed at the first stage that is not sealed if that stage wrote a log after `since_s`, of the clock that
    stamps the logs; without that moment it is not known whether it failed or is being made.
    """
    found = [_outcome(experiment, store, since_s, logs) for experiment in experiments]
    order = (_DONE, _FAILED, _OPEN)
    return sorted(found, key=lambda one: (order.index(one.state), _or_last(one.eval_loss), one.name))


def outcome_table(found: Sequence[Outcome]) -> str:
    """The outcomes as text, and how many there are of each kind."""
    rows = [("experiment", "state", "final loss", "held-out loss", "log"), *(one.cells for one in found)]
    counts = {state: sum(one.state == state for one in found) for state in (_DONE, _FAILED, _OPEN)}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return "\n".join([*units.columns(rows), f"{len(found)} experiments: {told}"])


def note_begin(logs: Path = LOGS) -> None:
    """Note when snakemake begins, for `tell_outcomes`."""
    logs.mkdir(parents=True, exist_ok=True)
    (logs / _BEGUN).touch()


def tell_outcomes(dag: Dag, say: Say, logs: Path = LOGS) -> None:
    """Link what is finished; of a sweep, show what became of each experiment since `note_begin`."""
    dag.link_results()
    if len(dag.experiments) > 1:
        begun = logs / _BEGUN
        since_s = begun.stat().st_mtime if begun.exists() else math.inf
        say(outcome_table(outcomes(dag.experiments, dag.store, since_s, logs)))


def _outcome(experiment: Experiment, store: Store, since_s: float, logs: Path) -> Outcome:
    missing = [spec for spec in experiment.specs.values() if not _is_sealed(spec, store)]
    if not _is_sealed(experiment.specs["report"], store):
        lost = missing[0]
        log = logs / lost.stage / f"{lost.digest}.log"
        if not log.exists():
            return Outcome(experiment.name, _OPEN, lost.stage)
        return Outcome(experiment.name, _FAILED if log.stat().st_mtime >= since_s else _OPEN, lost.stage, log)
    training = read_one(Training, store.sealed(experiment.ref("train")) / "summary.json")
    scores = read_one(Evaluation, store.sealed(experiment.ref("evaluate")) / "metrics.json").eval
    return Outcome(experiment.name, _DONE, final_loss=training.final_loss, eval_loss=scores.tuned.loss)


def _is_sealed(spec: Spec, store: Store) -> bool:
    return (store.sealed(spec.ref) / MANIFEST_NAME).exists()


def _or_last(loss: float | None) -> float:
    return math.inf if loss is None else loss
