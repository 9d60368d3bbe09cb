"""`python -m benchmarks [tokenizing] [packing] [reading] [caching] [kernels]`; all of them without a name."""

import argparse
from collections.abc import Callable, Mapping

from benchmarks import caching, kernels, packing, reading, tokenizing

BENCHMARKS: Mapping[str, Callable[[], None]] = {
    "tokenizing": tokenizing.run,
    "packing": packing.run,
    "reading": reading.run,
    "caching": caching.run,
    "kernels": kernels.run,
}

parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures what the README claims.")
parser.add_argument("names", nargs="*", metavar="name", help=", ".join(BENCHMARKS))
names = parser.parse_args().names
if unknown := [name for name in names if name not in BENCHMARKS]:
    parser.error(f"{', '.join(unknown)}: not one of {', '.join(BENCHMARKS)}")
for name, run in BENCHMARKS.items():
    if not names or name in names:
        run()
