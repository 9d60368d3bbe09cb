"""Read everything known about each of the experiments to compare, however far it got.

Sealed files are checked against their manifest before they are used; damaged files are noted in
`notes` and left out. Of an unfinished training, the metrics written so far are read, without broken
lines.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from pipeline_lib.compare.subjects import Stop, Subject
from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.stages import stage_of
from pipeline_lib.core.errors import IntegrityError, Unreadable
from pipeline_lib.core.run_folder import EVENTS_NAME, METRICS_NAME, PLAN_NAME, SUMMARY_NAME
from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.core.store import (
    MANIFEST_NAME,
    Manifest,
    Ref,
    describe_file,
    read_manifest,
)
from pipeline_lib.records.data import INDEX_NAME, LEDGER_NAME, BlockIndex, Ledger
from pipeline_lib.records.evaluation import (
    EVALUATION_NAME,
    GENERATIONS_NAME,
    SCORES_NAME,
    DocumentScore,
    Evaluation,
    Generation,
)
from pipeline_lib.records.plan import PlanDocument, read_plan, read_plan_of_training
from pipeline_lib.records.record import AnyRecord, parse, read_record, read_records
from pipeline_lib.records.training import Step, Training, read_training
from pipeline_lib.report.facts import Results
from pipeline_lib.status.at_rest import shown

Found = TypeVar("Found")
_UNREADABLE = (OSError, ValueError, RecursionError, IntegrityError, Unreadable)


@dataclass(frozen=True, kw_only=True)
class Known(Results):
    """Everything known about an experiment; missing parts are empty, `notes` name damaged ones.

    Damaged parts are empty too.
    """

    subject: Subject
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The experiment's name as the user gave it."""
        return self.subject.name

    @property
    def is_trained(self) -> bool:
        """Whether the training is sealed."""
        return "train" in self.manifests

    @property
    def is_finished(self) -> bool:
        """Whether the evaluation, the last stage that is read here, is sealed."""
        return "evaluate" in self.manifests

    @property
    def stop(self) -> Stop | None:
        """Why its sweep stopped it; None if it did not, or if the training was finished anyway."""
        return None if self.is_trained else self.subject.stop

    @property
    def last_step(self) -> int:
        """The last step that the training reached."""
        if self.training is not None:
            return self.training.steps
        return self.steps[-1].step if self.steps else 0

    @property
    def state(self) -> str:
        """`done`, or what is missing."""
        if self.is_finished:
            has_scores = self.evaluation is None or self.evaluation.scores is not None
            return "done" if has_scores else "done, nothing held out"
        if self.is_trained:
            return "not evaluated"
        if self.stop is not None:
            return f"stopped by its sweep after step {self.stop.step:,}: {self.stop.why}"
        if not self.steps:
            return "not begun"
        state = f"not finished: step {self.last_step:,}"
        planned = self.plan.batch.steps if self.plan else None
        if planned:
            state += f" of {planned:,}"
        return state

    @property
    def loss(self) -> float | None:
        """The held-out loss of the tuned model, in nats per supervised token."""
        return self.scores.tuned.loss if self.scores else None

    @cached_property
    def model_hashes(self) -> Mapping[str, str]:
        """SHA-256 of the exported weight files by name, from their manifest."""
        return self._hashes("merge", ".safetensors")

    @cached_property
    def tokenizer_hash(self) -> str | None:
        """SHA-256 of the tokenizer that defines the tokens of the losses."""
        return next(iter(self._hashes("model", "tokenizer.json").values()), None)

    def _hashes(self, part: str, suffix: str) -> dict[str, str]:
        if part not in self.manifests:
            return {}
        files = self.manifests[part].files
        names = [name for name in sorted(files) if name.endswith(suffix)]
        return {name: files[name].sha256 for name in names}

    @property
    def data(self) -> str | None:
        """A key of the data that the documents were drawn from: the digests of its downloads."""
        parts = self.subject.parts
        downloads = [part for part in sorted(parts) if part.startswith("data.")]
        return " ".join(parts[part] for part in downloads) or None


