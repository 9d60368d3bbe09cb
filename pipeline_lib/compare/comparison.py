"""Several experiments side by side: what the table, the page and the JSON are made of."""

import math
import os.path
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from pipeline_lib.compare.difference import Difference, Differences
from pipeline_lib.compare.read import Known, read_known
from pipeline_lib.compare.sameness import Sameness, sameness, told
from pipeline_lib.compare.select import Subject
from pipeline_lib.compare.versus import Ranking, Versus, rank
from pipeline_lib.publish.results import Training
from pipeline_lib.publish.spent import Spent, spent
from pipeline_lib.status.rest import shown
from pipeline_lib.train.progress import speed, training_time_s

DIGEST_SHOWN = 8


@dataclass(frozen=True)
class Measured:
    """What an experiment came to: losses in nats per supervised token, speed over all ranks, hours of a `device`.

    `training_time_s` is the time from the first step to the last, `held_s` how long the devices were held for it, from
    the start of the ranks to their end; all attempts together. A device is a `GPU` or a `CPU core`. None is what is not
    known, or not yet.
    """

    state: str
    loss: float | None
    standard_error: float | None
    perplexity: float | None
    base_loss: float | None
    final_loss: float | None
    steps: int
    supervised_tokens: int | None
    tokens_per_s: float | None
    mfu: float | None
    peak_memory_bytes: float | None
    training_time_s: float | None
    held_s: float | None
    device: str
    device_hours: float | None
    restarts: int


def measured(known: Known) -> Measured:
    """The numbers of `known`, from its sealed files, or from the steps that it took so far."""
    scores, training, rows = known.evaluation.eval, known.training, known.rows
    cost = _spent(known)
    supervised = [row.supervised_tokens for row in rows]
    losses = [row.loss for row in rows if row.verdict is None and row.loss is not None]
    return Measured(
        state=known.state,
        loss=scores.tuned.loss,
        standard_error=scores.tuned.standard_error,
        perplexity=scores.tuned.perplexity,
        base_loss=scores.base.loss,
        final_loss=training.final_loss if known.is_trained else next(reversed(losses), None),
        steps=known.last_step,
        supervised_tokens=training.supervised_tokens or _sum(supervised),
        tokens_per_s=speed(row.tokens_per_s for row in rows),
        mfu=_median(row.mfu for row in rows),
        peak_memory_bytes=max(
            (row.peak_memory_bytes for row in rows if row.peak_memory_bytes is not None), default=None
        ),
        training_time_s=_training_time_s(known),
        held_s=cost.held_s if cost else None,
        device=cost.device if cost else "GPU" if known.plan.cluster.is_gpu else "CPU core",
        device_hours=cost.hours if cost else None,
        restarts=max(0, known.attempts - 1),
    )


def _spent(known: Known) -> Spent | None:
    """As the report has it; of a training that goes on, by the steps that it took so far."""
    if known.is_trained:
        return spent(known.plan, known.training, known.rows, known.events)
    return spent(known.plan, Training(train_s=_training_time_s(known)), known.rows, [])


def _training_time_s(known: Known) -> float | None:
    return training_time_s((row.attempt, row.elapsed_s) for row in known.rows)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else None


