"""GGUF files of few bits by llama.cpp's own quantizer, as the package llama-cpp-python brings it."""

from pathlib import Path

import torch

from pipeline_lib.arch.gguf import LACKING_QUANTIZER
from pipeline_lib.core.errors import DataError, PipelineError
from pipeline_lib.export.gguf_file import AS_BF16, AS_F32, ModelFile, plan_file
from pipeline_lib.model.weights import find_tensors


def plan_source(merged: Path) -> ModelFile:
    """Return the file that the quantizer reads: the values of `merged` as they are stored.

    Raises DataError naming what GGUF has no names for.
    """
    dtypes = {tensor.dtype for tensor in find_tensors(merged).values()}
    return plan_file(merged, AS_BF16 if dtypes == {torch.bfloat16} else AS_F32)


def quantize(source: Path, target: Path) -> None:
    """Write the file `source` as q4_k_m to `target`.

    Raises DataError without the package, and PipelineError if llama.cpp fails.
    """
    try:
        import llama_cpp
    except ImportError as error:
        raise DataError(f"export: gguf-q4_k_m {LACKING_QUANTIZER}") from error
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    settings.nthread = torch.get_num_threads()
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), settings)
    if failed:
        raise PipelineError(
            f"{source}: llama.cpp's quantizer failed with {failed}; what it says is above"
        )
