"""What ranks import on their way, for the server that tests/ranks.py forks them from.

It takes each of them up to 12 s otherwise: DeepSpeed's Muon loads torch's compiler. What libraries
import or compute only where it is used takes a rank another second: DeepSpeed when it begins to
train, peft when it looks for layers to adapt, and transformers' 900 patterns of parameters' names.
So does pytest, which the modules of the tests import.
"""

import importlib
from contextlib import suppress

from pipeline_lib.core.processes import importing

with importing():
    for name in (
        "pipeline_lib.train.rank",
        "pipeline_lib.model.lora",
        "pytest",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "setuptools",
        "peft",
        "peft.tuners.lora.bnb",
        "peft.utils.transformers_weight_conversion",
        "deepspeed",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.ops.op_builder.all_ops",
        "deepspeed.runtime.superoffload.superoffload_stage3",
        "deepspeed.runtime.zero.muon.muon_optimizer",
    ):
        # of an extra that is not installed, or of another version of it
        with suppress(ImportError):
            importlib.import_module(name)
    transformers_patterns = importlib.import_module("transformers.conversion_mapping")
    transformers_patterns.get_checkpoint_conversion_mapping("qwen3")
