"""Writing a model folder with the linears of its layers in FP8, tensor by tensor.

The layout is that of compressed-tensors, which vLLM, SGLang and transformers read: weights in E4M3
with a scale for each row, and activations that the server rounds token by token. In memory is one
tensor for each file that is being written.
"""

import re
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline_lib.arch.config_json import read_object
from pipeline_lib.arch.fp8 import QUANTIZATION, SCALE, unfit_in_config
from pipeline_lib.arch.weight_files import SINGLE_NAME
from pipeline_lib.config.content import LICENCE_FILES, MEDIA_FILES, tokenizer_files
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import write_json
from pipeline_lib.export.write import Buffers, Entry, finite, write_files, write_index
from pipeline_lib.model.weights import Stored, find_tensors

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")


@dataclass(frozen=True)
class Fp8Folder:
    """What the folder of the model in `merged` will hold: the entries of each file of weights."""

    merged: Path
    stored: Mapping[str, Stored]
    files: Mapping[str, Sequence[Entry]]

    @property
    def size_bytes(self) -> int:
        """The size of all tensors."""
        return sum(entry.size_bytes for entries in self.files.values() for entry in entries)

    def write(self, out: Path) -> dict[str, str]:
        """Write the folder `out`; return the SHA-256 of each file of weights, by name.

        Raises TrainingError naming a tensor that is not finite.
        """
        hashes = write_files(out, self.files, self._value)
        if SINGLE_NAME not in self.files:
            write_index(out, self.files, self.size_bytes)
        config = read_object(self.merged / "config.json")
        write_json(out / "config.json", {**config, "quantization_config": QUANTIZATION})
        for name in texts_of(self.merged):
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(self.merged / name, out / name)
        return hashes

    def _value(self, entry: Entry, buffers: Buffers) -> Tensor:
        """Return the value of `entry`: of a weight in FP8, its codes or its scales."""
        name = entry.name.removesuffix(SCALE)
        if name == entry.name and entry.dtype != E4M3:
            values = buffers.empty(entry.shape, entry.dtype)
            self.stored[name].copy_to(values, self.stored[name].whole)
            return finite(values, entry)
        values = buffers.empty(self.stored[name].shape, torch.float32)
        self.stored[name].copy_to(values, self.stored[name].whole)
        scales = scales_of(finite(values, entry))
        if entry.dtype != E4M3:
            return scales
        scaled = values.div_(scales.float()).clamp_(-LARGEST, LARGEST)
        return buffers.rounded(scaled, E4M3)


def scales_of(weight: Tensor) -> Tensor:
    """Return the scale [rows, 1] of each row of `weight`, in bf16: by it the largest is LARGEST."""
    scales = (weight.abs().amax(dim=1, keepdim=True) / LARGEST).bfloat16()
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def plan_folder(merged: Path) -> Fp8Folder:
    """Return what the FP8 folder of the model in `merged` will hold.

    Raises DataError naming what is not exported.
    """
    unfit = list(unfit_in_config(read_object(merged / "config.json")))
    if unfit:
        raise DataError(f"{merged}: is not exported in FP8: it has {'; '.join(unfit)}")
    stored = find_tensors(merged)
    files: dict[str, list[Entry]] = defaultdict(list)
    for name, tensor in sorted(stored.items()):
        entries = files[tensor.path.name]
        if not _LINEAR.fullmatch(name):
            entries.append(Entry(name, tensor.shape, tensor.dtype))
            continue
        entries.append(Entry(name, tensor.shape, E4M3))
        entries.append(Entry(f"{name}{SCALE}", (tensor.shape[0], 1), torch.bfloat16))
    return Fp8Folder(merged, stored, files)


def texts_of(folder: Path) -> list[str]:
    """Return the names of the files in `folder` that are copied as they are."""
    others = [name for name in (*MEDIA_FILES, *LICENCE_FILES) if (folder / name).is_file()]
    return [*tokenizer_files(folder), *others]
