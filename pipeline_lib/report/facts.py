"""What the report shows about an experiment: its results, its cost, and its plan against the measurements."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from pipeline_lib.core import units
from pipeline_lib.core.events import EventName
from pipeline_lib.core.files import read_json, read_jsonl
from pipeline_lib.core.lenient import Lenient, unusable
from pipeline_lib.core.rank_use import PEAK_MEMORY, UTILIZATION, RankUse
from pipeline_lib.core.run_folder import EVENTS_NAME, METRICS_NAME, PLAN_NAME, SUMMARY_NAME
from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.core.stage import Sealed
from pipeline_lib.core.store import Manifest
from pipeline_lib.core.units import HOUR_S
from pipeline_lib.data.chat_template import Mode, modes_in
from pipeline_lib.lineage.record import LineageLink, chain, settings_in
from pipeline_lib.records.plan import Figure, PlanDocument, read_plan
from pipeline_lib.records.results import (
    DocumentScore,
    Evaluation,
    Generation,
    Index,
    Ledger,
    Parity,
    PreviewSample,
    Step,
    Training,
)
from pipeline_lib.report.statistics import LossGain, differences
from pipeline_lib.report.wall_time import Span, wall_time
from pipeline_lib.train.metrics import speed, training_time_s

# Cost of a training: how long its attempts occupied their devices, and which fraction produced the model.


@dataclass(frozen=True)
class Spent:
    """Device hours of all attempts: `held_s` seconds on at most `devices` of `device` ("GPU" or "CPU core") at a time.

    `used_fraction` is the fraction of the hours spent in steps that are in the model. The rest is startup, saving,
    validation, and lost steps. A killed attempt occupied its devices for longer than its events show: the fraction is
    None where the events cover less time than the steps took.
    """

    device: str
    devices: int
    held_s: float
    hours: float
    used_fraction: float | None


def spent(plan: PlanDocument, training: Training, steps: Sequence[Step], record: RunRecord) -> Spent | None:
    """Return the cost by the events of each attempt, or by the time of the steps alone; None if neither is known."""
    device = "GPU" if plan.cluster.is_gpu else "CPU core"
    per_rank = 1 if plan.cluster.is_gpu else plan.cluster.cpus_per_rank or 1
    usual = (training.world_size or plan.cluster.ranks or 1) * per_rank
    sizes = {attempt: event.get("world_size") for attempt, event in record.starts.items()}
    devices = {attempt: size * per_rank for attempt, size in sizes.items() if isinstance(size, int)}
    held_s = record.held_s
    if not any(held_s.values()):
        seconds = training.train_s
        return None if not seconds else Spent(device, usual, seconds, usual * seconds / HOUR_S, None)
    used = sum(devices.get(step.attempt or 1, usual) * (step.step_s or 0.0) for step in steps)
    total = sum(devices.get(attempt, usual) * seconds for attempt, seconds in held_s.items())
    return Spent(
        device=device,
        devices=max(devices.get(attempt, usual) for attempt in held_s),
        held_s=sum(held_s.values()),
        hours=total / HOUR_S,
        used_fraction=used / total if 0 < used <= total else None,
    )


# The plan's predictions against the measurements: each figure with its band, its measured value and its error.
# A figure that was not measured, or was measured under another plan, is omitted, never estimated.

# The first steps of an attempt choose kernels, allocate memory and compile; predictions do not cover them.
SETTLING_STEPS = 3
PHASES = ("forward_s", "backward_s", "update_s")
# The names of Prediction, each with its label and its unit (units.amount).
FIGURES = {
    "step_s": ("time of a step", "s"),
    "forward_s": ("forward of a step", "s"),
    "backward_s": ("backward of a step", "s"),
    "update_s": ("update of a step", "s"),
    "tokens_per_s_per_rank": ("speed of a rank", "tokens/s"),
    "mfu": ("MFU", "fraction"),
    "peak_memory_bytes": ("peak of the allocator", "memory"),
    "needed_memory_bytes": ("memory in use on the GPU", "memory"),
    "network_bytes": ("sent by a node in a step", "bytes"),
    "run_s": ("all steps with saving and validation", "s"),
    "gpu_hours": ("GPU hours of that", "GPU hours"),
    "checkpoint_bytes": ("a checkpoint", "bytes"),
    "checkpoint_s": ("writing a checkpoint", "s"),
}
# A checkpoint's tensors are counted exactly; headers, random states and records come on top.
_BESIDE_TENSORS, _RECORDS_BYTES = 0.02, 1_000_000
# The counters of a machine also count packet headers and unrelated traffic.
_BESIDE_PAYLOAD = 0.05
_WIDEST = 4  # times the low end; a wider band contains nearly any value, so it does not test the prediction
# Counters that saw less than this fraction of the exchanged bytes do not count the path that they took, as between
# ranks of one machine that is configured as several nodes.
_SEEN = 0.01


@dataclass(frozen=True)
class Compared:
    """A predicted figure and its measured value, both in `unit`."""

    key: str
    name: str
    unit: str
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def error_fraction(self) -> float:
        """The excess of the measured over the predicted value, as a fraction of the prediction."""
        return self.measured / self.predicted - 1

    @property
    def is_judged(self) -> bool:
        """Whether the band is narrow enough to test the prediction."""
        return self.high <= _WIDEST * self.low

    @property
    def within(self) -> bool:
        """Whether the measured value is within the band."""
        return self.low <= self.measured <= self.high

    @property
    def beyond_fraction(self) -> float:
        """The distance from the band, as a fraction of its nearer end; negative below the band, 0 within it."""
        end = min(max(self.measured, self.low), self.high)
        return self.measured / end - 1 if end else 0.0


def comparison(plan: PlanDocument, training: Training, steps: Sequence[Step], record: RunRecord) -> list[Compared]:
    """Return every figure of `plan` that was measured, in the order of FIGURES.

    Times are medians over the settled steps, memory is the maximum over all steps, and the run's time is the sum over
    its attempts.
    """
    others = attempts_elsewhere(plan, record)
    here = steps_here(plan, steps, record)
    saved = [event for event in record.named(EventName.CHECKPOINT_SAVED) if event.get("attempt") not in others]
    measured = {
        **medians(here),
        **_memory(plan, here),
        **_network(plan, here),
        **({} if others else _run(plan, training, here)),
        "checkpoint_bytes": median(event.get("bytes") for event in saved),
        "checkpoint_s": median(event.get("duration_s") for event in saved),
    }
    speed, ranks = measured.pop("tokens_per_s", None), plan.cluster.ranks
    measured["tokens_per_s_per_rank"] = speed / ranks if speed is not None and ranks else None
    compared = []
    for key, (name, unit) in FIGURES.items():
        band, value = _band(plan, key), measured.get(key)
        if band.value and band.low is not None and band.high is not None and value is not None:
            compared.append(Compared(key, name, unit, band.value, band.low, band.high, value))
    return compared


def verdict(compared: Sequence[Compared]) -> str:
    """Return sentences: how many figures are within their bands, and by how much each of the others is outside."""
    judged = [one for one in compared if one.is_judged]
    outside = [one for one in judged if not one.within]
    text = f"{tally(compared)}."
    if outside:
        text += f" Outside: {'; '.join(f'{one.name}, {beyond(one)} the band' for one in outside)}."
    if len(judged) < len(compared):
        text += f" Bands wider than a factor of {_WIDEST} are not judged; "
        text += "`python -m pipeline_lib calibrate CONFIG` narrows them."
    return text


def tally(compared: Sequence[Compared]) -> str:
    """Return text like `7 of 8 figures are within their bands, 2 not judged`."""
    judged = [one for one in compared if one.is_judged]
    others = len(compared) - len(judged)
    if not judged:
        return f"{units.count(others, 'figures')} not judged"
    are_within = "figure is within its band" if len(judged) == 1 else "figures are within their bands"
    text = f"{sum(one.within for one in judged)} of {len(judged)} {are_within}"
    return f"{text}, {others} not judged" if others else text


def unjudged(one: Compared) -> str:
    """Return the reason why a figure is not judged."""
    return "not judged: " + (f"a band of a factor of {one.high / one.low:,.0f}" if one.low > 0 else "a band from zero")


def beyond(one: Compared) -> str:
    """Return text like `14.0% above` for a figure that is outside its band."""
    side = "above" if one.beyond_fraction > 0 else "below"
    return f"{units.percent(abs(one.beyond_fraction))} {side}"


def settled(steps: Sequence[Step]) -> list[Step]:
    """Return the steps that predictions cover.

    These come after the first SETTLING_STEPS of their attempt, were applied, and were not slowed by the profiler.
    """
    seen: Counter[int] = Counter()  # steps by attempt
    found = []
    for step in steps:
        attempt = step.attempt or 1
        seen[attempt] += 1
        if seen[attempt] > SETTLING_STEPS and step.verdict is None and step.profile_compute_s is None:
            found.append(step)
    return found


def medians(steps: Sequence[Step]) -> dict[str, float | None]:
    """Return medians over the settled of `steps`: seconds of a step and its phases, tokens/s of all ranks, MFU."""
    names = ("step_s", *PHASES, "data_wait_s", "tokens_per_s", "mfu")
    found = settled(steps)
    return {name: median(getattr(step, name) for step in found) for name in names}


def steps_here(plan: PlanDocument, steps: Sequence[Step], record: RunRecord) -> list[Step]:
    """Return those of `steps` whose attempt ran as `plan` describes."""
    others = attempts_elsewhere(plan, record)
    return [step for step in steps if (step.attempt or 1) not in others]


def attempts_elsewhere(plan: PlanDocument, record: RunRecord) -> set[int]:
    """Return the attempts that ran with another number of ranks, strategy or placement than `plan`.

    A field that an event of an earlier version does not have counts as equal.
    """
    placed = plan.prediction.changes.model_dump()
    expected = {**placed, "world_size": plan.cluster.ranks, "strategy": plan.chosen.strategy}
    return {
        attempt
        for attempt, event in record.starts.items()
        if any(value is not None and event.get(key, value) != value for key, value in expected.items())
    }


def _band(plan: PlanDocument, key: str) -> Figure:
    """Return the predicted band, widened by what is measured along with the figure."""
    if key == "checkpoint_bytes":
        size = plan.prediction.checkpoint_bytes
        if size is None:
            return Figure()
        return Figure(value=size, low=size * (1 - _BESIDE_TENSORS), high=size * (1 + _BESIDE_TENSORS) + _RECORDS_BYTES)
    figure: Figure = getattr(plan.prediction, key)
    if key == "network_bytes" and figure.high is not None:
        return figure.model_copy(update={"high": figure.high * (1 + _BESIDE_PAYLOAD)})
    return figure


def _memory(plan: PlanDocument, steps: Sequence[Step]) -> dict[str, float | None]:
    """Return the memory peaks; on CPUs nothing, since the process is measured there but only tensors are predicted."""
    if not plan.cluster.is_gpu:
        return {}
    return {
        "peak_memory_bytes": _known(max, (step.peak_memory_bytes for step in steps)),
        "needed_memory_bytes": _known(max, (step.device_memory_bytes for step in steps)),
    }


def _network(plan: PlanDocument, steps: Sequence[Step]) -> dict[str, float | None]:
    sent = median(step.node_sent_bytes for step in settled(steps))
    expected = plan.prediction.network_bytes.value
    return {"network_bytes": sent if sent and expected and sent >= _SEEN * expected else None}


def _run(plan: PlanDocument, training: Training, steps: Sequence[Step]) -> dict[str, float | None]:
    """Return the run's time and GPU hours without lost steps; nothing for a run of another length than planned."""
    if training.steps is None or training.steps != plan.batch.steps:
        return {}
    last_s = {step.attempt or 1: step.elapsed_s for step in steps}
    if not last_s or None in last_s.values():
        return {}
    run_s = sum(value or 0.0 for value in last_s.values())
    ranks = plan.cluster.ranks
    return {"run_s": run_s, "gpu_hours": run_s * ranks / HOUR_S if ranks else None}


