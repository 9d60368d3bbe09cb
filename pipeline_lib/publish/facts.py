"""What the report knows: the results of all stages, read from their sealed directories."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.events import read_events
from pipeline_lib.base.fsio import read_json, read_jsonl
from pipeline_lib.base.manifest import Manifest
from pipeline_lib.base.run_folder import EVENTS_NAME, METRICS_NAME, PLAN_NAME, SUMMARY_NAME
from pipeline_lib.base.stage import Sealed
from pipeline_lib.data.chat.calling import Mode
from pipeline_lib.publish.differences import Difference, differences
from pipeline_lib.publish.forecast import Compared, comparison, steps_here
from pipeline_lib.publish.lineage import Link, chain
from pipeline_lib.publish.planned import Plan
from pipeline_lib.publish.results import (
    DocumentScore,
    Evaluation,
    Generation,
    Index,
    Ledger,
    Lenient,
    Parity,
    Prompts,
    Sample,
    Step,
    Training,
)
from pipeline_lib.publish.spent import Spent, spent
from pipeline_lib.train.progress import speed, training_time_s

Read = TypeVar("Read", bound=Lenient)
ORDER = ("model", "generation", "data", "tokenize", "shard", "train", "merge", "evaluate")


@dataclass(frozen=True)
class Facts:
    """All that the report shows. `damaged_events` counts the lines of events that say nothing that can be told."""

    experiment: str
    manifests: Mapping[str, Manifest]
    links: list[Link]
    ledger: Ledger
    preview: list[Sample]
    train_index: Index
    validation_index: Index
    plan: Plan
    training: Training
    steps: list[Step]
    events: list[dict[str, Any]]
    damaged_events: int
    evaluation: Evaluation
    document_scores: list[DocumentScore]
    generations: list[Generation]
    parity: Parity

    @property
    def modes(self) -> list[Mode]:
        """The switches for thinking that the model was trained with and has to be called with, if that is known."""
        return Prompts.model_validate(self.manifests["tokenize"].counts).modes if "tokenize" in self.manifests else []

    @property
    def attempts(self) -> int:
        """How often the training was started, those starts included whose every step was lost."""
        started = {event["attempt"] for event in self.events if isinstance(event.get("attempt"), int)}
        return max(len(started), self.training.attempts or 1)

    @property
    def restart_steps(self) -> list[int]:
        """The first step of every attempt but the first, of those that left steps in the model."""
        first_steps: dict[int, int] = {}
        for step in self.steps:
            first_steps.setdefault(step.attempt or 1, step.step)
        return list(first_steps.values())[1:]

    @property
    def validations(self) -> dict[int, float]:
        """The loss on the held-out blocks by the step after which it was taken."""
        return {step.step: step.validation_loss for step in self.steps if step.validation_loss is not None}

    @property
    def planned_steps(self) -> list[Step]:
        """The steps that were taken as the plan has it, and not on another number of ranks."""
        return steps_here(self.plan, self.steps, self.events)

    @property
    def compared(self) -> list[Compared]:
        """The plan's figures against what was measured for them."""
        return comparison(self.plan, self.training, self.steps, self.events)

    @property
    def spent(self) -> Spent | None:
        """What the training cost in hours of its devices."""
        return spent(self.plan, self.training, self.steps, self.events)

    @property
    def differences(self) -> list[Difference]:
        """By how much the tuned model is better than others on the held-out documents, and whether that is noise."""
        return differences(self.evaluation.eval, self.document_scores)

    @property
    def total_s(self) -> float:
        """Seconds that all stages took, each stage instance counted once."""
        return sum({manifest.digest: manifest.duration_s for manifest in self.manifests.values()}.values())

    @property
    def tokens_per_s(self) -> float | None:
        """The speed of the training, as every command has it."""
        return speed(step.tokens_per_s for step in self.steps)

    @property
    def training_time_s(self) -> float | None:
        """The time of the training from its first step to its last, over all attempts."""
        return training_time_s((step.attempt, step.elapsed_s) for step in self.steps)

    @property
    def mfu(self) -> float | None:
        """Median over the steps of the share of the GPUs' peak, attention counted causally; None on CPUs."""
        known = [step.mfu for step in self.steps if step.mfu is not None]
        return statistics.median(known) if known else None

    @property
    def peak_memory_bytes(self) -> float | None:
        """The largest memory that a training step reported."""
        known = [step.peak_memory_bytes for step in self.steps if step.peak_memory_bytes is not None]
        return max(known, default=None)


