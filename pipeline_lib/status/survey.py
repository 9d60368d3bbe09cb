"""One look at a store: a `Status` for each experiment, those first that something happens to."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import IntegrityError, Unreadable
from pipeline_lib.base.lock import holder
from pipeline_lib.base.spec import Ref, Spec
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import run_digest
from pipeline_lib.slurm.queue import QueuedJob, of_digest, queued_jobs
from pipeline_lib.status.catalog import LAST_PART, Catalog, Frozen, unreadable
from pipeline_lib.status.rest import (
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
from pipeline_lib.status.run import Numbers, Run, finished_numbers, planned_steps
from pipeline_lib.status.sweeps import Sweeps
from pipeline_lib.status.tail import changed_at, text_of

STATES = (RUNNING, REQUEUED, WAITING, FAILED, INTERRUPTED, UNREADABLE, NOT_BEGUN, STOPPED, DONE)


@dataclass(frozen=True)
class Status:
    """Where an experiment stands: its first stage that is not done, and how far its training is."""

    experiment: str
    frozen: str
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

    def to_json(self) -> dict[str, Any]:
        """All of it as one flat object; its keys stay as they are."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "numbers"}
        return own | {each.name: getattr(self.numbers, each.name) for each in fields(self.numbers)}


@dataclass
class Survey:
    """What is asked: which experiments of `store`. `folder` is where snakemake runs, whose logs are looked at.

    `is_slurm_silent` says that the last look could not ask SLURM, though there is a squeue.
    """

    store: Store
    folder: Path = Path()
    names: tuple[str, ...] = ()
    all_of_them: bool = False
    catalog: Catalog = field(init=False)
    is_slurm_silent: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Begin with nothing read."""
        self.catalog = Catalog(self.store)

    def look(self) -> list[Status]:
        """The experiments as they are now. Raises ConfigError for a name that is not there."""
        experiments = self.catalog.experiments(self.names, self.all_of_them)
        jobs = queued_jobs() if experiments else []
        self.is_slurm_silent = jobs is None and shutil.which("squeue") is not None
        look = _Look(self.store, self.folder, self.catalog, jobs)
        found = [look.status(experiment) for experiment in experiments]
        return sorted(found, key=lambda status: (STATES.index(status.state), status.experiment))


@dataclass
class _Look:
    """What one look has read; experiments share stages."""

    store: Store
    folder: Path
    catalog: Catalog
    jobs: list[QueuedJob] | None
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)

    def status(self, experiment: Frozen) -> Status:
        """Where `experiment` stands."""
        common: dict[str, Any] = {"experiment": shown(experiment.name), "frozen": experiment.path.stem}
        try:
            if not experiment.parts:
                raise unreadable(experiment)
            ready = [self._stage(spec) for spec in self.catalog.ready(experiment)]
            trained = self._trained(experiment)
        except (IntegrityError, Unreadable, OSError, ValueError, RecursionError) as error:
            # Of this one; the others are shown.
            return Status(**common, stage=None, digest=None, state=UNREADABLE, reason=shown(str(error)))
        if not ready:
            return Status(**common, stage=None, digest=None, state=DONE, numbers=trained)
        found = dict(min(ready, key=lambda each: STATES.index(each["state"])))
        if found["stage"] == "train" and found["state"] == NOT_BEGUN and (why := self.sweeps.why_stopped(experiment)):
            found |= {"state": STOPPED, "reason": shown(why)}
        if found["state"] == NOT_BEGUN and self.catalog.is_done(Ref(LAST_PART, experiment.parts[LAST_PART])):
            found |= {"reason": "the report is there and the model is missing", "advice": "run snakemake again"}
        if found["stage"] != "train":
            found["numbers"] = trained
        elif found["numbers"].last_step is None:
            steps = planned_steps(self.store.root / "plan" / experiment.parts.get("plan", ""))
            found["numbers"] = Numbers(**{**vars(found["numbers"]), "last_step": steps})
        return Status(**common, **found)

    @cached_property
    def sweeps(self) -> Sweeps:
        """What halving does with trainings."""
        return Sweeps(self.catalog, self.folder / LOGS, self.jobs or [])

    def _trained(self, experiment: Frozen) -> Numbers:
        """The numbers of the finished training, if it is."""
        train = self.catalog.train(experiment)
        return finished_numbers(self.store.sealed(train)) if train and self.catalog.is_done(train) else Numbers()

    def _stage(self, spec: Spec) -> dict[str, Any]:
        """What is known of a stage instance that is to be made."""
        if spec.digest not in self.seen:
            self.seen[spec.digest] = self._look_at(spec)
        return self.seen[spec.digest]

    def _look_at(self, spec: Spec) -> dict[str, Any]:
        is_train = spec.stage == "train"
        lock_digest = run_digest(spec) if is_train else spec.digest
        owner = holder(self.store.lock_path(lock_digest))
        run = Run.read(self.store.run_dir(lock_digest)) if is_train else None
        known_since = changed_at(self.store.spec_path(spec.digest))
        to_rungs = self.sweeps.to_rungs(lock_digest) if is_train else []
        jobs = None if self.jobs is None else of_digest(self.jobs, spec.digest, *to_rungs)
        traces = Traces(spec.stage, spec.digest, known_since, run, jobs, self.folder, to_rungs)
        rest = AtRest(RUNNING) if owner is not None else at_rest(traces)
        numbers = run.numbers(is_alive=owner is not None) if run else Numbers()
        job = _job_of(owner, run, rest, jobs)
        slurm_log = traces.slurm_log(job) if rest.state in (FAILED, INTERRUPTED, REQUEUED, RUNNING) else None
        return {
            "stage": spec.stage,
            "digest": spec.digest,
            "state": rest.state,
            "numbers": numbers,
            "owner": _named(owner),
            "job": job,
            "job_state": next((found.shown for found in jobs or [] if found.id == job), None),
            "reason": rest.reason or _stalled(numbers),
            "advice": _advice(rest.state, numbers, is_train),
            "log": str(traces.log) if traces.log else None,
            "slurm_log": str(slurm_log) if slurm_log else None,
        }


def _job_of(owner: Mapping[str, Any] | None, run: Run | None, rest: AtRest, jobs: list[QueuedJob] | None) -> str | None:
    """The SLURM job that works, is to work, or was the last to: the owner's own word first."""
    if owner is not None and (own := text_of(owner.get("slurm_job"))):
        return own
    if jobs and (owner is not None or rest.state in (WAITING, REQUEUED)):
        return jobs[0].id
    return run.job if run is not None else None


def _named(owner: Mapping[str, Any] | None) -> str | None:
    if owner is None:
        return None
    return shown(f"process {owner.get('pid')} on {owner.get('host')}") if "pid" in owner else "an owner not named"


def _stalled(numbers: Numbers) -> str | None:
    return f"no step since {numbers.since_step_s:,.0f} s" if numbers.is_stalled else None


def _advice(state: str, numbers: Numbers, is_train: bool) -> str | None:
    """What to do about it."""
    goes_on = "it begins this stage anew"
    if is_train and numbers.checkpoint_step is not None:
        goes_on = f"it goes on from the checkpoint after step {numbers.checkpoint_step}"
    return {
        FAILED: f"mend that and run snakemake again; {goes_on}",
        INTERRUPTED: f"run snakemake again; {goes_on}",
        UNREADABLE: "run snakemake again; it writes what is missing",
    }.get(state)