def median(values: Any) -> float | None:
    """Return the median of the numbers among `values`; None if there are none."""
    return _known(statistics.median, values)


def _known(reduce: Callable[[list[float]], float], values: Any) -> float | None:
    """Return `reduce` of the numbers among `values`; None if there are none."""
    found = [float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return float(reduce(found)) if found else None


# The facts of an experiment, read from the sealed directories of its stages.

Read = TypeVar("Read", bound=Lenient)
ORDER = ("model", "generation", "data", "tokenize", "shard", "train", "merge", "baseline", "evaluate")


@dataclass(frozen=True)
class Results:
    """What the stages of an experiment have made; empty where nothing is known. `record` has only sound events."""

    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    ledger: Ledger = Ledger()
    train_index: Index = Index()
    validation_index: Index = Index()
    plan: PlanDocument = PlanDocument()
    training: Training = Training()
    steps: list[Step] = field(default_factory=list)
    record: RunRecord = RunRecord()
    evaluation: Evaluation = Evaluation()
    document_scores: list[DocumentScore] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)

    @property
    def attempts(self) -> int:
        """The number of times the training was started, including attempts whose steps were all lost; at least 1."""
        return max(len(self._started), self.training.attempts or 1)

    @property
    def restarts(self) -> int:
        """The number of attempts after one that did not come to its end. A pause at a rung or a rehearsal is none."""
        return max(0, self.attempts - 1 - len(self._continued))

    @property
    def _started(self) -> set[int]:
        """The attempts that are known."""
        started = {number for event in self.record.events if isinstance(number := event.get("attempt"), int)}
        return started | {step.attempt or 1 for step in self.steps}

    @property
    def _continued(self) -> set[int]:
        """The attempts that continue one that came to the step at which it was to end."""
        return {after for before, after in pairwise(sorted(self._started)) if before in self.record.completed}

    @property
    def spent(self) -> Spent | None:
        """The cost of the training in device hours."""
        return spent(self.plan, self.training, self.steps, self.record)

    @property
    def tokens_per_s(self) -> float | None:
        """The training speed in tokens/s over all ranks, computed as every command computes it."""
        return speed(step.tokens_per_s for step in self.steps)

    @property
    def training_time_s(self) -> float | None:
        """The time of the training from its first step to its last, over all attempts."""
        return training_time_s((step.attempt, step.elapsed_s) for step in self.steps)

    @property
    def mfu(self) -> float | None:
        """The median MFU over the steps, with attention counted as causal; None on CPUs."""
        return median(step.mfu for step in self.steps)

    @property
    def peak_memory_bytes(self) -> float | None:
        """The largest peak memory that a training step reported, of any rank."""
        of_first = [step.peak_memory_bytes for step in self.steps if step.peak_memory_bytes is not None]
        return max([*of_first, *self.rank_use.peak_memory_bytes], default=None)

    @property
    def rank_use(self) -> RankUse:
        """What each rank used of its GPU and memory."""
        return RankUse.of(
            {UTILIZATION: step.gpu_utilization_of_ranks, PEAK_MEMORY: step.peak_memory_bytes_of_ranks}
            for step in self.steps
        )


