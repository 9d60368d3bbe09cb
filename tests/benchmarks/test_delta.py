"""The benchmark of Gated DeltaNet runs, and counts what its formula says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline_lib.arch.geometry import Delta

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_it_runs_on_a_cpu() -> None:
    command = [sys.executable, "-m", "benchmarks.delta", "--tiny", "--patience-s", "0.01"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * 4
    assert all(" ms " in line and "failed" not in line for line in lines)


def test_a_token_of_9b_costs_139264_flops_a_head() -> None:
    """3 products with a 128 x 128 state, and 5 with triangles of a chunk of 64, at two FLOPs."""
    assert (
        Delta(1, 1, 128, 128, 4).flops_per_token
        == 2 * (3 * 128 * 128 + 5 * 64 * 128 / 2)
        == 139_264
    )
