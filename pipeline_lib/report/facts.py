"""The facts of an experiment, read from the sealed directories of its stages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from pipeline_lib.config.benchmarks import NO_RULES, Ship
from pipeline_lib.config.stages import BASE_BENCHMARK, place_of
from pipeline_lib.core.rank_use import PEAK_MEMORY, UTILIZATION, RankUse
from pipeline_lib.core.run_folder import EVENTS_NAME, METRICS_NAME, PLAN_NAME, SUMMARY_NAME
from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.core.stage import Sealed
from pipeline_lib.core.store import Manifest
from pipeline_lib.data.how_to_call import Mode, modes_in
from pipeline_lib.lineage.record import LineageLink, chain, settings_in
from pipeline_lib.records.benchmark import (
    ANSWERS_NAME,
    BENCHMARK_NAME,
    OVERLAP_NAME,
    BaseBenchmarks,
    BenchmarkAnswer,
    BenchmarkComparison,
    Benchmarks,
    Overlaps,
)
from pipeline_lib.records.data import (
    INDEX_NAME,
    LEDGER_NAME,
    PREVIEW_NAME,
    BlockIndex,
    Ledger,
    PreviewSample,
)
from pipeline_lib.records.evaluation import (
    EVALUATION_NAME,
    GENERATIONS_NAME,
    SCORES_NAME,
    DocumentScore,
    Evaluation,
    Generation,
    Scores,
)
from pipeline_lib.records.merge import PARITY_NAME, Parity, Unproven, read_parity
from pipeline_lib.records.plan import PlanDocument, read_plan_of_training
from pipeline_lib.records.record import read_record, read_records
from pipeline_lib.records.training import Step, Training, read_training, speed, training_time_s
from pipeline_lib.report.cost import Spent, spent
from pipeline_lib.report.paired import without_touched
from pipeline_lib.report.plan_check import Compared, comparison, median, steps_here
from pipeline_lib.report.ship import ShipVerdict, ship_verdict
from pipeline_lib.report.statistics import LossGain, differences
from pipeline_lib.report.wall_time import Span, wall_time


@dataclass(frozen=True)
class Results:
    """What the stages of an experiment have made; empty where nothing is known.

    `record` has only sound events. What is None was not made, or is damaged.
    """

    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    ledger: Ledger | None = None
    train_index: BlockIndex | None = None
    validation_index: BlockIndex | None = None
    plan: PlanDocument | None = None
    training: Training | None = None
    steps: list[Step] = field(default_factory=list)
    record: RunRecord = RunRecord()
    evaluation: Evaluation | None = None
    document_scores: list[DocumentScore] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    benchmarks: Benchmarks | None = None

    @property
    def attempts(self) -> int:
        """The number of times the training was started, even if its steps were lost; at least 1."""
        return max(len(self._started), self.training.attempts if self.training else 1)

    @property
    def restarts(self) -> int:
        """The number of attempts after one that did not come to its end.

        A pause at a rung or a rehearsal is none.
        """
        return max(0, self.attempts - 1 - len(self._continued))

    @property
    def _started(self) -> set[int]:
        """The attempts that are known."""
        started = {step.attempt for step in self.steps}
        for event in self.record.events:
            attempt = event.get("attempt")
            if isinstance(attempt, int):
                started.add(attempt)
        return started

    @property
    def _continued(self) -> set[int]:
        """The attempts that continue one that came to the step at which it was to end."""
        completed = self.record.completed
        return {after for before, after in pairwise(sorted(self._started)) if before in completed}

    @property
    def scores(self) -> Scores | None:
        """The scores of the models; None if they were not evaluated or nothing was held out."""
        return self.evaluation.scores if self.evaluation else None

    @property
    def spent(self) -> Spent | None:
        """The cost of the training in device hours."""
        training = self.training
        return spent(
            self.plan,
            self.steps,
            self.record,
            world_size=training.world_size if training else None,
            train_s=training.train_s if training else None,
        )

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
        peaks: list[float] = [step.peak_memory_bytes for step in self.steps]  # of the first rank
        peaks += self.rank_use.peak_memory_bytes
        return max(peaks, default=None)

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
    ledger: Ledger
    train_index: BlockIndex
    validation_index: BlockIndex
    training: Training
    evaluation: Evaluation
    links: list[LineageLink]
    preview: list[PreviewSample]
    parity: Parity | Unproven
    ship: ShipVerdict | None = None
    overlaps: Overlaps | None = None
    # the benchmarks without the questions that stand in the training rows, where there are some
    clean: Mapping[str, BenchmarkComparison] = field(default_factory=dict)

    @property
    def modes(self) -> list[Mode]:
        """The chat template's variables that the model was trained with and must be called with."""
        return modes_in(self.manifests["tokenize"]) if "tokenize" in self.manifests else []

    @property
    def restart_steps(self) -> list[int]:
        """The first step of every restart, for those that left steps in the model."""
        first_steps: dict[int, int] = {}
        for step in self.steps:
            first_steps.setdefault(step.attempt, step.step)
        later = list(first_steps.items())[1:]
        return [step for attempt, step in later if attempt not in self._continued]

    @property
    def epoch_starts(self) -> list[int]:
        """The first step of each epoch but the first."""
        return [after.step for before, after in pairwise(self.steps) if after.epoch > before.epoch]

    @property
    def validations(self) -> dict[int, float]:
        """The loss on the held-out blocks by the step after which it was measured, if finite."""
        losses = {}
        for step in self.steps:
            if step.validation_loss is not None and math.isfinite(step.validation_loss):
                losses[step.step] = step.validation_loss
        return losses

    @property
    def has_lost_best(self) -> bool:
        """Whether the result should be the best step and is not, as its checkpoint was damaged."""
        settings = settings_in(self.manifests["train"])
        return self.training.has_lost_best(bool(settings.get("keep_best")))

    @property
    def planned_steps(self) -> list[Step]:
        """The steps that ran as the plan describes, and not on another number of ranks."""
        return steps_here(self.plan, self.steps, self.record) if self.plan else self.steps

    @property
    def compared(self) -> list[Compared]:
        """The plan's figures against their measured values."""
        if self.plan is None:
            return []
        return comparison(self.plan, self.training, self.steps, self.record)

    @property
    def differences(self) -> list[LossGain]:
        """By how much the tuned model beats others on held-out documents, and if it is noise."""
        return differences(self.scores, self.document_scores)

    @cached_property
    def spans(self) -> list[Span]:
        """Where the time of all stages went, each stage instance counted once."""
        return wall_time(self.manifests, self.record, self.steps)

    @property
    def total_s(self) -> float:
        """Seconds of all stages."""
        return sum(span.duration_s for span in self.spans)