@dataclass(frozen=True, kw_only=True)
class ReportFacts(Results):
    """Everything that the report shows."""

    experiment: str
    links: list[LineageLink]
    preview: list[PreviewSample]
    parity: Parity

    @property
    def modes(self) -> list[Mode]:
        """The variables of the chat template that the model was trained with and must be called with."""
        return modes_in(self.manifests["tokenize"]) if "tokenize" in self.manifests else []

    @property
    def restart_steps(self) -> list[int]:
        """The first step of every restart, for those that left steps in the model."""
        first_steps: dict[int, int] = {}
        for step in self.steps:
            first_steps.setdefault(step.attempt or 1, step.step)
        later = list(first_steps.items())[1:]
        return [step for attempt, step in later if attempt not in self._continued]

    @property
    def validations(self) -> dict[int, float]:
        """The loss on the held-out blocks by the step after which it was measured."""
        return {step.step: step.validation_loss for step in self.steps if step.validation_loss is not None}

    @property
    def has_lost_best(self) -> bool:
        """Whether the result should be the best step and is another, since the best one's checkpoint was damaged."""
        return self.training.has_lost_best(bool(settings_in(self.manifests["train"]).get("keep_best")))

    @property
    def planned_steps(self) -> list[Step]:
        """The steps that ran as the plan describes, and not on another number of ranks."""
        return steps_here(self.plan, self.steps, self.record)

    @property
    def compared(self) -> list[Compared]:
        """The plan's figures against their measured values."""
        return comparison(self.plan, self.training, self.steps, self.record)

    @property
    def differences(self) -> list[LossGain]:
        """By how much the tuned model beats others on the held-out documents, and whether the difference is noise."""
        return differences(self.evaluation.eval, self.document_scores)

    @cached_property
    def spans(self) -> list[Span]:
        """Where the time of all stages went, each stage instance counted once."""
        return wall_time(self.manifests, self.record, self.steps)

    @property
    def total_s(self) -> float:
        """Seconds of all stages."""
        return sum(span.duration_s for span in self.spans)


