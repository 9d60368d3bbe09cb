"""Successive halving: bring a training to its rung, then decide there which ones continue."""

import math
from collections.abc import Callable, Collection
from pathlib import Path

from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.halving import (
    Decision,
    Reached,
    decide,
    decision_path,
    reached_path,
    read_decision,
    read_reached,
    write_record,
)
from pipeline_lib.core.errors import Diverged, TrainingError
from pipeline_lib.core.run_folder import METRICS_NAME, SUMMARY_NAME
from pipeline_lib.core.stage import Say, open_sealed
from pipeline_lib.core.store import Ref, Spec, Store
from pipeline_lib.core.text import reason_of
from pipeline_lib.core.units import columns, real
from pipeline_lib.records.record import read_records
from pipeline_lib.records.training import Step, read_training
from pipeline_lib.upkeep.temporary import remove_passing


def reach(to_rung: Spec, store: Store, out: Path, train: Callable[[], None], say: Say) -> None:
    """Bring a training `to_rung` with `train`, and write its result there to `out`.

    If the whole training is already done, its metrics are read instead. A training that diverged is
    out of the sweep until `out` is deleted; any other error is raised.
    """
    step = int(to_rung.settings["until_step"])
    whole = Ref(to_rung.stage, run_digest(to_rung))
    try:
        if store.is_sealed(whole):
            text = f"train: the whole training {whole.digest} is done"
            say(f"{text}, and says what it had come to at step {step}")
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
        text = "this training diverged and is out of the sweep, which goes on"
        say(f"error: {error}\n{text}; to try again, delete {out}")
        reached = Reached(None, None, has_ended=False, failure=reason_of(error))
    write_record(out, reached)


def _reached(sealed: Path, step: int) -> Reached:
    """Return the sealed training's last validation up to `step`; else raise TrainingError."""
    training = read_training(sealed)
    last_step = None
    loss = math.nan
    for row in read_records(Step, sealed / METRICS_NAME):
        if row.validation_loss is not None and row.step <= step:
            last_step = row.step
            loss = row.validation_loss
    if last_step is None:
        raise TrainingError(f"{sealed}: there was no validation up to step {step}")
    has_stopped = training.stopped_early and training.steps <= step
    return Reached(
        last_step,
        loss if math.isfinite(loss) else None,
        has_ended=has_stopped or training.total_steps <= step,
        failure=None,
    )


def conclude_rung(dag: Dag, digest: str, say: Say) -> None:
    """Decide which trainings continue from the rung `digest`, show it, and write it down.

    The decision is written with their next specs. Then remove the temporary sealed directories of
    this rung and the earlier ones. Raise TrainingError if no training can continue.
    """
    rung, before = dag.rung(digest)
    going: Collection[str] = rung.trainings
    if before:
        going = read_decision(decision_path(dag.store, before.digest)).survivors
    reached = {}
    for one, spec in rung.trainings.items():
        if one in going:
            reached[one] = read_reached(reached_path(dag.store, spec.digest))
    number = dag.rungs.index(rung)
    further = dag.rungs[number + 1 :]
    names = {one: dag.names_of(one) for one in reached}
    decision = decide(rung, further[0].step if further else None, reached, names)
    if not decision.survivors:
        text = f"no training came to step {rung.step} with a loss"
        lines = [f"{text}; delete the files named here to try them again"]
        for one, record in reached.items():
            path = reached_path(dag.store, rung.trainings[one].digest)
            lines.append(f"{names[one][0]}: {record.failure or 'no finite loss'} ({path})")
        raise TrainingError("\n  - ".join(lines))
    if further and decision.next_step is not None:
        dag.store.write_specs(further[0].trainings[one] for one in decision.survivors)
    say(table(decision))
    write_record(decision_path(dag.store, digest), decision)
    behind: list[Spec] = []
    for each in dag.rungs[: number + 1]:
        behind += each.trainings.values()
    remove_passing(behind, dag.store)


def table(decision: Decision) -> str:
    """Return the decision as a text table."""
    rows = [("experiment", "held-out loss", "", "")]
    for one in decision.competitors:
        name = one.experiments[0]
        if len(one.experiments) > 1:
            name += f" and {len(one.experiments) - 1} more"
        rows.append((name, real(one.loss), "goes on" if one.goes_on else "stops", one.why))
    then = "the rest go to the end"
    if decision.next_step:
        then = f"the next decision is at step {decision.next_step}"
    return "\n".join([f"decided at step {decision.step}; {then}", *columns(rows)])
