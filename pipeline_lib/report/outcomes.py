"""The outcomes of a sweep's experiments: one line each, the best first."""

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size

from pipeline_lib.config.compile import Experiment
from pipeline_lib.config.dag import RESULTS, Dag
from pipeline_lib.config.halving import RUNG_LOGS, Competitor, Rung, last_decisions
from pipeline_lib.config.stages import PRODUCTS
from pipeline_lib.core import units
from pipeline_lib.core.language import N_, _
from pipeline_lib.core.run_folder import METRICS_NAME, SUMMARY_NAME
from pipeline_lib.core.stage import Say, open_sealed
from pipeline_lib.core.store import Ref, Store
from pipeline_lib.data.how_to_call import how_to_call, modes_in
from pipeline_lib.records.benchmark import BENCHMARK_NAME, Benchmarks
from pipeline_lib.records.evaluation import EVALUATION_NAME, Evaluation
from pipeline_lib.records.record import read_record
from pipeline_lib.records.training import read_training
from pipeline_lib.report.conclusion import conclusion
from pipeline_lib.report.ship import ShipVerdict, ship_verdict

LOGS = Path("logs")
BEGUN = "begun"  # a file beside the logs, stamped by the same clock, which may be a file server's
_DONE, _STOPPED = N_("done"), N_("stopped")
_FAILED, _OPEN = N_("failed"), N_("not done")
_ORDER = (_DONE, _STOPPED, _FAILED, _OPEN)


@dataclass(frozen=True)
class Outcome:
    """How one experiment ended; losses are in nats per supervised token.

    `log` is the log of the stage that the experiment did not complete. In a sweep with halving,
    `rung` is the last step where it was compared, and `rung_loss` its held-out loss there.
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
        """The cells of its table row."""
        state = f"{_(self.state)}: {self.stage}" if self.stage else _(self.state)
        rung = ""
        if self.rung is not None:
            rung = _("{loss} at step {step}").format(
                loss=units.real(self.rung_loss), step=self.rung
            )
        where = str(self.log) if self.log else ""
        return (
            self.name,
            state,
            rung,
            units.real(self.final_loss),
            units.real(self.eval_loss),
            where,
        )

    @property
    def is_done(self) -> bool:
        """Whether the experiment is finished."""
        return self.state == _DONE

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key: experiments that got further first, then those with the lower loss."""
        place = _ORDER.index(self.state)
        loss = math.inf if self.eval_loss is None else self.eval_loss
        if self.state != _STOPPED:
            return place, loss, self.name
        rung_loss = math.inf if self.rung_loss is None else self.rung_loss
        return place, -(self.rung or 0), rung_loss, loss, self.name


def outcomes(dag: Dag, since_s: float = math.inf, logs: Path = LOGS) -> list[Outcome]:
    """Return each experiment's outcome: done, by held-out loss; then stopped, failed, not done.

    An experiment failed at its first unsealed stage if that stage wrote a log at or after
    `since_s`, a time of the clock that stamps the logs; without it, failed and running stages
    cannot be distinguished. Raise IntegrityError if a rung's decision cannot be read, or a result
    differs from what was sealed.
    """
    return outcomes_of([(dag, one) for one in dag.experiments], since_s, logs)


def outcomes_of(
    opened: Sequence[tuple[Dag, Experiment]], since_s: float = math.inf, logs: Path = LOGS
) -> list[Outcome]:
    """Return the same as `outcomes`, of experiments with the sweeps that they belong to."""
    dags = {id(dag): dag for dag, _ in opened}
    rungs = {key: last_decisions(dag.decisions()) for key, dag in dags.items()}
    found = [_outcome(dag, one, rungs[id(dag)], since_s, logs) for dag, one in opened]
    return sorted(found, key=lambda one: one.order)


