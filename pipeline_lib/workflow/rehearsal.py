"""The findings of a rehearsal: two real steps through save, stop, resume, merge and load.

They are the first two steps of the run itself, which continues from them. Each is the first of its
process, and so slower than later ones: the faster one is reported as an upper limit of the step
time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline_lib.config.compile import Rehearsal, run_digest
from pipeline_lib.config.dag import Dag
from pipeline_lib.core.errors import ConfigError, TrainingError
from pipeline_lib.core.events import EventName
from pipeline_lib.core.files import write_text
from pipeline_lib.core.run_folder import (
    CHECKPOINTS,
    EVENTS_NAME,
    METRICS_NAME,
    PLAN_NAME,
    sealed_steps,
)
from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.core.stage import Say, open_sealed
from pipeline_lib.core.store import read_manifest
from pipeline_lib.core.units import amount, brief, columns, count, size
from pipeline_lib.records.merge import PARITY_NAME, Unproven, read_parity
from pipeline_lib.records.plan import PlanDocument, read_plan
from pipeline_lib.records.record import read_records
from pipeline_lib.records.training import Step, Training, read_training
from pipeline_lib.report.plan_check import FIGURES, Compared, comparison, unjudged
from pipeline_lib.upkeep.temporary import remove_passing
from pipeline_lib.workflow.cost import Cost

if TYPE_CHECKING:
    from pipeline_lib.evaluate.answers import Loaded


SHOWN_ANSWER = 60  # characters
_NOTHING = "nothing to rehearse"


def report_path(dag: Dag) -> Path | None:
    """Return the path of the rehearsal's report; None if there is no rehearsal."""
    rehearsal = dag.rehearsal
    return dag.store.root / "rehearse" / f"{rehearsal.merge.digest}.txt" if rehearsal else None


def needed_for_findings(dag: Dag) -> list[str]:
    """Return the pointer of the merged model; [] if there is nothing to rehearse."""
    rehearsal = dag.rehearsal
    return (
        [str(dag.store.pointer(rehearsal.merge.ref))] if rehearsal and why_not(dag) is None else []
    )


def needed_for_report(dag: Dag) -> list[str]:
    """Return the path of the report; [] if there is none and nothing to rehearse."""
    path = report_path(dag)
    return [str(path)] if path is not None and (path.exists() or why_not(dag) is None) else []


def write_findings(dag: Dag, out: Path, say: Say) -> None:
    """Load the merged model as its users will, and write the rehearsal's findings to `out`.

    Raise ConfigError if there is nothing to rehearse, IntegrityError or TrainingError if a phase
    failed.
    """
    from pipeline_lib.evaluate.answers import load_and_answer

    rehearsal = dag.rehearsal
    if rehearsal is None:
        raise ConfigError(f"experiment {dag.experiment.name!r}", [why_not(dag) or _NOTHING])
    merged = open_sealed(rehearsal.merge.ref, dag.store).folder()
    prompts = "validation/*" if dag.experiment.config.data.held_out_sources else "*"
    loaded = load_and_answer(
        merged, open_sealed(dag.experiment.ref("shard"), dag.store).folder(prompts)
    )
    say(
        f"rehearse: the merged model loads, and answers {loaded.prompt_tokens} tokens with "
        f"{loaded.answer!r}"
    )
    write_text(out, findings(dag, rehearsal, loaded) + "\n")


def conclude(dag: Dag, say: Say) -> None:
    """Show the findings, or why there are none; remove sealed directories only it needed.

    These are the directories that only the rehearsal needed.
    """
    nothing = why_not(dag)
    path = report_path(dag)
    text = ""
    if path is not None and path.exists():
        text = path.read_text(encoding="utf-8").rstrip()
    if nothing is not None and not text.startswith(_NOTHING):
        then = "; when it was rehearsed, this was found:\n" if text else ""
        say(f"{nothing}{then}")
    if text:
        say(text)
    if path is not None and text.startswith(_NOTHING):
        path.unlink()
    if freed := remove_passing(dag.rehearsal.specs if dag.rehearsal else (), dag.store):
        say(
            f"removed the trained and merged model of the rehearsal, {size(freed)}; its "
            "checkpoints stay"
        )


def why_not(dag: Dag) -> str | None:
    """Return why there is nothing to rehearse: the run is past it, or too short.

    None if a rehearsal makes sense.
    """
    rehearsal = dag.rehearsal
    experiment = dag.experiment
    store = dag.store
    if rehearsal is None:
        return f"{_NOTHING}: train.until_step is {experiment.config.train.until_step}"
    if store.is_sealed(experiment.ref("train")):
        return f"{_NOTHING}: the training is done"
    plan = experiment.ref("plan")
    if store.is_sealed(plan):
        reason = _too_short(read_plan(store.sealed(plan) / PLAN_NAME), rehearsal)
        if reason is not None:
            return reason
    run_dir = store.run_dir(run_digest(experiment.specs["train"]))
    newest = max((step for step, _ in sealed_steps(run_dir / CHECKPOINTS)), default=0)
    is_open = any(store.pointer(spec.ref).exists() for spec in (rehearsal.first, rehearsal.second))
    if newest > rehearsal.last_step or (newest == rehearsal.last_step and not is_open):
        return f"{_NOTHING}: already trained to step {newest}, which `snakemake` continues from"
    return None


