"""Unions of intervals, against counting small moments one by one, and the resulting event."""

from hypothesis import given
from hypothesis import strategies as st
from pytest import approx, mark

from pipeline_lib.train.gpu_activity import (
    Interval,
    describe,
    kind_of,
    length,
    row_fields,
    shares_of,
)

NAMES = (
    "gemm_kernel",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096>)",
    "Memcpy HtoD (Pinned)",
)
ALL_TO_ALL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
intervals = st.tuples(st.integers(-5, 30), st.integers(0, 12)).map(
    lambda pair: (pair[0], pair[0] + pair[1])
)
kernels = st.lists(st.tuples(st.sampled_from(NAMES), intervals), max_size=12)


def seconds_of(found: list[tuple[str, Interval]], span: Interval) -> dict[str, int]:
    """Whole seconds of `span` by what goes on in them."""
    counts = {"compute": 0, "communication": 0, "copy": 0, "idle": 0, "any communication": 0}
    for second in range(int(span[0]), int(span[1])):
        kinds = {kind_of(name) for name, (begin, end) in found if begin <= second < end}
        counts[next((kind for kind in counts if kind in kinds), "idle")] += 1
        counts["any communication"] += "communication" in kinds
    return counts


@given(found=kernels)
def test_every_second_counts_once(found: list[tuple[str, Interval]]) -> None:
    shares, counted = shares_of(found, (0, 20)), seconds_of(found, (0, 20))
    assert shares.compute_s == counted["compute"]
    assert shares.exposed_communication_s == counted["communication"]
    assert shares.exposed_copy_s == counted["copy"]
    assert shares.idle_s == counted["idle"]
    assert shares.hidden_communication_s == counted["any communication"] - counted["communication"]


@given(found=st.lists(intervals, max_size=12))
def test_the_length_of_a_union_is_that_of_its_points(found: list[Interval]) -> None:
    assert length(found) == len(
        {second for begin, end in found for second in range(int(begin), int(end))}
    )


@mark.parametrize(
    ("kernel", "kind"),
    [
        (
            "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "communication",
        ),
        ("ncclKernel_AllReduce_RING_LL_Sum_float", "communication"),
        (ALL_TO_ALL, "communication"),
        ("Memcpy DtoH (Device -> Pageable)", "copy"),
        ("Memset (Device)", "copy"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
            "compute",
        ),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTN", "compute"),
    ],
)
def test_kernels_by_their_names(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_the_event_has_seconds_and_fractions_that_add_up() -> None:
    """Clocks differ: the span ends with the last kernel."""
    fields = describe(
        [(NAMES[0], (100.0, 101.0)), (NAMES[1], (100.5, 101.5)), (NAMES[2], (101.5, 102.0))], 4.0
    )
    assert fields == {
        **{
            "step_s": 4.0,
            "compute_s": 1.0,
            "exposed_communication_s": 0.5,
            "exposed_copy_s": 0.5,
            "idle_s": 2.0,
        },
        **{
            "hidden_communication_s": 0.5,
            "compute_fraction": 0.25,
            "exposed_communication_fraction": 0.125,
        },
        **{
            "exposed_copy_fraction": 0.125,
            "idle_fraction": 0.5,
            "hidden_communication_fraction": 0.125,
        },
        **{"context_s": 0.0, "context_fraction": 0.0},
    }
    shares = [
        fields[f"{name}_fraction"]
        for name in ("compute", "exposed_communication", "exposed_copy", "idle")
    ]
    assert sum(shares) == approx(1.0)
    assert row_fields(fields) == {
        **{"profile_compute_s": 1.0, "profile_exposed_communication_s": 0.5},
        **{"profile_exposed_copy_s": 0.5, "profile_idle_s": 2.0},
    }


def test_communication_of_ranks_that_share_blocks_is_told_apart() -> None:
    found = shares_of(
        [(NAMES[0], (0.0, 2.0)), (NAMES[1], (2.0, 3.0)), (ALL_TO_ALL, (1.0, 2.5))], (0.0, 4.0)
    )
    assert found.context_s == 1.5
    assert found.exposed_communication_s + found.hidden_communication_s == 2.0


def test_a_profiler_that_sees_no_kernel_says_so() -> None:
    assert "saw no kernels" in describe([], 1.0)["problem"]
    assert row_fields(describe([], 1.0)) == {}
