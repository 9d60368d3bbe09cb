"""Successive halving: a sweep's trainings run to a rung, a step; the best go on to the next.

The rest stop.

As in a rehearsal, the training to a rung is the whole training with `until_step`, in the folder of
the whole run. A training that goes on continues from its checkpoint, so nothing is computed twice
and the end result has the digest of an ordinary run. The result of a training at a rung, and each
decision, is a small file of the store:

    STORE/rungs/DIGEST.json      of the training to the rung: its step and held-out loss, or why it failed
    STORE/halving/DIGEST.json    of the rung: which trainings go on, which stop, and why
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.config.schema import Config
from pipeline_lib.config.strict_yaml import Keys
from pipeline_lib.config.train import EPOCH
from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.files import (
    canonical_json,
    read_json,
    sha256_text,
    unreadable_named,
    write_json,
)
from pipeline_lib.core.store import DIGEST_CHARS, Spec, Store
from pipeline_lib.core.text import did_you_mean

LARGEST_KEEP = 0.5
RUNGS, DECISIONS = "rungs", "halving"  # folders of the store
RUNG_LOGS = "rung"  # folder for logs of trainings to a rung, beside those of the stages
_EXAMPLE = "as in {first_step: 50, keep: 0.5}"


@dataclass(frozen=True)
class Halving:
    """The settings of halving: the first rung's step, and the fraction `keep` that goes on."""

    first_step: int
    keep: float

    def survivors(self, count: int) -> int:
        """Return how many of `count` trainings go on: at least one."""
        return max(1, math.ceil(round(count * self.keep, 9)))

    def steps(self, count: int) -> list[int]:
        """Return the rungs' steps until one of `count` is left, each `1 / keep` times the last.

        The factor is approximate.
        """
        found: list[int] = []
        while count > 1:
            found.append(self.first_step * round(self.keep ** -len(found)))
            count = self.survivors(count)
        return found


@dataclass(frozen=True)
class Rung:
    """A step where trainings are compared.

    `trainings` are those up to it, by the digest of the whole training.
    """

    halving: Halving
    step: int
    digest: str
    trainings: Mapping[str, Spec]


@dataclass(frozen=True)
class Reached:
    """A training's result at a rung: its last validation's loss, in nats per token, at `step`.

    This is the held-out loss. `has_ended` is true if the training has no steps left. `failure` says
    why it has no loss.
    """

    step: int | None
    loss: float | None
    has_ended: bool
    failure: str | None


@dataclass(frozen=True)
class Competitor:
    """The decision of a rung about one training, and the experiments that share the training."""

    training: str
    experiments: Sequence[str]
    step: int | None
    loss: float | None
    failure: str | None
    goes_on: bool
    why: str


@dataclass(frozen=True)
class Decision:
    """The decision at the rung at `step`, best training first.

    `next_step` is the next rung's; None without one.
    """

    step: int
    next_step: int | None
    competitors: Sequence[Competitor]

    @property
    def survivors(self) -> list[str]:
        """The trainings that go on, by the digest of the whole training."""
        return [one.training for one in self.competitors if one.goes_on]


def read_halving(given: Any) -> tuple[Halving | None, list[str]]:
    """Return the settings of `sweep.halving` and its problems; with problems, no settings."""
    if not isinstance(given, dict) or not given:
        return None, [f"{json.dumps(given)} is not keys with values, {_EXAMPLE}"]
    problems = []
    known = ("first_step", "keep")
    for key in given.keys() - set(known):
        problems.append(f"{key}: unknown key{did_you_mean(key, known)}")
    first = given.get("first_step")
    keep = given.get("keep", LARGEST_KEEP)
    if first is None:
        problems.append(f"first_step: missing; the step of the first decision, {_EXAMPLE}")
    elif isinstance(first, bool) or not isinstance(first, int) or first < 1:
        problems.append(f"first_step: {json.dumps(first)} is not a whole number of at least 1")
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= LARGEST_KEEP:
        problems.append(
            f"keep: {json.dumps(keep)} is not a number above 0 and up to {LARGEST_KEEP}"
        )
    if problems:
        return None, sorted(problems)
    return Halving(int(given["first_step"]), float(keep)), []


def halving_problems(halving: Halving, config: Config) -> Iterator[tuple[Keys, str]]:
    """Yield why an experiment cannot be compared or stopped at the rungs, with keys to change."""
    every = config.train.validate_every_steps
    first = halving.first_step
    if not config.data.held_out_sources:
        text = "0 holds nothing out, but sweep.halving compares held-out losses"
        yield ("data", "validation_fraction"), f"{text}; raise it, or give data.validation instead"
    elif every is None:
        text = "missing, but sweep.halving compares held-out losses"
        yield (
            ("train", "validate_every_steps"),
            f"{text}; set it to {first} or a divisor of {first}",
        )
    elif every == EPOCH:
        text = "epoch is no number of steps, and sweep.halving compares after first_step"
        yield (
            ("train", "validate_every_steps"),
            f"{text}; set it to {first} or a divisor of {first}",
        )
    elif first % int(every):
        text = f"{every} does not divide sweep.halving.first_step ({first})"
        next_multiple = math.ceil(first / int(every)) * int(every)
        yield (
            ("train", "validate_every_steps"),
            f"{text}; set it to a divisor, or first_step to {next_multiple}",
        )
    if config.train.until_step is not None:
        yield (
            ("train", "until_step"),
            "cannot be combined with sweep.halving, which decides where trainings stop; remove one "
            "of them",
        )
    if config.train.local_sgd_steps > 1:
        text = (
            "cannot be combined with sweep.halving: stopping between two averagings changes the "
            "result"
        )
        yield ("train", "local_sgd_steps"), f"{text}; remove one of them"


