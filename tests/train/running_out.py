"""Functions of ranks whose GPU is made to look full; they have to be importable by name."""

from collections.abc import Mapping
from typing import Any

import torch

from pipeline_lib.core.errors import TrainingError
from pipeline_lib.train.rank import RankJob, train_rank

FULL = (
    "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.06 GiB is "
    "free. Including non-PyTorch memory, this process has 138.62 GiB memory in use. Of the allocated memory 134.50 GiB "
    "is allocated by PyTorch, and 2.51 GiB is reserved by PyTorch but unallocated."
)


def train_and_run_out(environ: Mapping[str, str], job: RankJob, event: str, step: int) -> tuple[int, str]:
    """Train until memory is full at `event` of `step`; the exit code and message of the rank."""

    def fill(name: str, fields: dict[str, Any]) -> None:
        if name == event and fields.get("step", step) == step:
            raise torch.OutOfMemoryError(FULL)

    try:
        train_rank(job, environ, lambda _: None, (fill,))
    except TrainingError as error:
        return error.exit_code, str(error)
    raise AssertionError("was to fail")
