"""Sameness: whether two runs are identical to the last bit, and if not, where they diverge."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline_lib.compare.read import Known
from pipeline_lib.core import units
from pipeline_lib.records.training import Step

# The computed values of a step; its duration is not compared.
_COMPUTED = (
    "step",
    "loss",
    "lr",
    "grad_norm",
    "validation_loss",
    "verdict",
    "epoch",
    "tokens",
    "supervised_tokens",
)


@dataclass(frozen=True)
class Sameness:
    """What two runs have in common: the `steps` of each, and the first step that differs, if any.

    `first` and `second` are their places. `is_one_run` is true if both experiments use the same
    training. `models` tells whether the exported weights have the same hashes; None if one of them
    is missing.
    """

    first: int
    second: int
    is_one_run: bool
    steps: tuple[int, int]
    parts_at: int | None
    models: bool | None

    @property
    def is_identical(self) -> bool:
        """Whether every step and the model files are the same."""
        return self.parts_at is None and self.steps[0] == self.steps[1] > 0 and self.models is True


def sameness(found: Sequence[Known], first: int, second: int) -> Sameness:
    """Compare the experiments `first` and `second` of `found` bit by bit."""
    one = found[first]
    other = found[second]
    models = None
    if one.model_hashes and other.model_hashes:
        models = one.model_hashes == other.model_hashes
    is_one_store = one.subject.store.root.resolve() == other.subject.store.root.resolve()
    training = one.subject.parts.get("train")
    is_one_training = training is not None and training == other.subject.parts.get("train")
    return Sameness(
        first,
        second,
        is_one_run=is_one_store and is_one_training,
        steps=(len(one.steps), len(other.steps)),
        parts_at=_first_difference(one.steps, other.steps),
        models=models,
    )


def _first_difference(one: Sequence[Step], other: Sequence[Step]) -> int | None:
    """Return the first step that was not computed alike; None if there is none in both."""
    for left, right in zip(one, other, strict=False):
        if any(getattr(left, key) != getattr(right, key) for key in _COMPUTED):
            return min(left.step, right.step)
    return None


def describe_sameness(same: Sameness, names: Sequence[str]) -> str:
    """Return a sentence that describes `same`."""
    one = names[same.first]
    other = names[same.second]
    pair = f"{one} and {other}"
    left, right = same.steps
    if same.is_one_run:
        return f"{pair} use the same training, so its results are the same."
    if not left:
        return f"{one} has no steps yet: there is no curve to compare."
    if not right:
        return f"{other} has no steps yet: there is no curve to compare."
    if same.parts_at is not None:
        difference = f"{pair} first differ at step {same.parts_at:,}."
        if same.models:
            difference += " Their model files are identical nevertheless."
        return difference
    if left != right:
        shorter, longer = (one, other) if left < right else (other, one)
        until = f"up to step {min(left, right):,}, where {shorter} ends; {longer} continues"
        return f"{pair} are the same to the last bit {until}."
    curves = (
        f"{units.count(left, 'steps')} with the same loss, learning rate and gradient norm to the "
        "last bit"
    )
    if same.models is None:
        return (
            f"{pair} have the same curves so far: {curves}; at least one of the models does not "
            "exist yet."
        )
    if same.models:
        return f"{pair} are identical: {curves}, and the same model files."
    return f"{pair} have the same curves, {curves}, but their model files differ."