def read_known(subject: Subject) -> Known:
    """Read everything known about `subject`. A damaged file raises nothing: a note names it."""
    reader = _ExperimentReader(subject)
    reader.read_manifests()
    if "train" in reader.manifests:
        steps = reader.rows(Step, "train", METRICS_NAME)
        record = reader.parsed("train", EVENTS_NAME, RunRecord.read_sound) or RunRecord()
    else:
        steps, record = reader.live()
    return Known(
        subject=subject,
        notes=reader.notes,
        manifests=reader.manifests,
        ledger=reader.one(Ledger, "tokenize", LEDGER_NAME),
        train_index=reader.one(BlockIndex, "shard", f"train/{INDEX_NAME}"),
        validation_index=reader.one(BlockIndex, "shard", f"validation/{INDEX_NAME}"),
        plan=reader.plan(),
        training=reader.training(),
        steps=steps,
        record=record,
        evaluation=reader.one(Evaluation, "evaluate", EVALUATION_NAME),
        document_scores=reader.rows(DocumentScore, "evaluate", SCORES_NAME),
        generations=reader.rows(Generation, "evaluate", GENERATIONS_NAME),
    )


@dataclass
class _ExperimentReader:
    """A reader of one experiment's files that notes what it cannot use."""

    subject: Subject
    notes: list[str] = field(default_factory=list)
    manifests: dict[str, Manifest] = field(default_factory=dict)

    def folder(self, part: str) -> Path:
        return self.subject.store.sealed(Ref(stage_of(part), self.subject.parts[part]))

    def note(self, text: str) -> None:
        self.notes.append(shown(text))

    def read_manifests(self) -> None:
        for part in self.subject.parts:
            folder = self.folder(part)
            if not (folder / MANIFEST_NAME).exists():
                continue
            try:
                manifest = read_manifest(folder)
            except (IntegrityError, Unreadable) as error:
                self.note(str(error))
                continue
            if manifest.digest == folder.name:
                self.manifests[part] = manifest
            else:
                self.note(
                    f"{folder}: sealed as {manifest.stage} {manifest.digest}; delete it and run "
                    "snakemake again"
                )

    def parsed(self, part: str, name: str, read: Callable[[Path], Found]) -> Found | None:
        """Return the parsed sealed file; None if it is missing or differs from what was sealed."""
        manifest = self.manifests.get(part)
        entry = manifest.files.get(name) if manifest else None
        if entry is None:
            return None
        path = self.folder(part) / name
        try:
            if describe_file(path) == entry:
                return read(path)
            self.note(
                f"{path}: content differs from what was sealed; delete {path.parent} and run "
                "snakemake again"
            )
        except _UNREADABLE as error:
            text = str(error)
            if str(path) not in text:
                text = f"{path}: cannot be read ({text})"
            self.note(f"{text}; not shown")
        return None

    def one(self, kind: type[AnyRecord], part: str, name: str) -> AnyRecord | None:
        return self.parsed(part, name, lambda path: read_record(kind, path))

    def rows(self, kind: type[AnyRecord], part: str, name: str) -> list[AnyRecord]:
        return self.parsed(part, name, lambda path: read_records(kind, path)) or []

    def plan(self) -> PlanDocument | None:
        if "train" not in self.manifests:
            return self.parsed("plan", PLAN_NAME, read_plan)
        return self.parsed("train", PLAN_NAME, self.plan_of_training)

    def plan_of_training(self, path: Path) -> PlanDocument | None:
        plan = read_plan_of_training(path)
        if plan is None:
            self.note(f"{path}: earlier code made this plan, and it is not shown")
        return plan

    def training(self) -> Training | None:
        return self.parsed("train", SUMMARY_NAME, lambda path: read_training(path.parent))

    def live(self) -> tuple[list[Step], RunRecord]:
        """Return the steps and events written so far in the run's folder, which may not exist."""
        steps: list[Step] = []
        store = self.subject.store
        digest = self.subject.parts.get("train", "")
        if not digest or not store.spec_path(digest).exists():
            return steps, RunRecord()
        try:
            folder = store.run_dir(run_digest(store.read_spec(store.spec_path(digest))))
            if (folder / METRICS_NAME).exists():
                steps = self._live_steps(folder / METRICS_NAME)
            return steps, RunRecord.read_sound(folder / EVENTS_NAME)
        except _UNREADABLE as error:
            self.note(str(error))
            return steps, RunRecord()

    def _live_steps(self, path: Path) -> list[Step]:
        """Return the steps that count: steps repeated by a later attempt replace earlier ones."""
        steps: list[Step] = []
        broken = []
        # the last may be incomplete
        *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, start=1):
            try:
                step = parse(Step, json.loads(line), path)
            except (ValueError, RecursionError, IntegrityError):
                if line.strip():
                    broken.append(number)
                continue
            while steps and steps[-1].step >= step.step:
                steps.pop()
            steps.append(step)
        if broken:
            which = f"{len(broken)} lines, the first {broken[0]}, are"
            if len(broken) == 1:
                which = f"line {broken[0]} is"
            self.note(f"{path}: {which} damaged and left out")
        return steps
