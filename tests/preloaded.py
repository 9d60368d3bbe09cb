"""What ranks import on their way, for the server that tests/ranks.py forks them from.

It takes each of them up to 12 s otherwise: DeepSpeed's Muon loads torch's compiler.
"""

import importlib

from pipeline_lib.core.processes import importing

with importing():
    for name in (
        "pipeline_lib.train.rank",
        "deepspeed",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "peft",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ):
        importlib.import_module(name)
