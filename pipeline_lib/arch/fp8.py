"""Which models are exported in FP8 as compressed-tensors has it. Torch is not loaded."""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline_lib.arch.families import geometry_in
from pipeline_lib.arch.geometry import Geometry

IGNORED = "lm_head"  # stays as it is, as in the published models of this layout
SCALE = "_scale"  # behind the name of a weight, the name of its scales
# Of config.json: what servers and transformers know the layout by.
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": [IGNORED],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


def unfit_in(geometry: Geometry) -> Iterator[str]:
    """Yield what is not exported in FP8 of a model of these sizes, each with its name."""
    if geometry.delta is not None:
        yield "layers with a gated delta rule (Qwen3.5)"
    if geometry.expert_layers:
        yield "experts, which transformers keeps in one tensor of a layer"


def unfit_in_config(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is not exported in FP8 in the model of the config.json `config`."""
    yield from unfit_in(geometry_in(config))
