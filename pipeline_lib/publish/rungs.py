"""The two steps of successive halving: a training comes to its rung, and a rung decides who goes on."""

from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline_lib.base.errors import Diverged, TrainingError
from pipeline_lib.base.fsio import read_json, read_jsonl
from pipeline_lib.base.redact import cut, redact
from pipeline_lib.base.run_folder import METRICS_NAME, SUMMARY_NAME
from pipeline_lib.base.spec import Ref, Spec
from pipeline_lib.base.stage import Say, open_sealed
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.halving import (
    Decision,
    Reached,
    Rung,
    decide,
    decision_path,
    reached_path,
    read_decision,
    read_reached,
    write_record,
)
from pipeline_lib.publish.passing import remove_passing
from pipeline_lib.publish.units import columns, real

REASON_CHARS = 500


def reach(to_rung: Spec, store: Store, out: Path, train: Callable[[], None], say: Say) -> None:
    """Bring a training `to_rung` with `train`, and write to `out` what it came to there.

    A whole training that is done already is asked instead. One that diverged has lost, wherever it runs, and stays so
    until `out` is deleted; whatever else stops a training is raised.
    """
    step, whole = int(to_rung.settings["until_step"]), Ref(to_rung.stage, run_digest(to_rung))
    try:
        if store.is_sealed(whole):
            say(f"train: the whole training {whole.digest} is done, and says what it had come to at step {step}")
            reached = _reached(open_sealed(whole, store).folder(SUMMARY_NAME, METRICS_NAME), step)
        else:
            train()
            reached = _reached(store.sealed(to_rung.ref), step)
    except FileNotFoundError:
        if not out.exists():
            raise
        say(f"train: another snakemake wrote {out} meanwhile, and has decided by it")
        return
    except Diverged as error:
        say(f"error: {error}\nthe training has lost, and the sweep goes on; to try again, delete {out}")
        reached = Reached(None, None, has_ended=False, failure=cut(redact(str(error)), REASON_CHARS))
    write_record(out, reached)


def _reached(sealed: Path, step: int) -> Reached:
    """What the training that is sealed there had come to at `step`, whether or not it went on."""
    summary, rows = read_json(sealed / SUMMARY_NAME), read_jsonl(sealed / METRICS_NAME)
    validated = [row for row in rows if "validation_loss" in row and row["step"] <= step]
    if not validated:
        raise TrainingError(f"{sealed}: there was no validation up to step {step}")
    last, stopped = validated[-1], summary["stopped_early"] and summary["steps"] <= step
    return Reached(last["step"], last["validation_loss"], stopped or summary["total_steps"] <= step, None)


def conclude_rung(dag: Dag, digest: str, say: Say) -> None:
    """Decide who goes on from the rung `digest`, tell it, and write it down, with the specs of what goes on.

    Of what was sealed up to here, only what was written down is kept. Raises TrainingError if nobody can go on.
    """
    rung, before = dag.rung(digest)
    going = read_decision(decision_path(dag.store, before.digest)).survivors if before else rung.trainings
    records = {one: read_reached(reached_path(dag.store, rung.trainings[one].digest)) for one in going}
    reached = {one: records[one] for one in rung.trainings if one in records}
    further = dag.rungs[dag.rungs.index(rung) + 1 :]
    names = {one: dag.names_of(one) for one in reached}
    decision = decide(rung, further[0].step if further else None, reached, names)
    if not decision.survivors:
        raise TrainingError(_nobody(rung, reached, names, dag.store))
    if further and decision.next_step is not None:
        dag.store.write_specs(further[0].trainings[one] for one in decision.survivors)
    say(table(decision))
    write_record(decision_path(dag.store, digest), decision)
    behind = dag.rungs[: dag.rungs.index(rung) + 1]
    remove_passing([spec for each in behind for spec in each.trainings.values()], dag.store)


def _nobody(rung: Rung, reached: Mapping[str, Reached], names: Mapping[str, list[str]], store: Store) -> str:
    """What to say where every training has lost."""
    lines = [f"no training came to step {rung.step} with a loss; delete the files named here to try them again"]
    for one, record in reached.items():
        path = reached_path(store, rung.trainings[one].digest)
        lines.append(f"{names[one][0]}: {record.failure or 'no finite loss'} ({path})")
    return "\n  - ".join(lines)


def table(decision: Decision) -> str:
    """The decision as text."""
    rows = [("experiment", "held-out loss", "", "")]
    for one in decision.competitors:
        name = one.experiments[0] + (f" and {len(one.experiments) - 1} more" if len(one.experiments) > 1 else "")
        rows.append((name, real(one.loss), "goes on" if one.goes_on else "stops", one.why))
    then = f"the next decision is at step {decision.next_step}" if decision.next_step else "the rest go to the end"
    return "\n".join([f"decided at step {decision.step}; {then}", *columns(rows)])