def read_facts(
    experiment: str, inputs: Mapping[str, Sealed], rules: Ship = NO_RULES
) -> ReportFacts:
    """Read the sealed directories `inputs`, by part; `rules` say whether the model may ship.

    Raise IntegrityError naming the file if one is damaged or of another schema.
    """
    tokenize = inputs["tokenize"]
    shard = inputs["shard"]
    train = inputs["train"]
    merge = inputs["merge"]
    evaluate = inputs["evaluate"]
    benchmarks = None
    overlaps = None
    clean: dict[str, BenchmarkComparison] = {}
    if "benchmark" in inputs:
        benchmarks = read_record(Benchmarks, inputs["benchmark"].file(BENCHMARK_NAME))
    if benchmarks is not None and "overlap" in inputs:
        overlaps = read_record(Overlaps, inputs["overlap"].file(OVERLAP_NAME))
        clean = _clean(overlaps, benchmarks, inputs)
    return ReportFacts(
        experiment=experiment,
        manifests={part: inputs[part].manifest for part in sorted(inputs, key=place_of)},
        links=chain(inputs),
        ledger=read_record(Ledger, tokenize.file(LEDGER_NAME)),
        preview=read_records(PreviewSample, tokenize.file(PREVIEW_NAME)),
        train_index=read_record(BlockIndex, shard.file(f"train/{INDEX_NAME}")),
        validation_index=read_record(BlockIndex, shard.file(f"validation/{INDEX_NAME}")),
        plan=read_plan_of_training(train.file(PLAN_NAME)),
        training=read_training(train.folder(SUMMARY_NAME, METRICS_NAME)),
        steps=read_records(Step, train.file(METRICS_NAME)),
        record=RunRecord.read_sound(train.file(EVENTS_NAME)),
        evaluation=read_record(Evaluation, evaluate.file(EVALUATION_NAME)),
        document_scores=read_records(DocumentScore, evaluate.file(SCORES_NAME)),
        generations=read_records(Generation, evaluate.file(GENERATIONS_NAME)),
        parity=read_parity(merge.file(PARITY_NAME)),
        benchmarks=benchmarks,
        overlaps=overlaps,
        clean=clean,
        ship=ship_verdict(rules, benchmarks),
    )


def _clean(
    overlaps: Overlaps, benchmarks: Benchmarks, inputs: Mapping[str, Sealed]
) -> dict[str, BenchmarkComparison]:
    """Return the benchmarks without the questions in the training rows.

    None where the base model's answers were computed again in another precision: they are not kept.
    """
    of_base = inputs[BASE_BENCHMARK]
    scores = read_record(BaseBenchmarks, of_base.file(BENCHMARK_NAME))
    if scores.precision != benchmarks.precision:
        return {}
    base = read_records(BenchmarkAnswer, of_base.file(ANSWERS_NAME))
    tuned = read_records(BenchmarkAnswer, inputs["benchmark"].file(ANSWERS_NAME))
    return without_touched(overlaps, base, tuned)
