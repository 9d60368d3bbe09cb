"""What ranks send each other in a step, and how long that takes.

Volumes follow how train/parallel/ exchanges: FSDP2 and ZeRO-3 gather weights in the arithmetic's precision, forward and
backward, for every micro-batch, unless FSDP2 keeps them for all of a step; gradients are reduced in fp32. A collective
over N ranks moves phi = (N - 1) / N of its payload through each rank, twice for an all-reduce (nccl-tests,
doc/PERFORMANCE.md). Between n nodes each node sends (N - 1) / N of the payload where a ring passes through all ranks,
which leaves each node once, and never less than (n - 1) / n. NCCL gathers and scatters by rings where a node has
several ranks, and has trees for all-reduce (src/graph/tuning.cc): the first are expected to send what a ring does, the
last the least, and the band covers both.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pipeline_lib.config.schema import Train
from pipeline_lib.core.units import MIB
from pipeline_lib.model.geometry import Geometry, frozen_parameters
from pipeline_lib.plan.machine import Luck, Ranks, Speeds
from pipeline_lib.plan.memory import FP32_BYTES, ZERO3_LIVE, ZERO_BUCKET, Model, compute_bytes, sharded_over
from pipeline_lib.plan.workload import stays_gathered

REDUCED_BYTES = FP32_BYTES  # of a gradient on its way
_DDP_BUCKET_BYTES = 25 * MIB  # torch's default
_HALF = 2
Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]
Phase = Literal["forward", "backward", "update"]
Group = Literal["all", "shard", "replicas"]


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind: `payload_bytes` in `pieces` at a time, `times` a step.

    `overlaps` says that computing goes on meanwhile; all but `tail_bytes`, which nothing is left to hide behind.
    """

    name: str
    phase: Phase
    kind: Kind
    group: Group
    payload_bytes: float
    pieces: int
    times: float
    overlaps: bool
    tail_bytes: float = 0.0


@dataclass(frozen=True)
class Reach:
    """The ranks of one group: how many, on how many nodes, and how many such groups share a node's network."""

    ranks: int
    nodes: int
    groups_per_node: int


def reach_of(group: Group, train: Train, ranks: Ranks) -> Reach:
    """How far a group of that kind reaches. Ranks that follow each other share a node, and a replica."""
    nodes = ranks.total // ranks.per_node
    if group == "all":
        return Reach(ranks.total, nodes, 1)
    return _reach_of_parts(group, sharded_over(train, ranks), ranks)


