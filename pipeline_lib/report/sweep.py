"""The outcomes of a sweep's experiments, and the rungs of successive halving."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.config.compile import Experiment, run_digest
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.halving import (
    RUNG_LOGS,
    Competitor,
    Decision,
    Reached,
    Rung,
    decide,
    decision_path,
    last_decisions,
    reached_path,
    read_decision,
    read_reached,
    write_record,
)
from pipeline_lib.core import units
from pipeline_lib.core.errors import Diverged, Interrupted, TrainingError
from pipeline_lib.core.files import read_json, read_jsonl, remove_dir
from pipeline_lib.core.lock import locked
from pipeline_lib.core.run_folder import METRICS_NAME, SUMMARY_NAME
from pipeline_lib.core.stage import Say, open_sealed
from pipeline_lib.core.store import Ref, Spec, Store
from pipeline_lib.core.text import reason_of
from pipeline_lib.core.units import columns, real
from pipeline_lib.report.facts import Read, read_one
from pipeline_lib.report.results import Evaluation, Training

# Removal of temporary sealed directories: those of a rehearsal, or of a training up to a rung.


def remove_passing(specs: Iterable[Spec], store: Store) -> int:
    """Remove the sealed directories and pointers of `specs`, and return the bytes freed. Checkpoints stay.

    Directories that an experiment of the store uses stay, since another config may need the same few steps. So do
    directories that another process has locked; that process will remove them.
    """
    there = [spec for spec in specs if store.sealed(spec.ref).exists() or store.pointer(spec.ref).exists()]
    used: set[str] = set()
    for frozen in (store.root / "experiments").glob("*.json") if there else ():
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            used |= set(read_json(frozen)["parts"].values())
    freed = 0
    for spec in there:
        if spec.digest in used:
            continue
        sealed = store.sealed(spec.ref)
        with (
            suppress(Interrupted),
            locked(store.lock_path(run_digest(spec) if spec.stage == "train" else spec.digest), _refuse),
        ):
            store.pointer(spec.ref).unlink(missing_ok=True)
            freed += sum(path.stat().st_size for path in sealed.rglob("*") if path.is_file())
            remove_dir(sealed)
    return freed


def _refuse(why: str) -> None:
    """Raise Interrupted instead of waiting for a lock."""
    raise Interrupted(why)


# Outcomes of a sweep's experiments: one line each, the best first.

LOGS = Path("logs")
BEGUN = "begun"  # a file beside the logs, stamped by the same clock, which may be a file server's
_DONE, _STOPPED, _FAILED, _OPEN = "done", "stopped", "failed", "not done"
_ORDER = (_DONE, _STOPPED, _FAILED, _OPEN)


@dataclass(frozen=True)
class Outcome:
    """How one experiment ended; losses are in nats per supervised token.

    `log` is the log of the stage that the experiment did not complete. In a sweep with halving, `rung` is the last step
    where it was compared, and `rung_loss` its held-out loss there.
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
        state = f"{self.state}: {self.stage}" if self.stage else self.state
        rung = "" if self.rung is None else f"{units.real(self.rung_loss)} at step {self.rung}"
        where = str(self.log) if self.log else ""
        return self.name, state, rung, units.real(self.final_loss), units.real(self.eval_loss), where

    @property
    def is_done(self) -> bool:
        """Whether the experiment is finished."""
        return self.state == _DONE

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key: experiments that got further first, then those with the lower loss."""
        rung_loss, loss = (math.inf if loss is None else loss for loss in (self.rung_loss, self.eval_loss))
        by_rung = (-(self.rung or 0), rung_loss) if self.state == _STOPPED else ()
        return _ORDER.index(self.state), *by_rung, loss, self.name


def outcomes(dag: Dag, since_s: float = math.inf, logs: Path = LOGS) -> list[Outcome]:
    """Return the outcome of each experiment: done by held-out loss, then stopped at a rung, failed, and not done.

    An experiment failed at its first unsealed stage if that stage wrote a log at or after `since_s`, a time of the
    clock that stamps the logs; without it, failed and running stages cannot be distinguished. Raise IntegrityError if a
    rung's decision cannot be read, or a result differs from what was sealed.
    """
    return outcomes_of([(dag, one) for one in dag.experiments], since_s, logs)


def outcomes_of(
    opened: Sequence[tuple[Dag, Experiment]], since_s: float = math.inf, logs: Path = LOGS
) -> list[Outcome]:
    """Return the same as `outcomes`, of experiments with the sweeps that they belong to."""
    dags = {id(dag): dag for dag, _ in opened}
    rungs = {key: last_decisions(dag.decisions()) for key, dag in dags.items()}
    found = (_outcome(dag, one, rungs[id(dag)], since_s, logs) for dag, one in opened)
    return sorted(found, key=lambda one: one.order)


def outcome_table(found: Sequence[Outcome]) -> str:
    """Return a table of the outcomes, and the number of experiments in each state."""
    head = ("experiment", "state", "at a rung", "final loss", "held-out loss", "log")
    rows = [head, *(one.cells for one in found)]
    if all(one.rung is None for one in found):
        rows = [(*row[:2], *row[3:]) for row in rows]
    counts = {state: sum(one.state == state for one in found) for state in _ORDER}
    states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return "\n".join([*units.columns(rows), f"{units.count(len(found), 'experiments')}: {states}"])


def note_begin(logs: Path = LOGS) -> None:
    """Record the time when snakemake begins, for `tell_outcomes`."""
    logs.mkdir(parents=True, exist_ok=True)
    (logs / BEGUN).touch()


def tell_outcomes(dag: Dag, say: Say, logs: Path = LOGS) -> None:
    """Link finished results; for a sweep, also show the outcome of each experiment since `note_begin`."""
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
    """Return a verified result; an empty `kind` if its directory was deleted."""
    return read_one(kind, open_sealed(spec.ref, dag.store).file(name)) if dag.store.is_sealed(spec.ref) else kind()


# Successive halving: bring a training to its rung, then decide at the rung which trainings continue.


def reach(to_rung: Spec, store: Store, out: Path, train: Callable[[], None], say: Say) -> None:
    """Bring a training `to_rung` with `train`, and write its result there to `out`.

    If the whole training is already done, its metrics are read instead. A training that diverged is out of the
    sweep until `out` is deleted; any other error is raised.
    """
    step, whole = int(to_rung.settings["until_step"]), Ref(to_rung.stage, run_digest(to_rung))
    try:
        if store.is_sealed(whole):
            say(f"train: the whole training {whole.digest} is done, and says what it had come to at step {step}")
            sealed = open_sealed(whole, store).folder(SUMMARY_NAME, METRICS_NAME)
        else:
            train()
            sealed = store.sealed(to_rung.ref)
        reached = _reached(sealed, step)
    except FileNotFoundError:
        if not out.exists():
            raise
        say(f"train: another snakemake wrote {out} meanwhile, and has decided by it")
        return
    except Diverged as error:
        advice = f"to try again, delete {out}"
        say(f"error: {error}\nthis training diverged and is out of the sweep, which goes on; {advice}")
        reached = Reached(None, None, has_ended=False, failure=reason_of(error))
    write_record(out, reached)


def _reached(sealed: Path, step: int) -> Reached:
    """Return the last validation up to `step` of the sealed training; raise TrainingError if there is none."""
    summary, rows = read_json(sealed / SUMMARY_NAME), read_jsonl(sealed / METRICS_NAME)
    validated = [row for row in rows if "validation_loss" in row and row["step"] <= step]
    if not validated:
        raise TrainingError(f"{sealed}: there was no validation up to step {step}")
    last, stopped = validated[-1], summary["stopped_early"] and summary["steps"] <= step
    return Reached(last["step"], last["validation_loss"], stopped or summary["total_steps"] <= step, None)


def conclude_rung(dag: Dag, digest: str, say: Say) -> None:
    """Decide which trainings continue from the rung `digest`, show the decision, and write it with their next specs.

    Then remove the temporary sealed directories of this rung and the earlier ones. Raise TrainingError if no training
    can continue.
    """
    rung, before = dag.rung(digest)
    going = read_decision(decision_path(dag.store, before.digest)).survivors if before else rung.trainings
    records = {one: read_reached(reached_path(dag.store, rung.trainings[one].digest)) for one in going}
    reached = {one: records[one] for one in rung.trainings if one in records}
    further = dag.rungs[dag.rungs.index(rung) + 1 :]
    names = {one: dag.names_of(one) for one in reached}
    decision = decide(rung, further[0].step if further else None, reached, names)
    if not decision.survivors:
        lines = [f"no training came to step {rung.step} with a loss; delete the files named here to try them again"]
        for one, record in reached.items():
            path = reached_path(dag.store, rung.trainings[one].digest)
            lines.append(f"{names[one][0]}: {record.failure or 'no finite loss'} ({path})")
        raise TrainingError("\n  - ".join(lines))
    if further and decision.next_step is not None:
        dag.store.write_specs(further[0].trainings[one] for one in decision.survivors)
    say(table(decision))
    write_record(decision_path(dag.store, digest), decision)
    behind = dag.rungs[: dag.rungs.index(rung) + 1]
    remove_passing([spec for each in behind for spec in each.trainings.values()], dag.store)


def table(decision: Decision) -> str:
    """Return the decision as a text table."""
    rows = [("experiment", "held-out loss", "", "")]
    for one in decision.competitors:
        name = one.experiments[0] + (f" and {len(one.experiments) - 1} more" if len(one.experiments) > 1 else "")
        rows.append((name, real(one.loss), "goes on" if one.goes_on else "stops", one.why))
    then = f"the next decision is at step {decision.next_step}" if decision.next_step else "the rest go to the end"
    return "\n".join([f"decided at step {decision.step}; {then}", *columns(rows)])
