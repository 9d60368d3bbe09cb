"""Lists of experiments and random draws: which they make, and what is said of bad ones."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_lib.config.draws import DIGITS, draw, range_problem
from pipeline_lib.config.load import load_configs
from tests.config.test_sweep import names, problems_of, written

LR = "train.lr: {low: 1.0e-5, high: 1.0e-3, scale: log}"
DRAWN = [4.58e-05, 0.000117, 1.56e-05, 3.78e-05]  # of seed 0, on every machine
ends = st.floats(1e-9, 1e9)


def test_each_entry_of_a_list_is_an_experiment_and_what_it_leaves_out_is_the_files(
    tmp_path: Path,
) -> None:
    path = written(
        tmp_path, "{list: [{train.lr: 2.0e-4, train.warmup_steps: 10}, {train.lr: 3.0e-4}, {}]}"
    )
    assert [
        (one.experiment, one.train.lr, one.train.warmup_steps) for one in load_configs(path)
    ] == [
        ("demo-lr=0.0002-warmup_steps=10", 2e-4, 10),
        ("demo-lr=0.0003", 3e-4, None),
        ("demo", 1e-4, None),
    ]


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        (
            "{list: [{train.lr: 2.0e-4, train.seed: 1}, {train.lr: 3.0e-4, train.seed: 1}]}",
            ["lr=0.0002", "lr=0.0003"],
        ),
        (
            "{train.seed: [1, 2], list: [{train.lr: 2.0e-4}, {}]}",
            ["seed=1-lr=0.0002", "seed=1", "seed=2-lr=0.0002", "seed=2"],
        ),
        ("{list: [{train.seed: 1}, {shard.seed: 1}]}", ["train.seed=1", "shard.seed=1"]),
        (
            "{random: {experiments: 2, train.seed: [4]}, train.lr: [2.0e-4, 3.0e-4]}",
            ["lr=0.0002", "lr=0.0003"],
        ),
    ],
)
def test_they_are_named_by_what_differs_and_combine_with_a_grid(
    tmp_path: Path, sweep: str, expected: list[str]
) -> None:
    assert names(written(tmp_path, sweep)) == [f"demo-{tag}" for tag in expected]


def test_another_experiment_or_key_changes_nothing_of_what_was_drawn(tmp_path: Path) -> None:
    def rates(sweep: str) -> list[float]:
        return [one.train.lr for one in load_configs(written(tmp_path, sweep))]

    few = rates(f"{{random: {{experiments: 4, {LR}}}}}")
    assert rates(f"{{random: {{experiments: 6, {LR}}}}}")[:4] == few
    assert rates(f"{{random: {{train.seed: [1, 2], experiments: 4, {LR}}}}}") == few
    assert rates(f"{{random: {{experiments: 4, seed: 1, {LR}}}}}") != few
    assert few == DRAWN


def test_draws_that_come_out_alike_are_one_experiment(tmp_path: Path) -> None:
    found = names(written(tmp_path, "{random: {experiments: 50, train.seed: {low: 1, high: 3}}}"))
    assert sorted(found) == ["demo-seed=1", "demo-seed=2", "demo-seed=3"]


@given(st.integers(0, 2**32), st.integers(0, 999), ends, ends, st.sampled_from(["linear", "log"]))
def test_a_drawn_number_is_in_its_range_and_short(
    seed: int, index: int, one: float, other: float, scale: str
) -> None:
    choices = {"low": min(one, other), "high": max(one, other), "scale": scale}
    if range_problem(choices) is None:
        value = draw(seed, "train.lr", index, choices)
        assert choices["low"] <= value <= choices["high"]
        assert value == draw(seed, "train.lr", index, choices)
        assert value in choices.values() or float(f"{value:.{DIGITS}g}") == value


def test_draws_spread_evenly_over_the_scale() -> None:
    log = [
        math.log10(draw(0, "lr", index, {"low": 1e-5, "high": 1e-3, "scale": "log"}))
        for index in range(1000)
    ]
    whole = [draw(0, "rank", index, {"low": 1, "high": 4}) for index in range(1000)]
    listed = [draw(0, "block", index, [2048, 4096]) for index in range(1000)]
    assert 440 < sum(value < -4 for value in log) < 560
    assert all(200 < whole.count(value) < 300 for value in (1, 2, 3, 4))
    assert 440 < listed.count(2048) < 560


WRONG = {
    "list of values": (
        "{list: [1.0e-4]}",
        ["list[0]: 0.0001 is not keys with values, as in {train.lr: 1.0e-4}"],
    ),
    "empty list": ("{list: []}", ["list: holds no experiments, as in [{train.lr: 1.0e-4}]"]),
    "no whole keys": (
        "{list: [{train: {lr: 1.0e-4}}, {train.lr: 1.0e-4}, {train.lr: 1.0e-4}]}",
        [
            "list[0]: train: a section or a name; sweep one of its keys, as in train.lr",
            "list[2]: the same as list[1]",
        ],
    ),
    "set twice": (
        "{train.lr: [1.0e-4], list: [{train.lr: 2.0e-4}]}",
        ["list: train.lr: is swept twice; keep one of them"],
    ),
    "within": (
        "{train.lora: [{rank: 4}], random: {experiments: 1, train.lora.rank: [4, 8]}}",
        ["random: train.lora.rank: lies within train.lora, which is swept too; keep one of them"],
    ),
    "no keys": (
        "{random: {experiments: 3}}",
        [
            "random: holds no keys to draw values of, as in"
            " {experiments: 8, seed: 0, train.lr: {low: 1.0e-5, high: 1.0e-3, scale: log}}"
        ],
    ),
    "all at once": (
        "{random: {seed: -1, experimets: 3, train.lr: {low: 1, hihg: 2}, train.beta1: 0.9}}",
        [
            "random: experiments: missing; how many are drawn, up to 1000",
            "random: seed: -1 is not a whole number of at least 0",
            "random: experimets: a section or a name; sweep one of its keys, as in train.lr;"
            " did you mean 'experiments'?",
            "random: train.lr: unknown key 'hihg'; did you mean 'high'?",
            "random: train.beta1: 0.9 is not a list of values or a range",
        ],
    ),
    "too many": (
        "{random: {experiments: 5000, train.seed: [1]}}",
        ["random: experiments: 5000 experiments are more than 1000"],
    ),
    "no range": (
        "{random: {experiments: 2, train.lr: {low: 2.0, high: 1.0}}}",
        ["random: train.lr: low 2.0 is not below high 1.0"],
    ),
    "log of zero": (
        "{random: {experiments: 2, train.lr: {low: 0, high: 1.0, scale: log}}}",
        ["random: train.lr: scale log, and low is 0; it has to be above 0"],
    ),
    "form": (
        "{lists: [{train.lr: 1.0}]}",
        ["lists: a section or a name; sweep one of its keys, as in train.lr; did you mean 'list'?"],
    ),
}


@pytest.mark.parametrize(("sweep", "said"), WRONG.values(), ids=WRONG)
def test_every_mistake_is_named_with_line_and_key(
    tmp_path: Path, sweep: str, said: list[str]
) -> None:
    assert problems_of(written(tmp_path, sweep)) == [
        f"line 5: sweep: {problem}" for problem in said
    ]


def test_lines_are_those_of_the_entries(tmp_path: Path) -> None:
    path = written(tmp_path, "\n  list:\n  - train.lr: -1.0\n  - train.seed: x\n    train.lrr: 2")
    assert problems_of(path) == [
        "line 7: train.lr: -1.0 should be greater than 0 (with lr=-1.0)",
        'line 8: train.seed: "x" is not a whole number (with seed=x-lrr=2)',
        "line 9: train.lrr: unknown key; did you mean 'lr'? (with seed=x-lrr=2)",
    ]
