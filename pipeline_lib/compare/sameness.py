"""Whether two runs are the same to the last bit, and if not, at which step they part."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from pipeline_lib.compare.read import Known, Row

# What a step computed; how long it took is another matter.
_COMPUTED = ("step", "loss", "lr", "grad_norm", "validation_loss", "verdict", "epoch", "tokens", "supervised_tokens")


@dataclass(frozen=True)
class Sameness:
    """What two runs have in common: `steps` of each, and the first that differs, if one does.

    `is_one_run` says that there is one training, which both experiments use. `models` says whether the exported
    weights hash the same; None while one of them is missing.
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
    """Of those two of `found`."""
    one, other = found[first], found[second]
    models = one.model_hashes == other.model_hashes if one.model_hashes and other.model_hashes else None
    is_one_run = (
        one.subject.store.root.resolve() == other.subject.store.root.resolve()
        and one.subject.parts.get("train") == other.subject.parts.get("train") is not None
    )
    steps = (len(one.rows), len(other.rows))
    return Sameness(first, second, is_one_run, steps, _parts_at(one.rows, other.rows), models)


def _parts_at(one: Sequence[Row], other: Sequence[Row]) -> int | None:
    """The first step that differs where both have one."""
    for left, right in zip_longest(one, other):
        if left is None or right is None:
            return None
        if any(getattr(left, name) != getattr(right, name) for name in _COMPUTED):
            return min(left.step, right.step)
    return None


def told(same: Sameness, names: Sequence[str]) -> str:
    """In a sentence."""
    one, other = names[same.first], names[same.second]
    pair, (left, right) = f"{one} and {other}", same.steps
    if same.is_one_run:
        return f"{pair} share one training: nothing that it computes can differ."
    if not left or not right:
        return f"{one if not left else other} has no steps yet: there is no curve to compare."
    if same.parts_at is not None:
        return f"{pair} part at step {same.parts_at:,}." + (
            " Their model files are the same all the same." if same.models else ""
        )
    if left != right:
        shorter, longer = (one, other) if left < right else (other, one)
        until = f"up to step {min(left, right):,}, where {shorter} ends; {longer} goes on"
        return f"{pair} are the same to the last bit {until}."
    curves = f"{left:,} steps with the same loss, learning rate and gradient norm to the last bit"
    if same.models is None:
        return f"{pair} have the same curves so far: {curves}; their models are not both there to compare."
    if same.models:
        return f"{pair} are identical: {curves}, and the same model files."
    return f"{pair} have the same curves, {curves}, but their model files differ."
