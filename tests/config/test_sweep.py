"""One config file, many experiments: which, by what names, and what is said of impossible ones."""

from pathlib import Path

import pytest

from pipeline_lib.config.compile import open_experiment, open_experiments
from pipeline_lib.config.load import load_config, load_configs
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.store import Store

BASE = """\
experiment: demo
model: {source: tiny}
data: {train: [{source: pydoc}]}
train: {lr: 1.0e-4}
"""


def written(folder: Path, sweep: str, base: str = BASE) -> Path:
    path = folder / "config.yaml"
    path.write_text(f"{base}sweep: {sweep}\n")
    return path


def names(path: Path) -> list[str]:
    return [config.experiment for config in load_configs(path)]


def problems_of(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_configs(path)
    return caught.value.problems


def test_a_grid_is_the_product_of_its_lists_and_the_last_changes_fastest(tmp_path: Path) -> None:
    found = load_configs(written(tmp_path, "{train.lr: [1.0e-4, 2.0e-4], train.seed: [1, 2]}"))
    assert [(config.experiment, config.train.lr, config.train.seed) for config in found] == [
        ("demo-lr=0.0001-seed=1", 1e-4, 1),
        ("demo-lr=0.0001-seed=2", 1e-4, 2),
        ("demo-lr=0.0002-seed=1", 2e-4, 1),
        ("demo-lr=0.0002-seed=2", 2e-4, 2),
    ]
    assert load_config(tmp_path / "config.yaml") == found[0]


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ("{train.seed: [5]}", ["demo"]),
        ("{train.seed: [5], train.lr: [1.0e-5, 3.0e-5]}", ["demo-lr=1e-05", "demo-lr=3e-05"]),
        ("{train.seed: [1, 2], shard.seed: [3]}", ["demo-seed=1", "demo-seed=2"]),
        (
            "{train.seed: [1, 2], shard.seed: [3, 4]}",
            [f"demo-train.seed={a}-shard.seed={b}" for a in "12" for b in "34"],
        ),
        ("{train.warmup_steps: [null, 2]}", ["demo-warmup_steps=none", "demo-warmup_steps=2"]),
        ("{train.compile: [false, true]}", ["demo-compile=false", "demo-compile=true"]),
        ("{tokenize.system: [Be short., BE SHORT!]}", ["demo-system=1", "demo-system=2"]),
        (
            "{tokenize.system: [Be short., Be kind/nice]}",
            ["demo-system=Be_short", "demo-system=Be_kind_nice"],
        ),
        (f"{{tokenize.system: [{'x' * 25}, y]}}", ["demo-system=1", "demo-system=2"]),
        ("{train.freeze: [[], [model.norm.*]]}", ["demo-freeze=1", "demo-freeze=2"]),
        ("{'data.train[0].weight': [1.0, 2.5]}", ["demo-weight=1.0", "demo-weight=2.5"]),
    ],
)
def test_experiments_are_named_by_what_differs(
    tmp_path: Path, sweep: str, expected: list[str]
) -> None:
    assert names(written(tmp_path, sweep)) == expected


def test_a_key_whose_section_is_not_in_the_file_makes_it(tmp_path: Path) -> None:
    found = load_configs(written(tmp_path, "{train.lora.rank: [4, 8], train.method: [lora]}"))
    assert [config.train.lora.rank for config in found] == [4, 8]


WRONG = {
    "not a mapping": (
        "[1]",
        ["line 5: sweep: holds no keys with lists of values, as in train.lr: [1.0e-4, 2.0e-4]"],
    ),
    "empty": (
        "",
        ["line 5: sweep: holds no keys with lists of values, as in train.lr: [1.0e-4, 2.0e-4]"],
    ),
    "nested": (
        "{train: {lr: [1.0e-4]}}",
        ["line 5: sweep: train: write the whole key and a list of values, as in train.lr: [...]"],
    ),
    "no list": ("{train.lr: 1.0e-4}", ["line 5: sweep: train.lr: 0.0001 is not a list of values"]),
    "empty list": ("{train.lr: []}", ["line 5: sweep: train.lr: [] is not a list of values"]),
    "no key": (
        "{train..lr: [1]}",
        ["line 5: sweep: train..lr: not a key of a section, such as train.lr"],
    ),
    "name": (
        "{experiment: [a, b]}",
        ["line 5: sweep: experiment: a section or a name; sweep one of its keys, as in train.lr"],
    ),
    "twice": ("{train.seed: [1, 1]}", ["line 5: sweep: train.seed: holds a value twice"]),
    "within": (
        "{train.lora: [{rank: 4}], train.lora.rank: [4, 8]}",
        [
            "line 5: sweep: train.lora.rank: lies within train.lora, which is swept too; keep one "
            "of them"
        ],
    ),
    "too many": (
        f"{{train.seed: {list(range(40))}, shard.seed: {list(range(40))}}}",
        ["line 5: sweep: 1600 experiments are more than 1000"],
    ),
    "no section": (
        "{data.train.path: [a, b]}",
        ["line 5: sweep: data.train.path: the file has a value or a list there, and no keys"],
    ),
    "unknown key of all": (
        "{train.lrr: [1, 2]}",
        ["line 5: train.lrr: unknown key; did you mean 'lr'?"],
    ),
    "value of one": (
        "{train.lr: [1.0, -1.0]}",
        ["line 5: train.lr: -1.0 should be greater than 0 (with lr=-1.0)"],
    ),
    "value of some": (
        "{train.lr: [-1.0, 1.0], train.seed: [1, 2, 3]}",
        ["line 5: train.lr: -1.0 should be greater than 0 (with lr=-1.0-seed=1, and 2 more)"],
    ),
    "between keys, of one": (
        "{train.method: [full, lora], train.freeze: [[model.norm.*]]}",
        [
            "line 5: train.freeze: has no effect with train.method: lora, which freezes every "
            "weight of the model; remove it, or choose train.lora.targets (with method=lora)"
        ],
    ),
}


