"""Where a whole model is scored and answers."""

from pathlib import Path

import torch

from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.memory import can_evaluate


def device_for(folder: Path, dtype: torch.dtype = torch.bfloat16) -> torch.device:
    """One GPU, if there is one with room for the model in `folder` in `dtype`, else the CPUs. Raises DataError."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what torch keeps of a model before this one counts as taken
        free_bytes, _ = torch.cuda.mem_get_info()
        if can_evaluate(Geometry.from_folder(folder).parameters, free_bytes, dtype.itemsize):
            return torch.device("cuda")
    return torch.device("cpu")
