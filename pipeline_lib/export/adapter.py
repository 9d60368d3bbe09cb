"""Export of the trained adapters alone, in peft's format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.arch.geometry import OF_HEADS
from pipeline_lib.arch.weight_files import peft_name
from pipeline_lib.config.content import ADAPTER_FOLDER, ADAPTER_WEIGHTS
from pipeline_lib.config.rope import Rope
from pipeline_lib.config.train import Train
from pipeline_lib.core.files import write_json
from pipeline_lib.export.card import HUBS, loading_code
from pipeline_lib.export.write import Entry, finite, write_files

# in the code that loads adapters on a model that no hub has
UNNAMED_BASE = "FOLDER OF THE BASE MODEL"


def export_adapter(
    adapters: Mapping[str, Tensor],
    train: Train,
    model: Mapping[str, Any],
    out: Path,
    base_folder: str | None = None,
) -> dict[str, str]:
    """Write `out`/adapter: the `adapters` in fp32 under peft's names, and their config.

    Return hashes of its weights. `model` holds the base model's settings in the spec. The config
    names the base model, so that peft finds it: by its name on a hub, or by its folder on this
    machine, `base_folder`. Raises TrainingError for a value that is not finite.
    """
    from pipeline_lib.model.lora import lora_config  # loads peft

    folder = out / ADAPTER_FOLDER
    folder.mkdir()
    names = {}
    entries = []
    for name, tensor in adapters.items():
        saved = peft_name(name)
        names[saved] = name
        entries.append(Entry(saved, tuple(tensor.shape), torch.float32))
    hashes = write_files(
        out,
        {f"{ADAPTER_FOLDER}/{ADAPTER_WEIGHTS}": entries},
        lambda entry, _: finite(adapters[names[entry.name]], entry),
    )
    modules = {name.partition(".lora_")[0] for name in adapters}
    config = lora_config(
        train.lora, sorted({name.rpartition(".")[2] for name in modules if ".experts" not in name})
    )
    config.inference_mode = True
    if model.get("source") in HUBS:
        config.base_model_name_or_path = model.get("name")
    elif base_folder is not None:
        config.base_model_name_or_path = base_folder
    if model.get("source") == "huggingface":
        config.revision = model.get("revision")
    settings: dict[str, Any] = config.to_dict()  # type: ignore[no-untyped-call]
    plain = dict(settings)
    for key, value in settings.items():
        if isinstance(value, set):
            plain[key] = sorted(value)
    write_json(folder / "adapter_config.json", plain)
    return hashes


def adapter_code(base: Path, model: Mapping[str, Any], train: Train, rope: Rope | None) -> str:
    """Return code that loads the adapters on the base in the folder `base`, by the settings.

    The settings are those in the spec.
    """
    name = str(model.get("name")) if model.get("source") == "huggingface" else UNNAMED_BASE
    skipped = OF_HEADS if read_geometry(base).delta is not None else ()
    return loading_code(train, name, skipped, is_stretched=rope is not None)
