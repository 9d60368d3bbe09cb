"""The state of a store: a `Status` for each experiment, sorted by state in the order of STATES."""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.stages import is_of_base, shown_stage
from pipeline_lib.core.errors import IntegrityError, Unreadable
from pipeline_lib.core.language import _
from pipeline_lib.core.lock import holder
from pipeline_lib.core.run_record import RunRecord, text_of
from pipeline_lib.core.store import Ref, Spec, Store
from pipeline_lib.slurm.queue import QueuedJob, of_digest, queued_jobs
from pipeline_lib.status.at_rest import (
    DONE,
    FAILED,
    INTERRUPTED,
    LOGS,
    NOT_BEGUN,
    REQUEUED,
    RUNNING,
    STOPPED,
    UNREADABLE,
    WAITING,
    AtRest,
    Traces,
    at_rest,
    shown,
)
from pipeline_lib.status.catalog import (
    LAST_PART,
    Catalog,
    Frozen,
    Sweeps,
    by_name,
    changed_at,
    missing_products,
    unreadable,
)
from pipeline_lib.status.progress import Numbers, finished_numbers, numbers_of, planned_steps
from pipeline_lib.status.selection import SelectedExperiment, Selector

STATES = (RUNNING, REQUEUED, WAITING, FAILED, INTERRUPTED, UNREADABLE, NOT_BEGUN, STOPPED, DONE)


@dataclass(frozen=True)
class Status:
    """The state of an experiment: its first unfinished stage, and its training's progress.

    `finished` names the newest finished config of the same name, if this one is not finished.
    """

    experiment: str
    frozen: str | None
    stage: str | None
    digest: str | None
    state: str
    numbers: Numbers = Numbers()
    owner: str | None = None
    job: str | None = None
    job_state: str | None = None
    reason: str | None = None
    advice: str | None = None
    log: str | None = None
    slurm_log: str | None = None
    finished: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all fields as one flat object, whose keys are stable."""
        flat = {each.name: getattr(self, each.name) for each in fields(self)}
        del flat["numbers"]
        for each in fields(self.numbers):
            flat[each.name] = getattr(self.numbers, each.name)
        return flat


@dataclass
class Survey:
    """A request to see experiments that `texts` name, else all, as `Selector.chosen` does.

    All are those of `store`. `folder` is where snakemake runs and keeps its logs. `is_slurm_silent`
    is true if squeue exists but did not answer at the last reading.
    """

    store: Store
    folder: Path = Path()
    texts: tuple[str, ...] = ()
    all_of_them: bool = False
    selector: Selector = field(init=False)
    is_slurm_silent: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Start with nothing read."""
        self.selector = Selector(self.store)

    def chosen(self) -> list[SelectedExperiment]:
        """Return the experiments to look at. Raises ConfigError for a text that names none."""
        return self.selector.chosen(self.texts, self.all_of_them)

    def statuses(self) -> list[Status]:
        """Return the present state of the experiments.

        Raises ConfigError for a text that names none.
        """
        chosen = self.chosen()
        jobs = queued_jobs() if chosen else []
        self.is_slurm_silent = jobs is None and shutil.which("squeue") is not None
        readers: dict[Path, _Reader] = {}
        statuses = []
        for one in chosen:
            catalog = one.catalog
            if catalog.folder not in readers:
                sweeps = Sweeps(catalog, self.folder / LOGS, jobs or [])
                readers[catalog.folder] = _Reader(catalog.store, self.folder, catalog, jobs, sweeps)
            reader = readers[catalog.folder]
            status = reader.status(one.frozen) if one.has_begun else _not_begun(one.frozen.name)
            if status.state != DONE and not self.all_of_them:
                status = replace(status, finished=reader.finished_of(one.frozen.name))
            statuses.append(status)
        return sorted(statuses, key=lambda status: (STATES.index(status.state), status.experiment))


def _not_begun(name: str) -> Status:
    """Return the status of an experiment of a config file with which snakemake has not begun."""
    return Status(
        shown(name),
        frozen=None,
        stage=None,
        digest=None,
        state=NOT_BEGUN,
        reason=_("snakemake has not begun with this config"),
        advice=_("run snakemake with it"),
    )


