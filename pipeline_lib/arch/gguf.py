"""Which models GGUF has names for, as llama.cpp reads it. Neither torch nor gguf is loaded."""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline_lib.arch.families import geometry_in
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.arch.rope import scaling_in

# llama.cpp's name of the architecture, by the model_type of config.json
ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
LACKING_QUANTIZER = (
    "needs llama.cpp's quantizer: install the extra `llamacpp` (`pip install -e '.[llamacpp]'`, "
    "which builds llama.cpp), or export gguf-q8_0"
)
_SCALINGS = ("", "yarn")
# of YaRN; llama.cpp computes all else as transformers does by default
_YARN_KEYS = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"}


def unnamed_in(geometry: Geometry) -> Iterator[str]:
    """Yield what GGUF has no names for in a model of these sizes, each with its name."""
    if geometry.delta is not None:
        yield "layers with a gated delta rule (Qwen3.5)"
    if len(geometry.expert_layers) not in (0, geometry.layers):
        yield "experts in some of the layers only (decoder_sparse_step, mlp_only_layers)"
    if geometry.shared_expert:
        yield "a shared expert"
    if "o_proj" in geometry.biased:
        yield "a bias in all four projections of attention (attention_bias)"
    if geometry.scaling not in _SCALINGS:
        yield f"rotary embeddings scaled by {geometry.scaling!r}"


def unnamed_in_config(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what GGUF has no names for in the model of the config.json `config`.

    Beside what its sizes tell, that is what llama.cpp takes for granted.
    """
    yield from unnamed_in(geometry_in(config))
    if config.get("model_type") not in ARCHITECTURES:
        yield f"model_type {config.get('model_type')!r}"
    if config.get("num_experts_per_tok") and not config.get("norm_topk_prob", False):
        yield "routers whose weights are not normalized (norm_topk_prob: false)"
    others = sorted(scaling_in(config).keys() - _YARN_KEYS)
    if others:
        yield f"rotary embeddings with {', '.join(others)}"