def rungs_of(halving: Halving, trainings: Mapping[str, Spec]) -> tuple[Rung, ...]:
    """Return the rungs of the whole `trainings`, by digest in file order; equal rungs share it."""
    rungs = []
    for step, digest in rung_digests(halving, list(trainings)):
        to_rung = {whole: until(step, spec) for whole, spec in trainings.items()}
        rungs.append(Rung(halving, step, digest, to_rung))
    return tuple(rungs)


def rung_digests(halving: Halving, trainings: Sequence[str]) -> list[tuple[int, str]]:
    """Return the step and digest of each rung of the whole `trainings`, in file order."""
    found = []
    for step in halving.steps(len(trainings)):
        keyed = {"halving": asdict(halving), "step": step, "trainings": trainings}
        found.append((step, sha256_text(canonical_json(keyed))[:DIGEST_CHARS]))
    return found


def until(step: int, whole: Spec) -> Spec:
    """Return the training `whole`, stopped at `step`."""
    return Spec(whole.stage, whole.version, {**whole.settings, "until_step": step}, whole.inputs)


def decide(
    rung: Rung,
    next_step: int | None,
    reached: Mapping[str, Reached],
    names: Mapping[str, list[str]],
) -> Decision:
    """Decide which trainings go on from `rung`: those with least loss; on a tie, the earlier ones.

    A training that failed, or has no finite loss, stops. If all others have ended, all of them go
    on: there is nothing left to save. `reached` is in the order of the file, by the digest of the
    whole training; `names` are the experiments that share it.
    """
    losses = {}
    for training, one in reached.items():
        losses[training] = math.inf if one.loss is None else one.loss
    order = sorted(reached, key=losses.__getitem__)
    sound = [training for training in order if reached[training].loss is not None]
    are_over = all(reached[training].has_ended for training in sound)
    kept = sound if are_over else sound[: rung.halving.survivors(len(reached))]
    competitors = []
    for place, training in enumerate(order, start=1):
        one = reached[training]
        goes_on = training in kept
        why = f"place {place} of {len(order)}, {len(kept)} go on"
        if one.loss is None:
            why = "failed" if one.failure else "no finite loss"
        elif not goes_on and one.loss == reached[kept[-1]].loss:
            why += "; as good as the last of them, which stands earlier in the file"
        competitors.append(
            Competitor(training, names[training], one.step, one.loss, one.failure, goes_on, why)
        )
    is_last = len(kept) <= 1 or all(reached[training].has_ended for training in kept)
    return Decision(rung.step, None if is_last else next_step, competitors)


def reached_path(store: Store, digest: str) -> Path:
    """Return the path of the result of the training `digest`, which runs to a rung."""
    return store.root / RUNGS / f"{digest}.json"


def decision_path(store: Store, digest: str) -> Path:
    """Return the path of the decision of the rung `digest`."""
    return store.root / DECISIONS / f"{digest}.json"


def write_record(path: Path, record: Reached | Decision) -> None:
    """Write a record for `read_reached` or `read_decision`."""
    write_json(path, asdict(record))


def read_reached(path: Path) -> Reached:
    """Read the result of a training at a rung. Raises IntegrityError, Unreadable."""
    try:
        with unreadable_named(path):
            content = read_json(path)
        step = content["step"]
        loss = content["loss"]
        if not _is_loss(loss) or not isinstance(content["has_ended"], bool):
            raise TypeError("no finite loss")
        return Reached(step, loss, content["has_ended"], content["failure"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{path}: not the result of a training at a rung ({error!r}); delete it and run "
            "snakemake"
        ) from error


def read_decision(path: Path) -> Decision:
    """Read the decision of a rung. Raises IntegrityError, Unreadable."""
    try:
        with unreadable_named(path):
            content = read_json(path)
        competitors = tuple(Competitor(**one) for one in content["competitors"])
        are_sound = all(_is_loss(one.loss) and isinstance(one.goes_on, bool) for one in competitors)
        if not are_sound or not any(one.goes_on for one in competitors):
            raise TypeError("nobody goes on, or a loss is no number")
        return Decision(int(content["step"]), content["next_step"], competitors)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{path}: not the decision of a rung ({error!r}); delete it and run snakemake"
        ) from error


def last_decisions(decided: Iterable[tuple[Rung, Decision]]) -> dict[str, tuple[Rung, Competitor]]:
    """Return, by whole training, the last rung that decided about it, with that decision."""
    return {one.training: (rung, one) for rung, decision in decided for one in decision.competitors}


def _is_loss(loss: Any) -> bool:
    return loss is None or (
        isinstance(loss, int | float) and not isinstance(loss, bool) and math.isfinite(loss)
    )
