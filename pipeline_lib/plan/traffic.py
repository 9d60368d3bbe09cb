"""Count the bytes that ranks exchange in a step, and predict how long that takes.

Volumes follow the strategies: FSDP2 and ZeRO-3 gather weights in the arithmetic's precision,
forward and backward, for every micro-batch, unless FSDP2 keeps them for the whole step; gradients
are reduced in fp32.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pipeline_lib.arch.geometry import FP32_BYTES, HALF_BYTES, Geometry
from pipeline_lib.arch.layers import recompute_of, stays_gathered
from pipeline_lib.config.train import Train
from pipeline_lib.core.units import MIB
from pipeline_lib.plan.activations import compute_bytes, exchanged_bytes_per_token
from pipeline_lib.plan.machine import End, Ranks, Speeds
from pipeline_lib.plan.moments import ZERO3_LIVE, ZERO_BUCKET, Model, sharded_over
from pipeline_lib.plan.trained import checkpoint_bytes, portions, trained_shapes

_DDP_BUCKET_BYTES = 25 * MIB  # torch's default
# times through each rank
_FACTORS = {"all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0, "all-reduce": 2.0}
Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
Phase = Literal["forward", "backward", "update"]
Group = Literal["all", "shard", "replicas", "context"]


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind: `payload_bytes` in `pieces` collectives.

    They take place in each micro-batch if `is_each_pass`, else once in `steps_apart` steps. The
    payload is what all ranks of the group have afterwards or before, or in an all-to-all what each
    of them has.

    With `overlaps`, computation continues meanwhile, except for `tail_bytes`, which no computation
    is left to hide.
    """

    name: str
    phase: Phase
    kind: Kind
    group: Group
    payload_bytes: float
    pieces: int
    is_each_pass: bool
    overlaps: bool
    tail_bytes: float = 0.0
    steps_apart: int = 1

    def times(self, accumulation: int) -> float:
        """Return how often it takes place in a step of so many micro-batches."""
        return accumulation if self.is_each_pass else 1 / self.steps_apart


@dataclass(frozen=True)
class Reach:
    """The extent of a group of ranks: its ranks, nodes, and how many groups share a network."""

    ranks: int
    nodes: int
    groups_per_node: int


def reach_of(group: Group, train: Train, ranks: Ranks) -> Reach:
    """Return the extent of a group of that kind. Consecutive ranks share a node, and a replica."""
    nodes = ranks.total // ranks.per_node
    if group == "all":
        return Reach(ranks.total, nodes, 1)
    if group == "context":
        return _reach_of_parts("shard", train.ranks_per_block, ranks)
    return _reach_of_parts(group, sharded_over(train, ranks), ranks)


