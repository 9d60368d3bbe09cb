"""Fine-tunes Qwen models in sealed stages, which know nothing of Snakemake or DVC."""

import logging
import warnings

# bitsandbytes warns about a kernel for generation on CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# peft asks transformers for a name that is about to be another, on each rank.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
