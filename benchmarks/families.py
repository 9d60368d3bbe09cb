"""Every family of models with every published template, full and LoRA, through all stages.

`python -m benchmarks.families [--family NAME ...] [--template NAME ...]` takes about a quarter of
an hour for all. tests/pipeline/test_each_family.py has each family and each template once.
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path

from tests.data.chats import TEMPLATES
from tests.families import FAMILIES, METHODS, run_family, write_family
from tests.ranks import run_ranks_that_may_fail

LIMIT_S = 600.0  # for one of them


def main() -> None:
    """Run the product, print a line for each, and exit with 1 if any failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--template", nargs="*", choices=TEMPLATES, default=list(TEMPLATES))
    arguments = parser.parse_args()
    failed = 0
    for family, template, method in product(arguments.family, arguments.template, METHODS):
        with tempfile.TemporaryDirectory() as root:
            outcome = run(Path(root), family, template, method)
        failed += not outcome.startswith("exported")
        print(f"{family:12} {template:22} {method:5} {outcome}", flush=True)
    if failed:
        sys.exit(1)


def run(root: Path, family: str, template: str, method: str) -> str:
    """Return `exported` with the difference of the logits, or the last line of the error."""
    base = write_family(root / "base", family, template)
    done, failures = run_ranks_that_may_fail(
        _run_quietly, 1, root, base, template, method, timeout_s=LIMIT_S
    )
    if failures:
        return failures[0].strip().splitlines()[-1]
    parity = json.loads((done[0] / "parity.json").read_text())
    return f"exported, logits differ by {parity['relative_difference']:.1e}"


def _run_quietly(
    environ: dict[str, str], root: Path, base: Path, template: str, method: str
) -> Path:
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        return run_family(environ, root, base, template, method)


if __name__ == "__main__":  # the ranks import this module too
    main()
