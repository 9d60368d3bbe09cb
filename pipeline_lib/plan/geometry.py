"""Sizes of a Qwen3 model from its config.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.fsio import read_json
from pipeline_lib.config.schema import Lora

SUPPORTED = ("qwen3",)


@dataclass(frozen=True)
class Geometry:
    """A dense Qwen3. Sizes are element counts."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    max_positions: int

    @staticmethod
    def from_folder(folder: Path) -> "Geometry":
        """Read `folder/config.json`. Raises DataError if it does not read, or is of another kind of model."""
        path = folder / "config.json"
        try:
            config = dict(read_json(path))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{path}: not the config.json of a model ({error})") from error
        if config.get("model_type") not in SUPPORTED:
            raise DataError(f"{path}: model_type {config.get('model_type')!r} is not one of {', '.join(SUPPORTED)}")
        try:
            return Geometry.from_config(config)
        except KeyError as error:
            raise DataError(f"{path}: lacks {error}") from error

    @staticmethod
    def from_config(config: dict[str, Any]) -> "Geometry":
        """Read the keys that transformers' Qwen3Config has."""
        heads = config["num_attention_heads"]
        return Geometry(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            tied=bool(config.get("tie_word_embeddings", False)),
            max_positions=config.get("max_position_embeddings", 32768),
        )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of every linear module of one layer, by its name."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, q),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def matmul_parameters(self) -> int:
        """Weights that every token is multiplied by: the linears and the head, not the embedding."""
        per_layer = sum(inputs * outputs for inputs, outputs in self.linears.values())
        return self.layers * per_layer + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; a tied head is the embedding and counts once."""
        norms = self.layers * (2 * self.hidden + 2 * self.head_dim) + self.hidden
        embedding = 0 if self.tied else self.vocab * self.hidden
        return self.matmul_parameters + embedding + norms

    def adapter_parameters(self, lora: Lora) -> int:
        """Parameters of rank-r adapters: r x (inputs + outputs) for each target."""
        names = self.linears.keys() if lora.targets == "all-linear" else lora.targets
        widths = (sum(self.linears[name]) for name in names)
        return self.layers * lora.rank * sum(widths)
