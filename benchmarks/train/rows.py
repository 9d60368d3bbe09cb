"""Documents as the peers' trainers want them, in the order in which their ranks take them."""

from typing import Any

import torch
from torch.utils.data import Dataset

from pipeline_lib.data.documents import Document

IGNORED = -100
Row = dict[str, Any]


class Rows(Dataset[Row]):
    """A list of rows."""

    def __init__(self, rows: list[Row]) -> None:
        """Of all ranks and steps."""
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


def row_of(document: Document) -> Row:
    """Tokens and labels."""
    tokens = document.tokens.tolist()
    labels = [
        token if used else IGNORED
        for token, used in zip(tokens, document.supervised.tolist(), strict=True)
    ]
    return {"input_ids": tokens, "labels": labels}


def padded(rows: list[Row], length: int | None) -> dict[str, torch.Tensor]:
    """A batch filled up to `length`, or to its longest row."""
    longest = length or max(len(row["input_ids"]) for row in rows)

    def fill(key: str, value: int) -> torch.Tensor:
        return torch.tensor([row[key] + [value] * (longest - len(row[key])) for row in rows])

    mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {
        "input_ids": fill("input_ids", 0),
        "labels": fill("labels", IGNORED),
        "attention_mask": torch.tensor(mask),
    }


def dealt(of_ranks: list[list[list[Row]]], micro: int) -> list[Row]:
    """Rows by rank and step in the order in which accelerate deals micro-batches: in turns."""
    found = []
    for step in range(len(of_ranks[0])):
        for start in range(0, len(of_ranks[0][step]), micro):
            for of_rank in of_ranks:
                found += of_rank[step][start : start + micro]
    return found