def read_facts(experiment: str, inputs: Mapping[str, Sealed]) -> ReportFacts:
    """Read the sealed directories `inputs`, by part.

    Raise IntegrityError naming the file if one is damaged or of another schema.
    """
    tokenize, shard, train = inputs["tokenize"], inputs["shard"], inputs["train"]
    merge, evaluate = inputs["merge"], inputs["evaluate"]
    return ReportFacts(
        experiment=experiment,
        manifests={part: inputs[part].manifest for part in sorted(inputs, key=_place)},
        links=chain(inputs),
        ledger=read_one(Ledger, tokenize.file("ledger.json")),
        preview=read_rows(PreviewSample, tokenize.file("preview.json"), read_json),
        train_index=read_one(Index, shard.file("train/index.json")),
        validation_index=read_one(Index, shard.file("validation/index.json")),
        plan=read_plan(train.file(PLAN_NAME)),
        training=read_one(Training, train.file(SUMMARY_NAME)),
        steps=read_rows(Step, train.file(METRICS_NAME), read_jsonl),
        record=RunRecord.read_sound(train.file(EVENTS_NAME)),
        evaluation=read_one(Evaluation, evaluate.file("metrics.json")),
        document_scores=read_rows(DocumentScore, evaluate.file("scores.jsonl"), _read_whole),
        generations=read_rows(Generation, evaluate.file("generations.jsonl"), read_jsonl),
        parity=read_one(Parity, merge.file("parity.json")),
    )


