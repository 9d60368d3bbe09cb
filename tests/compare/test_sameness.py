"""Two runs of one config: identical to the last bit, or from which step on they are not."""

import math
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.compare.verdict import verdict
from pipeline_lib.core.store import Store
from tests.compare.fakes import Samples, compared, evaluated, experiment, made, seal, weights
from tests.report.fakes import Files, realistic_files


def files(content: str = "weights") -> Files:
    found = realistic_files()
    weights(found, content)
    evaluated(Samples.drawn(0).scores(0.0, 0), found)
    return found


def twin(store: Store, found: Files, replica: str | None = None) -> None:
    seal(
        store, experiment("twin" if replica is None else replica, train={"replica": replica}), found
    )


def test_the_same_config_in_two_stores_is_identical(store: Store, tmp_path: Path) -> None:
    other = Store(tmp_path / "other")
    for where in (store, other):
        twin(where, files())

    found = compared(store, "twin", f"{other.root}:twin")

    assert found.is_identical
    assert verdict(found) == (
        f"twin in {store.root} and twin in {other.root} are identical: 118 steps with the same "
        "loss, learning rate and gradient norm to the last bit, and the same model files."
    )


def test_speed_does_not_count_and_a_replica_has_its_own_digest(store: Store) -> None:
    slower = files()
    for row in slower["train"]["metrics.jsonl"]:
        row |= {"step_s": 9.0, "tokens_per_s": 1.0, "elapsed_s": 9.0 * row["step"], "attempt": 1}
    twin(store, files())
    twin(store, slower, "again")

    found = compared(store, "twin", "again")

    assert found.is_identical
    assert [row.name for row in found.differences.placing] == ["train.replica"]
    assert found.differences.changing == []


@pytest.mark.parametrize("name", ["loss", "lr", "grad_norm", "supervised_tokens"])
def test_a_last_bit_tells_them_apart_from_its_step_on(store: Store, name: str) -> None:
    other = files("other weights")
    row = other["train"]["metrics.jsonl"][41]
    row[name] = (
        math.nextafter(row[name], math.inf) if isinstance(row[name], float) else row[name] + 1
    )
    twin(store, files())
    twin(store, other, "again")

    found = compared(store, "twin", "again")

    assert not found.is_identical
    assert found.same_texts == ["twin and again first differ at step 42."]


@pytest.mark.parametrize(
    ("steps", "content", "told"),
    [
        (118, "other", "twin and again have the same curves, 118 steps with the same loss, "
        "learning rate and gradient "
         "norm to the last bit, but their model files differ."),
        (60, "weights", "twin and again are the same to the last bit up to step 60, where again "
        "ends; twin continues."),
        (0, "weights", "again has no steps yet: there is no curve to compare."),
    ],
)  # fmt: skip
def test_what_is_the_same_only_in_part_is_told_so(
    store: Store, steps: int, content: str, told: str
) -> None:
    other = files(content)
    del other["train"]["metrics.jsonl"][steps:]
    twin(store, files())
    twin(store, other, "again")

    found = compared(store, "twin", "again")

    assert (found.is_identical, found.same_texts) == (False, [told])


def test_without_both_models_nothing_is_called_identical(store: Store) -> None:
    without: dict[str, Any] = files()
    twin(store, files())
    parts = ("model", "data.0", "tokenize", "shard", "plan", "train")
    seal(store, experiment("again", train={"replica": "again"}), without, parts)

    found = compared(store, "twin", "again")

    assert not found.is_identical
    assert "have the same curves so far" in found.same_texts[0]


def test_one_training_that_two_experiments_share_is_no_repetition(store: Store) -> None:
    seal(store, experiment("one"), files())
    seal(store, experiment("two", evaluate={"generations": 1}), files())

    found = compared(store, "one", "two")

    assert found.same_texts == ["one and two use the same training, so its results are the same."]


def test_of_several_only_those_that_should_be_the_same_are_told_of(store: Store) -> None:
    twin(store, files())
    twin(store, files(), "again")
    made(store, "faster", 0.1, 1, train={"lr": 1e-2})

    found = compared(store, "twin", "again", "faster")

    assert not found.is_identical
    assert len(found.same) == 1
    assert "twin and again are identical" in found.same_texts[0]
