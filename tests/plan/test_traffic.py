"""What a node sends to others in one collective, by hand."""

import pytest

from pipeline_lib.config.train import Train
from pipeline_lib.plan.choose import choose
from pipeline_lib.plan.machine import End, Ranks
from pipeline_lib.plan.traffic import Exchange, Group, Kind, duration_of
from tests.plan.fleet import QWEN3_8B, asking, case_of, machine, workload

PAYLOAD = 16e9


def sent_share(
    kind: Kind, end: End, ranks: Ranks, group: Group = "all", by_nccl: bool = True, **way: object
) -> float:
    """Bytes that the busiest node sends, of a payload."""
    exchange = Exchange("x", "backward", kind, group, PAYLOAD, 1, False, True)
    train = Train.model_validate({"strategy": "fsdp", **way})
    speeds = machine(ranks.total // ranks.per_node, ranks.per_node).speeds(end)
    return duration_of(exchange, train, ranks, speeds, end, by_nccl).sent_bytes / PAYLOAD


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
@pytest.mark.parametrize(
    ("end", "share"), [(End.GOOD, 1 / 2), (End.EXPECTED, 15 / 16), (End.BAD, 15 / 16)], ids=str
)
def test_rings_gather_and_scatter_between_nodes_of_several_gpus(
    kind: Kind, end: End, share: float
) -> None:
    """A ring through 16 ranks leaves both nodes once; 15/16 of the payload pass every link."""
    assert sent_share(kind, end, Ranks(16, 8)) == pytest.approx(share)


@pytest.mark.parametrize(
    ("end", "share"), [(End.GOOD, 1.0), (End.EXPECTED, 1.0), (End.BAD, 15 / 8)], ids=str
)
def test_trees_reduce_between_nodes(end: End, share: float) -> None:
    """They send the halves of two nodes there and back, a ring twice 15/16."""
    assert sent_share("all-reduce", end, Ranks(16, 8)) == pytest.approx(share)


@pytest.mark.parametrize("end", list(End), ids=str)
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
def test_of_nodes_with_one_gpu_a_ring_sends_the_least(kind: Kind, end: End) -> None:
    assert sent_share(kind, end, Ranks(4, 1)) == pytest.approx(
        (2 if kind == "all-reduce" else 1) * 3 / 4
    )


@pytest.mark.parametrize(
    ("ranks", "shared", "share"),
    [(Ranks(16, 8), 8, 0.0), (Ranks(16, 8), 16, 8 / 2), (Ranks(4, 1), 4, 3 / 4)],
    ids=str,
)
def test_ranks_that_share_blocks_send_equal_parts_to_all(
    ranks: Ranks, shared: int, share: float
) -> None:
    """Of 16 ranks on two nodes, the 8 of a node send half of what each has to the other node."""
    found = sent_share("all-to-all", End.EXPECTED, ranks, "context", context_ranks=shared)
    assert found == pytest.approx(share)


def test_gloo_reduces_and_scatters_by_a_ring_that_goes_round_twice() -> None:
    assert sent_share("reduce-scatter", End.EXPECTED, Ranks(4, 2), by_nccl=False) == pytest.approx(
        2 * 3 / 4
    )


def test_replicas_that_span_nodes_have_rings_of_their_own() -> None:
    """12 of 24 ranks on three nodes of 8: the node in the middle is in both rings."""
    found = sent_share(
        "all-gather", End.EXPECTED, Ranks(24, 8), "shard", strategy="hsdp", shard_ranks=12
    )
    assert found == pytest.approx(2 * 11 / 12)


def test_over_25_gbit_each_node_of_eight_keeps_a_whole_model() -> None:
    """By the least possible, fsdp over both nodes would look faster than hsdp, which is false."""
    setting = case_of(QWEN3_8B, machine(2, 8, 25), workload(4096, 500), 256, None)
    choice = choose(asking(setting, Train(strategy="auto"), (), True))
    assert choice.chosen.train.strategy == "hsdp"
    assert choice.chosen.train.shard_ranks == 8
