"""The long-context benchmark: it runs on a CPU with small sizes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline_lib.core.files import read_json

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_it_runs_small(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.long_context", "--tiny", "--lengths", "64,256", "--layers", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    results = read_json(tmp_path / "results.json")["results"]
    assert [found for found in results if "error" in found] == []
    assert [(found["tokens"], found["kind"]) for found in results] == [
        (tokens, kind) for tokens in (64, 256) for kind in ("parts", "away", "here")
    ]
    for found in results:
        assert found["parts_s"] > found["attention_s"] > 0 if found["kind"] == "parts" else found["tokens_per_s"] > 0
    assert "parts / step" in done.stdout
