"""The files of a model folder, without torch: which tensors they hold and what is wrong with them."""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from pipeline_lib.config.content import GENERATION_NAME, model_files, not_json
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json
from pipeline_lib.core.stage import Sealed
from pipeline_lib.core.text import cut, shortened
from pipeline_lib.data.chat_template import ChatTemplate, has_template
from pipeline_lib.data.encode import load_tokenizer
from pipeline_lib.model.geometry import EMBEDDING, HEAD, Geometry

# Which tensors the safetensors files of a model folder hold, and how they are laid out in the model's parameters.
#
# Only headers are read. Non-goal: other formats, since a pickle can run code.

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
READABLE_KINDS = ("F32", "BF16", "F16")  # of elements, as safetensors calls them
_NAMED_AT_MOST = 5
_FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Header:
    """What a file says of a tensor that it holds."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str  # of its elements, as safetensors calls it: `BF16`


@dataclass(frozen=True)
class Piece:
    """The values of `sizes` elements of a parameter from `offsets` on: the stored tensor `name`."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor of `shape` is meant; an expert's has no dimension for the experts."""
        extra = len(self.sizes) - len(shape)
        return self.sizes == (1,) * extra + shape


def read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor; empty if one file holds all. Raises DataError."""
    path = folder / INDEX_NAME
    if (folder / SINGLE_NAME).exists() or not path.exists():  # the order in which transformers looks
        return {}
    try:
        weight_map: dict[str, Any] = read_json(path)["weight_map"]
        index = {name: str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not an index of safetensors files ({error!r}); get the model again") from error
    for file in index.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise DataError(f"{path}: {file!r} is not the name of a safetensors file beside it; get the model again")
    return index


def weight_files(folder: Path, index: Mapping[str, str]) -> list[Path]:
    """The files that hold the weights, where `index` is that of `folder`."""
    return [folder / name for name in sorted(set(index.values())) or [SINGLE_NAME]]


def read_headers(path: Path) -> list[Header]:
    """The tensors in the file at `path`, whose length and offsets fit them. Raises DataError."""
    try:
        with safe_open(str(path), framework="numpy") as file:
            slices = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118 - it is no dict
            return [Header(path, name, tuple(values.get_shape()), values.get_dtype()) for name, values in slices]
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read as safetensors ({error}); get the model again") from error


def find_headers(folder: Path) -> dict[str, Header]:
    """The tensors that `folder` holds, by name. Raises DataError for absent or damaged files."""
    index = read_index(folder)
    return named((header for path in weight_files(folder, index) for header in read_headers(path)), index)


def named(headers: Iterable[Header], index: Mapping[str, str]) -> dict[str, Header]:
    """`headers` by name; without those that `index` looks for in another file."""
    return {each.name: each for each in headers if index.get(each.name, each.path.name) == each.path.name}


def copies_of(shape: tuple[int, ...], names: Sequence[str], stored: Mapping[str, Header]) -> list[list[Piece]]:
    """The pieces of a parameter of `shape` under each name by which it is stored; under the first if by none."""
    held = [name for name in names if name in stored] or names[:1]
    return [_pieces(name, shape, stored) for name in held]


def _pieces(name: str, shape: tuple[int, ...], stored: Mapping[str, Header]) -> list[Piece]:
    """What fills a parameter: one tensor of its name, or, for all experts' [E, rows, columns], a few for each."""
    stem, _, last = name.rpartition(".")
    if name in stored or not stem.endswith(".experts") or last not in _FUSED_EXPERTS:
        return [Piece(name, (0,) * len(shape), shape)]
    parts = _FUSED_EXPERTS[last]
    rows = shape[1] // len(parts)
    return [
        Piece(f"{stem}.{expert}.{part}.weight", (expert, number * rows, 0), (1, rows, shape[2]))
        for expert in range(shape[0])
        for number, part in enumerate(parts)
    ]


def refuse_misfit(folder: Path, copies: list[list[list[Piece]]], stored: Mapping[str, Header]) -> None:
    """Raise DataError unless the files hold the model, all of it, and nothing else. The same on every rank."""
    wanted = {piece.name: piece for of_one in copies for pieces in of_one for piece in pieces}
    held = [piece for name, piece in wanted.items() if name in stored]
    misfits = {piece.name: stored[piece.name].shape for piece in held if not piece.fits(stored[piece.name].shape)}
    shapes = [f"{name} {list(shape)} instead of {list(wanted[name].sizes)}" for name, shape in misfits.items()]
    problems = [
        *_list("lacks", [name for name in wanted if name not in stored]),
        *_list("holds besides", [name for name in stored if name not in wanted]),
        *_list("holds in another shape", shapes),
    ]
    if problems:
        raise DataError(
            f"{folder}: the weights are not those of its config.json: it {'; it '.join(problems)}. "
            "Get the whole model again, with the config.json that belongs to it"
        )


def refuse_unreadable_kinds(headers: Iterable[Header]) -> None:
    """Raise DataError for the first tensor of another kind than is read and written here."""
    for header in headers:
        if header.kind not in READABLE_KINDS:
            known = ", ".join(READABLE_KINDS)
            raise DataError(f"{header.path}: {header.name} is stored as {header.kind}, not one of {known}")


