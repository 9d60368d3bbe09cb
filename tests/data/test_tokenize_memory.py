"""The tokenize stage reads, encodes and writes as a stream: ten times the data, equal memory."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from .conftest import ROOT, Pipeline

ROWS = 700
# Small batches, so that a small input too has as many of them on their way as there may be. VmHWM
# is the peak of a program alone; rusage also counts what its process held before it became that
# program.
STAGE = """
import sys
from functools import partial
from pathlib import Path
import psutil
from pipeline_lib.core.stage import run_stage
from pipeline_lib.core.store import Store
from pipeline_lib.data import sources, tokenize

def peak_kb(process):
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])

def workers():
    return [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]

class Writer(tokenize.SampleWriter):
    def finish(self, sources):
        super().finish(sources)
        global peak_worker_kb
        peak_worker_kb = max(map(peak_kb, workers()))

sources.BATCH_BYTES = tokenize.BYTES_PER_WORKER = 1 << 16
tokenize.SampleWriter = Writer
path = Path(sys.argv[1])
store = Store(path.parent.parent)
run_stage(partial(tokenize.run, workers=2), store.read_spec(path), store, lambda text: None)
print(peak_kb(psutil.Process()), peak_worker_kb)
"""


def write_rows(path: Path, count: int) -> None:
    random = Random(0)
    words = [f"word{number}" for number in range(300)]
    with path.open("w") as file:
        for number in range(count):
            answer = " ".join(random.choices(words, k=150))
            file.write(json.dumps({"instruction": f"What is {number}?", "output": answer}) + "\n")


def peaks_mb(pipeline: Pipeline, path: Path) -> tuple[float, float]:
    """Peak resident memory of the process that runs the stage, and of its largest worker."""
    experiment = pipeline.compile(
        data=[{"source": "file", "path": str(path)}],
        tokenize={"max_tokens": 4096},
        shard={"block_tokens": 4096},
        train={"global_batch_tokens": 8192},
    )
    pipeline.run(experiment, "data.0")
    spec = experiment.specs["tokenize"]
    pipeline.store.write_specs([spec])
    command = [sys.executable, "-c", STAGE, str(pipeline.store.spec_path(spec.digest))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    parent, worker = (int(number) / 1024 for number in done.stdout.split())
    return parent, worker


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ten_times_the_data_take_the_same_memory(pipeline: Pipeline, tmp_path: Path) -> None:
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    write_rows(small, ROWS)
    write_rows(large, 10 * ROWS)
    before, after = peaks_mb(pipeline, small), peaks_mb(pipeline, large)
    grown_mb = [later - earlier for earlier, later in zip(before, after, strict=True)]
    assert large.stat().st_size > 7e6
    assert max(grown_mb) < 5, f"peaks of parent and worker: {before} MB, then {after} MB"
