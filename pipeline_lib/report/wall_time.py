"""Where an experiment's wall time went: each stage's spans, and the bytes that paced some."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline_lib.core.events import EventName
from pipeline_lib.core.language import N_
from pipeline_lib.core.run_record import RunRecord, number
from pipeline_lib.core.spans import COUNT
from pipeline_lib.core.store import Manifest
from pipeline_lib.records.training import Step

REST = N_("rest")


@dataclass(frozen=True)
class Span:
    """Seconds of the stage that made `part`: of the work `name`, or of all if that is empty.

    `size_bytes` were read or written in them; 0 if they do not set the pace or are not known.
    """

    part: str
    name: str
    duration_s: float
    size_bytes: float = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """The rate of the bytes; None if there are none."""
        return self.size_bytes / self.duration_s if self.size_bytes and self.duration_s else None


def wall_time(
    manifests: Mapping[str, Manifest], record: RunRecord, steps: Sequence[Step]
) -> list[Span]:
    """Return all parts' spans, in the order of `manifests`; a stage with several parts counts once.

    The time of a training is that of all its attempts, by `record` and `steps`.
    """
    found: list[Span] = []
    counted = set[str]()
    for part, manifest in manifests.items():
        if manifest.digest in counted:
            continue
        counted.add(manifest.digest)
        if part == "train":
            total_s = _training_s(manifest, record)
            spans = _of_training(record, steps)
        else:
            total_s = manifest.duration_s
            spans = list(_of_manifest(part, manifest))
        found += _with_rest(part, total_s, spans)
    return found


def _with_rest(part: str, total_s: float, spans: Sequence[Span]) -> list[Span]:
    """Return `spans` and what they leave of the total; a nameless span if there are none."""
    if not spans:
        return [Span(part, "", total_s)]
    rest_s = total_s - sum(span.duration_s for span in spans)
    return [*spans, Span(part, REST, max(0.0, rest_s))]


def _of_manifest(part: str, manifest: Manifest) -> Iterator[Span]:
    """Yield the spans that the stage recorded, without those that are not valid."""
    recorded = manifest.counts.get(COUNT)
    if not isinstance(recorded, list):
        return
    for span in recorded:
        duration_s = number(span.get("duration_s")) if isinstance(span, dict) else None
        if duration_s is not None and duration_s >= 0:
            yield Span(part, str(span.get("name")), duration_s, number(span.get("bytes")) or 0.0)


def _training_s(manifest: Manifest, record: RunRecord) -> float:
    """Return the seconds of all attempts; the last of them sealed the training."""
    earlier = sorted(record.held_s.items())[:-1]
    return manifest.duration_s + sum(held_s for _, held_s in earlier)


def _of_training(record: RunRecord, steps: Sequence[Step]) -> list[Span]:
    """Return a training's spans; none if an earlier version, without marks, wrote its events."""
    launched = _times(record, EventName.RUN_LAUNCHED)
    started = _times(record, EventName.RUN_START)
    stepping = _times(record, EventName.RUN_STEPS)
    if not stepping:
        return []
    steps_s = sum((step.step_s or 0.0) + (step.data_wait_s or 0.0) for step in steps)
    saves = record.named(EventName.CHECKPOINT_SAVED)
    saves_s = sum(number(event.get("wait_s")) or 0.0 for event in saves)
    return [
        Span("train", N_("start and load"), _between(launched, started)),
        Span("train", N_("first pass"), _between(started, stepping)),
        Span("train", N_("steps"), steps_s),
        Span("train", N_("wait for saves"), saves_s),
    ]


def _times(record: RunRecord, name: str) -> dict[Any, float]:
    """Return the time of the event `name` in each attempt that has it."""
    return {event.get("attempt"): event["at"] for event in record.named(name) if "at" in event}


def _between(begins: Mapping[Any, float], ends: Mapping[Any, float]) -> float:
    """Return the seconds from begin to end, summed over the attempts that have both."""
    total_s = 0.0
    for attempt, end in ends.items():
        if attempt in begins:
            total_s += max(0.0, end - begins[attempt])
    return total_s
