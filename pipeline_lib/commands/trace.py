"""`trace`: where a model folder comes from."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.stage import say
from pipeline_lib.base.store import Store


def add_to(commands: Any) -> None:
    """Add these commands to the subparsers `commands`."""
    text = "tell where a model folder comes from, back to hub commits and data files, and check every digest"
    sub = commands.add_parser("trace", help=text, description=text)
    sub.add_argument("model", type=Path, metavar="MODEL_DIR", help="as results/NAME/model, or a copy of it")
    sub.add_argument("--quick", action="store_true", help="check the sizes of files only, not their content")
    sub.add_argument("--json", action="store_true", help="as nested objects")
    sub.set_defaults(command=trace)


def trace(arguments: argparse.Namespace) -> None:
    """Show the chain. Raises IntegrityError, after it, if anything in it is not what it was."""
    from pipeline_lib.publish.trace import trace as trace_model
    from pipeline_lib.publish.trace_text import problems_of, show, to_json, told_on

    with told_on(sys.stderr) as tell:
        found = trace_model(arguments.model, Store.from_env(os.environ), arguments.quick, tell)
    if arguments.json:
        say(to_json(found))
    else:
        show(found, sys.stdout)
    if problems := problems_of(found):
        raise IntegrityError(
            "\n".join([f"{arguments.model}: this chain does not hold:", *(f"  - {p}" for p in problems)])
        )