@dataclass
class _Reader:
    """What was read of a store so far, as stages are shared: `stages` has `Status` by digest."""

    store: Store
    folder: Path
    catalog: Catalog
    jobs: list[QueuedJob] | None
    sweeps: Sweeps
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    def status(self, experiment: Frozen) -> Status:
        """Return the state of `experiment`."""
        common: dict[str, Any] = {
            "experiment": shown(experiment.name),
            "frozen": experiment.path.stem,
        }
        try:
            if not experiment.parts:
                raise unreadable(experiment)
            # last: what comes next is the training
            ready = sorted(self.catalog.ready(experiment), key=is_of_base)
            for spec in ready:
                if spec.digest not in self.stages:
                    self.stages[spec.digest] = self._stage(spec)
            trained = Numbers()
            train = Ref("train", experiment.parts.get("train", ""))
            if train.digest and self.store.is_sealed(train):
                trained = finished_numbers(self.store.sealed(train))
        except (IntegrityError, Unreadable, OSError, ValueError, RecursionError) as error:
            # An unreadable experiment must not hide the others.
            return Status(
                **common, stage=None, digest=None, state=UNREADABLE, reason=shown(str(error))
            )
        if not ready:
            return Status(**common, stage=None, digest=None, state=DONE, numbers=trained)
        to_make = [self.stages[spec.digest] for spec in ready]
        found = dict(min(to_make, key=lambda each: STATES.index(each["state"])))
        if found["state"] == NOT_BEGUN:
            found |= self._why_not_begun(experiment, found["stage"])
        if found["stage"] != "train":
            found["numbers"] = trained
        elif found["numbers"].last_step is None:
            steps = planned_steps(self.store.root / "plan" / experiment.parts.get("plan", ""))
            found["numbers"] = replace(found["numbers"], last_step=steps)
        return Status(**common, **found)

    def _why_not_begun(self, experiment: Frozen, stage: str) -> dict[str, str]:
        """Return the fields that tell more of a stage that is not begun."""
        if stage == "train" and (why := self.sweeps.why_stopped(experiment)):
            return {"state": STOPPED, "reason": shown(why)}
        if self.store.is_sealed(Ref(LAST_PART, experiment.parts[LAST_PART])):
            return {
                "reason": _("its report exists, and its model is missing"),
                "advice": _("run snakemake again"),
            }
        return {}

    def finished_of(self, name: str) -> str | None:
        """Return the newest finished config's digest by name; None if there is none to see."""
        with suppress(Unreadable, OSError, ValueError):
            for one in self._configs.get(name, []):
                if one.parts and not missing_products(one, self.store):
                    return one.path.stem
        return None

    @cached_property
    def _configs(self) -> dict[str, list[Frozen]]:
        return by_name(self.catalog.experiments(all_of_them=True))

    def _stage(self, spec: Spec) -> dict[str, Any]:
        """Return the fields of `Status` for a stage instance that is to be made."""
        is_train = spec.stage == "train"
        lock_digest = run_digest(spec) if is_train else spec.digest
        owner = holder(self.store.lock_path(lock_digest))
        known_since = changed_at(self.store.spec_path(spec.digest))
        run = None
        to_rungs: list[str] = []
        if is_train:
            run = RunRecord.read_ends(self.store.run_dir(lock_digest))
            to_rungs = self.sweeps.to_rungs.get(lock_digest, [])
        jobs = None
        if self.jobs is not None:
            jobs = of_digest(self.jobs, spec.digest, *to_rungs)
        traces = Traces(spec.stage, spec.digest, known_since, run, jobs, self.folder, to_rungs)
        rest = AtRest(RUNNING) if owner is not None else at_rest(traces)
        numbers = numbers_of(run, is_alive=owner is not None) if run else Numbers()
        reason = rest.reason or None
        if reason is None and numbers.is_stalled:
            reason = _("no step since {seconds:,.0f} s").format(seconds=numbers.since_step_s)
        job = _job_of(rest.state, owner, jobs, run)
        slurm_log = None
        if rest.state in (FAILED, INTERRUPTED, REQUEUED, RUNNING):
            slurm_log = traces.slurm_log(job)
        return {
            # The base's evaluation may be made while the training is.
            "stage": shown_stage(spec),
            "digest": spec.digest,
            "state": rest.state,
            "numbers": numbers,
            "owner": _worker(owner) if owner is not None else None,
            "job": job,
            "job_state": next((queued.shown for queued in jobs or [] if queued.id == job), None),
            "reason": reason,
            "advice": _advice(rest.state, numbers, is_train),
            "log": str(traces.log) if traces.log else None,
            "slurm_log": str(slurm_log) if slurm_log else None,
        }


def _job_of(
    state: str,
    owner: Mapping[str, Any] | None,
    jobs: Sequence[QueuedJob] | None,
    run: RunRecord | None,
) -> str | None:
    """Return the id of the job that works, is to work, or was the last to work.

    `owner` is what the lock says of who works; it is asked first.
    """
    if owner is not None and (job := text_of(owner.get("slurm_job"))) is not None:
        return job
    if jobs and state in (RUNNING, WAITING, REQUEUED):
        return jobs[0].id
    return run.job if run is not None else None


def _worker(owner: Mapping[str, Any]) -> str:
    if "pid" not in owner:
        return "an owner not named"
    return shown(f"process {owner.get('pid')} on {owner.get('host')}")


def _advice(state: str, numbers: Numbers, is_train: bool) -> str | None:
    """Return what the user can do about the state; None if nothing."""
    if state == UNREADABLE:
        return _("run snakemake again; it writes the missing files")
    then = _("this stage starts over")
    if is_train and numbers.checkpoint_step is not None:
        then = _("training resumes from the checkpoint of step {step}").format(
            step=numbers.checkpoint_step
        )
    if state == FAILED:
        return _("fix the error and run snakemake again; {then}").format(then=then)
    if state == INTERRUPTED:
        return _("run snakemake again; {then}").format(then=then)
    return None