@pytest.mark.parametrize(("sweep", "said"), WRONG.values(), ids=WRONG)
def test_every_mistake_is_named_once_with_its_experiments(
    tmp_path: Path, sweep: str, said: list[str]
) -> None:
    assert problems_of(written(tmp_path, sweep)) == said


def test_mistakes_of_all_experiments_and_of_the_sweep_are_told_at_once(tmp_path: Path) -> None:
    base = BASE.replace("lr: 1.0e-4", "lr: 1.0e-4, beta1: 2.0")
    path = written(tmp_path, "{train.lr: [-1.0, 1.0], train.seed: [1, -2]}", base)
    assert problems_of(path) == [
        "line 5: train.lr: -1.0 should be greater than 0 (with lr=-1.0-seed=1, and 1 more)",
        "line 4: train.beta1: 2.0 should be less than 1",
        "line 5: train.seed: -2 should be greater than or equal to 0 (with lr=-1.0-seed=-2, and 1 "
        "more)",
    ]


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    base = BASE.replace("demo", "d" * 120)
    [problem] = problems_of(
        written(tmp_path, "{train.seed: [1, 2], train.lr: [1.0e-4, 2.0e-4]}", base)
    )
    assert "experiment: " in problem
    assert "is not a name of up to 128 letters" in problem


def test_overrides_come_after_the_sweep(tmp_path: Path) -> None:
    path = written(tmp_path, "{train.lr: [1.0e-4, 2.0e-4]}")
    assert [config.train.lr for config in load_configs(path, ["train.lr=3.0e-4"])] == [3e-4, 3e-4]


def test_what_experiments_have_in_common_is_one_stage(tmp_path: Path) -> None:
    found = open_experiments(
        written(tmp_path, "{train.lr: [1.0e-4, 2.0e-4]}"), Store(tmp_path / "store")
    )
    first, second = (experiment.specs for experiment in found)
    shared = [part for part in first if first[part].digest == second[part].digest]
    assert shared == ["model", "data.0", "tokenize", "shard", "baseline"]


def test_one_experiment_of_a_sweep_is_chosen_by_name(tmp_path: Path) -> None:
    path, store = written(tmp_path, "{train.lr: [1.0e-4, 2.0e-4]}"), Store(tmp_path / "store")
    assert open_experiment(path, store, "demo-lr=0.0002").config.train.lr == 2e-4
    with pytest.raises(
        ConfigError,
        match="a sweep of 2 experiments; name one with --experiment NAME: demo-lr=0.0001",
    ):
        open_experiment(path, store)
    with pytest.raises(
        ConfigError, match="no experiment is called 'demo-lr=2'; did you mean 'demo-lr=0.0002'"
    ):
        open_experiment(path, store, "demo-lr=2")


def test_files_that_some_experiments_lack_are_named_with_them(tmp_path: Path) -> None:
    path = written(tmp_path, "{model.tokenizer: [/nowhere/a, /nowhere/b], train.seed: [1, 2]}")
    with pytest.raises(ConfigError) as caught:
        open_experiments(path, Store(tmp_path / "store"))
    assert len(caught.value.problems) == 2
    for folder, problem in zip("ab", caught.value.problems, strict=True):
        assert f"/nowhere/{folder}" in problem
        assert problem.endswith(f"(with tokenizer=nowhere_{folder}-seed=1, and 1 more)")
