"""What ranks import on their way, for the server that tests/ranks.py forks them from.

It takes each of them up to 12 s otherwise: DeepSpeed's Muon loads torch's compiler. What libraries import or compute
only where it is used takes a rank another second: DeepSpeed when it begins to train, peft when it looks for layers to
adapt, and transformers' 900 patterns of parameters' names. So does pytest, which the modules of the tests import.
"""

import importlib

from pipeline_lib.core.processes import importing

with importing():
    for name in (
        "pipeline_lib.train.rank",
        "pipeline_lib.model.lora",
        "deepspeed",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.ops.op_builder.all_ops",
        "deepspeed.runtime.superoffload.superoffload_stage3",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "peft",
        "peft.tuners.lora.bnb",
        "peft.utils.transformers_weight_conversion",
        "pytest",
        "setuptools",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ):
        importlib.import_module(name)
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen3")