def _place(part: str) -> tuple[int, int]:
    """Return the position of `part` in the pipeline; a stored spec names its inputs in alphabetical order."""
    name, _, number = part.partition(".")
    return ORDER.index(name), int(number or 0)


def read_one(kind: type[Read], path: Path) -> Read:
    """Return the parsed file at `path`, or an empty `kind` if there is no file.

    Raise IntegrityError naming the file if it is damaged or of another schema.
    """
    return _parse(kind, path, _read(read_json, path)) if path.exists() else kind()


def read_rows(kind: type[Read], path: Path, read: Callable[[Path], Any]) -> list[Read]:
    """Return the parsed items of the list that `read` reads from `path`, or [] if there is no file.

    Raise IntegrityError naming the file if it is damaged or of another schema.
    """
    return [_parse(kind, path, row) for row in _read(read, path)] if path.exists() else []


def _read_whole(path: Path) -> list[Any]:
    """Return the rows at `path`; none if any row has an unknown value, since the rest would not be representative."""
    rows = read_jsonl(path)
    return rows if all(isinstance(row, dict) and None not in row.values() for row in rows) else []


def _read(read: Callable[[Path], Any], path: Path) -> Any:
    try:
        return read(path)
    except ValueError as error:
        raise unusable(path, error) from error


def _parse(kind: type[Read], path: Path, value: Any) -> Read:
    try:
        return kind.model_validate(_without_nulls(value))
    except ValidationError as error:
        raise unusable(path, error) from error


def _without_nulls(value: Any) -> Any:
    """Return `value` without nulls, which stand for "not known", so that defaults apply."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value if item is not None]
    return value
