"""The comparison of several experiments: the content of the table, the page and the JSON."""

import math
import os.path
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

from pipeline_lib.compare.differences import (
    Differences,
    DifferingRow,
    as_number,
    by_dotted_key,
    filled,
)
from pipeline_lib.compare.ranking import Ranking, Versus, rank
from pipeline_lib.compare.read import Known, read_known
from pipeline_lib.compare.sameness import Sameness, describe_sameness, sameness
from pipeline_lib.compare.subjects import Subject
from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.report.cost import spent
from pipeline_lib.status.at_rest import shown

DIGEST_SHOWN = 8


@dataclass(frozen=True)
class ExperimentNumbers:
    """An experiment's numbers: losses in nats, speed over all ranks, hours of a `device`.

    The losses are per supervised token. All attempts count. `training_time_s` is the time from the
    first step to the last; `held_s` is how long the devices were occupied, from the start of the
    ranks to their end. A device is a `GPU` or a `CPU core`. If a rung of its sweep stopped it,
    `rung_loss` is its held-out loss there, after the step `stopped_at`. None means not known, or
    not yet.
    """

    state: str
    stopped_at: int | None
    rung_loss: float | None
    loss: float | None
    standard_error: float | None
    perplexity: float | None
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


def measured(known: Known) -> ExperimentNumbers:
    """Return the numbers of `known`, from its sealed files, or from its steps so far."""
    tuned = known.scores.tuned if known.scores else None
    steps = known.steps
    if known.is_trained:
        cost = known.spent
    else:  # from the steps that it has taken so far
        cost = spent(known.plan, steps, RunRecord(), world_size=None, train_s=known.training_time_s)
    losses = [step.loss for step in steps if step.verdict is None and step.loss is not None]
    final_loss = losses[-1] if losses else None
    supervised_tokens = sum(step.supervised_tokens for step in steps) or None
    if known.training is not None:
        final_loss = known.training.final_loss
        supervised_tokens = known.training.supervised_tokens
    is_gpu = known.plan is not None and known.plan.cluster.is_gpu
    planned_device = "GPU" if is_gpu else "CPU core"
    return ExperimentNumbers(
        state=known.state,
        stopped_at=known.stop.step if known.stop else None,
        rung_loss=known.stop.loss if known.stop else None,
        loss=tuned.loss if tuned else None,
        standard_error=tuned.standard_error if tuned else None,
        perplexity=tuned.perplexity if tuned else None,
        final_loss=final_loss,
        steps=known.last_step,
        supervised_tokens=supervised_tokens,
        tokens_per_s=known.tokens_per_s,
        mfu=known.mfu,
        peak_memory_bytes=known.peak_memory_bytes,
        training_time_s=known.training_time_s,
        held_s=cost.held_s if cost else None,
        device=cost.device if cost else planned_device,
        device_hours=cost.hours if cost else None,
        restarts=known.restarts,
    )


