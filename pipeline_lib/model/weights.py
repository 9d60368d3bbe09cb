"""Which tensors the safetensors files of a model folder hold, and how they are laid out in the model's parameters.

Only headers are read. Non-goal: other formats, since a pickle can run code.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.fsio import read_json

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