def _list(what: str, names: list[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
        yield f"{what} {', '.join(names[:_NAMED_AT_MOST])}{more}"


# Finds weights that are not finite, without torch: their exponent has all bits set.

# By the kind of element: unsigned integers of its width, and the bits of its exponent.
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}
_CHUNK_BYTES = 1 << 20
_FILES_AT_ONCE = 8


class _Values(NamedTuple):
    """Where a tensor's values lie in its file, in bytes from the beginning."""

    name: str
    kind: str
    begin: int
    bytes: int


def refuse_not_finite(folder: Path) -> None:
    """Raise DataError naming the first tensor of each file with a value that is NaN or infinite.

    Reads all weights of `folder`, whose headers are sound, in some tens of MB of memory.
    """
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        found = list(pool.map(_first_not_finite, weight_files(folder, read_index(folder))))
    if named := [text for text in found if text is not None]:
        raise DataError(f"{'; '.join(named)}: holds values that are not finite, which no training mends; get the "
                        "model again, or take another")  # fmt: skip


def _first_not_finite(path: Path) -> str | None:
    with path.open("rb") as file:
        for values in _values_in(path):
            kind, exponent = _EXPONENTS[values.kind]
            width = np.dtype(kind).itemsize
            file.seek(values.begin)
            for done in range(0, values.bytes, _CHUNK_BYTES):
                chunk = np.fromfile(file, kind, min(_CHUNK_BYTES, values.bytes - done) // width)
                if (chunk & chunk.dtype.type(exponent)).max() == exponent:
                    return f"{path}: {values.name}"
    return None


def _values_in(path: Path) -> Iterator[_Values]:
    """In the order of the file."""
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        yield _Values(name, entry["dtype"], 8 + header_bytes + begin, end - begin)


# Reads generation_config.json, which says how a model is to answer: it is published, and decides no training.

_IDS = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_eos_token_id")
_SEVERAL_IDS = ("eos_token_id", "forced_eos_token_id")
_NUMBERS = ("temperature", "top_p", "top_k", "repetition_penalty", "max_length", "max_new_tokens")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """What generation_config.json of the model in `folder` says; empty without one.

    Raises DataError with all that is wrong with it, as far as it shows without transformers.
    """
    path = folder / GENERATION_NAME
    if not path.exists():
        return {}
    config = read_object(path)
    if problems := list(_wrong_keys(config)):
        raise DataError(f"{path}: {'; '.join(problems)}")
    return config


def take_generation_config(folder: Path) -> dict[str, Any]:
    """The same. Raises DataError also for what transformers does not take."""
    config = read_generation_config(folder)
    if not config:
        return {}
    from transformers import GenerationConfig  # loads torch

    try:
        GenerationConfig.from_dict(config)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise DataError(
            f"{folder / GENERATION_NAME}: transformers does not take it ({cut(str(error), 200)})"
        ) from error
    return config


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`. Raises DataError, also for values that no JSON file can hold."""
    try:
        content = read_json(path)
        wrong = next(not_json(content), None)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: does not read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds no JSON object")
    if wrong is not None:
        raise DataError(f"{path}: {wrong}")
    return content


def wrong_ids(config: dict[str, Any], vocab: int) -> Iterator[str]:
    """What is wrong with the token ids that a config.json names."""
    for key in _IDS:
        value = config.get(key)
        if value is None:
            continue
        values = value if isinstance(value, list) and value and key in _SEVERAL_IDS else [value]
        # -1 means none to some tools, and no token has it.
        if not all(_is_whole(each) and -1 <= each < vocab for each in values):
            which = "a token id, or a list of them," if key in _SEVERAL_IDS else "a token id"
            yield f"{key}: {_short(value)} is not {which} of a vocabulary of {vocab:,}"


def _wrong_keys(config: dict[str, Any]) -> Iterator[str]:
    for key in _IDS:
        value = config.get(key)
        values = value if isinstance(value, list) and value else [value]
        if value is not None and not all(map(_is_whole, values)):
            yield f"{key}: {_short(value)} is not a token id, or a list of them"
    for key in _NUMBERS:
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            yield f"{key}: {_short(value)} is not a number"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    return cut(repr(value), 40)


# Finds what is wrong with a model folder before anything is computed with it.
#
# All that is small is parsed, and the headers of the weights are checked. finite.py reads the weights themselves.


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


# Reads the generation_config.json of a base model from among the inputs of a stage.


def generation_config_of(inputs: Mapping[str, Sealed]) -> dict[str, Any]:
    """That of the base: of a local model it is sealed by itself, else with the model. Raises DataError."""
    folder = inputs.get("generation", inputs["model"]).folder(GENERATION_NAME)
    try:
        return take_generation_config(folder)
    except DataError as error:
        mend = "mend it in the model's folder" if "generation" in inputs else f"delete {folder}"
        raise DataError(f"{error}; {mend} and run snakemake again") from error
