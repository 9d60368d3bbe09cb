"""What the export stage leaves in parity.json: how the exported file compares with the model."""

from dataclasses import dataclass

from pipeline_lib.records.merge import LogitFigures


@dataclass(frozen=True, kw_only=True)
class ExportParity(LogitFigures):
    """The differences between the exported file, read back, and the merged model.

    Of the tensors: the largest difference beyond the rounding of its type, relative to the root
    mean square of its tensor, and the number of tensors by type. `trained_difference` is the norm
    of the logits' difference from those that the training left, which has the rounding of the merge
    in it too. `compared_tokens` is the number of tokens that the tokenizer in the file gave.
    """

    trained_difference: float
    value_difference: float
    value_tolerance: float
    tensors: dict[str, int]
    compared_tokens: int
