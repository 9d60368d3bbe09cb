"""Each operation of a training step at best, and the step, tokens a second and MFU it allows."""

import torch


def run() -> None:
    """All of it for Qwen3-8B; one line where there is no GPU."""
    if not torch.cuda.is_available():
        print("kernels: needs a CUDA GPU")
        return
    from benchmarks.kernels.__main__ import main

    main([])
