"""The long-context benchmark: it runs on a CPU with small sizes."""

import sys
from pathlib import Path

import pytest

from benchmarks.long_context import KINDS, cases, main
from pipeline_lib.core.files import read_json

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_it_runs_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "long_context",
        "--tiny",
        "--lengths",
        "256",
        "--layers",
        "2",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
    main()
    results = read_json(tmp_path / "results.json")["results"]
    assert [found for found in results if "error" in found] == []
    assert [(found["tokens"], found["kind"]) for found in results] == [
        (256, kind) for kind in ("parts", "away", "here")
    ]
    for found in results:
        assert (
            found["parts_s"] > found["attention_s"] > 0
            if found["kind"] == "parts"
            else found["tokens_per_s"] > 0
        )
    assert "parts / step" in capsys.readouterr().out


def test_every_length_has_every_kind() -> None:
    found = [(case.tokens, case.kind) for case in cases([64, 256], 2, True, list(KINDS), None)]
    assert found == [(tokens, kind) for tokens in (64, 256) for kind in ("parts", "away", "here")]
