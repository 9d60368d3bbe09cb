"""The tensors in a model folder's safetensors files: what they are called, their shapes, and slices of them.

Promise: no more of a tensor is read than is asked for, and nothing of it stays in memory. Non-goal: other formats,
since a pickle can run code.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.fsio import read_json

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str  # of its elements, as safetensors calls it: `BF16`

    def read(self) -> Tensor:
        """All of it, in memory of its own."""
        with safe_open(str(self.path), framework="pt") as file:
            return file.get_tensor(self.name).clone()  # type: ignore[no-any-return]

    def copy_to(self, target: Tensor, slices: tuple[slice, ...]) -> None:
        """Copy the `slices` of the tensor to `target`, in its dtype and on its device.

        `slices` may begin with some for dimensions that `target` has and the tensor has not.
        """
        # Opened for each tensor, since pages of an open file count as memory of this process.
        with safe_open(str(self.path), framework="pt") as file:
            values = file.get_slice(self.name)[slices[len(slices) - len(self.shape) :]]
            target.copy_(values.view(target.shape))


def find_tensors(folder: Path) -> dict[str, Stored]:
    """What the weight files of `folder` hold, by name. Raises DataError for absent or damaged files."""
    index = _read_index(folder)
    found: dict[str, Stored] = {}
    for file_name in sorted(set(index.values())) or [SINGLE_NAME]:
        path = folder / file_name
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    if index.get(name, file_name) == file_name:
                        values = file.get_slice(name)
                        found[name] = Stored(path, name, tuple(values.get_shape()), values.get_dtype())
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path}: cannot be read as safetensors ({error}); get the model again") from error
    return found


def _read_index(folder: Path) -> dict[str, str]:
    """The file of each tensor; empty if one file holds all."""
    path = folder / INDEX_NAME
    if (folder / SINGLE_NAME).exists() or not path.exists():  # the order in which transformers looks
        return {}
    try:
        weight_map: dict[str, Any] = read_json(path)["weight_map"]
        index = {name: str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not an index of safetensors files ({error!r}); get the model again") from error
    for file in index.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise DataError(f"{path}: {file!r} is not the name of a safetensors file beside it; get the model again")
    return index
