"""The tiny model that tests begin with, made once a process: its tokenizer trains for seconds."""

import tempfile
from functools import cache
from pathlib import Path

from pipeline_lib.config.schema import TinyModel
from pipeline_lib.data.tiny_model import build_tiny


def tiny_model() -> Path:
    """The folder of the model with its tokenizer; copy it to change it."""
    return Path(_made().name) / "model"


@cache
def _made() -> "tempfile.TemporaryDirectory[str]":
    folder = tempfile.TemporaryDirectory(prefix="tiny-")
    model = Path(folder.name) / "model"  # which others may read, unlike the folder
    model.mkdir()
    build_tiny(
        TinyModel(source="tiny", vocab_tokens=512, hidden_size=32, layers=1), model, lambda _: None
    )
    return folder
