"""Records are strict, and say what is wrong in which file."""

import math
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.train import PLACEMENT_KEYS
from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.files import write_json, write_jsonl
from pipeline_lib.records.merge import Unproven, read_parity
from pipeline_lib.records.plan import Chosen, PlannedBatch, read_plan, read_plan_of_training
from pipeline_lib.records.record import read_record, to_json
from pipeline_lib.records.training import Step, Training, read_training
from tests.complete import parity, plan_document, record, step, step_json, training, training_json


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"steps": "many"}, "steps"),
        ({"steps": None}, "steps"),
        ({"made_up": 1}, "made_up"),
    ],
)
def test_a_wrong_value_and_an_unknown_key_are_named(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    path = tmp_path / "summary.json"
    write_json(path, training_json(**change))
    with pytest.raises(IntegrityError, match=rf"summary\.json: {named}: .*run snakemake again"):
        read_record(Training, path)


@pytest.mark.parametrize("key", training_json())
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    content = training_json()
    del content[key]
    write_json(tmp_path / "summary.json", content)
    with pytest.raises(IntegrityError, match=rf"summary\.json: {key}: "):
        read_record(Training, tmp_path / "summary.json")


@pytest.mark.parametrize("field", fields(PlannedBatch), ids=lambda field: field.name)
def test_a_default_that_is_always_written_may_not_be_missing_either(field: Field[Any]) -> None:
    written = to_json(PlannedBatch(64, 2, 1, 1, 1.0, 128))
    assert record(PlannedBatch, written) == PlannedBatch(64, 2, 1, 1, 1.0, 128)
    del written[field.name]
    with pytest.raises(IntegrityError, match=f"{field.name}: Field required"):
        record(PlannedBatch, written)


@pytest.mark.parametrize("text", ["", "{", "[1, 2"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"summary\.json is damaged"):
        read_record(Training, tmp_path / "summary.json")


def test_what_a_step_did_not_measure_is_not_in_its_row() -> None:
    assert to_json(step(3)) == step_json(3)
    assert list(to_json(step(3, verdict="skip", mfu=0.5)))[-2:] == ["peak_memory_bytes", "mfu"]


def test_a_held_out_loss_that_is_not_finite_is_null_and_another_thing_than_none() -> None:
    row = to_json(step(3, validation_loss=math.nan))
    assert row["validation_loss"] is None
    found = record(Step, row).validation_loss
    assert found is not None and math.isnan(found)
    assert record(Step, step_json(3)).validation_loss is None


def test_speed_and_time_come_from_the_rows_of_a_training_whose_summary_lacks_them(
    tmp_path: Path,
) -> None:
    earlier = training_json()
    del earlier["tokens_per_s"], earlier["training_time_s"]
    write_json(tmp_path / "summary.json", earlier)
    rows = [step_json(1, elapsed_s=2.0), step_json(2, elapsed_s=5.0, attempt=2)]
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    assert read_training(tmp_path) == training(tokens_per_s=100.0, training_time_s=7.0)


def test_a_proof_is_told_from_a_reason_for_none(tmp_path: Path) -> None:
    path = tmp_path / "parity.json"
    for written in (parity(), Unproven(unproven="another base")):
        write_json(path, to_json(written))
        assert read_parity(path) == written


def test_the_plan_chooses_every_key_of_placement() -> None:
    assert {field.name for field in fields(Chosen)} == PLACEMENT_KEYS


def test_a_plan_of_earlier_code_is_none_beside_its_training_and_a_damaged_one_an_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "plan.json"
    found = to_json(plan_document())
    write_json(path, found)
    assert read_plan_of_training(path) == read_plan(path) == plan_document()
    del found["words"]["verdicts"]
    write_json(path, found)
    assert read_plan_of_training(path) is None
    with pytest.raises(IntegrityError, match=r"plan\.json: words\.verdicts: Field required"):
        read_plan(path)
    path.write_text("{")
    with pytest.raises(IntegrityError, match=r"plan\.json is damaged"):
        read_plan_of_training(path)
