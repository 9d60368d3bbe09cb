"""What the ranks of a calibration are told to measure."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline_lib.config.schema import Train, read_settings, settings_of
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.workload import Workload

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


@dataclass(frozen=True)
class Task:
    """The model's shapes, how it is trained, and on what; `device` is `cuda` or `cpu`."""

    geometry: Geometry
    train: Train
    workload: Workload
    device: str
    parts_budget_s: float

    def as_json(self) -> str:
        """For the processes that measure."""
        fields: dict[str, Any] = {"device": self.device, "parts_budget_s": self.parts_budget_s}
        fields |= {"train": settings_of(self.train), "workload": asdict(self.workload)}
        geometry = asdict(self.geometry) | {"expert_layers": sorted(self.geometry.expert_layers)}
        return json.dumps({**fields, "geometry": geometry})

    @staticmethod
    def from_json(text: str) -> "Task":
        """What `as_json` gave."""
        fields = json.loads(text)
        geometry = fields["geometry"]
        geometry |= {"biased": tuple(geometry["biased"]), "expert_layers": frozenset(geometry["expert_layers"])}
        return Task(
            Geometry(**geometry),
            read_settings(Train, fields["train"]),
            Workload(**fields["workload"]),
            fields["device"],
            fields["parts_budget_s"],
        )


def with_layers(geometry: Geometry, layers: int) -> Geometry:
    """The same widths with so many layers, all of which have experts if any has."""
    return replace(
        geometry, layers=layers, expert_layers=frozenset(range(layers)) if geometry.expert_layers else frozenset()
    )


def config_json(geometry: Geometry) -> dict[str, Any]:
    """A config.json from which `Geometry.from_config` reads `geometry`; its layers have experts all, or none."""
    kind = "qwen3_moe" if geometry.expert_layers else "qwen3" if geometry.normed_heads else "qwen2"
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
