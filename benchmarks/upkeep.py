"""Commands over a store of 1,000 experiments: `store`, `status`, `compare`, and `snakemake -n`.

The last is for another one.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.measure import seconds, show, spread
from tests.upkeep.stores import Shop, large_store

ROOT = Path(__file__).parents[1]


def run(experiments: int = 1000, repeats: int = 3) -> None:
    """Print what each command takes with `experiments` in the store, and with two."""
    with tempfile.TemporaryDirectory() as name:
        start_s = time.perf_counter()
        many = large_store(Path(name) / "many", experiments)
        made_s = time.perf_counter() - start_s
        two = large_store(Path(name) / "two", 2)
        commands = {
            "store ls": ["-m", "pipeline_lib", "store", "ls"],
            "store ls --all": ["-m", "pipeline_lib", "store", "ls", "--all"],
            "store du": ["-m", "pipeline_lib", "store", "du"],
            "store gc --dry-run, one kept": [*_GC, "run-0"],
            "store gc --dry-run, half kept": [*_GC, "run-*[02468]"],
            "store verify": ["-m", "pipeline_lib", "store", "verify"],
            "status": ["-m", "pipeline_lib", "status"],
            "compare": ["-m", "pipeline_lib", "compare", "run-0", "run-1"],
            "snakemake -n": [*_SNAKEMAKE, "--configfile", "run.yaml"],
        }
        rows = []
        for what, command in commands.items():
            small = seconds(partial(_run, command, two), repeats)
            before_s = _computed_s()
            large = seconds(partial(_run, command, many), repeats)
            computed_s = (_computed_s() - before_s) / repeats
            rows.append([what, spread(large), f"{computed_s:.3g} s", spread(small)])
    show(
        f"{experiments:,} finished experiments (the store was made in {made_s:.0f} s)",
        ["command", f"{experiments:,} in the store", "of it computing", "two"],
        rows,
    )


_SNAKEMAKE = ["-m", "snakemake", "-n", "--quiet", "-s", str(ROOT / "workflow" / "Snakefile")]
_GC = ["-m", "pipeline_lib", "store", "gc", "--dry-run", "--ignore-queue", "--keep-experiments"]


def _computed_s() -> float:
    """What all commands so far took of the processor: equal on a busy machine, unlike time."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(command: list[str], shop: Shop) -> None:
    config = shop.folder / "run.yaml"
    if not config.exists():
        config.write_text((shop.folder / "first.yaml").read_text().replace("first", "new"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PIPELINE_STORE": str(shop.store.root)}
    subprocess.run(
        [sys.executable, *command],
        cwd=shop.folder,
        env=environment,
        check=True,
        capture_output=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.upkeep", description=__doc__)
    parser.add_argument("--experiments", type=int, default=1000)
    run(parser.parse_args().experiments)
