"""`python -m benchmarks.choices [--configs 3000]`: the plan's choice beside all legal ways.

Random configs, each with a plain loop over all ways to train that shares nothing with the planner
but its formulas. A config for which that finds anything more than 1 % better is printed.
"""

import argparse
import random

from tests.plan.every_way import is_best, some_case

_FIRST = 10_000  # tests have the seeds below


def main() -> None:
    """Print how many choices were held against all ways, and which were not the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=int, default=3000)
    configs = parser.parse_args().configs
    fitting = 0
    missed = []
    for seed in range(_FIRST, _FIRST + configs):
        try:
            dice = random.Random(seed)  # noqa: S311  (no secret)
            fitting += is_best(some_case(dice))
        except AssertionError as error:
            missed.append(seed)
            print(f"seed {seed}: {error}")
    print(f"{configs} configs, {fitting} of which fit in a node: {len(missed)} missed")


if __name__ == "__main__":
    main()