def _too_short(plan: PlanDocument, rehearsal: Rehearsal) -> str | None:
    steps = plan.run_steps
    if steps > rehearsal.last_step:
        return None
    return f"{_NOTHING}: the whole run has {count(steps, 'steps')}"


def findings(dag: Dag, rehearsal: Rehearsal, loaded: "Loaded") -> str:
    """Return the duration of each phase, the plan against measurements, and the run's cost.

    Raise TrainingError if the second training did not resume from the first.
    """
    store = dag.store
    trained = store.sealed(rehearsal.second.ref)
    plan = read_plan(trained / PLAN_NAME)
    training = read_training(trained)
    if reason := _too_short(plan, rehearsal):
        return reason
    if training.steps != rehearsal.last_step:
        return (
            f"{_NOTHING}: another training of this run went on meanwhile, to step {training.steps}"
        )
    record = RunRecord.read(trained / EVENTS_NAME)
    resumed_at = [event.get("step") for event in record.named(EventName.RUN_RESUMED)]
    if rehearsal.first_step not in resumed_at:
        raise TrainingError(
            f"{trained}: the second training did not resume from the checkpoint of step "
            f"{rehearsal.first_step}; see events.jsonl there"
        )
    steps = read_records(Step, trained / METRICS_NAME)
    step_s = min(step.step_s for step in steps)
    around_s = read_manifest(trained).duration_s - steps[-1].elapsed_s
    config = dag.experiment.config
    parity = read_parity(store.sealed(rehearsal.merge.ref) / PARITY_NAME)
    if isinstance(parity, Unproven):
        proof = parity.unproven
    else:
        proof = f"relative difference of the logits {parity.relative_difference:.1e}"
    cluster = config.cluster
    durations_s = [read_manifest(store.sealed(spec.ref)).duration_s for spec in rehearsal.specs]
    first, second, merge = map(brief, durations_s)
    answer = " ".join(loaded.answer.split())[:SHOWN_ANSWER] or "(nothing)"
    phases = [
        (f"train to step {rehearsal.first_step}, save", first, "checkpoint sealed"),
        (
            f"resume, train to step {rehearsal.last_step}",
            second,
            f"continued from step {rehearsal.first_step}",
        ),
        (
            "merge",
            merge,
            proof,
        ),
        (
            "load with transformers",
            brief(loaded.duration_s),
            f"{loaded.prompt_tokens} tokens are answered with: {answer}",
        ),
    ]
    parts: dict[str, Sequence[Sequence[str]]] = {
        "": phases,
        "plan and measurements": _measured(plan, training, steps, step_s, record),
        "the whole run": Cost.of(config, plan, step_s, around_s, record).rows(store.root),
    }
    where = f"{count(cluster.nodes, 'nodes')}, {count(cluster.ranks, f'{cluster.device} ranks')}"
    lines = [
        f"rehearsal of {dag.experiment.name}: {config.train.method} by {training.strategy} on "
        f"{where}"
    ]
    for title, rows in parts.items():
        lines.append(f"\n{title}" if title else "")
        lines += [f"  {line}" for line in columns(rows)]
    return "\n".join([*lines, "", f"`snakemake` continues from step {rehearsal.last_step}."])


def _measured(
    plan: PlanDocument, training: Training, steps: list[Step], step_s: float, record: RunRecord
) -> list[tuple[str, ...]]:
    """Return a line for each predicted figure; the measured step time is an upper limit."""
    name, unit = FIGURES["step_s"]
    found = comparison(plan, training, steps, record)
    rows: list[tuple[str, ...]] = []
    if plan.prediction is not None:
        band = plan.prediction.step_s
        found.insert(0, Compared("step_s", name, unit, band.value, band.low, band.high, step_s))
    else:
        rows.append(
            (name, "not predicted: cluster.gpu is not set", f"measured {amount(step_s, unit)}", "")
        )
    for one in found:
        predicted = amount(one.predicted, one.unit)
        low = amount(one.low, one.unit)
        high = amount(one.high, one.unit)
        is_first = one.key == "step_s" and one.measured > one.high
        verdict = "above, as usual for first steps" if is_first else "outside the band"
        if one.within:
            verdict = "within the band"
        if not one.is_judged:
            verdict = unjudged(one)
        measured = f"measured {amount(one.measured, one.unit)}"
        rows.append((one.name, f"predicted {predicted} ({low} to {high})", measured, verdict))
    if not plan.cluster.is_gpu:
        peak = max((step.peak_memory_bytes for step in steps), default=0)
        rows.append(
            (
                "memory of a rank",
                "only its tensors are predicted",
                f"measured {amount(peak, 'memory')}",
                "",
            )
        )
    return rows
