"""What a config says of held-out data: own sources, a fraction, or none, and what needs some."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.checks import cross_check
from pipeline_lib.config.load import load_config, load_sweep
from pipeline_lib.config.schema import Config
from pipeline_lib.config.strict_yaml import dotted
from pipeline_lib.config.train import Train
from pipeline_lib.config.warnings import warnings_of
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.report.publish import resolved
from tests.config.test_compile import compiled

PYDOC = {"source": "pydoc"}
OWN = {"source": "pydoc", "max_rows": 10}


def given(data: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "experiment": "demo",
        "model": {"source": "tiny"},
        "data": {"train": [PYDOC], **data},
        **sections,
    }


def problems(data: dict[str, Any], **sections: Any) -> dict[str, str]:
    config = Config.model_validate_json(json.dumps(given(data, **sections)))
    return {dotted(keys): text for keys, text in cross_check(config)}


def test_held_out_sources_and_a_fraction_exclude_each_other() -> None:
    [(key, text)] = problems({"validation": [OWN], "validation_fraction": 0.05}).items()
    assert key == "data.validation_fraction" and "cannot be combined with data.validation" in text
    assert (
        problems({"validation": [OWN]})
        == problems({"validation": [OWN], "validation_fraction": 0})
        == {}
    )


def test_a_held_out_source_has_no_weight_and_all_problems_are_told() -> None:
    files = {"source": "huggingface", "name": "a/b", "files": ["*.json"], "split": "test"}
    found = problems(
        {"validation": [OWN, {**OWN, "weight": 2.0}, files], "validation_fraction": 0.1}
    )
    assert list(found) == [
        "data.validation[2].files",
        "data.validation_fraction",
        "data.validation[1].weight",
    ]


NEEDS_SOME = {
    "validate_every_steps": 5,
    "early_stop_validations": 2,
    "keep_best": True,
    "sample_every_steps": 5,
}


def test_what_needs_held_out_data_is_refused_without_any() -> None:
    found = problems({"validation_fraction": 0}, train=NEEDS_SOME)
    assert list(found) == [f"train.{key}" for key in NEEDS_SOME]
    assert all("data.validation_fraction is 0" in text for text in found.values())
    assert (
        problems({"validation_fraction": 0})
        == problems({"validation": [OWN]}, train=NEEDS_SOME)
        == {}
    )


def test_halving_needs_held_out_data_and_steps(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    sweep = {"train.lr": [1e-4, 2e-4], "halving": {"first_step": 10}}
    for data, train, key, said in (
        (
            {"validation_fraction": 0},
            {},
            "data.validation_fraction",
            "sweep.halving compares held-out losses",
        ),
        (
            {},
            {"validate_every_steps": "epoch"},
            "train.validate_every_steps",
            "set it to 10 or a divisor of 10",
        ),
    ):
        path.write_text(json.dumps(given(data, train=train, sweep=sweep)))
        with pytest.raises(ConfigError) as raised:
            load_sweep(path)
        [problem] = raised.value.problems
        assert key in problem and said in problem


def test_an_unused_number_of_held_out_prompts_is_named() -> None:
    config = Config.model_validate_json(
        json.dumps(given({"validation_fraction": 0}, evaluate={"generations": 3}))
    )
    assert any(
        one.key == "evaluate.generations" and one.sentence.startswith("has no effect")
        for one in warnings_of(config)
    )
    assert config.asked.generations == 0


def test_near_duplicates_that_are_kept_are_only_counted() -> None:
    for duplicates, is_named in (("keep", True), ("drop", False)):
        tokenize = {"near_duplicates": 0.9, "duplicates": duplicates}
        config = Config.model_validate_json(json.dumps(given({}, tokenize=tokenize)))
        assert (
            any(
                one.key == "tokenize.near_duplicates" and one.sentence.startswith("only counts")
                for one in warnings_of(config)
            )
            == is_named
        )


def test_only_several_held_out_sources_are_told_apart_by_the_evaluation() -> None:
    two = {"train": [PYDOC, OWN]}
    for data, is_by_source in (
        ({}, False),
        (two, True),
        ({**two, "validation_fraction": 0}, False),
        ({**two, "validation": [OWN]}, False),
        ({"validation": [OWN, PYDOC]}, True),
    ):
        inputs = compiled(given(data)).specs["evaluate"].inputs
        assert ("tokenize" in inputs) == is_by_source


def test_held_out_sources_are_keyed_as_such_and_others_keep_their_digests() -> None:
    specs = compiled(given({"validation": [OWN]})).specs
    assert (
        specs["tokenize"].settings["validation_sources"]
        == specs["shard"].settings["validation_sources"]
        == 1
    )
    assert specs["shard"].settings["validation_fraction"] == 0
    assert list(specs["tokenize"].inputs) == ["model", "data.0", "data.1"]
    plain = compiled(given({})).specs
    assert "validation_sources" not in {**plain["tokenize"].settings, **plain["shard"].settings}
    assert plain["data.0"].digest == specs["data.0"].digest


def test_a_resolved_config_reads_again(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(json.dumps(given({"validation": [OWN]})))
    config = load_config(path)
    path.write_text(json.dumps(resolved(config)))
    assert load_config(path) == config


# The word `epoch` in place of a number of steps.


@pytest.mark.parametrize(
    ("key", "words"), [("save_every_steps", "epoch, auto"), ("validate_every_steps", "epoch")]
)
def test_a_word_or_a_number_is_read_and_anything_else_is_refused_once(
    tmp_path: Path, key: str, words: str
) -> None:
    path = tmp_path / "my.yaml"
    for value, said in (
        ("epoch", None),
        (7, None),
        ("epochs", f'"epochs" is not one of {words}, a whole number; did you mean'),
        (0, "0 should be greater than or equal to 1"),
        (1.5, "1.5 is not a whole number"),
        ([3], "[3] is not a whole number"),
    ):
        path.write_text(json.dumps(given({}, train={key: value})))
        if said is None:
            assert getattr(load_config(path).train, key) == value
            continue
        with pytest.raises(ConfigError) as raised:
            load_config(path)
        [problem] = raised.value.problems
        assert f"train.{key}: {said}" in problem


def test_saves_by_epoch_are_counted_with_those_for_the_guards() -> None:
    train = Train.model_validate(
        {"save_every_steps": "epoch", "guards": {"rollback_every_steps": 100}}
    )
    saved = {*range(30, 300, 30), *range(100, 300, 100)}
    assert train.saves(300, epoch_steps=30) == len(saved) + 1
    assert train.model_copy(update={"keep_last": 1}).keeps_one_for_guards
    assert (
        train.intervals_in_words == "at the end of every epoch and, for the guards, every 100 steps"
    )


def test_saves_by_auto_are_not_counted_and_the_one_for_the_guards_is_kept() -> None:
    train = Train.model_validate({"guards": {"rollback_every_steps": 100}})
    assert train.save_every_steps == "auto"
    assert train.saves(300, epoch_steps=30) == len({100, 200, 300})
    assert train.model_copy(update={"keep_last": 1}).keeps_one_for_guards
    assert (
        train.intervals_in_words
        == "as often as hardly costs time and, for the guards, every 100 steps"
    )


def test_saving_by_epoch_changes_no_result_and_validating_by_epoch_is_part_of_it() -> None:
    plain, saved, seen = (
        compiled(given({}, train=train)).ref("train").digest
        for train in ({}, {"save_every_steps": "epoch"}, {"validate_every_steps": "epoch"})
    )
    assert plain == saved != seen
