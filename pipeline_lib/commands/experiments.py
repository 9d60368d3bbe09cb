"""Commands that people type about an experiment: check, plan, summary, publish, and docs."""

import argparse
import os
from pathlib import Path
from typing import Any

from pipeline_lib.base.stage import say
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import open_experiment
from pipeline_lib.config.dag import DEFAULT_CONFIG


def add_to(commands: Any) -> None:
    """Add these commands to the subparsers `commands`."""
    for name, command, text in (
        ("check", check, "read a config and name all of its problems"),
        ("summary", summary, "show the results of a finished experiment"),
        ("publish", publish, "copy the small results of a finished experiment to results/current, for DVC"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("config", type=Path, nargs="?", default=DEFAULT_CONFIG, help=f"default: {DEFAULT_CONFIG}")
        sub.set_defaults(command=command)
    docs = commands.add_parser("docs", help="write docs/config.md and the JSON schema of the config anew")
    docs.set_defaults(command=write_docs)


def check(arguments: argparse.Namespace) -> None:
    """Name all problems of a config, or say that there are none."""
    from pipeline_lib.config.load import load_config
    from pipeline_lib.plan.preflight import refuse_impossible

    store = Store.from_env(os.environ)
    refuse_impossible(load_config(arguments.config), store)  # before a hub is asked, which may take a while
    experiment = open_experiment(arguments.config, store)
    refuse_impossible(experiment.config, store)  # again, with the commits and hashes that are known now
    say(f"{arguments.config}: no problems; experiment {experiment.name!r} has {len(experiment.specs)} stages")


def summary(arguments: argparse.Namespace) -> None:
    """Show the table of a finished experiment."""
    from pipeline_lib.publish.record import print_summary

    store = Store.from_env(os.environ)
    print_summary(open_experiment(arguments.config, store), store)


def publish(arguments: argparse.Namespace) -> None:
    """Rewrite results/current from a finished experiment."""
    from pipeline_lib.publish.record import publish as publish_results

    store = Store.from_env(os.environ)
    for path in publish_results(open_experiment(arguments.config, store), store):
        say(f"wrote {path}")


def write_docs(_: argparse.Namespace) -> None:
    """Bring the table of the config's keys and the JSON schema up to date."""
    from pipeline_lib.base.fsio import write_text
    from pipeline_lib.config.docs import config_json_schema, config_page

    page, schema = Path("docs/config.md"), Path("workflow/schemas/config.schema.json")
    write_text(page, config_page())
    write_text(schema, config_json_schema())
    say(f"wrote {page} and {schema}")
