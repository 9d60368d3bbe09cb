"""Fine-tunes Qwen3 models in sealed stages, which know nothing of Snakemake or DVC."""

import logging

# bitsandbytes warns about a kernel for generation on CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