@dataclass(frozen=True)
class Comparison:
    """The experiments in the order in which they were named, and everything that is told of them."""

    found: list[Known]

    @staticmethod
    def of(subjects: Sequence[Subject]) -> "Comparison":
        """Read them all."""
        return Comparison([read_known(subject) for subject in subjects])

    @cached_property
    def family(self) -> str:
        """What the names of more than two begin with, up to a hyphen: those of a sweep its experiment; else empty."""
        first, hyphen, _ = os.path.commonprefix([shown(known.name) for known in self.found]).rpartition("-")
        return first + hyphen if len(self.found) > 2 else ""

    @cached_property
    def title(self) -> str:
        """`a against b`, or of more their family and how many they are."""
        if len(self.names) == 2:
            return " against ".join(self.names)
        count = f"{len(self.names)} experiments"
        return f"{self.family.removesuffix('-')}: {count}" if self.family else count

    @cached_property
    def names(self) -> list[str]:
        """What to call each: its name without the family's, told from others of that name by its digest or store."""
        plain = [shown(known.name).removeprefix(self.family) for known in self.found]
        digests = [known.subject.parts["report"][:DIGEST_SHOWN] for known in self.found]
        stores = [shown(str(known.subject.store.root)) for known in self.found]
        each = list(zip(plain, digests, strict=True))
        found = []
        for (name, digest), store in zip(each, stores, strict=True):
            is_other_config = len({other for known, other in each if known == name}) > 1
            with_digest = f"{name} ({digest})" if is_other_config else name
            found.append(f"{with_digest} in {store}" if each.count((name, digest)) > 1 else with_digest)
        return found

    @cached_property
    def measured(self) -> list[Measured]:
        """The numbers of each."""
        return [measured(known) for known in self.found]

    @cached_property
    def ranking(self) -> Ranking:
        """Which is best, and how the others compare with it."""
        return rank(self.found, self.names)

    @cached_property
    def differences(self) -> Differences:
        """What is not the same in all of them."""
        return Differences.between(self.found)

    @cached_property
    def same(self) -> list[Sameness]:
        """Of two experiments how far they are the same; of more, of those whose configs mean the same result."""
        places = range(len(self.found))
        pairs = [(one, other) for one in places for other in places if one < other]
        if len(self.found) > 2:
            keys = [tuple(row.values[place] for row in self.differences.changing) for place in places]
            pairs = [(one, other) for one, other in pairs if keys[one] == keys[other]]
        return [sameness(self.found, one, other) for one, other in pairs]

    @property
    def same_told(self) -> list[str]:
        """Those in sentences."""
        return [told(same, self.names) for same in self.same]

    @property
    def is_identical(self) -> bool:
        """Whether all of them are the same to the last bit."""
        pairs = len(self.found) * (len(self.found) - 1) // 2
        return len(self.same) == pairs and all(same.is_identical for same in self.same)

    @property
    def notes(self) -> list[str]:
        """What is damaged and was not used, by experiment."""
        named = zip(self.names, self.found, strict=True)
        return [f"{name}: {note}" for name, known in named for note in dict.fromkeys(known.notes)]

    @property
    def order(self) -> list[int]:
        """The best first, then by loss, then those that have none, as they were named."""

        def key(place: int) -> tuple[bool, bool, float, int]:
            loss = self.measured[place].loss
            versus = self.ranking.versus.get(place, Versus(""))
            difference = versus.difference if versus.difference is not None else loss
            return place != self.ranking.best, loss is None, difference if difference is not None else math.inf, place

        return sorted(range(len(self.found)), key=key)

    def to_json(self, verdict: str) -> dict[str, Any]:
        """All of it but the curves, with keys that stay."""
        ranking = self.ranking

        def rows(of: Sequence[Difference]) -> dict[str, list[str]]:
            return {row.name: list(row.values) for row in of}

        return {
            "verdict": verdict,
            "identical": self.is_identical,
            "best": None if ranking.best is None else self.names[ranking.best],
            "documents_shared_by_all": ranking.shared,
            "pairs": ranking.pairs,
            "experiments": [
                {
                    "name": known.name,
                    "label": name,
                    "store": str(known.subject.store.root),
                    "report": known.subject.parts["report"],
                    **asdict(numbers),
                    "versus_best": asdict(ranking.versus[place]) if place in ranking.versus else None,
                }
                for place, (name, known, numbers) in enumerate(zip(self.names, self.found, self.measured, strict=True))
            ],
            "config": rows(self.differences.changing),
            "placement": rows(self.differences.placing),
            "software": rows(self.differences.software),
            "data": rows(self.differences.data),
            "plan": rows(self.differences.plan),
            "same": [
                {**asdict(same), "first": self.names[same.first], "second": self.names[same.second]}
                for same in self.same
            ],
            "notes": self.notes,
        }
