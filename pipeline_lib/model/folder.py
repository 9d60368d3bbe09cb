"""Finds what is wrong with a model folder before anything is computed with it.

All that is small is parsed, and the headers of the weights are checked. finite.py reads the weights themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.redact import shortened
from pipeline_lib.config.content import model_files
from pipeline_lib.data.chat.encoder import load_tokenizer
from pipeline_lib.data.chat.template import ChatTemplate, has_template
from pipeline_lib.model.generation import read_generation_config, read_object, wrong_ids
from pipeline_lib.model.weights import (
    Header,
    copies_of,
    named,
    read_headers,
    read_index,
    refuse_misfit,
    refuse_unreadable_kinds,
    weight_files,
)
from pipeline_lib.plan.geometry import EMBEDDING, HEAD, Geometry


def problems_of(folder: Path) -> list[str]:
    """All that keeps the model in `folder` from being trained and published, one text each that names its file."""
    stamps = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in model_files(folder))
    return list(_problems(folder, stamps))


def generation_problems(folder: Path) -> list[str]:
    """The same, of generation_config.json alone."""
    problems: list[str] = []
    with _collected(problems):
        _check_generation(folder)
    return problems


def refuse_untaken_config(folder: Path) -> None:
    """Raise DataError for a config.json that transformers does not take; a key that we do not read may be why."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig  # loads torch
    from transformers.activations import get_activation

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        get_activation(config.hidden_act)  # type: ignore[no-untyped-call]
    except (StrictDataclassError, OSError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise DataError(
            f"{folder / 'config.json'}: transformers does not take it ({shortened(str(error), 200)})"
        ) from error


@lru_cache(maxsize=16)
def _problems(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> tuple[str, ...]:
    """Remembered as long as the `stamps` of the files stay: the experiments of a sweep have the same model."""
    problems: list[str] = []
    with _collected(problems):
        geometry = _read_config(folder)
        with _collected(problems):
            _check_generation(folder)
        with _collected(problems):
            _check_tokenizer(folder, geometry.vocab)
        _check_weights(folder, geometry, problems)
    return tuple(problems)


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """What the block raises is one of `problems`."""
    try:
        yield
    except DataError as error:
        problems.append(str(error))


def _read_config(folder: Path) -> Geometry:
    """The sizes in config.json. Raises DataError for these, and for what transformers or we would fail at later."""
    path = folder / "config.json"
    config = read_object(path)
    geometry = Geometry.from_folder(folder)
    if problems := list(wrong_ids(config, geometry.vocab)):
        raise DataError(f"{path}: {'; '.join(problems)}")
    return geometry


def _check_generation(folder: Path) -> None:
    try:
        read_generation_config(folder)
    except DataError as error:
        raise DataError(f"{error}; mend that, or delete the file") from error


def _check_tokenizer(folder: Path, vocab: int) -> None:
    """Raise DataError for a tokenizer or template that does not load, or with tokens that the model has not."""
    if has_template(folder):
        ChatTemplate.load(folder)
    token, largest = max(load_tokenizer(folder).get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab:
        raise DataError(
            f"{folder / 'tokenizer.json'}: the token {token!r} has the id {largest}, and config.json says vocab_size "
            f"{vocab}: they belong to different models; get the whole model again"
        )


def _check_weights(folder: Path, geometry: Geometry, problems: list[str]) -> None:
    """Add to `problems` what is wrong with the headers of the weights. Raises DataError for a damaged index."""
    index = read_index(folder)
    headers: list[Header] = []
    damaged: list[str] = []
    for path in weight_files(folder, index):
        with _collected(damaged):
            headers += read_headers(path)
    if damaged:  # what they lack is not known
        problems += damaged
        return
    stored = named(headers, index)
    copies = [
        copies_of(shape, [name, HEAD] if geometry.tied and name == EMBEDDING else [name], stored)
        for name, shape in geometry.shapes().items()
    ]
    with _collected(problems):
        refuse_misfit(folder, copies, stored)
    with _collected(problems):
        refuse_unreadable_kinds(stored.values())