def outcome_table(found: Sequence[Outcome]) -> str:
    """Return a table of the outcomes, and the number of experiments in each state."""
    rows: list[tuple[str, ...]] = [
        (
            _("experiment"),
            _("state"),
            _("at a rung"),
            _("final loss"),
            _("held-out loss"),
            _("log"),
        )
    ]
    rows += [one.cells for one in found]
    if all(one.rung is None for one in found):
        rows = [row[:2] + row[3:] for row in rows]
    counts = Counter(one.state for one in found)
    states = ", ".join(f"{counts[state]} {_(state)}" for state in _ORDER if counts[state])
    lines = units.columns(rows)
    lines.append(f"{units.count(len(found), _('experiments'))}: {states}")
    return "\n".join(lines)


def note_begin(logs: Path = LOGS) -> None:
    """Record the time when snakemake begins, for `tell_outcomes`."""
    logs.mkdir(parents=True, exist_ok=True)
    (logs / BEGUN).touch()


def tell_outcomes(dag: Dag, say: Say, logs: Path = LOGS) -> None:
    """Link finished results; for a sweep, show each experiment's outcome since `note_begin`."""
    dag.link_results()
    if len(dag.experiments) > 1:
        begun = logs / BEGUN
        since_s = begun.stat().st_mtime if begun.exists() else math.inf
        say(outcome_table(outcomes(dag, since_s, logs)))


def tell_results(dag: Dag, say: Say) -> None:
    """Say where the results of the only experiment are and how to use them, once it is finished."""
    experiment = dag.experiment
    if len(dag.experiments) > 1 or not dag.store.is_sealed(experiment.ref("report")):
        return
    sealed = open_sealed(experiment.ref("evaluate"), dag.store)
    evaluation = read_record(Evaluation, sealed.file(EVALUATION_NAME))
    tokenize = open_sealed(experiment.ref("tokenize"), dag.store).manifest
    rows = [(_("verdict"), conclusion(evaluation))]
    if verdict := ship_verdict_of(experiment, dag.store):
        rows.append((_("ship"), verdict.text))
    for part, product in PRODUCTS.items():
        if part in experiment.specs:
            name = Path(product.link).stem
            rows.append((_(name), str(RESULTS / experiment.name / product.link)))
    rows.append((_("chat"), f"qwen3 chat {shlex.quote(experiment.name)}"))
    rows += [(_("call"), line) for line in how_to_call(modes_in(tokenize))]
    width = max(cell_len(name) for name, _text in rows)
    for name, text in rows:
        say(f"{set_cell_size(name, width)}  {text}")


def ship_verdict_of(experiment: Experiment, store: Store) -> ShipVerdict | None:
    """Return whether the experiment's model may ship, by the config's rules; None without any.

    Raise IntegrityError if it has benchmarks that are not finished.
    """
    if "benchmark" not in experiment.specs:
        return None
    sealed = open_sealed(experiment.ref("benchmark"), store)
    benchmarks = read_record(Benchmarks, sealed.file(BENCHMARK_NAME))
    return ship_verdict(experiment.config.ship, benchmarks)


def _outcome(
    dag: Dag,
    experiment: Experiment,
    rungs: Mapping[str, tuple[Rung, Competitor]],
    since_s: float,
    logs: Path,
) -> Outcome:
    name = experiment.name
    store = dag.store
    training = experiment.ref("train").digest
    rung, judged = rungs.get(training, (None, None))
    step = rung.step if rung else None
    loss = judged.loss if judged else None
    if store.is_sealed(experiment.ref("report")):
        return Outcome(
            name,
            _DONE,
            final_loss=_final_loss(experiment.ref("train"), store),
            eval_loss=_eval_loss(experiment.ref("evaluate"), store),
            rung=step,
            rung_loss=loss,
        )
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


def _final_loss(ref: Ref, store: Store) -> float | None:
    """Return the last loss of a verified training; None if its directory was deleted."""
    if not store.is_sealed(ref):
        return None
    sealed = open_sealed(ref, store)
    return read_training(sealed.folder(SUMMARY_NAME, METRICS_NAME)).final_loss


def _eval_loss(ref: Ref, store: Store) -> float | None:
    """Return the held-out loss of a verified evaluation.

    None if nothing was held out or its directory was deleted.
    """
    if not store.is_sealed(ref):
        return None
    evaluation = read_record(Evaluation, open_sealed(ref, store).file(EVALUATION_NAME))
    return evaluation.scores.tuned.loss if evaluation.scores else None
