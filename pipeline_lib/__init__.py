"""Fine-tunes Qwen3 models as a pipeline of sealed stages; its stages know nothing of Snakemake or DVC."""

import logging

# bitsandbytes warns about a kernel for generation on CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
