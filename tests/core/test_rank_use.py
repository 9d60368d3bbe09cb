"""What is told of the ranks of a training, and what is warned of."""

from typing import Any

from pipeline_lib.core.rank_use import RankUse

GIB = 2**30


def rows(
    utilization: list[float] | None, memory: list[float], count: int = 3
) -> list[dict[str, Any]]:
    """Rows of steps, of which every second has the readings of all ranks."""
    known = {} if utilization is None else {"gpu_utilization_of_ranks": utilization}
    reading = {**known, "peak_memory_bytes_of_ranks": [value * GIB for value in memory]}
    return [
        row
        for step in range(count)
        for row in ({"step": 2 * step}, {"step": 2 * step + 1, **reading})
    ]


def test_the_median_utilization_and_the_largest_memory_count() -> None:
    found = RankUse.of([*rows([0.2, 0.3], [1, 1], 1), *rows([0.9, 0.95], [3, 2], 2)])
    assert found == RankUse((0.9, 0.95), (3 * GIB, 2 * GIB), 3)
    assert found.warnings().keys() == {"uneven GPU memory"}


def test_ranks_that_work_alike_and_enough_are_not_warned_of() -> None:
    assert RankUse.of(rows([0.9, 0.8], [10, 9.1])).warnings() == {}


def test_low_and_uneven_utilization_and_uneven_memory_are_told_with_the_ranks() -> None:
    found = RankUse.of(rows([0.97, 0.9, 0.61, 0.95], [70, 71, 70, 60])).warnings()
    assert "stays under 80% on rank 2 (61%)" in found["low GPU utilization"]
    assert "61% on rank 2, 97% on rank 0" in found["uneven GPU utilization"]
    assert found["uneven GPU memory"].endswith("60.0 GiB on rank 3, 71.0 GiB on rank 1")


def test_of_many_ranks_the_lowest_is_named() -> None:
    found = RankUse.of(rows([0.7, 0.72, 0.69, 0.7, 0.71, 0.9], [1] * 6)).warnings()
    assert "on 5 of 6 ranks, the lowest is rank 2 (69%)" in found["low GPU utilization"]


def test_a_few_readings_and_those_without_gpus_give_no_warning() -> None:
    assert RankUse.of(rows([0.1, 0.9], [1, 9], 2)).warnings() == {}
    of_cpus = RankUse.of(rows(None, [1, 9], 9))
    assert (of_cpus.utilization, of_cpus.peak_memory_bytes) == ((), (GIB, 9 * GIB))
    assert of_cpus.warnings() == {}


def test_rows_of_earlier_code_of_other_ranks_and_damaged_ones_are_left_out() -> None:
    assert RankUse.of([{"step": 1, "gpu_utilization": 0.5, "peak_memory_bytes": 7}]) == RankUse()
    damaged: list[dict[str, Any]] = [
        {"peak_memory_bytes_of_ranks": ["1", None]}, {"peak_memory_bytes_of_ranks": 3},
        {"peak_memory_bytes_of_ranks": []}, {"peak_memory_bytes_of_ranks": [float("nan"), 1.0]},
    ]  # fmt: skip
    found = RankUse.of([*damaged, *rows([0.1] * 4, [9] * 4), *rows([0.9, 0.9], [1, 1]), *damaged])
    assert found == RankUse((0.9, 0.9), (GIB, GIB), 3)
