"""Sizes of a Qwen model read from its config.json, the FLOPs of a training step, and sizes of published models."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline_lib.config.rope import Rope
from pipeline_lib.config.train import Lora, Train
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json
from pipeline_lib.core.text import cut
from pipeline_lib.model.rope import original_positions, positions_in, refuse_scaled, scaling_type, stretched_positions

# A base in 4 bits (model/nf4.py): values of a row that share a scale, and the bytes of a value with all scales.
NF4_BLOCK = 64
NF4_BYTES = 0.5 + 1 / NF4_BLOCK + 4 / (256 * NF4_BLOCK)

# Which parameters `train.freeze` freezes.


def frozen_names(names: Mapping[str, Iterable[str]], globs: Iterable[str]) -> set[str]:
    """Return the keys of `names` that match one of `globs`.

    The values of `names` are the names that globs may match: two for a tied parameter. Raises DataError for a glob
    that matches nothing, and if no parameter is left to train.
    """
    frozen: set[str] = set()
    for glob in globs:
        matched = {name for name, called in names.items() if any(fnmatchcase(each, glob) for each in called)}
        if not matched:
            near = get_close_matches(glob, names, n=3, cutoff=0.3) or list(names)[:3]
            raise DataError(f"train.freeze: {glob!r} matches no parameter of this model; near it: {', '.join(near)}")
        frozen |= matched
    if frozen and len(frozen) == len(names):
        raise DataError("train.freeze: matches every parameter of this model, so nothing is trained; leave some out")
    return frozen


# Geometry of published Qwen models, so that a plan can be made before the download.
# The values are from the config.json files on the Hugging Face hub.

_QWEN3_VOCAB = 151936

# For each size: hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
# vocab_size, tie_word_embeddings. Heads have 128 elements in Qwen3, and hidden_size / num_attention_heads in Qwen2.
_Size = tuple[int, int, int, int, int, int, bool]
_QWEN3: dict[str, _Size] = {
    "0.6b": (1024, 3072, 28, 16, 8, _QWEN3_VOCAB, True),
    "1.7b": (2048, 6144, 28, 16, 8, _QWEN3_VOCAB, True),
    "4b": (2560, 9728, 36, 32, 8, _QWEN3_VOCAB, True),
    "8b": (4096, 12288, 36, 32, 8, _QWEN3_VOCAB, False),
    "14b": (5120, 17408, 40, 40, 8, _QWEN3_VOCAB, False),
    "32b": (5120, 25600, 64, 64, 8, _QWEN3_VOCAB, False),
    "30b-a3b": (2048, 6144, 48, 32, 4, _QWEN3_VOCAB, False),
    "235b-a22b": (4096, 12288, 94, 64, 4, _QWEN3_VOCAB, False),
}
# The models' cards (30B's also counts its parameters), and for 480B slime's scripts/models/qwen3-coder-480B-A35B.sh.
_QWEN3_CODER: dict[str, _Size] = {
    "30b-a3b": _QWEN3["30b-a3b"],
    "480b-a35b": (6144, 8192, 62, 96, 8, _QWEN3_VOCAB, False),
}
_QWEN2: dict[str, _Size] = {
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "14b": (5120, 13824, 48, 40, 8, 152064, False),
    "32b": (5120, 27648, 64, 40, 8, 152064, False),
    "72b": (8192, 29568, 80, 64, 8, 152064, False),
}
# num_experts and moe_intermediate_size; 8 experts compute each token.
_EXPERTS = {"30b-a3b": (128, 768), "235b-a22b": (128, 1536), "480b-a35b": (160, 2560)}

# For each series: its table of sizes, and for each variant the max_position_embeddings of each size that exists.
_2507 = {"4b": 262144, "30b-a3b": 262144, "235b-a22b": 262144}
_CODER_SIZES = ("0.5b", "1.5b", "3b", "7b", "14b", "32b")
_QWEN2_SIZES = ("0.5b", "1.5b", "7b", "72b")
_SERIES: dict[str, tuple[dict[str, _Size], dict[str, dict[str, int]]]] = {
    "qwen3": (
        _QWEN3,
        {
            "": dict.fromkeys(_QWEN3, 40960),
            "-base": dict.fromkeys(("0.6b", "1.7b", "4b", "8b", "14b", "30b-a3b"), 32768),
            "-instruct-2507": _2507,
            "-thinking-2507": _2507,
        },
    ),
    "qwen3-coder": (_QWEN3_CODER, {"-instruct": dict.fromkeys(_QWEN3_CODER, 262144)}),
    "qwen2.5": (
        _QWEN2,
        {
            "": {**dict.fromkeys(_QWEN2, 131072), "0.5b": 32768, "3b": 32768},
            "-instruct": dict.fromkeys(_QWEN2, 32768),
        },
    ),
    "qwen2.5-coder": (
        _QWEN2,
        {variant: dict.fromkeys(_CODER_SIZES, 32768) for variant in ("", "-instruct")},
    ),
    "qwen2": (
        _QWEN2,
        {"": dict.fromkeys(_QWEN2_SIZES, 131072), "-instruct": dict.fromkeys(_QWEN2_SIZES, 32768)},
    ),
}


def published(name: str) -> dict[str, Any] | None:
    """Return a config for `Geometry.from_config` of the published model `name`; None if the name is unknown.

    `name` is the model's name on the hub, in upper or lower case, with or without its owner: `Qwen/Qwen3-8B`.
    """
    found = PUBLISHED.get(name.lower().removeprefix("qwen/"))
    return None if found is None else dict(found)


def _config(series: str, size: str, values: _Size, positions: int) -> dict[str, Any]:
    hidden, intermediate, layers, heads, kv_heads, vocab, tied = values
    is_qwen3 = series.startswith("qwen3")
    config: dict[str, Any] = {
        "model_type": "qwen3" if is_qwen3 else "qwen2",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
    }
    if is_qwen3:
        config |= {"head_dim": 128, "attention_bias": False}
    if size in _EXPERTS:
        experts, width = _EXPERTS[size]
        config |= {
            "model_type": "qwen3_moe",
            "num_experts": experts,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


# Configs by model name in lower case, without the owner.
PUBLISHED = {
    f"{series}-{size}{variant}": _config(series, size, sizes[size], positions)
    for series, (sizes, variants) in _SERIES.items()
    for variant, by_size in variants.items()
    for size, positions in by_size.items()
}


# Sizes of a Qwen model and the shapes of its parameters, from config.json and without building the model.

SUPPORTED = ("qwen2", "qwen3", "qwen3_moe")
PLANNED = ("llama", "mistral")  # have the layers of Qwen2 without biases: they are planned, and not trained
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MLP = ("gate_proj", "up_proj", "down_proj")
_SIZES = ("num_attention_heads", "num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size")
_OF_MEDIA = ("vision_config", "audio_config", "thinker_config")  # keys of models that take more than text
_EXPERT_SIZES = ("num_experts_per_tok", "moe_intermediate_size")
# Upper bounds far above any real model, to catch typing errors. The bound on layers and experts is lower, since the
# code loops over them.
_MANY = ("num_hidden_layers", "num_experts", "num_local_experts")
_MOST_OF_MANY, _MOST = 10_000, 2**31


@dataclass(frozen=True)
class Geometry:
    """The sizes of a Qwen2, Qwen3 or Qwen3-MoE model, in elements; or of one of PLANNED, if `is_trained` is false.

    Layers whose numbers are in `expert_layers` have `experts` experts, of which each token uses `experts_per_token`.
    All other layers have one MLP of width `intermediate`. `rope` is the config's `model.rope`, which `max_positions`
    counts; `scaling` is the type of scaled rotary embeddings in config.json.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    max_positions: int
    biased: tuple[str, ...] = ()
    normed_heads: bool = True
    expert_layers: frozenset[int] = frozenset()
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    rope: Rope | None = None
    scaling: str = ""
    is_trained: bool = True

    @staticmethod
    def from_folder(folder: Path, may_be_planned: bool = False) -> "Geometry":
        """Read `folder/config.json`. Raises DataError if it is unreadable, malformed, or of an unsupported model.

        With `may_be_planned`, models of PLANNED are supported too.
        """
        path = folder / "config.json"
        try:
            config = dict(read_json(path))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise DataError(f"{path}: not the config.json of a model ({error})") from error
        return Geometry.checked(config, str(path), may_be_planned)

    @staticmethod
    def checked(config: dict[str, Any], origin: str, may_be_planned: bool = False) -> "Geometry":
        """Read the config.json `config`, which came from anywhere and is called `origin` in messages.

        Raises DataError if it is malformed or of an unsupported model.
        """
        if config.get("model_type") not in (*SUPPORTED, *(PLANNED if may_be_planned else ())):
            text = f"{origin}: model_type {short(config.get('model_type'))} is not one of {', '.join(SUPPORTED)}"
            is_mixed = any(key in config for key in _OF_MEDIA)
            media = ": it takes pictures, video or sound beside text, and only text is trained on" if is_mixed else ""
            raise DataError(f"{text}{media}; name a text model of the Qwen2, Qwen2.5 or Qwen3 series")
        window = "sliding_window" if config["model_type"] == "mistral" else "use_sliding_window"
        if config.get(window):
            value = str(config[window]).lower()
            raise DataError(f"{origin}: {window} is {value}, and packed blocks support whole documents only")
        try:
            if problem := next(_malformed(config), None):
                raise DataError(f"{origin}: {problem}")
            return Geometry.from_config(config)
        except KeyError as error:
            raise DataError(f"{origin}: lacks {error}") from error

    @staticmethod
    def from_config(config: dict[str, Any]) -> "Geometry":
        """Read the keys of transformers' Qwen2Config, Qwen3Config and Qwen3MoeConfig, with the same defaults."""
        kind = config.get("model_type", "qwen3")
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
        has_experts = kind == "qwen3_moe"
        experts = config["num_local_experts" if "num_local_experts" in config else "num_experts"] if has_experts else 0
        step, plain = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
        # By transformers' rule.
        expert_layers = [layer for layer in range(layers) if experts and layer not in plain and (layer + 1) % step == 0]
        # Qwen2's q, k and v always have a bias; later models have one in all four of attention, or none.
        biased: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
        if kind != "qwen2":  # Mistral's config has no such key
            biased = (*biased, "o_proj") if config.get("attention_bias") else ()
        return Geometry(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=layers,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or (128 if kind == "qwen3" else config["hidden_size"] // heads),
            tied=bool(config.get("tie_word_embeddings", False)),
            max_positions=positions_in(config),
            biased=biased,
            normed_heads=kind not in ("qwen2", *PLANNED),
            expert_layers=frozenset(expert_layers),
            experts=int(experts),
            experts_per_token=config["num_experts_per_tok"] if has_experts else 0,
            expert_intermediate=config["moe_intermediate_size"] if has_experts else 0,
            scaling=scaling_type(config),
            is_trained=kind in SUPPORTED,
        )

    def stretched(self, rope: Rope | None) -> "Geometry":
        """Return the geometry with `model.rope`. Raises DataError if the model has a scaling of its own."""
        if rope is None:
            return self
        refuse_scaled(self.scaling)
        return replace(self, max_positions=stretched_positions(self.max_positions, rope), rope=rope)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of every linear module in a layer without experts, by module name."""
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

    def too_long(self, block_tokens: int) -> Iterator[str]:
        """Yield a problem if blocks of `block_tokens` tokens exceed the model's maximum number of positions."""
        if block_tokens > self.max_positions:
            text = f"{block_tokens} tokens are more than the model's {self.max_positions} positions"
            yield f"shard.block_tokens: {text}; lower it{self._way_to(block_tokens)}"

    def _way_to(self, tokens: int) -> str:
        """Return how `model.rope` would give the model `tokens` positions; empty if it has a scaling of its own."""
        if self.scaling:
            return ""
        original = self.max_positions / self.rope.factor if self.rope else original_positions(self.max_positions)
        verb, factor = ("raise it to" if self.rope else "set"), math.ceil(tokens / original)
        return f", or {verb} model.rope: {{type: yarn, factor: {factor:.1f}}}"

    def problems(self, train: Train, block_tokens: int) -> Iterator[str]:
        """Yield what of `train` and of blocks of `block_tokens` tokens does not fit the model."""
        yield from self.too_long(block_tokens)
        yield from self._context_problems(train)
        yield from self.adapter_problems(train)

    def _context_problems(self, train: Train) -> Iterator[str]:
        """Yield a problem if `train.context_ranks` ranks cannot share the heads equally."""
        ranks = train.context_ranks
        if not self._can_share_heads(ranks):
            legal = [count for count in range(1, self.heads + 1) if self._can_share_heads(count)]
            text = f"{ranks} ranks cannot share the model's {self.heads} attention heads and {self.kv_heads} KV heads"
            yield f"train.context_ranks: {text} equally; it may be {', '.join(map(str, legal))}"

    def _can_share_heads(self, ranks: int) -> bool:
        """Return whether `ranks` ranks can have equally many heads, and equally many KV heads or one."""
        return self.heads % ranks == 0 and max(ranks, self.kv_heads) % min(ranks, self.kv_heads) == 0

    def adapter_problems(self, train: Train) -> Iterator[str]:
        """Yield a problem for targets or a base that do not fit the model, or a rank above a matrix's smaller side."""
        if train.method != "lora":
            return
        yield from self._nf4_problems(train)
        adapted = self.adapted_linears(train.lora) | self.adapted_experts(train.lora)
        if train.lora.targets != "all-linear" and (absent := [n for n in train.lora.targets if n not in adapted]):
            every = train.lora.model_copy(update={"targets": (*self.linears, *self._of_experts)})
            has = ", ".join([*self.adapted_linears(every), *self.adapted_experts(every)])
            yield f"train.lora.targets: this model has no {', '.join(absent)}; it has {has}"
        if not adapted:
            return
        name, (inputs, outputs) = min(adapted.items(), key=lambda item: min(item[1]))
        most = min(inputs, outputs)
        if train.lora.rank > most:
            text = f"{train.lora.rank} is more than the rank of {name}, which is {outputs} x {inputs}"
            yield f"train.lora.rank: {text}; lower it to {most} or less, or choose train.lora.targets"

    def _nf4_problems(self, train: Train) -> Iterator[str]:
        """Yield a problem if `train.lora.base: nf4` does not fit the model: experts, or rows of incomplete blocks."""
        if train.lora.base != "nf4":
            return
        if self.expert_layers:
            yield "train.lora.base: nf4 does not work for models with experts; set it to unquantized"
        for name, (inputs, _) in self.linears.items():
            if inputs % NF4_BLOCK and not self.expert_layers:
                text = f"nf4 needs inputs in multiples of {NF4_BLOCK}, but {name} has {inputs}"
                yield f"train.lora.base: {text}; set it to unquantized"
                return

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every parameter by transformers' name; a tied head is listed as the embedding only."""
        return self._shapes

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab, self.hidden)}
        for layer in range(self.layers):
            prefix, has_experts = f"model.layers.{layer}.", layer in self.expert_layers
            for name, (inputs, outputs) in self.linears.items():
                if name in _MLP and has_experts:
                    continue
                module = f"{prefix}{'mlp' if name in _MLP else 'self_attn'}.{name}"
                shapes[f"{module}.weight"] = (outputs, inputs)
                if name in self.biased:
                    shapes[f"{module}.bias"] = (outputs,)
            if has_experts:
                shapes[f"{prefix}mlp.gate.weight"] = (self.experts, self.hidden)
                shapes[f"{prefix}mlp.experts.gate_up_proj"] = (self.experts, 2 * self.expert_intermediate, self.hidden)
                shapes[f"{prefix}mlp.experts.down_proj"] = (self.experts, self.hidden, self.expert_intermediate)
            for norm in ("q_norm", "k_norm") if self.normed_heads else ():
                shapes[f"{prefix}self_attn.{norm}.weight"] = (self.head_dim,)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{prefix}{norm}.weight"] = (self.hidden,)
        shapes["model.norm.weight"] = (self.hidden,)
        return shapes if self.tied else shapes | {HEAD: (self.vocab, self.hidden)}

    @cached_property
    def matmul_parameters(self) -> int:
        """The number of weights that each token is multiplied by.

        These are the linears, the token's experts, the routers and the head, but not the embedding lookup.
        """
        dense = self.layers - len(self.expert_layers)
        linears = sum(
            (dense if name in _MLP else self.layers) * inputs * outputs
            for name, (inputs, outputs) in self.linears.items()
        )
        expert = 3 * self.hidden * self.expert_intermediate
        routed = self.experts_per_token * expert + self.experts * self.hidden
        return linears + len(self.expert_layers) * routed + self.vocab * self.hidden

    @cached_property
    def largest_tensor(self) -> int:
        """The number of elements of the largest parameter."""
        return max(math.prod(shape) for shape in self.shapes().values())

    @cached_property
    def parameters(self) -> int:
        """The number of all parameters; a tied head and embedding count once."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def adapter_parameters(self, lora: Lora) -> int:
        """Return the number of adapter parameters: rank x (inputs + outputs) for each target, plus outputs with DoRA.

        Every expert has adapters of its own.
        """
        return self._adapter_parameters(lora, self.experts)

    def adapter_matmul_parameters(self, lora: Lora) -> int:
        """Return the number of adapter parameters that each token is multiplied by: of the experts, only its own."""
        return self._adapter_parameters(lora, self.experts_per_token)

    def _adapter_parameters(self, lora: Lora, experts: int) -> int:
        of_linears = sum(
            lora.rank * (inputs + outputs) + (outputs if lora.dora else 0)
            for inputs, outputs in self.adapted_linears(lora).values()
        )
        of_experts = sum(lora.rank * (inputs + outputs) for inputs, outputs in self.adapted_experts(lora).values())
        return self.layers * of_linears + len(self.expert_layers) * experts * of_experts

    def adapted_experts(self, lora: Lora) -> dict[str, tuple[int, int]]:
        """Return (inputs, outputs) of the matrices of an expert that get adapters."""
        return {name: widths for name, widths in self._of_experts.items() if name in lora.of_experts}

    @property
    def _of_experts(self) -> dict[str, tuple[int, int]]:
        matrices = {
            "experts.gate_up_proj": (self.hidden, 2 * self.expert_intermediate),
            "experts.down_proj": (self.expert_intermediate, self.hidden),
        }
        return matrices if self.expert_layers else {}

    def quantized_parameters(self, train: Train) -> int:
        """Return the number of parameters of the base that are kept in 4 bits: the linears of dense layers."""
        if train.method != "lora" or train.lora.base != "nf4":
            return 0
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears.values())

    def adapted_linears(self, lora: Lora) -> dict[str, tuple[int, int]]:
        """Return the entries of `linears` that get adapters; in models with experts, only those of the attention."""
        names = set(self.linears) if lora.targets == "all-linear" else set(lora.targets)
        if self.expert_layers:
            names -= set(_MLP)
        return {name: widths for name, widths in self.linears.items() if name in names}

    def trained_parameters(self, train: Train) -> int:
        """Return the number of parameters that get gradients.

        Raises DataError if a glob of `train.freeze` matches nothing, or if all parameters are frozen.
        """
        if train.method == "lora":
            return self.adapter_parameters(train.lora)
        shapes = self.shapes()
        return self.parameters - sum(math.prod(shapes[name]) for name in frozen_parameters(self, train))

    def is_head(self, name: str) -> bool:
        """Return True if the parameter `name` is the head, or an embedding tied to it."""
        return name == HEAD or (self.tied and name == EMBEDDING)


def _malformed(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each invalid number of a config.json. Raises KeyError for a missing number."""
    has_experts = config["model_type"] == "qwen3_moe"
    values = {key: config[key] for key in (*_SIZES, *(_EXPERT_SIZES if has_experts else ()))}
    # For these keys null means the default, as in transformers.
    values |= {key: config[key] for key in ("num_key_value_heads", "head_dim") if config.get(key) is not None}
    values |= {key: config[key] for key in ("max_position_embeddings",) if key in config}
    if has_experts:
        experts = "num_local_experts" if "num_local_experts" in config else "num_experts"
        values[experts] = config[experts]
        values |= {key: config[key] for key in ("decoder_sparse_step",) if key in config}
        plain = config.get("mlp_only_layers") or ()
        if not isinstance(plain, list | tuple) or not all(is_whole(layer) for layer in plain):
            yield f"mlp_only_layers: {short(plain)} is no list of the numbers of layers"
    for key, value in values.items():
        most = _MOST_OF_MANY if key in _MANY else _MOST
        if not is_whole(value) or not 1 <= value <= most:
            yield f"{key}: {short(value)} is not a whole number from 1 to {most:,}"
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads is not None and heads % kv_heads:
        yield f"num_key_value_heads: {kv_heads} does not divide num_attention_heads, {heads}"
    if config.get("head_dim") is None and config["model_type"] != "qwen3" and config["hidden_size"] % heads:
        yield f"num_attention_heads: {heads} does not divide hidden_size, {config['hidden_size']}; give head_dim"


