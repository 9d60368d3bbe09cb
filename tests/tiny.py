"""The very small model that tests begin with, made once in each process: its tokenizer takes seconds to train."""

import tempfile
from functools import cache
from pathlib import Path

from pipeline_lib.config.schema import TinyModel
from pipeline_lib.data.demo import build_tiny


def tiny_model() -> Path:
    """The folder of the model with its tokenizer; copy it to change it."""
    return Path(_made().name)


@cache
def _made() -> "tempfile.TemporaryDirectory[str]":
    folder = tempfile.TemporaryDirectory(prefix="tiny-")
    build_tiny(TinyModel(source="tiny", vocab_tokens=512, hidden_size=32, layers=1), Path(folder.name), lambda _: None)
    return folder
