"""What earlier code sealed is read strictly, and would be written again with the same bytes."""

import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline_lib.core.files import json_text, write_jsonl
from pipeline_lib.records.data import BlockIndex, Ledger, PreviewSample
from pipeline_lib.records.evaluation import (
    BaseAnswer,
    BaseEvaluation,
    BaseScore,
    DocumentScore,
    Evaluation,
    Generation,
)
from pipeline_lib.records.merge import Parity
from pipeline_lib.records.plan import PlanDocument
from pipeline_lib.records.record import Record, read_record, read_records, to_json
from pipeline_lib.records.training import Step, Training
from tests.golden.make import ARCHIVE

BASE, TUNED = "8b1ac49371a09010", "902a3c5915a04022"
ONE: Mapping[str, type[Record]] = {
    "store/train/090ee2397abeda19/summary.json": Training,
    "store/train/090ee2397abeda19/plan.json": PlanDocument,
    "store/plan/713a6591be2ed68d/plan.json": PlanDocument,
    "store/plan/9129d17c427744a4/plan.json": PlanDocument,
    f"store/evaluate/{BASE}/metrics.json": BaseEvaluation,
    f"store/evaluate/{TUNED}/metrics.json": Evaluation,
    "store/merge/b4bba1e684442b82/parity.json": Parity,
    "store/tokenize/cec3653fbce90e19/ledger.json": Ledger,
    "store/shard/fd90166a2a759702/train/index.json": BlockIndex,
    "store/shard/fd90166a2a759702/validation/index.json": BlockIndex,
}
SEVERAL: Mapping[str, type[Record]] = {
    "store/train/090ee2397abeda19/metrics.jsonl": Step,
    "runs/f286f512ff98b509/checkpoints/step-00000009/metrics/from-00000001.jsonl": Step,
    f"store/evaluate/{BASE}/scores.jsonl": BaseScore,
    f"store/evaluate/{BASE}/generations.jsonl": BaseAnswer,
    f"store/evaluate/{TUNED}/scores.jsonl": DocumentScore,
    f"store/evaluate/{TUNED}/generations.jsonl": Generation,
    "store/tokenize/cec3653fbce90e19/preview.json": PreviewSample,
}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of earlier code."""
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(ARCHIVE) as archive:
        for name in (*ONE, *SEVERAL):
            archive.extract(name, folder)  # noqa: S202 - made here
    return folder


@pytest.mark.parametrize("name", ONE)
def test_a_record_keeps_its_bytes(earlier: Path, name: str) -> None:
    path = earlier / name
    assert json_text(to_json(read_record(ONE[name], path))) == path.read_text()


@pytest.mark.parametrize("name", SEVERAL)
def test_rows_keep_their_bytes(earlier: Path, tmp_path: Path, name: str) -> None:
    path = earlier / name
    rows = to_json(read_records(SEVERAL[name], path))
    if path.suffix == ".jsonl":
        write_jsonl(tmp_path / "again", rows)
        assert (tmp_path / "again").read_bytes() == path.read_bytes()
    else:
        assert json_text(rows) == path.read_text()