@dataclass(frozen=True)
class Comparison:
    """The experiments in the order of their naming, and everything that is shown of them."""

    found: list[Known]

    @staticmethod
    def of(subjects: Sequence[Subject]) -> "Comparison":
        """Read all `subjects`."""
        return Comparison([read_known(subject) for subject in subjects])

    @cached_property
    def family(self) -> str:
        """The common prefix, up to a hyphen, of at least three names, like a sweep's; or empty."""
        if len(self.found) <= 2:
            return ""
        common = os.path.commonprefix([shown(known.name) for known in self.found])
        first, hyphen, _ = common.rpartition("-")
        return first + hyphen

    @cached_property
    def title(self) -> str:
        """The title: `a against b`, or for more than two their family and their number."""
        if len(self.names) == 2:
            return " against ".join(self.names)
        count = f"{len(self.names)} experiments"
        return f"{self.family.removesuffix('-')}: {count}" if self.family else count

    @cached_property
    def names(self) -> list[str]:
        """Display names without the common prefix, made unique by the digest or the store."""
        named = []
        digests_by_name: dict[str, set[str]] = {}
        for known in self.found:
            name = shown(known.name).removeprefix(self.family)
            digest = known.subject.parts["report"][:DIGEST_SHOWN]
            named.append((name, digest))
            digests_by_name.setdefault(name, set()).add(digest)
        labels = []
        for (name, digest), known in zip(named, self.found, strict=True):
            label = name
            if len(digests_by_name[name]) > 1:
                label += f" ({digest})"
            if named.count((name, digest)) > 1:
                label += f" in {shown(str(known.subject.store.root))}"
            labels.append(label)
        return labels

    @cached_property
    def measured(self) -> list[ExperimentNumbers]:
        """The numbers of each experiment."""
        return [measured(known) for known in self.found]

    @cached_property
    def ranking(self) -> Ranking:
        """Which experiment is best, and how the others compare with it."""
        return rank(self.found, self.names)

    @cached_property
    def differences(self) -> Differences:
        """The differences between all experiments."""
        return Differences.between(self.found)

    @cached_property
    def same(self) -> list[Sameness]:
        """Bit-by-bit comparisons of two experiments, or of pairs that mean the same result."""
        changing = self.differences.changing
        same = []
        for one, other in combinations(range(len(self.found)), 2):
            means_same = all(row.values[one] == row.values[other] for row in changing)
            if means_same or len(self.found) == 2:
                same.append(sameness(self.found, one, other))
        return same

    @cached_property
    def swept(self) -> dict[str, list[float | None]]:
        """The values of each key that differs and holds numbers, by experiment; or else None."""
        tables = [by_dotted_key(filled(known.subject.config)) for known in self.found]
        swept = {}
        for row in self.differences.changing:
            values = [as_number(table.get(row.name)) for table in tables]
            if len(set(values) - {None}) > 1:
                swept[row.name] = values
        return swept

    @property
    def same_texts(self) -> list[str]:
        """The comparisons of `same` as sentences."""
        return [describe_sameness(same, self.names) for same in self.same]

    @property
    def telling_texts(self) -> list[str]:
        """Those of `same_texts` that the verdict and the differing keys do not say already."""
        if len(self.found) == 2 and (self.is_identical or self.differences.changing):
            return []
        return self.same_texts

    @property
    def is_identical(self) -> bool:
        """Whether all experiments are the same to the last bit."""
        pairs = len(self.found) * (len(self.found) - 1) // 2
        return len(self.same) == pairs and all(same.is_identical for same in self.same)

    @property
    def notes(self) -> list[str]:
        """Notes on damaged files that were not used, prefixed with the experiment."""
        notes = []
        for name, known in zip(self.names, self.found, strict=True):
            notes += [f"{name}: {note}" for note in dict.fromkeys(known.notes)]
        return notes

    @property
    def order(self) -> list[int]:
        """The places in display order: the best, then by loss, then stopped ones, latest first."""

        def key(place: int) -> tuple[bool, bool, int, float, int]:
            numbers = self.measured[place]
            versus = self.ranking.versus.get(place, Versus(""))
            known = (versus.difference, numbers.loss, numbers.rung_loss)
            difference = next((one for one in known if one is not None), math.inf)
            return (
                place != self.ranking.best,
                numbers.loss is None,
                -(numbers.stopped_at or 0),
                difference,
                place,
            )

        return sorted(range(len(self.found)), key=key)

    def to_json(self, verdict: str) -> dict[str, Any]:
        """Return everything but the curves as JSON values; the keys are stable."""
        ranking = self.ranking

        def rows(of: Sequence[DifferingRow]) -> dict[str, list[str]]:
            return {row.name: list(row.values) for row in of}

        same = []
        for one in self.same:
            names = {"first": self.names[one.first], "second": self.names[one.second]}
            same.append(asdict(one) | names)
        return {
            "verdict": verdict,
            "identical": self.is_identical,
            "best": None if ranking.best is None else self.names[ranking.best],
            "documents_shared_by_all": ranking.shared,
            "pairs": ranking.pairs,
            "experiments": [self._experiment_json(place) for place in range(len(self.found))],
            "held_out_by_source": rows(self.differences.sources),
            "config": rows(self.differences.changing),
            "placement": rows(self.differences.placing),
            "software": rows(self.differences.software),
            "data": rows(self.differences.data),
            "plan": rows(self.differences.plan),
            "same": same,
            "notes": self.notes,
        }

    def _experiment_json(self, place: int) -> dict[str, Any]:
        known = self.found[place]
        versus = self.ranking.versus.get(place)
        return {
            "name": known.name,
            "label": self.names[place],
            "store": str(known.subject.store.root),
            "report": known.subject.parts["report"],
            **asdict(self.measured[place]),
            "versus_best": None if versus is None else asdict(versus),
        }
