"""Look at a store, and show what each of its experiments is at."""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pipeline_lib.config.compile import BASELINE, is_of_base, run_digest
from pipeline_lib.core.errors import IntegrityError, Unreadable
from pipeline_lib.core.lock import holder
from pipeline_lib.core.run_record import RunRecord, text_of
from pipeline_lib.core.store import Ref, Spec, Store
from pipeline_lib.core.units import brief, count, gib
from pipeline_lib.slurm.job import QueuedJob, of_digest, queued_jobs
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
from pipeline_lib.train.metrics import clock

# The state of a store: a `Status` for each experiment, sorted by state in the order of STATES.

STATES = (RUNNING, REQUEUED, WAITING, FAILED, INTERRUPTED, UNREADABLE, NOT_BEGUN, STOPPED, DONE)


@dataclass(frozen=True)
class Status:
    """The state of an experiment: its first stage that is not done, and the progress of its training.

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
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "numbers"}
        return own | {each.name: getattr(self.numbers, each.name) for each in fields(self.numbers)}


@dataclass
class Survey:
    """A request to look at the experiments that `texts` name, all of `store` without any, as `Selector.chosen` does.

    `folder` is where snakemake runs and keeps its logs. `is_slurm_silent` is true if squeue exists but did not answer
    at the last reading.
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
        """Return the present state of the experiments. Raises ConfigError for a text that names none."""
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
    reason, advice = "snakemake has not begun with this config", "run snakemake with it"
    return Status(shown(name), None, None, None, NOT_BEGUN, reason=reason, advice=advice)


@dataclass
class _Reader:
    """What was read of a store so far, since experiments share stages: `stages` are fields of `Status` by digest."""

    store: Store
    folder: Path
    catalog: Catalog
    jobs: list[QueuedJob] | None
    sweeps: Sweeps
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)

    def status(self, experiment: Frozen) -> Status:
        """Return the state of `experiment`."""
        common: dict[str, Any] = {"experiment": shown(experiment.name), "frozen": experiment.path.stem}
        try:
            if not experiment.parts:
                raise unreadable(experiment)
            ready = sorted(self.catalog.ready(experiment), key=is_of_base)  # last: what comes next is the training
            for spec in ready:
                if spec.digest not in self.stages:
                    self.stages[spec.digest] = self._stage(spec)
            train = Ref("train", experiment.parts.get("train", ""))
            is_trained = train.digest and self.store.is_sealed(train)
            trained = finished_numbers(self.store.sealed(train)) if is_trained else Numbers()
        except (IntegrityError, Unreadable, OSError, ValueError, RecursionError) as error:
            # An unreadable experiment must not hide the others.
            return Status(**common, stage=None, digest=None, state=UNREADABLE, reason=shown(str(error)))
        if not ready:
            return Status(**common, stage=None, digest=None, state=DONE, numbers=trained)
        found = dict(min((self.stages[spec.digest] for spec in ready), key=lambda each: STATES.index(each["state"])))
        if found["stage"] == "train" and found["state"] == NOT_BEGUN and (why := self.sweeps.why_stopped(experiment)):
            found |= {"state": STOPPED, "reason": shown(why)}
        if found["state"] == NOT_BEGUN and self.store.is_sealed(Ref(LAST_PART, experiment.parts[LAST_PART])):
            found |= {"reason": "its report exists, and its model is missing", "advice": "run snakemake again"}
        if found["stage"] != "train":
            found["numbers"] = trained
        elif found["numbers"].last_step is None:
            steps = planned_steps(self.store.root / "plan" / experiment.parts.get("plan", ""))
            found["numbers"] = replace(found["numbers"], last_step=steps)
        return Status(**common, **found)

    def finished_of(self, name: str) -> str | None:
        """Return the digest of the newest finished config of that name; None if there is none, or it cannot be seen."""
        configs = (one for one in self._configs.get(name, []) if one.parts)
        with suppress(Unreadable, OSError, ValueError):
            return next((one.path.stem for one in configs if not missing_products(one, self.store)), None)
        return None

    @cached_property
    def _configs(self) -> dict[str, list[Frozen]]:
        return by_name(self.catalog.experiments(all_of_them=True))

    def _stage(self, spec: Spec) -> dict[str, Any]:
        """Return the fields of `Status` for a stage instance that is to be made."""
        is_train = spec.stage == "train"
        lock_digest = run_digest(spec) if is_train else spec.digest
        owner = holder(self.store.lock_path(lock_digest))
        run = RunRecord.read_ends(self.store.run_dir(lock_digest)) if is_train else None
        known_since = changed_at(self.store.spec_path(spec.digest))
        to_rungs = self.sweeps.to_rungs.get(lock_digest, []) if is_train else []
        jobs = None if self.jobs is None else of_digest(self.jobs, spec.digest, *to_rungs)
        traces = Traces(spec.stage, spec.digest, known_since, run, jobs, self.folder, to_rungs)
        rest = AtRest(RUNNING) if owner is not None else at_rest(traces)
        numbers = numbers_of(run, is_alive=owner is not None) if run else Numbers()
        # The job that works, is to work, or was the last to work; the lock's owner is asked first.
        job = text_of(owner.get("slurm_job")) if owner is not None else None
        if job is None and jobs and (owner is not None or rest.state in (WAITING, REQUEUED)):
            job = jobs[0].id
        if job is None and run is not None:
            job = run.job
        worker = None
        if owner is not None:
            named = f"process {owner.get('pid')} on {owner.get('host')}" if "pid" in owner else "an owner not named"
            worker = shown(named)
        slurm_log = traces.slurm_log(job) if rest.state in (FAILED, INTERRUPTED, REQUEUED, RUNNING) else None
        return {
            "stage": BASELINE if is_of_base(spec) else spec.stage,  # it may be made while the training is
            "digest": spec.digest,
            "state": rest.state,
            "numbers": numbers,
            "owner": worker,
            "job": job,
            "job_state": next((queued.shown for queued in jobs or [] if queued.id == job), None),
            "reason": rest.reason or (f"no step since {numbers.since_step_s:,.0f} s" if numbers.is_stalled else None),
            "advice": _advice(rest.state, numbers, is_train),
            "log": str(traces.log) if traces.log else None,
            "slurm_log": str(slurm_log) if slurm_log else None,
        }


