"""`compare`: several experiments side by side."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from pipeline_lib.base.stage import say
from pipeline_lib.base.store import Store


def add_to(commands: Any) -> None:
    """Add these commands to the subparsers `commands`."""
    text = "show which of several experiments is best, what differs between them, and what of that is noise"
    sub = commands.add_parser("compare", help=text, description=text)
    which = "a name (* and ? as in file names), the beginning of a digest, a config file, or STORE:NAME"
    sub.add_argument("experiments", nargs="+", metavar="EXPERIMENT", help=which)
    sub.add_argument("--page", type=Path, metavar="FILE", help="write a page with curves and answers as well")
    sub.add_argument("--json", action="store_true", help="as an object instead of text")
    sub.set_defaults(command=compare)


def compare(arguments: argparse.Namespace) -> None:
    """Show the comparison, and write its page."""
    from pipeline_lib.compare.comparison import Comparison
    from pipeline_lib.compare.select import select
    from pipeline_lib.compare.table import render
    from pipeline_lib.compare.verdict import verdict
    from pipeline_lib.status.show import console_on

    comparison = Comparison.of(select(arguments.experiments, Store.from_env(os.environ)))
    said = verdict(comparison)
    if arguments.json:
        say(json.dumps(comparison.to_json(said), indent=2, allow_nan=False))
    else:
        console = console_on(sys.stdout)
        console.print(render(comparison, said, console.width))
    if arguments.page is not None:
        from pipeline_lib.compare.page import write_page

        size_bytes = write_page(comparison, arguments.page)
        if not arguments.json:
            say(f"wrote {arguments.page} ({size_bytes / 1e6:.1f} MB); open it in any browser, it needs no network")
