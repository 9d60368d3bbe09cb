"""What the export stage leaves in parity.json: how the exported file compares with the model."""

from dataclasses import dataclass

from pipeline_lib.records.record import Record


@dataclass(frozen=True, kw_only=True)
class ExportParity(Record):
    """The differences between the exported file, read back, and the merged model.

    Of the tensors: the largest difference beyond the rounding of its type, relative to the root
    mean square of its tensor, and the number of tensors by type. Of the logits: the figures of
    `Parity`; `trained_difference` is the norm of their difference from those that the training
    left, which has the rounding of the merge in it too. `compared_tokens` is the number of tokens
    that the tokenizer in the file gave.
    """

    compared_logits: int
    max_abs_difference: float
    relative_difference: float
    tolerance: float
    positions_apart: int
    top1_agreement: float
    trained_difference: float
    value_difference: float
    value_tolerance: float
    tensors: dict[str, int]
    compared_tokens: int
