"""The model of a chat, where it has room, and the base model that its lineage names."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.logging import set_verbosity_error

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.arch.generation_config import generation_config_of
from pipeline_lib.config.rope import Rope, rope_in
from pipeline_lib.core.errors import DataError, IntegrityError
from pipeline_lib.core.memory import host_free_bytes
from pipeline_lib.core.stage import Say, Sealed, open_sealed
from pipeline_lib.core.store import MANIFEST_NAME, Ref, Store, read_manifest
from pipeline_lib.core.units import count, gib
from pipeline_lib.evaluate.loading import device_for
from pipeline_lib.lineage.record import (
    LINEAGE_NAME,
    origin_of,
    parse_manifest,
    read_lineage,
    settings_in,
)
from pipeline_lib.lineage.trace import store_of
from pipeline_lib.model.build import load_plain


@dataclass(frozen=True)
class Place:
    """The dtype of a model's weights, transformers' `device_map`, and a text that says both."""

    dtype: torch.dtype
    device_map: str | torch.device
    text: str


def place_for(folder: Path) -> Place:
    """Return the place for the model in `folder`: a GPU, else all GPUs and host memory, or CPUs.

    It is on CPUs where there are no GPUs. Raises DataError if there is too little memory.
    """
    parameters = read_geometry(folder).parameters
    host_bytes = host_free_bytes()
    if not torch.cuda.is_available():
        for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
            if parameters * dtype.itemsize <= host_bytes:
                return Place(dtype, torch.device("cpu"), f"on the CPU in {name}")
        raise _no_room(folder, parameters, f"{gib(host_bytes)} of the host's memory are")
    if device_for(folder).type == "cuda":
        return Place(torch.bfloat16, torch.device("cuda"), "on the GPU in bf16")
    gpus = range(torch.cuda.device_count())
    gpu_bytes = sum(torch.cuda.mem_get_info(gpu)[0] for gpu in gpus)
    where = f"{count(len(gpus), 'GPUs')} and, as far as they have no room, the host's memory"
    if parameters * torch.bfloat16.itemsize > gpu_bytes + host_bytes:
        raise _no_room(
            folder,
            parameters,
            f"{gib(gpu_bytes)} of {count(len(gpus), 'GPUs')} and {gib(host_bytes)} are",
        )
    return Place(torch.bfloat16, "auto", f"in bf16 on {where}")


def _no_room(folder: Path, parameters: int, free: str) -> DataError:
    needed = gib(parameters * torch.bfloat16.itemsize)
    return DataError(
        f"{folder}: there is no room for this model: it takes {needed} in bf16, and {free} free"
    )


def load_to_chat(folder: Path, place: Place, rope: Rope | None = None) -> PreTrainedModel:
    """Load the model in `folder`, with `rope`, at `place`.

    Raises DataError if transformers cannot load it.
    """
    set_verbosity_error()  # type: ignore[no-untyped-call]  # warnings would stand amid the answers
    model = load_plain(folder, place.dtype, rope, device_map=place.device_map)
    model.config.use_cache = True
    return model


def load_base_of(folder: Path, store: Store, tell: Say) -> PreTrainedModel:
    """Load the base of the model in `folder` from the folder's store, or else from `store`.

    Raises DataError if the folder names no base model or there is no room, IntegrityError if the
    base is not in the store.
    """
    record = read_lineage(folder)
    if record is None or "model" not in record.links:
        raise DataError(f"{folder}: it has no {LINEAGE_NAME} that names its base model")
    if (folder / MANIFEST_NAME).is_file():
        store = store_of(folder, read_manifest(folder), store)
    inputs: dict[str, Sealed] = {}
    for part in ("model", "generation"):  # the second is that of a local model
        if part not in record.links:
            continue
        manifest = parse_manifest(record.links[part].manifest, LINEAGE_NAME)
        ref = Ref(manifest.stage, manifest.digest)
        if not store.is_sealed(ref):
            raise IntegrityError(
                f"{store.sealed(ref)}: the base model ({origin_of(manifest)}) is not in this "
                "store; run snakemake with the config of the experiment to get it again, or set "
                "PIPELINE_STORE to the store that has it"
            )
        inputs[part] = open_sealed(ref, store)
    base = inputs["model"].path
    place = place_for(base)
    tell(f"loading the base model beside the tuned one, {place.text}")
    inputs["model"].folder()  # verifies its files
    trained = record.links.get("train")
    rope = rope_in(settings_in(parse_manifest(trained.manifest, LINEAGE_NAME))) if trained else None
    model = load_to_chat(base, place, rope)
    if generation := generation_config_of(inputs):
        model.generation_config = GenerationConfig.from_dict(generation)
    return model
