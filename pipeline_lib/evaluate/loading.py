"""The devices for a whole model that answers, and the model on them."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.config.rope import Rope
from pipeline_lib.config.schema import Evaluate
from pipeline_lib.core.memory import host_free_bytes
from pipeline_lib.model.build import load_base, load_plain
from pipeline_lib.model.gpu import free_gpus
from pipeline_lib.plan.evaluation import (
    ANSWERING_BYTES,
    Answers,
    gpus_to_hold,
    is_loaded_once,
    plan_answers,
)


def device_for(folder: Path, dtype: torch.dtype = torch.bfloat16) -> torch.device:
    """Return the GPU if it has memory for the model in `folder` in `dtype`, else the CPU.

    Raises DataError if the folder's config.json is invalid.
    """
    geometry = read_geometry(folder)
    free = free_gpus()
    return torch.device(
        "cuda" if free and gpus_to_hold(geometry, free[0], dtype.itemsize) == 1 else "cpu"
    )


def answers_here(folder: Path, settings: Evaluate) -> Answers:
    """Return how the model in `folder` can answer with the memory that is free here."""
    free = free_gpus()
    return plan_answers(
        read_geometry(folder), settings, len(free), min(free, default=0), host_free_bytes()
    )


def is_loaded_once_here(folder: Path, place: Answers, block_tokens: int) -> bool:
    """Return whether the model in `folder`, answering at `place`, can compute the loss there.

    It needs room for the held-out loss.
    """
    gpu_bytes = min(free_gpus(), default=0)
    return is_loaded_once(read_geometry(folder), block_tokens, place, gpu_bytes, host_free_bytes())


def load_to_score(folder: Path, place: Answers, rope: Rope | None = None) -> PreTrainedModel:
    """Load the model in `folder`, with `rope`, for the held-out loss, on `place`'s one device.

    `prepare_to_generate` makes it one of `load_to_answer`. Raises DataError if transformers cannot
    load the model.
    """
    device = torch.device("cuda", 0) if place.gpus else torch.device("cpu")
    model = load_base(folder, _dtype_at(place), rope, device_map=device)
    model.train(False)
    return model


def _dtype_at(place: Answers) -> torch.dtype:
    return torch.bfloat16 if place.gpus else torch.float32


def load_to_answer(folder: Path, place: Answers, rope: Rope | None = None) -> PreTrainedModel:
    """Load the model in `folder`, with `rope`, at `place`: bf16 on its GPUs, else fp32 on CPUs.

    Raises DataError if transformers cannot load the model.
    """
    options: dict[str, Any] = {"device_map": torch.device("cpu")}
    if place.gpus == 1:
        options = {"device_map": torch.device("cuda", 0)}
    elif place.gpus:  # transformers spreads whole layers over these GPUs
        free = free_gpus()[: place.gpus]
        options = {
            "device_map": "auto",
            "max_memory": {gpu: size - ANSWERING_BYTES for gpu, size in enumerate(free)},
        }
    model = load_plain(folder, _dtype_at(place), rope, **options)
    model.config.use_cache = True
    model.train(False)
    return model
