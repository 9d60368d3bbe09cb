"""The facts of an experiment, read from the sealed directories of its stages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from pipeline_lib.config.stages import place_of
from pipeline_lib.core.files import read_json, read_jsonl
from pipeline_lib.core.lenient import Lenient, unusable
from pipeline_lib.core.rank_use import PEAK_MEMORY, UTILIZATION, RankUse
from pipeline_lib.core.run_folder import EVENTS_NAME, METRICS_NAME, PLAN_NAME, SUMMARY_NAME
from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.core.stage import Sealed
from pipeline_lib.core.store import Manifest
from pipeline_lib.data.how_to_call import Mode, modes_in
from pipeline_lib.lineage.record import LineageLink, chain, settings_in
from pipeline_lib.records.plan import PlanDocument, read_plan
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
from pipeline_lib.report.cost import Spent, spent
from pipeline_lib.report.plan_check import Compared, comparison, median, steps_here
from pipeline_lib.report.statistics import LossGain, differences
from pipeline_lib.report.wall_time import Span, wall_time
from pipeline_lib.train.metrics import speed, training_time_s

Read = TypeVar("Read", bound=Lenient)


@dataclass(frozen=True)
class Results:
    """What the stages of an experiment have made; empty where nothing is known.

    `record` has only sound events.
    """

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
        """The number of times the training was started, even if its steps were lost; at least 1."""
        return max(len(self._started), self.training.attempts or 1)

    @property
    def restarts(self) -> int:
        """The number of attempts after one that did not come to its end.

        A pause at a rung or a rehearsal is none.
        """
        return max(0, self.attempts - 1 - len(self._continued))

    @property
    def _started(self) -> set[int]:
        """The attempts that are known."""
        started = {
            number
            for event in self.record.events
            if isinstance(number := event.get("attempt"), int)
        }
        return started | {step.attempt or 1 for step in self.steps}

    @property
    def _continued(self) -> set[int]:
        """The attempts that continue one that came to the step at which it was to end."""
        return {
            after
            for before, after in pairwise(sorted(self._started))
            if before in self.record.completed
        }

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
        of_first = [
            step.peak_memory_bytes for step in self.steps if step.peak_memory_bytes is not None
        ]
        return max([*of_first, *self.rank_use.peak_memory_bytes], default=None)

    @property
    def rank_use(self) -> RankUse:
        """What each rank used of its GPU and memory."""
        return RankUse.of(
            {
                UTILIZATION: step.gpu_utilization_of_ranks,
                PEAK_MEMORY: step.peak_memory_bytes_of_ranks,
            }
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
        """The chat template's variables that the model was trained with and must be called with."""
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
        return {
            step.step: step.validation_loss
            for step in self.steps
            if step.validation_loss is not None
        }

    @property
    def has_lost_best(self) -> bool:
        """Whether the result should be the best step and is not, as its checkpoint was damaged."""
        return self.training.has_lost_best(
            bool(settings_in(self.manifests["train"]).get("keep_best"))
        )

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
        """By how much the tuned model beats others on held-out documents, and if it is noise."""
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
    tokenize = inputs["tokenize"]
    shard = inputs["shard"]
    train = inputs["train"]
    merge = inputs["merge"]
    evaluate = inputs["evaluate"]
    return ReportFacts(
        experiment=experiment,
        manifests={part: inputs[part].manifest for part in sorted(inputs, key=place_of)},
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
    """Return the rows at `path`; none if any value is unknown, as the rest would mislead."""
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
