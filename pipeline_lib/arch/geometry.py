"""Sizes of a model, the shapes of its parameters, and the FLOPs of a training step."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache

from pipeline_lib.arch.rope import original_positions, refuse_scaled, stretched_positions
from pipeline_lib.config.optimizers import DEFAULT, EXPERTS, OPTIMIZERS
from pipeline_lib.config.rope import Rope
from pipeline_lib.config.train import Lora, Train
from pipeline_lib.core.errors import DataError

FP32_BYTES, HALF_BYTES = 4, 2  # of a number

# A base in 4 bits (model/nf4.py): values of a row that share a scale, and the bytes of a value with
# all scales.
NF4_BLOCK = 64
NF4_BYTES = 0.5 + 1 / NF4_BLOCK + 4 / (256 * NF4_BLOCK)

DELTA_CHUNK = 64  # tokens of a document that the gated delta rule takes at once (model/delta.py)


def frozen_names(names: Mapping[str, Iterable[str]], globs: Iterable[str]) -> set[str]:
    """Return the keys of `names` that match one of `globs`, those of `train.freeze`.

    The values of `names` are the names that globs may match: two for a tied parameter. Raises
    DataError for a glob that matches nothing, and if no parameter is left to train.
    """
    frozen: set[str] = set()
    for glob in globs:
        matched = set()
        for name, called in names.items():
            if any(fnmatchcase(each, glob) for each in called):
                matched.add(name)
        if not matched:
            near = get_close_matches(glob, names, n=3, cutoff=0.3) or list(names)[:3]
            raise DataError(
                f"train.freeze: {glob!r} matches no parameter of this model; near it: "
                f"{', '.join(near)}"
            )
        frozen |= matched
    if frozen and len(frozen) == len(names):
        raise DataError(
            "train.freeze: matches every parameter of this model, so nothing is trained; leave "
            "some out"
        )
    return frozen


# Sizes of a model and the shapes of its parameters, without building it. A file of each family
# reads its config.json.

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_MLP = ("gate_proj", "up_proj", "down_proj")
# Linears with a few outputs for each head, of which a recurrent state's decay and rate are made:
# they get no adapters, and are not quantized.
OF_HEADS = ("in_proj_b", "in_proj_a")


@dataclass(frozen=True)
class Delta:
    """The sizes of a gated delta rule: heads of keys and values, widths, convolution's width.

    A head of values has a state of `key_dim` x `value_dim`. Several share a head of queries and
    keys.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def keys(self) -> int:
        """The channels of all heads of keys, and as many of queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The channels of all heads of values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of the chunked delta rule for a token, forward; backward takes twice as many.

        For each head of values: a chunk's products of keys with keys and with queries, the solution
        of its triangular system for keys and values and the product with the values, of each of
        which half is needed; and three products with the state.
        """
        of_chunk = DELTA_CHUNK * (3 * self.key_dim + 2 * self.value_dim)
        return self.value_heads * (of_chunk + 6 * self.key_dim * self.value_dim)