def _advice(state: str, numbers: Numbers, is_train: bool) -> str | None:
    """Return what the user can do about the state; None if nothing."""
    then = "this stage starts over"
    if is_train and numbers.checkpoint_step is not None:
        then = f"training resumes from the checkpoint of step {numbers.checkpoint_step}"
    return {
        FAILED: f"fix the error and run snakemake again; {then}",
        INTERRUPTED: f"run snakemake again; {then}",
        UNREADABLE: "run snakemake again; it writes the missing files",
    }.get(state)


# Rendering of the statuses: a table of at most WIDTH columns unless told otherwise, lines below it, or JSON.

WIDTH = 100
UNKNOWN = "-"
STYLES = {
    **{RUNNING: "green", WAITING: "yellow", REQUEUED: "yellow", DONE: "dim"},
    **{FAILED: "bold red", INTERRUPTED: "red", UNREADABLE: "red"},
}
_LEFT = ("stage", "state")  # columns that are always shown
_NAMES_SHOWN = 5  # of experiments with the same stage, in a line below the table; others are counted
_NAME_CHARS = 16  # of an experiment's name that always fit; a longer name wraps


def render(found: Sequence[Status], where: str, width: int = WIDTH) -> Group:
    """Return the table and the lines below it; `where` is the folder that was looked at."""
    if not found:
        return Group(Text(f"{where}: no experiments yet; snakemake adds them when it starts"))
    parts: list[Table | Text | Padding] = [_table(found, width)]
    if notes := list(_notes(found)):
        parts += [Text(""), *notes]
    return Group(*parts)


def to_json(found: Sequence[Status]) -> str:
    """Return a JSON list of flat objects, whose keys are stable."""
    return json.dumps([status.to_json() for status in found], indent=2, ensure_ascii=False)


def plain_table(first: str, columns: Iterable[str], left: Collection[str] = (), gap: int = 2) -> Table:
    """Return a table without lines: the `first` column wraps, the others align right except those in `left`."""
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, no_wrap=True, justify="left" if name in left else "right")
    return table


def _table(found: Sequence[Status], width: int) -> Table:
    """Return a table with one row per experiment, without empty columns and without those that do not fit."""
    rows = [_cells(status) for status in found]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    short_saved = columns.pop("saved, short")
    columns = {name: cells for name, cells in columns.items() if name in _LEFT or set(cells) != {UNKNOWN}}
    gap = 2
    width -= min(_NAME_CHARS, max(map(len, ("experiment", *(status.experiment for status in found)))))
    for left_out in ("GPU", "memory", "attempt", "elapsed", "age", "gap", "tokens/s", "job", "loss", "saved"):
        if sum(max(map(len, (name, *cells))) + gap for name, cells in columns.items()) <= width:
            break
        if left_out == "age" and "saved" in columns:
            columns["saved"] = short_saved
        elif left_out == "gap":
            gap = 1
        else:
            columns.pop(left_out, None)
    table = plain_table("experiment", columns, _LEFT, gap)
    for index, status in enumerate(found):
        styles = {"state": STYLES.get(status.state, "")}
        cells = (Text(cells[index], styles.get(name, "")) for name, cells in columns.items())
        table.add_row(Text(status.experiment), *cells)
    return table