@cache
def _reach_of_parts(group: Group, shard: int, ranks: Ranks) -> Reach:
    """Return the widest group's extent and the most groups across nodes that share one node."""
    replicas = ranks.total // shard
    if group == "shard":
        members = [range(replica * shard, (replica + 1) * shard) for replica in range(replicas)]
    else:
        members = [range(place, ranks.total, shard) for place in range(shard)]
    places = [{rank // ranks.per_node for rank in each} for each in members]
    leaving = Counter(node for nodes in places if len(nodes) > 1 for node in nodes)
    return Reach(len(members[0]), max(map(len, places)), max(leaving.values(), default=1))


def exchanges_of(geometry: Geometry, train: Train, ranks: Ranks) -> list[Exchange]:
    """Return the exchanges of weights, gradients and updates; none of a rank that is alone."""
    if ranks.total == 1:
        return []
    model = Model.of(geometry, train)
    return [*_of_state(geometry, train, ranks, model), *_of_matrices(geometry, train, ranks)]


def _of_matrices(geometry: Geometry, train: Train, ranks: Ranks) -> list[Exchange]:
    """Return the exchanges of matrices whose updates are made orthogonal, each by one rank.

    It has the whole matrix with ddp, and sends the result to all. Where matrices are sharded, as
    many as there are ranks go to one rank each, and the results back.
    """
    found = []
    for portion in portions(geometry, train):
        if not portion.flops:
            continue
        whole = float(HALF_BYTES * portion.elements)
        if train.strategy == "ddp":
            found.append(
                Exchange(
                    "orthogonal updates",
                    "update",
                    "all-gather",
                    "all",
                    whole,
                    portion.tensors,
                    is_each_pass=False,
                    overlaps=False,
                )
            )
            continue
        share = sharded_over(train, ranks)
        found.append(
            Exchange(
                "orthogonal updates",
                "update",
                "all-to-all",
                "shard",
                2 * whole / share,
                2 * math.ceil(portion.tensors / share),
                is_each_pass=False,
                overlaps=False,
            )
        )
    return found


def exchanges_of_context(geometry: Geometry, train: Train, tokens: int) -> list[Exchange]:
    """Return the exchanges of ranks that share blocks: one on each side of a layer's attention.

    `tokens` are those of a rank in a micro-batch, which the payload is proportional to. The
    backward pass makes them in reverse, and before that again if layers are recomputed. Attention
    waits for them.
    """
    if train.ranks_per_block == 1:
        return []
    of_pass = float(tokens * exchanged_bytes_per_token(geometry, train))
    pieces = 2 * geometry.layers
    again = 1 if recompute_of(train) == "none" else 2

    def exchange(phase: Phase, times: int) -> Exchange:
        return Exchange(
            "attention heads",
            phase,
            "all-to-all",
            "context",
            times * of_pass,
            times * pieces,
            is_each_pass=True,
            overlaps=False,
        )

    return [exchange("forward", 1), exchange("backward", again)]


def _of_state(geometry: Geometry, train: Train, ranks: Ranks, model: Model) -> list[Exchange]:
    """Return the exchanges of weights, gradients and updates."""
    if train.strategy in ("fsdp", "hsdp"):
        return _of_fsdp(geometry, train, ranks, model)
    if train.strategy == "ddp":
        return _of_ddp(geometry, train, model)
    if train.strategy == "zero3":
        return _of_zero3(geometry, train, model)
    return _of_zero(train, model)


def _reduced_bytes(train: Train) -> int:
    """Return the bytes of a gradient while it is exchanged."""
    return HALF_BYTES if train.gradient_compression == "bf16" else FP32_BYTES


def _of_fsdp(geometry: Geometry, train: Train, ranks: Ranks, model: Model) -> list[Exchange]:
    """Return FSDP's exchanges. Embedding and head stay gathered until they are no longer needed.

    No computation is left to hide the embedding; a tied head is gathered and reduced with it.
    """
    number = compute_bytes(train)
    layers = math.ceil(geometry.layers / train.unit_layers)
    units = layers + (1 if geometry.tied else 3)
    gathered = model.base_bytes(train)
    again = model.layer_bytes(train) * (model.parameters - model.root)
    reduced = float(_reduced_bytes(train) * model.trained)
    first = float(model.first)
    tail = min(reduced, _reduced_bytes(train) * first) if train.method == "full" else 0.0
    is_kept = stays_gathered(train)
    found = [
        Exchange(
            "weights",
            "forward",
            "all-gather",
            "shard",
            gathered,
            units,
            is_each_pass=not is_kept,
            overlaps=True,
            tail_bytes=number * first,
        )
    ]
    if not is_kept:
        found.append(
            Exchange("weights again", "backward", "all-gather", "shard", again, layers, True, True)
        )
    found.append(
        Exchange(
            "gradients", "backward", "reduce-scatter", "shard", reduced, units, True, True, tail
        )
    )
    if train.strategy == "hsdp":
        payload = reduced / sharded_over(train, ranks)
        found.append(
            Exchange(
                "parts of gradients",
                "backward",
                "all-reduce",
                "replicas",
                payload,
                units,
                False,
                True,
            )
        )
    return found


def _of_ddp(geometry: Geometry, train: Train, model: Model) -> list[Exchange]:
    payload = float(_reduced_bytes(train) * model.trained)
    tail = float(_reduced_bytes(train) * model.matrix) if train.method == "full" else 0.0
    if train.local_sgd_steps > 1:
        tensors = sum(
            portion.tensors * (1 + len(portion.rule.moments))
            for portion in portions(geometry, train)
        )
        return [
            Exchange(
                "models",
                "update",
                "all-reduce",
                "all",
                float(checkpoint_bytes(geometry, train)),
                tensors,
                is_each_pass=False,
                overlaps=False,
                steps_apart=train.local_sgd_steps,
            )
        ]
    if train.gradient_compression == "powersgd":
        payload = _powersgd_bytes(geometry, train)
        tail = 0.0
    pieces = max(1, math.ceil(payload / _DDP_BUCKET_BYTES))
    # its factors are exchanged by the computing thread
    overlaps = train.gradient_compression != "powersgd"
    return [
        Exchange(
            "gradients",
            "backward",
            "all-reduce",
            "all",
            payload,
            pieces,
            is_each_pass=False,
            overlaps=overlaps,
            tail_bytes=min(tail, payload),
        )
    ]


def _powersgd_bytes(geometry: Geometry, train: Train) -> float:
    """Return the bytes that PowerSGD exchanges: two factors of rank r per matrix, and vectors."""
    total = 0.0
    for shape in trained_shapes(geometry, train).values():
        size = math.prod(shape)
        factors = train.powersgd_rank * (shape[0] + size // shape[0])
        total += min(size, factors) if len(shape) > 1 else size
    return FP32_BYTES * total


def _of_zero(train: Train, model: Model) -> list[Exchange]:
    """Return the exchanges of ZeRO-1, which reduces once a step, or ZeRO-2, per micro-batch."""
    reduced = float(_reduced_bytes(train) * model.trained)
    updated = float(compute_bytes(train) * model.trained)
    pieces = max(1, math.ceil(model.trained / ZERO_BUCKET))
    is_first = train.strategy == "zero1"
    tail = float(_reduced_bytes(train) * model.matrix) if train.method == "full" else 0.0
    return [
        Exchange(
            "gradients",
            "backward",
            "all-reduce",
            "all",
            reduced,
            pieces,
            is_each_pass=not is_first,
            overlaps=not is_first,
            tail_bytes=tail,
        ),
        Exchange("updated weights", "update", "all-gather", "all", updated, pieces, False, False),
    ]


def _of_zero3(geometry: Geometry, train: Train, model: Model) -> list[Exchange]:
    """Return ZeRO-3's exchanges.

    The last layers stay gathered: DeepSpeed keeps what is reused within a distance. That distance,
    stage3_max_reuse_distance, counts parameters; between the two uses of a layer, all that follow
    it are used twice, hence half of ZERO3_LIVE.
    """
    number = compute_bytes(train)
    pieces = 7 * geometry.layers + 2
    gathered = float(number * model.parameters)
    again = float(number * max(0, model.parameters - ZERO3_LIVE // 2))
    reduced = float(_reduced_bytes(train) * model.trained)
    buckets = max(1, math.ceil(model.trained / ZERO_BUCKET))
    tail = float(number * model.matrix)
    found = [
        Exchange("weights", "forward", "all-gather", "all", gathered, pieces, True, True, tail)
    ]
    if again:
        found.append(
            Exchange("weights again", "backward", "all-gather", "all", again, pieces, True, True)
        )
    return [
        *found,
        Exchange("gradients", "backward", "reduce-scatter", "all", reduced, buckets, True, True),
    ]


@dataclass(frozen=True)
class Duration:
    """The cost of an exchange: its seconds, those that nothing hides, and a node's sent bytes."""

    seconds: float
    tail_s: float
    sent_bytes: float
    crosses_nodes: bool


def duration_of(
    exchange: Exchange, train: Train, ranks: Ranks, speeds: Speeds, end: End, by_nccl: bool = True
) -> Duration:
    """Return the duration of an exchange: the slower link, within or between nodes, decides.

    A collective over N ranks moves (N - 1) / N of its payload through each rank, twice for an
    all-reduce (nccl-tests, doc/PERFORMANCE.md). Gloo, on CPUs, implements reduce-scatter by an
    all-reduce.
    """
    reach = reach_of(exchange.group, train, ranks)
    if reach.ranks == 1:
        return Duration(0.0, 0.0, 0.0, False)
    factor = (
        _FACTORS[exchange.kind]
        if by_nccl or exchange.kind != "reduce-scatter"
        else _FACTORS["all-reduce"]
    )
    ring = (reach.ranks - 1) / reach.ranks
    crosses = reach.nodes > 1
    share = leaving_share(exchange.kind, reach.ranks, reach.nodes, end)
    sent = factor * share * exchange.payload_bytes * reach.groups_per_node
    within_s = (
        factor * ring * exchange.payload_bytes / speeds.in_node_bytes_s
        if reach.ranks > reach.nodes
        else 0.0
    )
    between_s = sent / speeds.between_bytes_s if crosses else 0.0
    latency_s = exchange.pieces * (
        speeds.between_latency_s if crosses else speeds.in_node_latency_s
    )
    moving_s = max(within_s, between_s)
    tail_s = (
        moving_s * exchange.tail_bytes / exchange.payload_bytes if exchange.payload_bytes else 0.0
    )
    return Duration(moving_s + latency_s, tail_s, sent if crosses else 0.0, crosses)


def leaving_share(kind: Kind, ranks: int, nodes: int, end: End = End.EXPECTED) -> float:
    """Return the fraction of a payload that each node sends to others.

    Of N ranks on n nodes, a ring through all ranks leaves each node once, which makes (N - 1) / N;
    the least possible is (n - 1) / n, as where switches reduce. NCCL gathers and scatters by rings
    where a node has several ranks, and has trees for all-reduce (src/graph/tuning.cc), so the
    former are expected to send a ring's share and the latter the least; the band covers both. In an
    all-to-all, the payload is that of one rank, and each sends equal parts to all.
    """
    if kind == "all-to-all":
        return ranks / nodes * (nodes - 1) / nodes
    is_by_ring = end == End.BAD or (end == End.EXPECTED and kind != "all-reduce")
    members = ranks if is_by_ring else nodes
    return (members - 1) / members
