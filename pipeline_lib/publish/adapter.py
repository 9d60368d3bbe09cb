"""The trained adapters alone, as peft saves and loads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline_lib.base.errors import TrainingError
from pipeline_lib.base.fsio import write_json
from pipeline_lib.config.schema import Train
from pipeline_lib.publish.fold import Trained
from pipeline_lib.publish.weight_files import Entry, write_tensors
from pipeline_lib.train.adapted import ADAPTER
from pipeline_lib.train.adapters import lora_config

FOLDER = "adapter"


def export_adapter(trained: Trained, train: Train, model: Mapping[str, Any], out: Path) -> None:
    """Write `out`/adapter: the adapters in fp32 under peft's names, and their config.

    `model` is the spec's settings of the base model; a hub's names it, and a folder of this machine stays unnamed.
    Raises TrainingError for a value that is not finite.
    """
    folder = out / FOLDER
    folder.mkdir()
    names = {_saved_name(name): name for name in trained.shapes}
    entries = [Entry(saved, trained.shapes[name], torch.float32) for saved, name in names.items()]
    write_tensors(
        folder / "adapter_model.safetensors", entries, lambda entry: finite(trained.read(names[entry.name]), entry)
    )
    targets = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in trained.shapes})
    config = lora_config(train.lora, targets)
    config.inference_mode = True
    if model.get("source") == "huggingface":
        config.base_model_name_or_path, config.revision = model.get("name"), model.get("revision")
    settings: dict[str, Any] = config.to_dict()  # type: ignore[no-untyped-call]
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    write_json(folder / "adapter_config.json", plain)


def finite(value: Tensor, entry: Entry) -> Tensor:
    """`value`; raises TrainingError if it is not finite everywhere."""
    low, high = value.aminmax()  # either is not a number if one value is; makes no tensor of the same size
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise TrainingError(f"merged weight {entry.name} is not finite; this model is not exported")
    return value


def _saved_name(name: str) -> str:
    """What peft calls a parameter in a file: without the adapter's name, and a magnitude without `.weight`."""
    return name.replace(f".{ADAPTER}.", ".").replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
