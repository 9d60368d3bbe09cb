"""Which tensors a model folder's safetensors files hold, and how they map to parameters.

Without torch. Only headers are read, but for `refuse_not_finite`. Other formats are not supported,
since a pickle can run code.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from safetensors import SafetensorError, safe_open

from pipeline_lib.arch.config_json import read_object
from pipeline_lib.arch.families import family_in
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# torch's names by safetensors'
READABLE_KINDS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
ADAPTER = "default"  # peft's name of a model's only adapter, in the names of its tensors
_NAMED_AT_MOST = 5
_FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Header:
    """The header entry of a tensor in a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str  # element type by safetensors' name: `BF16`
    begin: int  # where its values begin in the file, in bytes


AnyHeader = TypeVar("AnyHeader", bound=Header)


@dataclass(frozen=True)
class Piece:
    """A box of a parameter: `sizes` elements from `offsets` on, with values of tensor `name`."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the parameter."""
        return tuple(
            slice(begin, begin + size) for begin, size in zip(self.offsets, self.sizes, strict=True)
        )

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if a stored tensor of `shape` fits; an expert's lacks the experts' axis."""
        extra = len(self.sizes) - len(shape)
        return self.sizes == (1,) * extra + shape


def read_index(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor; empty if one file holds all.

    Raises DataError for a malformed index.
    """
    path = folder / INDEX_NAME
    if (
        folder / SINGLE_NAME
    ).exists() or not path.exists():  # the same precedence as in transformers
        return {}
    try:
        weight_map: dict[str, Any] = read_json(path)["weight_map"]
        index = {name: str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path}: not an index of safetensors files ({error!r}); get the model again"
        ) from error
    for file in index.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise DataError(
                f"{path}: {file!r} is not the name of a safetensors file beside it; get the model "
                "again"
            )
    return index


def weight_files(folder: Path, index: Mapping[str, str]) -> list[Path]:
    """Return the paths of the weight files of `folder`, whose index is `index`."""
    return [folder / name for name in sorted(set(index.values())) or [SINGLE_NAME]]


def weights_bytes(folder: Path) -> int:
    """Return the bytes of all weight files of the model in `folder`."""
    return sum(path.stat().st_size for path in weight_files(folder, read_index(folder)))


def read_headers(path: Path) -> list[Header]:
    """Return the headers of the tensors in the file at `path`.

    Raises DataError for a damaged or truncated file.
    """
    try:
        with safe_open(
            str(path), framework="numpy"
        ) as checked:  # the header is whole and describes all of the file
            names = list(checked.keys())
        with path.open("rb") as file:
            entries, begin = read_layout(file)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path}: cannot be read as safetensors ({error}); get the model again"
        ) from error
    headers = []
    for name in names:
        entry = entries[name]
        headers.append(
            Header(
                path, name, tuple(entry["shape"]), entry["dtype"], begin + entry["data_offsets"][0]
            )
        )
    return headers


def read_layout(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return what a safetensors header says of each tensor, and where the data begins."""
    (header_bytes,) = struct.unpack("<Q", file.read(8))
    entries = json.loads(file.read(header_bytes))
    entries.pop("__metadata__", None)
    return entries, 8 + header_bytes


def peft_name(name: str) -> str:
    """Return the name in peft's files of an adapter's parameter, by its `name` in the model.

    peft leaves the adapter's name out, and `.weight` after a magnitude.
    """
    saved = name.replace(f".{ADAPTER}.", ".")
    return saved.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def find_headers(folder: Path) -> dict[str, Header]:
    """Return the headers of all tensors in `folder`, by name.

    Raises DataError for missing or damaged files.
    """
    index = read_index(folder)
    return named(
        (header for path in weight_files(folder, index) for header in read_headers(path)), index
    )


def named(headers: Iterable[Header], index: Mapping[str, str]) -> dict[str, Header]:
    """Return `headers` by name, without those that `index` assigns to another file."""
    return {
        each.name: each
        for each in headers
        if index.get(each.name, each.path.name) == each.path.name
    }


def of_text(headers: Mapping[str, AnyHeader], folder: Path) -> dict[str, AnyHeader]:
    """Return the `headers` in `folder` that belong to the text model, by transformers' names."""
    family = family_in(read_object(folder / "config.json"))
    names = {stored: family.text_name(stored) for stored in headers}
    return {name: headers[stored] for stored, name in names.items() if name is not None}


def copies_of(
    shape: tuple[int, ...], names: Sequence[str], stored: Mapping[str, Header]
) -> list[list[Piece]]:
    """Return a parameter's pieces of `shape` for each stored one of `names`, or else the first."""
    there = [name for name in names if name in stored]
    return [_pieces(name, shape, stored) for name in there or names[:1]]


def _pieces(name: str, shape: tuple[int, ...], stored: Mapping[str, Header]) -> list[Piece]:
    """Return the pieces that fill a parameter.

    One piece if a tensor of its name is stored; for fused experts [E, rows, columns], one or two
    for each expert.
    """
    stem, _, last = name.rpartition(".")
    if name in stored or not stem.endswith(".experts") or last not in _FUSED_EXPERTS:
        return [Piece(name, (0,) * len(shape), shape)]
    parts = _FUSED_EXPERTS[last]
    rows = shape[1] // len(parts)
    pieces = []
    for expert in range(shape[0]):
        for number, part in enumerate(parts):
            offsets = (expert, number * rows, 0)
            name = f"{stem}.{expert}.{part}.weight"
            pieces.append(Piece(name, offsets, (1, rows, shape[2])))
    return pieces


def refuse_misfit(
    folder: Path, copies: list[list[list[Piece]]], stored: Mapping[str, Header]
) -> None:
    """Raise DataError unless the files hold exactly the model's tensors, equally on all ranks."""
    wanted = {piece.name: piece for of_one in copies for pieces in of_one for piece in pieces}
    lists = {
        "lacks": [name for name in wanted if name not in stored],
        "holds besides": [name for name in stored if name not in wanted],
        "holds in another shape": [
            f"{name} {list(stored[name].shape)} instead of {list(piece.sizes)}"
            for name, piece in wanted.items()
            if name in stored and not piece.fits(stored[name].shape)
        ],
    }
    problems = []
    for what, names in lists.items():
        if names:
            more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
            problems.append(f"{what} {', '.join(names[:_NAMED_AT_MOST])}{more}")
    if problems:
        raise DataError(
            f"{folder}: the weights are not those of its config.json: it {'; it '.join(problems)}. "
            "Get the whole model again, with the config.json that belongs to it"
        )


def refuse_unreadable_kinds(headers: Iterable[Header]) -> None:
    """Raise DataError for the first tensor whose element type is not in READABLE_KINDS."""
    for header in headers:
        if header.kind not in READABLE_KINDS:
            known = ", ".join(READABLE_KINDS)
            raise DataError(
                f"{header.path}: {header.name} is stored as {header.kind}, not one of {known}"
            )