@cache
def _reach_of_parts(group: Group, shard: int, ranks: Ranks) -> Reach:
    """That of the group that reaches farthest, and the node that most groups which leave it share."""
    replicas = ranks.total // shard
    if group == "shard":
        members = [range(replica * shard, (replica + 1) * shard) for replica in range(replicas)]
    else:
        members = [range(place, ranks.total, shard) for place in range(shard)]
    places = [{rank // ranks.per_node for rank in each} for each in members]
    leaving = Counter(node for nodes in places if len(nodes) > 1 for node in nodes)
    return Reach(len(members[0]), max(map(len, places)), max(leaving.values(), default=1))


def exchanges_of(geometry: Geometry, train: Train, ranks: Ranks, accumulation: int) -> list[Exchange]:
    """All that a step of `accumulation` micro-batches exchanges; nothing on one rank."""
    if ranks.total == 1:
        return []
    model = Model.of(geometry, train)
    if train.strategy in ("fsdp", "hsdp"):
        return _of_fsdp(geometry, train, ranks, model, accumulation)
    if train.strategy == "ddp":
        return _of_ddp(geometry, train, model)
    if train.strategy == "zero3":
        return _of_zero3(geometry, train, model, accumulation)
    return _of_zero(train, model, accumulation)


def _of_fsdp(geometry: Geometry, train: Train, ranks: Ranks, model: Model, times: int) -> list[Exchange]:
    """Embedding and head stay gathered until they are used up.

    Nothing is left to hide the embedding behind; if the head is the same, that is gathered and reduced with it.
    """
    number, layers = compute_bytes(train), math.ceil(geometry.layers / train.unit_layers)
    units = layers + (1 if geometry.tied else 3)
    gathered, again = float(number * model.parameters), float(number * (model.parameters - model.root))
    reduced, first = float(REDUCED_BYTES * model.trained), float(model.first)
    tail = min(reduced, REDUCED_BYTES * first) if train.method == "full" else 0.0
    is_kept = stays_gathered(train)
    every = 1 if is_kept else times
    found = [Exchange("weights", "forward", "all-gather", "shard", gathered, units, every, True, number * first)]
    if not is_kept:
        found.append(Exchange("weights again", "backward", "all-gather", "shard", again, layers, times, True))
    found.append(Exchange("gradients", "backward", "reduce-scatter", "shard", reduced, units, times, True, tail))
    if train.strategy == "hsdp":
        payload = reduced / sharded_over(train, ranks)
        found.append(Exchange("parts of gradients", "backward", "all-reduce", "replicas", payload, units, 1, True))
    return found


def _of_ddp(geometry: Geometry, train: Train, model: Model) -> list[Exchange]:
    payload = float(REDUCED_BYTES * model.trained)
    tail = float(REDUCED_BYTES * model.matrix) if train.method == "full" else 0.0
    if train.local_sgd_steps > 1:
        state = 3 * payload  # weights and both moments
        pieces = 3 * len(trained_shapes(geometry, train))
        return [Exchange("models", "update", "all-reduce", "all", state, pieces, 1 / train.local_sgd_steps, False)]
    if train.gradient_compression == "bf16":
        payload, tail = payload * _HALF / REDUCED_BYTES, tail * _HALF / REDUCED_BYTES
    elif train.gradient_compression == "powersgd":
        payload, tail = _powersgd_bytes(geometry, train), 0.0
    pieces = max(1, math.ceil(payload / _DDP_BUCKET_BYTES))
    overlaps = train.gradient_compression != "powersgd"  # whose factors the computing thread exchanges
    return [Exchange("gradients", "backward", "all-reduce", "all", payload, pieces, 1, overlaps, min(tail, payload))]


def trained_shapes(geometry: Geometry, train: Train) -> Mapping[str, tuple[int, ...]]:
    """The shapes of what gets gradients; of adapters both factors of each linear."""
    if train.method == "full":
        if not train.freeze:
            return geometry.shapes()
        frozen = frozen_parameters(geometry, train)
        return {name: shape for name, shape in geometry.shapes().items() if name not in frozen}
    adapted = geometry.adapted_linears(train.lora)
    return {
        f"{layer}.{name}.{factor}": shape
        for layer in range(geometry.layers)
        for name, (inputs, outputs) in adapted.items()
        for factor, shape in (("A", (train.lora.rank, inputs)), ("B", (outputs, train.lora.rank)))
    }


def _powersgd_bytes(geometry: Geometry, train: Train) -> float:
    """Two factors of rank r for each matrix, vectors as they are."""
    total = 0.0
    for shape in trained_shapes(geometry, train).values():
        size = math.prod(shape)
        factors = train.powersgd_rank * (shape[0] + size // shape[0])
        total += min(size, factors) if len(shape) > 1 else size
    return FP32_BYTES * total


def _of_zero(train: Train, model: Model, accumulation: int) -> list[Exchange]:
    """Stage 1 reduces when the step is complete, and waits for it; stage 2 after every micro-batch."""
    reduced, updated = float(REDUCED_BYTES * model.trained), float(compute_bytes(train) * model.trained)
    pieces = max(1, math.ceil(model.trained / ZERO_BUCKET))
    is_first = train.strategy == "zero1"
    tail = float(REDUCED_BYTES * model.matrix) if train.method == "full" else 0.0
    times = 1 if is_first else accumulation
    return [
        Exchange("gradients", "backward", "all-reduce", "all", reduced, pieces, times, not is_first, tail),
        Exchange("updated weights", "update", "all-gather", "all", updated, pieces, 1, False),
    ]


def _of_zero3(geometry: Geometry, train: Train, model: Model, times: int) -> list[Exchange]:
    """The last layers stay gathered: those used again before stage3_max_reuse_distance other parameters.

    The way from a layer to its backward pass leads twice through what follows it.
    """
    number, pieces = compute_bytes(train), 7 * geometry.layers + 2
    gathered, again = float(number * model.parameters), float(number * max(0, model.parameters - ZERO3_LIVE // 2))
    reduced, buckets = float(REDUCED_BYTES * model.trained), max(1, math.ceil(model.trained / ZERO_BUCKET))
    tail = float(number * model.matrix)
    found = [Exchange("weights", "forward", "all-gather", "all", gathered, pieces, times, True, tail)]
    if again:
        found.append(Exchange("weights again", "backward", "all-gather", "all", again, pieces, times, True))
    return [*found, Exchange("gradients", "backward", "reduce-scatter", "all", reduced, buckets, times, True)]


@dataclass(frozen=True)
class Duration:
    """One go of an exchange: seconds, what of them nothing hides, and what a node sends to others."""

    seconds: float
    tail_s: float
    sent_bytes: float
    crosses_nodes: bool


def duration_of(
    exchange: Exchange, train: Train, ranks: Ranks, speeds: Speeds, luck: Luck, by_nccl: bool = True
) -> Duration:
    """How long one go takes: as long as the slower of the links within nodes and between them.

    Gloo, on CPUs, reduces and scatters by an all-reduce.
    """
    reach = reach_of(exchange.group, train, ranks)
    if reach.ranks == 1:
        return Duration(0.0, 0.0, 0.0, False)
    factor = 1.0 if exchange.kind == "all-gather" or (exchange.kind == "reduce-scatter" and by_nccl) else 2.0
    ring = (reach.ranks - 1) / reach.ranks
    crosses = reach.nodes > 1
    share = leaving_share(exchange.kind, reach.ranks, reach.nodes, luck)
    sent = factor * share * exchange.payload_bytes * reach.groups_per_node
    within_s = factor * ring * exchange.payload_bytes / speeds.in_node_bytes_s if reach.ranks > reach.nodes else 0.0
    between_s = sent / speeds.between_bytes_s if crosses else 0.0
    latency_s = exchange.pieces * (speeds.between_latency_s if crosses else speeds.in_node_latency_s)
    moving_s = max(within_s, between_s)
    tail_s = moving_s * exchange.tail_bytes / exchange.payload_bytes if exchange.payload_bytes else 0.0
    return Duration(moving_s + latency_s, tail_s, sent if crosses else 0.0, crosses)


def leaving_share(kind: Kind, ranks: int, nodes: int, luck: Luck = Luck.EXPECTED) -> float:
    """The part of a payload that each node sends to others: a ring's, or the least, as where switches reduce."""
    is_by_ring = luck == Luck.BAD or (luck == Luck.EXPECTED and kind != "all-reduce")
    members = ranks if is_by_ring else nodes
    return (members - 1) / members
