"""What the merge stage leaves in parity.json: how the exported model compares with the trained."""

from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.records.record import Record, parse, read_sealed_json

PARITY_NAME = "parity.json"


@dataclass(frozen=True, kw_only=True)
class LogitFigures(Record):
    """The differences between the logits of two models.

    They are the largest one, and the norm of all relative to that of the logits, with its
    `tolerance`; the fraction of positions with the same most likely token, and the positions where
    routers chose other experts.
    """

    compared_logits: int
    max_abs_difference: float
    relative_difference: float
    tolerance: float
    positions_apart: int
    top1_agreement: float


@dataclass(frozen=True, kw_only=True)
class Parity(LogitFigures):
    """The differences between the exported model and the trained one.

    Of the tensors: the largest one beside rounding, relative to the root mean square of its tensor.
    `rounding_difference` is how much rounding changes the logits. Of a mean of several checkpoints,
    `averaged_steps` are the steps after which they were saved: its tensors are compared with the
    mean, the logits are those of the last one, and `rounding_difference` has the averaging in it.
    """

    rounding_difference: float
    value_difference: float
    value_tolerance: float
    compared_tensors: int
    averaged_steps: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Unproven(Record):
    """Why the exported model was not compared with the trained one."""

    unproven: str


def read_parity(path: Path) -> Parity | Unproven:
    """Return the comparison in the file at `path`, or why there is none.

    Raise OSError, or IntegrityError naming the file and the key if it is damaged or of another
    schema.
    """
    found = read_sealed_json(path)
    if isinstance(found, dict) and "unproven" in found:
        return parse(Unproven, found, path)
    return parse(Parity, found, path)
