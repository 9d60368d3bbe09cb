"""A token cache hit: `snakemake` for unchanged download, tokenize and shard, as users wait."""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.conversations import write_rows
from benchmarks.measure import seconds, show, spread
from pipeline_lib.config.compile import open_experiment
from pipeline_lib.core.store import Store

ROOT = Path(__file__).resolve().parent.parent
ROWS = 20_000


def run() -> None:
    """Print the first run, and the runs after it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", "plain", ROWS)
        config = folder / "config.yaml"
        source = {"source": "file", "path": str(folder / "rows.jsonl")}
        config.write_text(
            json.dumps(
                {"experiment": "cached", "model": {"source": "tiny"}, "data": {"train": [source]}}
            )
        )
        store = Store(folder / "store")
        target = str(store.pointer(open_experiment(config, store).ref("shard")))
        snakemake = partial(_snakemake, config, target, store, folder / "work")
        first, again = seconds(snakemake, repeats=1), seconds(snakemake)
    rows = [["first run", spread(first)], ["nothing changed", spread(again)]]
    show(f"cache: snakemake, up to the shards of {ROWS:,} rows", ["", "time"], rows)


def _snakemake(config: Path, target: str, store: Store, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    command = [
        str(Path(sys.executable).with_name("snakemake")),
        "--snakefile",
        str(ROOT / "workflow" / "Snakefile"),
    ]
    command += [target, "--directory", str(directory), "--configfile", str(config)]
    command += ["--workflow-profile", str(ROOT / "workflow" / "profiles" / "default")]
    environment = {**os.environ, "PIPELINE_STORE": str(store.root), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
