"""`publish` and `record`: what a finished experiment leaves for DVC."""

import argparse
import os
from pathlib import Path
from typing import Any

from pipeline_lib.base.git import how_to_commit
from pipeline_lib.base.stage import say
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import Experiment, open_experiment
from pipeline_lib.config.dag import DEFAULT_CONFIG, Dag


def add_to(commands: Any) -> None:
    """Add these commands to the subparsers `commands`."""
    text = "copy the small results of a finished experiment, of a sweep the best, to results/current, for DVC"
    sub = commands.add_parser("publish", help=text, description=text)
    add_arguments(sub)
    sub.set_defaults(command=publish)
    text = "publish a finished experiment and save it as a DVC experiment"
    sub = commands.add_parser("record", help=text, description=text)
    sub.add_argument("name", metavar="NAME", help="of the DVC experiment")
    add_arguments(sub)
    sub.add_argument("--model", action="store_true", help="with its model folder, as results/current/model")
    sub.add_argument("--force", action="store_true", help="replace a DVC experiment of this name")
    sub.set_defaults(command=record)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Those that say which experiment; `--configfile` too, since that is what snakemake was given."""
    given = argparse.SUPPRESS
    sub.add_argument("config", type=Path, nargs="?", default=given, help=f"default: {DEFAULT_CONFIG}")
    sub.add_argument("--configfile", type=Path, dest="config", default=given, metavar="CONFIG", help="the same")
    sub.add_argument("--experiment", metavar="NAME", help="which one of a sweep")
    sub.set_defaults(config=DEFAULT_CONFIG)


def publish(arguments: argparse.Namespace) -> None:
    """Rewrite results/current from a finished experiment: of a sweep the best, or the one that --experiment names."""
    from pipeline_lib.base.lock import locked
    from pipeline_lib.publish.record import RECORDING, best_of
    from pipeline_lib.publish.record import publish as publish_results

    store = Store.from_env(os.environ)
    if arguments.experiment is None:
        dag = Dag.open(arguments.config, store)
        experiment = best_of(dag)
        if len(dag.experiments) > 1:
            say(f"of the sweep, {experiment.name!r} has the lowest held-out loss; for another say --experiment NAME")
    else:
        experiment = open_experiment(arguments.config, store, arguments.experiment)
    with locked(RECORDING, say):
        for path in publish_results(experiment, store):
            say(f"wrote {path}")
    if "DVC_ROOT" not in os.environ:  # `dvc exp run` saves these files itself
        _say_how_to_commit(experiment)


def record(arguments: argparse.Namespace) -> None:
    """Publish the experiment and save it in DVC."""
    from pipeline_lib.publish.dvc_record import record as record_experiment

    store = Store.from_env(os.environ)
    experiment = open_experiment(arguments.config, store, arguments.experiment)
    record_experiment(arguments.name, experiment, store, say, with_model=arguments.model, force=arguments.force)
    _say_how_to_commit(experiment)


def _say_how_to_commit(experiment: Experiment) -> None:
    from pipeline_lib.publish.record import FOR_GIT

    if told := how_to_commit(FOR_GIT, f"Results of {experiment.name}"):
        say(told)