def is_whole(value: Any) -> bool:
    """Return whether `value` is a whole number; a JSON boolean is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def short(value: Any) -> str:
    """Return `value` as messages quote it: at most 40 characters."""
    return cut(repr(value), 40)


# FLOPs of a training step, by the two usual conventions. Recomputed activations, padding and pointwise work (norms,
# softmax) do not count. A matmul with N weights takes 2 N FLOPs per token forward, 2 N for the gradient of its input,
# and 2 N for the gradient of trained weights: 6 N, or 4 N if frozen. In MoE layers only the experts that a token uses
# count. Attention of n tokens to m visible ones takes 4 n m per channel forward and 8 n m backward.


@dataclass(frozen=True)
class StepFlops:
    """The FLOPs of a batch by two conventions.

    `causal` counts only the visible half of each attention square (NVIDIA's convention). `full_attention` counts whole
    squares, as PaLM, nanoGPT and torchtitan do, although half of each is never computed.
    """

    causal: float
    full_attention: float


def step_flops(
    geometry: Geometry, train: Train, tokens: int, squared_lengths: int, supervised_tokens: int | None = None
) -> StepFlops:
    """Return the FLOPs of a step over `tokens` tokens without padding.

    `squared_lengths` is the sum of the documents' squared lengths. The head counts for the `supervised_tokens` only,
    since no other tokens reach it; None means all tokens. The backward pass is counted down to the first layer, even
    if frozen layers let it stop earlier.
    """
    attention = 6.0 * geometry.layers * geometry.heads * geometry.head_dim * squared_lengths
    without_head = 0 if supervised_tokens is None else tokens - supervised_tokens
    # The head never has an adapter.
    is_frozen = train.method == "lora" or any(geometry.is_head(name) for name in frozen_parameters(geometry, train))
    of_head = (4.0 if is_frozen else 6.0) * geometry.vocab * geometry.hidden
    linear = flops_per_token(geometry, train) * tokens - of_head * without_head
    return StepFlops(linear + attention, linear + 2 * attention)


def flops_per_token(geometry: Geometry, train: Train) -> float:
    """Return the FLOPs per token of matmuls with weights, forward and backward."""
    if train.method == "lora":
        return 4.0 * geometry.matmul_parameters + 6.0 * geometry.adapter_matmul_parameters(train.lora)
    shapes = geometry.shapes()
    used = geometry.experts_per_token / geometry.experts if geometry.experts else 1.0
    frozen = sum(
        math.prod(shapes[name]) * (used if ".experts." in name else 1.0)
        for name in frozen_parameters(geometry, train)
        if len(shapes[name]) > 1 and (name != EMBEDDING or geometry.is_head(name))
    )
    return 6.0 * geometry.matmul_parameters - 2.0 * frozen


def frozen_parameters(geometry: Geometry, train: Train) -> set[str]:
    """Return the names of the parameters that `train.freeze` matches; a tied head is named as the embedding."""
    if not train.freeze:
        return set()
    names = geometry.shapes()
    return frozen_names({name: (name, HEAD) if geometry.is_head(name) else (name,) for name in names}, train.freeze)
