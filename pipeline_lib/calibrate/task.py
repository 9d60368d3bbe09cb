"""The task that the ranks of a calibration measure."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.schema import ModelSource
from pipeline_lib.config.section import read_settings, settings_of
from pipeline_lib.config.train import Train
from pipeline_lib.records.plan import Workload

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


_LAYERS = ("expert_layers", "delta_layers")  # sets of numbers in a Geometry


_MOST_LOAD = 1.0  # processes that want a core, beside those that measure


def busy(load: float) -> str:
    """Return what is wrong with measuring while processes compete for cores; else empty."""
    if load <= _MOST_LOAD:
        return ""
    return (
        f"{load:.1f} processes are at work on this machine, so it measures slower than it is; "
        "wait until it is idle"
    )


@dataclass(frozen=True)
class Task:
    """A measurement task: model shapes, training settings, workload, and `cuda` or `cpu`."""

    geometry: Geometry
    train: Train
    workload: Workload
    device: str
    parts_budget_s: float

    def as_json(self) -> str:
        """Return the task as JSON for the measuring processes."""
        fields: dict[str, Any] = {"device": self.device, "parts_budget_s": self.parts_budget_s}
        fields |= {"train": settings_of(self.train), "workload": asdict(self.workload)}
        geometry = asdict(self.geometry) | {
            key: sorted(getattr(self.geometry, key)) for key in _LAYERS
        }
        return json.dumps({**fields, "geometry": geometry})

    @staticmethod
    def from_json(text: str) -> "Task":
        """Return the task that `as_json` wrote."""
        fields = json.loads(text)
        geometry = fields["geometry"]
        geometry |= {
            "biased": tuple(geometry["biased"]),
            **{key: frozenset(geometry[key]) for key in _LAYERS},
        }
        return Task(
            Geometry(**geometry),
            read_settings(Train, fields["train"]),
            Workload(**fields["workload"]),
            fields["device"],
            fields["parts_budget_s"],
        )


def with_layers(geometry: Geometry, layers: int) -> Geometry:
    """Return `geometry` with `layers` layers, all of which have experts if any layer had."""
    return replace(
        geometry,
        layers=layers,
        expert_layers=frozenset(range(layers)) if geometry.expert_layers else frozenset(),
    )


def model_name(model: ModelSource) -> str:
    """Return the name of `model` for cluster.json."""
    if model.source == "tiny":
        return "tiny"
    name = model.path if model.source == "local" else model.name
    return Path(name or model.source).name


def config_json(geometry: Geometry) -> dict[str, Any]:
    """Return a config.json for `geometry`, the inverse of `geometry_in`.

    Either all layers of `geometry` must have experts, or none.
    """
    kind = "qwen2"
    if geometry.normed_heads:
        kind = "qwen3"
    if geometry.expert_layers:
        kind = "qwen3_moe"
    config: dict[str, Any] = {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": geometry.vocab,
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.intermediate,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "tie_word_embeddings": geometry.tied,
        "max_position_embeddings": geometry.max_positions,
        "rms_norm_eps": 1e-6,
    }
    if kind != "qwen2":
        config["attention_bias"] = bool(geometry.biased)
    if kind == "qwen3_moe":
        config |= {
            "num_experts": geometry.experts,
            "num_experts_per_tok": geometry.experts_per_token,
            "moe_intermediate_size": geometry.expert_intermediate,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    return config
