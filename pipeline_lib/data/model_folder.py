"""Checks of a model folder before anything is computed with it.

All small files are parsed, and the headers of the weights are checked; `refuse_not_finite`
(arch/weight_files.py) reads the weights themselves.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline_lib.arch.config_json import is_whole, read_object, refuse_quantized, short
from pipeline_lib.arch.families import family_in, read_geometry
from pipeline_lib.arch.generation_config import IDS, SEVERAL_IDS, read_generation_config
from pipeline_lib.arch.geometry import EMBEDDING, HEAD, Geometry
from pipeline_lib.arch.weight_files import (
    Header,
    copies_of,
    named,
    of_text,
    read_headers,
    read_index,
    refuse_misfit,
    refuse_unreadable_kinds,
    weight_files,
)
from pipeline_lib.config.content import model_files
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.chat_template import has_template
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.data.template_worker import check_template


def problems_of(folder: Path) -> list[str]:
    """Return all problems of training and publishing the model in `folder`, with their files."""
    stamps = tuple(
        (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in model_files(folder)
    )
    return list(_problems(folder, stamps))


def generation_problems(folder: Path) -> list[str]:
    """Return the problems of generation_config.json in `folder`."""
    try:
        read_generation_config(folder)
    except DataError as error:
        return [f"{error}; mend that, or delete the file"]
    return []


@lru_cache(maxsize=16)
def _problems(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> tuple[str, ...]:
    """Return `folder`'s problems, cached by its files' `stamps`: a sweep often repeats a check."""
    problems: list[str] = []
    with _collected(problems):
        config_path = folder / "config.json"
        config = read_object(config_path)
        geometry = read_geometry(folder)
        refuse_quantized(config, str(config_path))
        if wrong := list(_wrong_ids(family_in(config).text(config), geometry.vocab)):
            raise DataError(f"{config_path}: {'; '.join(wrong)}")
        problems += generation_problems(folder)
        with _collected(problems):
            _check_tokenizer(folder, geometry.vocab)
        _check_weights(folder, geometry, problems)
    return tuple(problems)


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Append the message of a DataError raised in the block to `problems`."""
    try:
        yield
    except DataError as error:
        problems.append(str(error))


def _wrong_ids(config: Mapping[str, Any], vocab: int) -> Iterator[str]:
    """Yield a message for each invalid token id in a config.json with `vocab` tokens."""
    for key in IDS:
        value = config.get(key)
        if value is None:
            continue
        values = value if isinstance(value, list) and value and key in SEVERAL_IDS else [value]
        # Some tools write -1 for "none"; no token has this id.
        if not all(is_whole(each) and -1 <= each < vocab for each in values):
            which = "a token id, or a list of them," if key in SEVERAL_IDS else "a token id"
            yield f"{key}: {short(value)} is not {which} of a vocabulary of {vocab:,}"


def _check_tokenizer(folder: Path, vocab: int) -> None:
    """Raise DataError if tokenizer or template do not load, or a token exceeds the vocabulary."""
    if has_template(folder):
        check_template(folder)
    token, largest = max(load_tokenizer(folder).get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab:
        raise DataError(
            f"{folder / 'tokenizer.json'}: the token {token!r} has the id {largest}, and "
            "config.json says vocab_size "
            f"{vocab}: they belong to different models; get the whole model again"
        )


def _check_weights(folder: Path, geometry: Geometry, problems: list[str]) -> None:
    """Append the problems of the weights' headers to `problems`.

    Raises DataError for a damaged index.
    """
    index = read_index(folder)
    headers: list[Header] = []
    damaged: list[str] = []
    for path in weight_files(folder, index):
        with _collected(damaged):
            headers += read_headers(path)
    if damaged:  # their tensors are unknown, so missing ones cannot be reported
        problems += damaged
        return
    stored = of_text(named(headers, index), folder)
    copies = []
    for name, shape in geometry.shapes().items():
        is_tied = geometry.tied and name == EMBEDDING
        copies.append(copies_of(shape, [name, HEAD] if is_tied else [name], stored))
    with _collected(problems):
        refuse_misfit(folder, copies, stored)
    with _collected(problems):
        refuse_unreadable_kinds(stored.values())
