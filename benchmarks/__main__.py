"""`python -m benchmarks [tokenizing] [packing] [reading] [caching] [kernels] [counts]`; by default all."""

import argparse
import importlib

BENCHMARKS = ("tokenizing", "packing", "reading", "caching", "kernels", "counts")


def main() -> None:
    """Run the named benchmarks, each imported only then: a GPU machine lacks some packages."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measures what docs/data.md claims."
    )
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(BENCHMARKS))
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(BENCHMARKS)}")
    for name in names or BENCHMARKS:
        importlib.import_module(f"benchmarks.{name}").run()


if __name__ == "__main__":  # the workers of the stage that is measured import this module too
    main()
