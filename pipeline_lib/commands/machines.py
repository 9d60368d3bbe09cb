"""Commands that people type about a machine: doctor and calibrate."""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

from pipeline_lib.base.stage import say
from pipeline_lib.base.store import Store
from pipeline_lib.config.dag import DEFAULT_CONFIG


def add_to(commands: Any) -> None:
    """Add these commands to the subparsers `commands`."""
    text = "look at this machine: what it has, how fast it is, what is wrong and what to set"
    examine = commands.add_parser("doctor", help=text, description=text)
    examine.add_argument("config", type=Path, nargs="?", help="take the number of ranks from it")
    examine.add_argument(
        "--ranks", type=positive, help="that exchange data; one for each GPU by default, two without any"
    )
    examine.add_argument("--json", type=Path, help="write all facts here, too")
    examine.set_defaults(command=doctor)
    text = "measure this machine for the plan: its rates, and the layers of a config's model; writes cluster.json"
    measuring = commands.add_parser("calibrate", help=text, description=text)
    measuring.add_argument("config", type=Path, nargs="?", default=DEFAULT_CONFIG, help=f"default: {DEFAULT_CONFIG}")
    measuring.add_argument("--out", type=Path, default=Path("cluster.json"), help="default: cluster.json")
    measuring.add_argument("--ranks", type=positive, help="of this machine; as many as the config says by default")
    measuring.set_defaults(command=calibrate, when_stopped="nothing was written")


def positive(text: str) -> int:
    """`text` as a whole number of at least 1. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def doctor(arguments: argparse.Namespace) -> None:
    """Look at this machine and say what is wrong."""
    from pipeline_lib.base.fsio import write_json
    from pipeline_lib.config.load import load_config
    from pipeline_lib.doctor.report import report
    from pipeline_lib.doctor.rules import advice
    from pipeline_lib.doctor.run import Examination

    ranks = load_config(arguments.config).cluster.ranks if arguments.config and not arguments.ranks else arguments.ranks
    facts = Examination(Store.from_env(os.environ).root, ranks, os.environ).facts(say)
    wrong = advice(facts)
    if arguments.json:
        write_json(arguments.json, {"facts": facts, "wrong": wrong})
    say(report(facts, wrong))


def calibrate(arguments: argparse.Namespace) -> None:
    """Measure what the plan computes with, write it and show it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that its folders are removed
    from pipeline_lib.base.fsio import write_json
    from pipeline_lib.calibrate.report import report
    from pipeline_lib.calibrate.run import Calibration
    from pipeline_lib.config.load import load_config
    from pipeline_lib.plan.known import geometry_of, workload_of

    config, store = load_config(arguments.config), Store.from_env(os.environ)
    geometry, workload = geometry_of(config, store), workload_of(config, store)
    calibration = Calibration.of(config, geometry, workload, arguments.ranks, store.root, os.environ)
    measured, left_out = calibration.measure(say)
    if calibration.is_first:
        write_json(arguments.out, measured)
        say(report(calibration.task, measured, left_out, arguments.out, config.cluster))