def read_facts(experiment: str, inputs: Mapping[str, Sealed]) -> Facts:
    """Read the sealed directories `inputs`, by part. Raises IntegrityError naming a file of another schema."""
    tokenize, shard, train = inputs["tokenize"], inputs["shard"], inputs["train"]
    merge, evaluate = inputs["merge"], inputs["evaluate"]
    events, damaged = read_sound_events(train.file(EVENTS_NAME))
    return Facts(
        experiment=experiment,
        manifests={part: inputs[part].manifest for part in sorted(inputs, key=_place)},
        links=chain(inputs),
        ledger=read_one(Ledger, tokenize.file("ledger.json")),
        preview=read_rows(Sample, tokenize.file("preview.json"), read_json),
        train_index=read_one(Index, shard.file("train/index.json")),
        validation_index=read_one(Index, shard.file("validation/index.json")),
        plan=read_one(Plan, train.file(PLAN_NAME)),
        training=read_one(Training, train.file(SUMMARY_NAME)),
        steps=read_rows(Step, train.file(METRICS_NAME), read_jsonl),
        events=events,
        damaged_events=damaged,
        evaluation=read_one(Evaluation, evaluate.file("metrics.json")),
        document_scores=read_rows(DocumentScore, evaluate.file("scores.jsonl"), _read_whole),
        generations=read_rows(Generation, evaluate.file("generations.jsonl"), read_jsonl),
        parity=read_one(Parity, merge.file("parity.json")),
    )


def _place(part: str) -> tuple[int, int]:
    """Where `part` stands in the pipeline; a stored spec names its inputs in the order of the alphabet."""
    name, _, number = part.partition(".")
    return ORDER.index(name), int(number or 0)


def read_sound_events(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The events at `path`, and how many lines are damaged: no JSON, no name, or a time or attempt that is none."""
    if not path.exists():
        return [], 0
    lines = sum(not line.isspace() for line in path.read_bytes().splitlines())
    sound = [event for event in read_events(path) if _is_sound(event)]
    return sound, lines - len(sound)


def _is_sound(event: Any) -> bool:
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return False
    at, attempt = event.get("at", 0.0), event.get("attempt", 0)
    return isinstance(at, (int, float)) and math.isfinite(at) and isinstance(attempt, int)


def read_one(kind: type[Read], path: Path) -> Read:
    """The file at `path`, or nothing known if there is none. Raises IntegrityError naming one of another schema."""
    return _parse(kind, path, _read(read_json, path)) if path.exists() else kind()


def read_rows(kind: type[Read], path: Path, read: Callable[[Path], Any]) -> list[Read]:
    """The same of a file that is a list, which `read` reads."""
    return [_parse(kind, path, row) for row in _read(read, path)] if path.exists() else []


def _read_whole(path: Path) -> list[Any]:
    """The rows at `path`; none of them if a value of any is not known, since the others would not stand for all."""
    rows = read_jsonl(path)
    return rows if all(isinstance(row, dict) and None not in row.values() for row in rows) else []


def _read(read: Callable[[Path], Any], path: Path) -> Any:
    try:
        return read(path)
    except ValueError as error:
        raise IntegrityError(f"{path} is damaged: {error}; delete {path.parent} and run snakemake again") from error


def _parse(kind: type[Read], path: Path, value: Any) -> Read:
    try:
        return kind.model_validate(_without_nulls(value))
    except ValidationError as error:
        detail = error.errors()[0]
        where = ".".join(str(key) for key in detail["loc"])
        raise IntegrityError(
            f"{path}: {where}: {detail['msg']}; another version of the code sealed it: "
            f"delete {path.parent} and run snakemake again"
        ) from error


def _without_nulls(value: Any) -> Any:
    """`value` without its nulls, which is how "not known" is written: the default stands."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value if item is not None]
    return value