@dataclass(frozen=True)
class LayerKind:
    """What a decoder layer is made of: attention or a recurrent state, then an MLP or experts."""

    is_recurrent: bool = False
    has_experts: bool = False


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model, in elements. If `is_trained` is false, it is one that is planned only.

    Layers whose numbers are in `expert_layers` have `experts` experts, of which each token uses
    `experts_per_token`. All other layers have one MLP of width `intermediate`; with
    `shared_expert`, layers with experts have one too, which every token goes through, and a gate
    for its output. Layers whose numbers are in `delta_layers` have the gated delta rule `delta` in
    place of attention. `gated_attention` means that q_proj has as many outputs again, a gate of
    attention's output. `rope` is the config's `model.rope`, which `max_positions` counts; `scaling`
    is the type of scaled rotary embeddings in config.json.
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
    gated_attention: bool = False
    delta: Delta | None = None
    delta_layers: frozenset[int] = frozenset()
    shared_expert: bool = False

    def stretched(self, rope: Rope | None) -> "Geometry":
        """Return the geometry with `model.rope`.

        Raises DataError if the model has a scaling of its own, or recurrent layers.
        """
        if rope is None:
            return self
        if self.delta is not None:
            raise DataError(
                f"model.rope: is not supported for models with a gated delta rule; this one takes "
                f"{self.max_positions:,} positions as it is"
            )
        refuse_scaled(self.scaling)
        return replace(self, max_positions=stretched_positions(self.max_positions, rope), rope=rope)

    @cached_property
    def kinds(self) -> dict[LayerKind, int]:
        """The number of layers of each kind."""
        return dict(Counter(self.kind_of(layer) for layer in range(self.layers)))

    def kind_of(self, layer: int) -> LayerKind:
        """Return the kind of the layer with that number, counted from 0."""
        return LayerKind(layer in self.delta_layers, layer in self.expert_layers)

    @property
    def attention_layers(self) -> int:
        """The number of layers with attention."""
        return self.layers - len(self.delta_layers)

    def layers_with(self, name: str) -> int:
        """Return the number of layers that have the linear called `name`."""
        return self._layers_with[name]

    @cached_property
    def _layers_with(self) -> Counter[str]:
        found = Counter[str]()
        for kind, count in self.kinds.items():
            found.update(dict.fromkeys(self.linears_of(kind), count))
        return found

    def linears_of(self, kind: LayerKind) -> dict[str, tuple[int, int]]:
        """Return (inputs, outputs) of each linear module of such a layer, without experts.

        The keys are module names.
        """
        mixing = self._of_delta if kind.is_recurrent else self._of_attention
        return mixing if kind.has_experts else mixing | self._of_mlp

    @cached_property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        """(inputs, outputs) of each linear module of any layer, by module name, without experts."""
        return self._of_attention | self._of_delta | self._of_mlp

    @cached_property
    def _of_delta(self) -> dict[str, tuple[int, int]]:
        if self.delta is None:
            return {}
        return {
            "in_proj_qkv": (self.hidden, self.delta.channels),
            "in_proj_z": (self.hidden, self.delta.values),
            **{name: (self.hidden, self.delta.value_heads) for name in OF_HEADS},
            "out_proj": (self.delta.values, self.hidden),
        }

    @cached_property
    def _of_attention(self) -> dict[str, tuple[int, int]]:
        q = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, 2 * q if self.gated_attention else q),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden),
        }

    @cached_property
    def _of_mlp(self) -> dict[str, tuple[int, int]]:
        return {
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    def too_long(self, block_tokens: int) -> Iterator[str]:
        """Yield a problem if blocks of `block_tokens` tokens exceed the model's most positions."""
        if block_tokens > self.max_positions:
            text = f"{block_tokens} tokens are more than the model's {self.max_positions} positions"
            yield f"shard.block_tokens: {text}; lower it{self._way_to(block_tokens)}"

    def _way_to(self, tokens: int) -> str:
        """Return how `model.rope` would give `tokens` positions; empty with a scaling already."""
        if self.scaling:
            return ""
        if self.rope:
            verb = "raise it to"
            original = self.max_positions / self.rope.factor
        else:
            verb = "set"
            original = original_positions(self.max_positions)
        factor = math.ceil(tokens / original)
        return f", or {verb} model.rope: {{type: yarn, factor: {factor:.1f}}}"

    def problems(self, train: Train, block_tokens: int) -> Iterator[str]:
        """Yield what of `train` and of blocks of `block_tokens` tokens does not fit the model."""
        yield from self.too_long(block_tokens)
        if why := self.left_out.get(train.strategy):
            yield (
                f"train.strategy: {train.strategy} does not work for this model: {why}; fsdp "
                "shards as much"
            )
        if self.delta is not None and train.precision == "fp8":
            yield (
                "train.precision: fp8 does not work for models with a gated delta rule; set it "
                "to bf16"
            )
        why = OPTIMIZERS[train.optimizer].refuses.get(EXPERTS)
        if self.expert_layers and why:
            text = f"{train.optimizer} does not work for {EXPERTS}: {why}"
            yield f"train.optimizer: {text}; set it to {DEFAULT}"
        yield from self._context_problems(train)
        if (
            not self.experts
            and train.router_aux_loss != Train.model_fields["router_aux_loss"].default
        ):
            yield (
                "train.router_aux_loss: has no effect, because the model has no experts; remove it"
            )
        if train.unit_layers > self.layers:
            yield (
                f"train.unit_layers: {train.unit_layers} are more than the model's {self.layers} "
                "layers"
            )
        if (
            train.kept_attention_layers != "auto"
            and train.kept_attention_layers > self.attention_layers
        ):
            of_model = f"the model's {self.attention_layers} layers with attention"
            yield (
                f"train.kept_attention_layers: {train.kept_attention_layers} are more than "
                f"{of_model}"
            )
        yield from self.adapter_problems(train)

    @property
    def left_out(self) -> dict[str, str]:
        """The strategies that the model cannot be trained with, and why."""
        if self.delta is None:
            return {}
        return {
            "zero3": "the weights of its convolutions are used where DeepSpeed does not gather them"
        }

    def _context_problems(self, train: Train) -> Iterator[str]:
        """Yield a problem if `train.context_ranks` ranks cannot share the heads equally."""
        ranks = train.ranks_per_block
        if ranks not in self.sharing_ranks:
            text = (
                f"{ranks} ranks cannot share the model's {self.heads} attention heads and "
                f"{self.kv_heads} KV heads"
            )
            if self.delta is not None:
                text += f" and {self.delta.key_heads} key heads of its delta rule"
            yield (
                f"train.context_ranks: {text} equally; it may be "
                f"{', '.join(map(str, self.sharing_ranks))}"
            )

    @cached_property
    def sharing_ranks(self) -> tuple[int, ...]:
        """The numbers of ranks that can share each block, the smallest first."""
        return tuple(count for count in range(1, self.heads + 1) if self._can_share_heads(count))

    def _can_share_heads(self, ranks: int) -> bool:
        """Return whether `ranks` ranks can have equally many heads, and equal KV heads or one."""
        if self.delta is not None and self.delta.key_heads % ranks:
            return False
        return (
            self.heads % ranks == 0 and max(ranks, self.kv_heads) % min(ranks, self.kv_heads) == 0
        )

    def adapter_problems(self, train: Train) -> Iterator[str]:
        """Yield a problem for targets or a base unfit for the model, or for too high a rank.

        A rank must not exceed a matrix's smaller side.
        """
        if train.method != "lora":
            return
        yield from self._nf4_problems(train)
        adapted = {**self.adapted_linears(train.lora), **self.adapted_experts(train.lora)}
        if train.lora.targets != "all-linear" and (
            absent := [n for n in train.lora.targets if n not in adapted]
        ):
            every = train.lora.model_copy(update={"targets": (*self.linears, *self._of_experts)})
            has = ", ".join([*self.adapted_linears(every), *self.adapted_experts(every)])
            yield f"train.lora.targets: this model has no {', '.join(absent)}; it has {has}"
        if not adapted:
            return
        name, (inputs, outputs) = min(adapted.items(), key=lambda item: min(item[1]))
        most = min(inputs, outputs)
        if train.lora.rank > most:
            text = (
                f"{train.lora.rank} is more than the rank of {name}, which is {outputs} x {inputs}"
            )
            yield (
                f"train.lora.rank: {text}; lower it to {most} or less, or choose train.lora.targets"
            )

    def _nf4_problems(self, train: Train) -> Iterator[str]:
        """Yield a problem if `train.lora.base: nf4` does not fit the model.

        It does not with experts, or with rows of incomplete blocks.
        """
        if train.lora.base != "nf4":
            return
        if self.expert_layers:
            yield (
                "train.lora.base: nf4 does not work for models with experts; set it to unquantized"
            )
        for name, (inputs, _) in self.linears.items():
            if inputs % NF4_BLOCK and not self.expert_layers:
                text = f"nf4 needs inputs in multiples of {NF4_BLOCK}, but {name} has {inputs}"
                yield f"train.lora.base: {text}; set it to unquantized"
                return

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return every parameter's shape by transformers' name; a tied head is the embedding."""
        return self._shapes

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            kind = self.kind_of(layer)
            for name, (inputs, outputs) in self.linears_of(kind).items():
                attention = "linear_attn" if kind.is_recurrent else "self_attn"
                part = "mlp" if name in _MLP else attention
                module = f"{prefix}{part}.{name}"
                shapes[f"{module}.weight"] = (outputs, inputs)
                if name in self.biased:
                    shapes[f"{module}.bias"] = (outputs,)
            if kind.has_experts:
                shapes[f"{prefix}mlp.gate.weight"] = (self.experts, self.hidden)
                shapes[f"{prefix}mlp.experts.gate_up_proj"] = (
                    self.experts,
                    2 * self.expert_intermediate,
                    self.hidden,
                )
                shapes[f"{prefix}mlp.experts.down_proj"] = (
                    self.experts,
                    self.hidden,
                    self.expert_intermediate,
                )
            if kind.has_experts and self.shared_expert:
                for name, (inputs, outputs) in self._of_mlp.items():
                    shapes[f"{prefix}mlp.shared_expert.{name}.weight"] = (outputs, inputs)
                shapes[f"{prefix}mlp.shared_expert_gate.weight"] = (1, self.hidden)
            if kind.is_recurrent and self.delta is not None:
                of_delta = f"{prefix}linear_attn."
                shapes[f"{of_delta}dt_bias"] = (self.delta.value_heads,)
                shapes[f"{of_delta}A_log"] = (self.delta.value_heads,)
                shapes[f"{of_delta}conv1d.weight"] = (self.delta.channels, 1, self.delta.width)
                shapes[f"{of_delta}norm.weight"] = (self.delta.value_dim,)
            if self.normed_heads and not kind.is_recurrent:
                shapes[f"{prefix}self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{prefix}self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[f"{prefix}input_layernorm.weight"] = (self.hidden,)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (self.hidden,)
        shapes["model.norm.weight"] = (self.hidden,)
        return shapes if self.tied else shapes | {HEAD: (self.vocab, self.hidden)}

    @cached_property
    def matmul_parameters(self) -> int:
        """The number of weights that each token is multiplied by.

        These are the linears, the token's experts, the routers and the head, but not the embedding
        lookup.
        """
        linears = 0
        for kind, count in self.kinds.items():
            for inputs, outputs in self.linears_of(kind).values():
                linears += count * inputs * outputs
        expert = 3 * self.hidden * self.expert_intermediate
        routed = self.experts_per_token * expert + self.experts * self.hidden
        if self.shared_expert:
            routed += (3 * self.intermediate + 1) * self.hidden
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
        """Return the number of adapter parameters.

        That is rank x (inputs + outputs) for each target, plus outputs with DoRA. Every expert has
        adapters of its own.
        """
        return self._adapter_parameters(lora, self.experts)

    def adapter_matmul_parameters(self, lora: Lora) -> int:
        """Return how many adapter parameters multiply each token: of experts, only its own."""
        return self._adapter_parameters(lora, self.experts_per_token)

    def _adapter_parameters(self, lora: Lora, experts: int) -> int:
        of_linears = 0
        for name, (inputs, outputs) in self.adapted_linears(lora).items():
            of_one = lora.rank * (inputs + outputs)
            if lora.dora:
                of_one += outputs
            of_linears += self.layers_with(name) * of_one
        widths = sum(inputs + outputs for inputs, outputs in self.adapted_experts(lora).values())
        of_experts = lora.rank * widths
        return of_linears + len(self.expert_layers) * experts * of_experts

    def adapted_experts(self, lora: Lora) -> dict[str, tuple[int, int]]:
        """Return (inputs, outputs) of the matrices of an expert that get adapters."""
        adapted = self._of_experts.keys() & lora.of_experts
        return {name: self._of_experts[name] for name in self._of_experts if name in adapted}

    @property
    def _of_experts(self) -> dict[str, tuple[int, int]]:
        matrices = {
            "experts.gate_up_proj": (self.hidden, 2 * self.expert_intermediate),
            "experts.down_proj": (self.expert_intermediate, self.hidden),
        }
        return matrices if self.expert_layers else {}

    def quantized_parameters(self, train: Train) -> int:
        """Return how many parameters of the base are kept in 4 bits: dense layers' linears."""
        if train.method != "lora" or train.lora.base != "nf4":
            return 0
        quantized = 0
        for name, (inputs, outputs) in self.linears.items():
            if name not in OF_HEADS:
                quantized += self.layers_with(name) * inputs * outputs
        return quantized

    def adapted_linears(self, lora: Lora) -> Mapping[str, tuple[int, int]]:
        """Return the entries of `linears` that get adapters; with experts, none of MLPs."""
        if lora.targets not in self._adapted:
            names = set(self.linears) if lora.targets == "all-linear" else set(lora.targets)
            names.difference_update(OF_HEADS)
            if self.expert_layers:
                names -= set(_MLP)
            found = {name: widths for name, widths in self.linears.items() if name in names}
            self._adapted[lora.targets] = found
        return self._adapted[lora.targets]

    @cached_property
    def _adapted(self) -> dict[str | tuple[str, ...], Mapping[str, tuple[int, int]]]:
        """By targets: a search for the fastest way to train asks tens of thousands of times."""
        return {}

    def trained_parameters(self, train: Train) -> int:
        """Return the number of parameters that get gradients.

        Raises DataError if a glob of `train.freeze` matches nothing, or if all parameters are
        frozen.
        """
        if train.method == "lora":
            return self.adapter_parameters(train.lora)
        shapes = self.shapes()
        frozen = sum(math.prod(shapes[name]) for name in frozen_parameters(self, train))
        return self.parameters - frozen

    def is_head(self, name: str) -> bool:
        """Return True if the parameter `name` is the head, or an embedding tied to it."""
        return name == HEAD or (self.tied and name == EMBEDDING)


# FLOPs of a training step, by the two usual conventions. Recomputed activations, padding and
# pointwise work (norms, softmax) do not count. A matmul with N weights takes 2 N FLOPs per token
# forward, 2 N for the gradient of its input, and 2 N for the gradient of trained weights: 6 N, or 4
# N if frozen. In MoE layers only the experts that a token uses count. Attention of n tokens to m
# visible ones takes 4 n m per channel forward and 8 n m backward.


@dataclass(frozen=True)
class StepFlops:
    """The FLOPs of a batch by two conventions.

    `causal` counts only the visible half of each attention square (NVIDIA's convention).
    `full_attention` counts whole squares, as PaLM, nanoGPT and torchtitan do, although half of each
    is never computed.
    """

    causal: float
    full_attention: float


def step_flops(
    geometry: Geometry,
    train: Train,
    tokens: int,
    squared_lengths: int,
    supervised_tokens: int | None = None,
) -> StepFlops:
    """Return the FLOPs of a step over `tokens` tokens without padding.

    `squared_lengths` is the sum of the documents' squared lengths. The head counts for the
    `supervised_tokens` only, since no other tokens reach it; None means all tokens. The backward
    pass is counted down to the first layer, even if frozen layers let it stop earlier.
    """
    heads = geometry.attention_layers * geometry.heads
    attention = 6.0 * heads * geometry.head_dim * squared_lengths
    without_head = 0 if supervised_tokens is None else tokens - supervised_tokens
    # The head never has an adapter.
    is_frozen = train.method == "lora" or any(
        map(geometry.is_head, frozen_parameters(geometry, train))
    )
    of_head = (4.0 if is_frozen else 6.0) * geometry.vocab * geometry.hidden
    linear = flops_per_token(geometry, train) * tokens - of_head * without_head
    if geometry.delta is not None:
        linear += 3.0 * len(geometry.delta_layers) * geometry.delta.flops_per_token * tokens
    return StepFlops(linear + attention, linear + 2 * attention)


def flops_per_token(geometry: Geometry, train: Train) -> float:
    """Return the FLOPs per token of matmuls with weights, forward and backward."""
    if train.method == "lora":
        adapters = geometry.adapter_matmul_parameters(train.lora)
        return 4.0 * geometry.matmul_parameters + 6.0 * adapters
    shapes = geometry.shapes()
    frozen = 0.0  # of those that a token is multiplied by
    for name in frozen_parameters(geometry, train):
        is_lookup = name == EMBEDDING and not geometry.is_head(name)
        if len(shapes[name]) < 2 or is_lookup:
            continue
        is_of_experts = ".experts." in name
        used = geometry.experts_per_token / geometry.experts if is_of_experts else 1.0
        frozen += math.prod(shapes[name]) * used
    return 6.0 * geometry.matmul_parameters - 2.0 * frozen


def frozen_parameters(geometry: Geometry, train: Train) -> frozenset[str]:
    """Return the names of parameters that `train.freeze` matches; a tied head is the embedding."""
    return _frozen(geometry, tuple(train.freeze)) if train.freeze else frozenset()


@lru_cache(maxsize=4)  # a plan asks thousands of times about one model
def _frozen(geometry: Geometry, globs: tuple[str, ...]) -> frozenset[str]:
    names = {}
    for name in geometry.shapes():
        names[name] = (name, HEAD) if geometry.is_head(name) else (name,)
    return frozenset(frozen_names(names, globs))
