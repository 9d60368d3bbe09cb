"""The tensors in a model folder's safetensors files: slices of them.

Promise: no more of a tensor is read than is asked for, and nothing of it stays in memory.
"""

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from pipeline_lib.model.weights import Header, find_headers


@dataclass(frozen=True)
class Stored(Header):
    """A tensor in a file."""

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
    return {name: Stored(**vars(header)) for name, header in find_headers(folder).items()}