def _cells(status: Status) -> dict[str, str]:
    """Return the cells of a row by column. A first attempt has no number; `saved, short` is without the age."""

    def known(value: Any, show: Callable[[Any], str] = str) -> str:
        return UNKNOWN if value is None else show(value)

    numbers = status.numbers
    step, last_step = ("?" if value is None else str(value) for value in (numbers.step, numbers.last_step))
    attempt = UNKNOWN
    if numbers.attempt is not None and numbers.attempt > 1:
        attempt = f"{numbers.attempt}, {numbers.requeues} by SLURM" if numbers.requeues else str(numbers.attempt)
    short_saved = known(numbers.checkpoint_step)
    age_s = numbers.checkpoint_age_s
    return {
        "stage": status.stage or UNKNOWN,
        "state": status.state,
        "step": UNKNOWN if step == last_step == "?" else f"{step}/{last_step}",
        "loss": known(numbers.loss, "{:.4f}".format),
        "tokens/s": known(numbers.tokens_per_s, "{:,.0f}".format),
        "ETA": known(numbers.eta_s, clock),
        "elapsed": known(numbers.elapsed_s, clock),
        "attempt": attempt,
        "memory": known(numbers.peak_memory_bytes, gib),
        "GPU": known(numbers.gpu_utilization, _range),
        "job": status.job or UNKNOWN,
        "saved": short_saved if short_saved == UNKNOWN or age_s is None else f"{short_saved}, {_ago(age_s)}",
        "saved, short": short_saved,
    }


def _range(fractions: Sequence[float]) -> str:
    """Return the utilization of all GPUs: `97%`, or `61-97%` from the lowest to the highest."""
    low, high = (round(100 * value) for value in (min(fractions), max(fractions)))
    return f"{low}%" if low == high else f"{low}-{high}%"


def _ago(age_s: float) -> str:
    """Return a rough age: `12 s`, `5 min`, `3 h`, `2 d`."""
    for unit, size_s, limit in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48)):
        if age_s < size_s * limit:
            return f"{int(age_s // size_s)} {unit}"
    return f"{int(age_s // 86400)} d"


def _notes(found: Sequence[Status]) -> Iterator[Text | Padding]:
    """Yield lines about each stage with a reason or an error, once for all experiments that wait for it."""
    groups: dict[tuple[str | None, str, str | None], list[Status]] = {}
    for status in found:
        if status.reason or status.numbers.warnings or status.state in (FAILED, INTERRUPTED, UNREADABLE):
            groups.setdefault((status.digest or status.frozen, status.state, status.reason), []).append(status)
    for group in groups.values():
        first, numbers = group[0], group[0].numbers
        names = list(dict.fromkeys(status.experiment for status in group))
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        stage = f" in {first.stage}" if first.stage else ""
        title = Text(f"{', '.join(names[:_NAMES_SHOWN])}{more}: ")
        yield title.append(f"{first.state}{stage}", STYLES.get(first.state, ""))
        lines = [first.reason] if first.reason else []
        lines += [f"warning: {text}" for text in numbers.warnings]
        if numbers.attempt is not None and numbers.attempt > 1:
            requeues = f", queued again by SLURM {count(numbers.requeues, 'times')}" if numbers.requeues else ""
            lines.append(f"attempt {numbers.attempt}{requeues}")
        logs = [path for path in (first.log, first.slurm_log) if path]
        if logs and first.state != WAITING:
            lines.append(f"log: {', '.join(logs)}")
        if first.advice:
            lines.append(f"then: {first.advice}")
        yield from (Padding.indent(Text(line), 2) for line in lines)
    for status in found:
        if status.finished is not None:
            done = f"an earlier config is done ({status.finished})"
            yield Text(f"{status.experiment}: {done}; to chat, summary and compare, the name means that one")


def footer(found: Sequence[Status], every_s: float, took_s: float) -> Text:
    """Return the last line while watching: counts by state, and when the next look is."""
    counts = Counter(status.state for status in found)
    text = ", ".join(f"{count} {state}" for state, count in counts.items())
    return Text(f"\n{text}; read in {brief(took_s)}, again every {brief(every_s)}, until Ctrl-C", "dim")


# Showing a survey, once or repeatedly: in place on a terminal, one below the other elsewhere.


def show(survey: Survey, stream: TextIO, as_json: bool = False) -> None:
    """Write the present state to `stream`, as a table or JSON."""
    if as_json:
        stream.write(to_json(survey.statuses()) + "\n")
        return
    console = console_on(stream)
    console.print(_page(survey, console.width))


def watch(survey: Survey, stream: TextIO, every_s: float) -> None:
    """Show the state every `every_s` seconds until Ctrl-C."""
    console = console_on(stream)
    survey.chosen()  # raises for a wrong name before the screen changes
    try:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                page = _page(survey, console.width, every_s)
                if console.is_terminal:
                    live.update(page, refresh=True)
                else:
                    console.print(page)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return


def console_on(stream: TextIO) -> Console:
    """Return a console for `stream`: plain text of WIDTH columns unless it is a terminal."""
    is_terminal = stream.isatty()
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=None if is_terminal else WIDTH)


def _page(survey: Survey, width: int, every_s: float | None = None) -> Group:
    """Read the state, and return what to show; `every_s` is the interval while watching."""
    start_s = time.monotonic()
    found = survey.statuses()
    parts: list[Group | Text] = [render(found, str(survey.selector.catalog(survey.store).folder), width)]
    if survey.is_slurm_silent:
        parts.append(Text("\nsqueue does not answer, so it is unknown which jobs are in the queue", "yellow"))
    if every_s is not None:
        parts.append(footer(found, every_s, time.monotonic() - start_s))
    return Group(*parts)
