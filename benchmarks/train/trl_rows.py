"""Documents packed by TRL itself, by step and rank, so that every side trains on the same."""

from datasets import Dataset, disable_progress_bars  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerFast
from trl.data_utils import pack_dataset  # type: ignore[import-not-found,unused-ignore]

from benchmarks.train.rows import IGNORED, Row, row_of
from pipeline_lib.data.documents import Document

PADDING, END = "<pad>", "</s>"
# Of rows that are there so that all ranks take as many in each step: two tokens that nothing is
# learned from.
_FILLER: Row = {"input_ids": [0, 0], "labels": [IGNORED] * 2, "seq_lengths": [2]}


def packed_rows(
    of_ranks: list[list[list[Document]]], length: int, micro: int
) -> tuple[list[list[list[Row]]], int]:
    """Rows of up to `length` tokens by rank and step; how many micro-batches of `micro` a step."""
    disable_progress_bars()
    packed = [[_pack(documents, length) for documents in steps] for steps in of_ranks]
    micro_batches = -(-max(len(rows) for steps in packed for rows in steps) // micro)
    return [
        [_spread(rows, micro_batches, micro) for rows in steps] for steps in packed
    ], micro_batches


def _pack(documents: list[Document], length: int) -> list[Row]:
    dataset = Dataset.from_list([row_of(document) for document in documents])
    return list(pack_dataset(dataset, length, "bfd"))


def _spread(rows: list[Row], micro_batches: int, micro: int) -> list[Row]:
    """The rows in micro-batches of about as many."""
    found = []
    for number in range(micro_batches):
        part = rows[number::micro_batches]
        found += part + [_FILLER] * (micro - len(part))
    return found


def tokenizer() -> PreTrainedTokenizerFast:
    """One that TRL asks for its padding and nothing else."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({PADDING: 0, END: 1}, unk_token=PADDING))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PADDING, eos_token=END)  # type: ignore[no-untyped-call]
