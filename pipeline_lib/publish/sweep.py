"""What became of the experiments of a sweep: one line each, the best first."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.base.run_folder import SUMMARY_NAME
from pipeline_lib.base.spec import Spec
from pipeline_lib.base.stage import Say, open_sealed
from pipeline_lib.config.compile import Experiment
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.halving import RUNG_LOGS, Competitor, Rung, last_decisions
from pipeline_lib.publish import units
from pipeline_lib.publish.facts import Read, read_one
from pipeline_lib.publish.results import Evaluation, Training

LOGS = Path("logs")
BEGUN = "begun"  # a file beside the logs, for the clock that stamps them: it may be a file server's
_DONE, _STOPPED, _FAILED, _OPEN = "done", "stopped", "failed", "not done"
_ORDER = (_DONE, _STOPPED, _FAILED, _OPEN)


@dataclass(frozen=True)
class Outcome:
    """How one experiment ended; `log` is that of the stage that it did not get past. Losses are in nats per token.

    Of a sweep with halving, `rung` is the last step where it was compared, with its held-out loss there.
    """

    name: str
    state: str
    stage: str | None = None
    log: Path | None = None
    final_loss: float | None = None
    eval_loss: float | None = None
    rung: int | None = None
    rung_loss: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """Its line of the table."""
        state = f"{self.state}: {self.stage}" if self.stage else self.state
        rung = "" if self.rung is None else f"{units.real(self.rung_loss)} at step {self.rung}"
        where = str(self.log) if self.log else ""
        return self.name, state, rung, units.real(self.final_loss), units.real(self.eval_loss), where

    @property
    def is_done(self) -> bool:
        """Whether it came to its end."""
        return self.state == _DONE

    @property
    def order(self) -> tuple[Any, ...]:
        """Where it stands: those that got further first, of these those with the lower loss."""
        by_rung = (-(self.rung or 0), _or_last(self.rung_loss)) if self.state == _STOPPED else ()
        return _ORDER.index(self.state), *by_rung, _or_last(self.eval_loss), self.name


def outcomes(dag: Dag, since_s: float = math.inf, logs: Path = LOGS) -> list[Outcome]:
    """That of each, the best held-out loss first, then those that a rung stopped, that failed, that are to be done.

    One has failed at the first stage that is not sealed if that stage wrote a log after `since_s`, of the clock that
    stamps the logs; without that moment it is not known whether it failed or is being made. Raises IntegrityError if
    what a rung decided cannot be read, or a result is not what was sealed.
    """
    rungs = last_decisions(dag.decisions())
    return sorted((_outcome(dag, one, rungs, since_s, logs) for one in dag.experiments), key=lambda one: one.order)


def outcome_table(found: Sequence[Outcome]) -> str:
    """The outcomes as text, and how many there are of each kind."""
    head = ("experiment", "state", "at a rung", "final loss", "held-out loss", "log")
    rows = [head, *(one.cells for one in found)]
    if all(one.rung is None for one in found):
        rows = [(*row[:2], *row[3:]) for row in rows]
    counts = {state: sum(one.state == state for one in found) for state in _ORDER}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return "\n".join([*units.columns(rows), f"{len(found)} experiments: {told}"])


def note_begin(logs: Path = LOGS) -> None:
    """Note when snakemake begins, for `tell_outcomes`."""
    logs.mkdir(parents=True, exist_ok=True)
    (logs / BEGUN).touch()


def tell_outcomes(dag: Dag, say: Say, logs: Path = LOGS) -> None:
    """Link what is finished; of a sweep, show what became of each experiment since `note_begin`."""
    dag.link_results()
    if len(dag.experiments) > 1:
        begun = logs / BEGUN
        since_s = begun.stat().st_mtime if begun.exists() else math.inf
        say(outcome_table(outcomes(dag, since_s, logs)))


def _outcome(
    dag: Dag, experiment: Experiment, rungs: Mapping[str, tuple[Rung, Competitor]], since_s: float, logs: Path
) -> Outcome:
    name, store, training = experiment.name, dag.store, experiment.ref("train").digest
    rung, judged = rungs.get(training, (None, None))
    step, loss = (rung.step, judged.loss) if rung and judged else (None, None)
    if store.is_sealed(experiment.ref("report")):
        final_loss = _sealed(Training, dag, experiment.specs["train"], SUMMARY_NAME).final_loss
        scores = _sealed(Evaluation, dag, experiment.specs["evaluate"], "metrics.json").eval
        return Outcome(name, _DONE, None, None, final_loss, scores.tuned.loss, step, loss)
    if rung and judged and not judged.goes_on:
        if judged.failure is None:
            return Outcome(name, _STOPPED, rung=step, rung_loss=loss)
        log = logs / RUNG_LOGS / f"{rung.trainings[training].digest}.log"
        return Outcome(name, _FAILED, "train", log if log.exists() else None, rung=step)
    lost = next(spec for spec in experiment.specs.values() if not store.is_sealed(spec.ref))
    log = logs / lost.stage / f"{lost.digest}.log"
    if lost.stage == "train" and (to_rung := dag.next_to_rung(training)):
        log = logs / RUNG_LOGS / f"{to_rung.digest}.log"
    if not log.exists():
        return Outcome(name, _OPEN, lost.stage, rung=step, rung_loss=loss)
    state = _FAILED if log.stat().st_mtime >= since_s else _OPEN
    return Outcome(name, state, lost.stage, log, rung=step, rung_loss=loss)


def _sealed(kind: type[Read], dag: Dag, spec: Spec, name: str) -> Read:
    """A result as it was sealed; what somebody deleted since is not known."""
    return read_one(kind, open_sealed(spec.ref, dag.store).file(name)) if dag.store.is_sealed(spec.ref) else kind()


def _or_last(loss: float | None) -> float:
    return math.inf if loss is None else loss
