"""The QLoRA benchmark: every part runs on a CPU with small sizes."""

import math
import sys
from pathlib import Path

import pytest

from benchmarks.qlora import cases, main
from pipeline_lib.core.files import read_json

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_all_parts_run_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["qlora", "--tiny", "--out", str(tmp_path), "--pretrain-s", "1"]
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
    main()
    results = read_json(tmp_path / "results.json")["results"]
    assert [found for found in results if "error" in found] == []
    assert {found["part"] for found in results} == {"memory", "speed", "peers", "quality"}
    assert all(found["tokens_per_s"] > 0 for found in results if found["part"] != "quality")
    losses = results[-1]
    exact, quantized = (losses[f"LoRA, base in {base}"] for base in ("bf16", "nf4"))
    assert all(math.isfinite(way["after"]) for way in (exact, quantized))
    assert quantized["before"] != exact["before"]
    assert "held-out after" in capsys.readouterr().out


def test_the_cases_are_those_of_the_issue() -> None:
    found = [(case.size, case.cap_bytes) for case in cases(["memory"], False, 0.0, "full")]
    assert found == [("8B", 12 * 10**9), ("14B", 16 * 10**9), ("32B", 32 * 10**9)]
