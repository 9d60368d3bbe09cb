"""Commands that people type about an experiment: check, summary, status, rehearse, and docs."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from pipeline_lib.base.stage import say
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import open_experiment, open_experiments
from pipeline_lib.config.dag import DEFAULT_CONFIG, Dag


def add_to(commands: Any) -> None:
    """Add these commands to the subparsers `commands`."""
    for name, command, text in (
        ("check", check, "read a config and name all of its problems"),
        ("summary", summary, "show the results of a finished experiment"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("config", type=Path, nargs="?", default=DEFAULT_CONFIG, help=f"default: {DEFAULT_CONFIG}")
        sub.set_defaults(command=command)
        if command is not check:
            sub.add_argument("--experiment", metavar="NAME", help="which one of a sweep")
    add_status_to(commands)
    add_rehearse_to(commands)
    docs = commands.add_parser("docs", help="write docs/config.md and the JSON schema of the config anew")
    docs.set_defaults(command=write_docs)


def add_status_to(commands: Any) -> None:
    """Add `status`."""
    text = "show where every experiment in the store stands"
    sub = commands.add_parser("status", help=text, description=text)
    sub.add_argument("names", nargs="*", metavar="NAME", help="only these experiments")
    sub.add_argument("--all", action="store_true", help="also older configs of the same name")
    how = sub.add_mutually_exclusive_group()
    how.add_argument("--watch", nargs="?", const=5.0, type=interval, metavar="SECONDS", help="again and again; 5 s")
    how.add_argument("--json", action="store_true", help="as a list of objects")
    sub.set_defaults(command=status)


def add_rehearse_to(commands: Any) -> None:
    """Add `rehearse`, which the rules of that target run."""
    text = "say what a rehearsal found; people run `snakemake rehearse`"
    sub = commands.add_parser("rehearse", help=text, description=text)
    sub.add_argument("--frozen", type=Path, required=True, help="the frozen experiment, of the store")
    sub.add_argument("--out", type=Path, help="load the merged model and write what was found here")
    sub.set_defaults(command=rehearse)


def interval(text: str) -> float:
    """`text` as seconds between two looks. Raises ArgumentTypeError."""
    try:
        every_s = float(text)
    except ValueError:
        every_s = 0.0
    if not 0.2 <= every_s <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds of at least 0.2; names go before --watch")
    return every_s


def status(arguments: argparse.Namespace) -> None:
    """Show where the experiments stand, once or again and again."""
    from pipeline_lib.status.show import show, watch
    from pipeline_lib.status.survey import Survey

    store = Store.from_env(os.environ)
    survey = Survey(store, names=tuple(arguments.names), all_of_them=arguments.all)
    if arguments.watch is not None:
        watch(survey, sys.stdout, arguments.watch)
    else:
        show(survey, sys.stdout, arguments.json)


def check(arguments: argparse.Namespace) -> None:
    """Name all problems of a config, or say that there are none."""
    from pipeline_lib.config.unusual import warnings_of
    from pipeline_lib.plan.command import long_evaluations
    from pipeline_lib.plan.preflight import refuse_impossible

    store, source = Store.from_env(os.environ), str(arguments.config)
    found = open_experiments(arguments.config, store, lambda config: refuse_impossible(config, store))
    configs = [experiment.config for experiment in found]
    for text in (*warnings_of(configs), *long_evaluations(configs, store)):
        say(f"{source}: warning: {text}")
    if len(found) == 1:
        say(f"{source}: no problems; experiment {found[0].name!r} has {len(found[0].specs)} stages")
        return
    stages = {spec.digest for experiment in found for spec in experiment.specs.values()}
    say(f"{source}: no problems; {len(found)} experiments have {len(stages)} stages:")
    for experiment in found:
        say(f"  {experiment.name}")


def summary(arguments: argparse.Namespace) -> None:
    """Show the table of a finished experiment; of a sweep, a line for each, or with --experiment the table of one."""
    from pipeline_lib.publish.record import print_summary
    from pipeline_lib.publish.sweep import outcome_table, outcomes

    store = Store.from_env(os.environ)
    dag = Dag.open(arguments.config, store)
    if len(dag.experiments) > 1 and arguments.experiment is None:
        say(outcome_table(outcomes(dag)))
    else:
        print_summary(open_experiment(arguments.config, store, arguments.experiment), store)


def rehearse(arguments: argparse.Namespace) -> None:
    """Open the merged model of a rehearsal and write what was found; or show that, and clean up."""
    from pipeline_lib.publish.rehearsal import conclude, look

    dag = Dag.thaw(arguments.frozen, Store.around(arguments.frozen, os.environ))
    if arguments.out is None:
        conclude(dag, say)
    else:
        look(dag, arguments.out, say)


def write_docs(_: argparse.Namespace) -> None:
    """Bring the table of the config's keys and the JSON schema up to date."""
    from pipeline_lib.base.fsio import write_text
    from pipeline_lib.config.docs import config_json_schema, config_page

    page, schema = Path("docs/config.md"), Path("workflow/schemas/config.schema.json")
    write_text(page, config_page())
    write_text(schema, config_json_schema())
    say(f"wrote {page} and {schema}")
