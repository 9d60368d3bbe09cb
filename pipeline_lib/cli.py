"""The command line: the only place that reads arguments and the environment, and the only one that exits."""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from pipeline_lib.base.errors import PipelineError
from pipeline_lib.base.redact import RedactedText, redact
from pipeline_lib.base.stage import StageFunction, run_stage, say
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import open_experiment, run_digest
from pipeline_lib.config.dag import DEFAULT_CONFIG

STAGES = ("download", "tokenize", "shard", "plan", "train", "merge", "evaluate", "report")
KEYBOARD_INTERRUPT_CODE = 130
INTERNAL_ERROR_CODE = 1
INPUT_OUTPUT_ERROR_CODE = 74  # EX_IOERR


def main() -> NoReturn:
    """Run the command in sys.argv and exit with its code. A user's mistake is one message, never a traceback."""
    arguments = parser().parse_args()
    try:
        arguments.command(arguments)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"error: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr, flush=True)
        sys.exit(INPUT_OUTPUT_ERROR_CODE)
    except KeyboardInterrupt:
        print(f"stopped; {arguments.when_stopped}", file=sys.stderr, flush=True)
        sys.exit(KEYBOARD_INTERRUPT_CODE)
    except Exception:  # the one boundary: whatever arrives here is a mistake of ours
        print(redact(traceback.format_exc()), end="", file=sys.stderr)
        print("error: this is a bug in pipeline_lib; the traceback above says where", file=sys.stderr, flush=True)
        sys.exit(INTERNAL_ERROR_CODE)
    sys.exit(0)


def parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    root = argparse.ArgumentParser(prog="python -m pipeline_lib", description=__doc__)
    root.set_defaults(when_stopped="run the same command again to continue")
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    for name, command, text in (
        ("check", check, "read a config and name all of its problems"),
        ("summary", summary, "show the results of a finished experiment"),
        ("publish", publish, "copy the small results of a finished experiment to results/current, for DVC"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("config", type=Path, nargs="?", default=DEFAULT_CONFIG, help=f"default: {DEFAULT_CONFIG}")
        sub.set_defaults(command=command)
    for stage in STAGES:
        text = "show what a config will take, or run the plan stage" if stage == "plan" else f"run the {stage} stage"
        sub = commands.add_parser(stage, help=text, description=text)
        sub.add_argument("--spec", type=Path, required=stage != "plan", help="STORE/specs/DIGEST.json")
        if stage == "train":
            sub.add_argument("--plan", type=Path, required=True, help="STORE/plan/DIGEST.ok")
        if stage == "tokenize":
            sub.add_argument("--workers", type=int, help="processes that encode; one for each core by default")
        sub.set_defaults(command=run_one_stage, stage=stage)
        if stage == "plan":
            add_plan_arguments(sub)
    rank = commands.add_parser("rank", help="one rank of a training run; started by `train`")
    for option in ("--spec", "--plan", "--out"):
        rank.add_argument(option, type=Path, required=True)
    rank.add_argument("--attempt", type=int, required=True)
    rank.add_argument("--resume-from", type=Path)
    rank.set_defaults(command=run_rank)
    tracker = commands.add_parser("track", help="show a run in a tracker; started by `train`")
    tracker.add_argument("--to", choices=("tensorboard", "swanlab", "wandb", "mlflow"), required=True)
    for option in ("--run-dir", "--plan"):
        tracker.add_argument(option, type=Path, required=True)
    tracker.set_defaults(command=track)
    text = "look at this machine: what it has, how fast it is, what is wrong and what to set"
    examine = commands.add_parser("doctor", help=text, description=text)
    examine.add_argument("config", type=Path, nargs="?", help="take the number of ranks from it")
    examine.add_argument(
        "--ranks", type=positive, help="that exchange data; one for each GPU by default, two without any"
    )
    examine.add_argument("--json", type=Path, help="write all facts here, too")
    examine.set_defaults(command=doctor)
    asked = commands.add_parser("probe", help="one measurement; started by `doctor`")
    asked.add_argument("name", choices=("gpus", "torch", "disk", "exchange"))
    asked.add_argument("--store", type=Path, default=Path())
    asked.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    asked.set_defaults(command=probe)
    text = "measure this machine for the plan: its rates, and the layers of a config's model; writes cluster.json"
    measuring = commands.add_parser("calibrate", help=text, description=text)
    measuring.add_argument("config", type=Path, nargs="?", default=DEFAULT_CONFIG, help=f"default: {DEFAULT_CONFIG}")
    measuring.add_argument("--out", type=Path, default=Path("cluster.json"), help="default: cluster.json")
    measuring.add_argument("--ranks", type=positive, help="of this machine; as many as the config says by default")
    measuring.set_defaults(command=calibrate, when_stopped="nothing was written")
    one = commands.add_parser("measure", help="one rank of a calibration; started by `calibrate`")
    one.add_argument("--task", type=Path, required=True)
    one.set_defaults(command=measure)
    docs = commands.add_parser("docs", help="write docs/config.md and the JSON schema of the config anew")
    docs.set_defaults(command=write_docs)
    return root


def add_plan_arguments(sub: argparse.ArgumentParser) -> None:
    """Those of `plan CONFIG`; with `--spec` it is the stage."""
    sub.add_argument("config", type=Path, nargs="?", help=f"default: {DEFAULT_CONFIG}")
    sub.add_argument(
        "--what-if",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="show the plan beside that with other values, as cluster.nodes=4 cluster.internode_gbit_s=100",
    )
    sub.add_argument("--explain", action="store_true", help="show every formula with the numbers put in")
    sub.set_defaults(command=plan)


def is_file_name(text: str) -> bool:
    """Whether `text` names a config rather than a key with its value."""
    return "=" not in text and text.endswith((".yaml", ".yml"))


def positive(text: str) -> int:
    """`text` as a whole number of at least 1. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def check(arguments: argparse.Namespace) -> None:
    """Name all problems of a config, or say that there are none."""
    from pipeline_lib.config.load import load_config
    from pipeline_lib.plan.preflight import refuse_impossible, several_nodes

    store = Store.from_env(os.environ)
    refuse_impossible(load_config(arguments.config), store)  # before a hub is asked, which may take a while
    experiment = open_experiment(arguments.config, store)
    refuse_impossible(experiment.config, store)  # again, with the commits and hashes that are known now
    say(f"{arguments.config}: no problems; experiment {experiment.name!r} has {len(experiment.specs)} stages")
    if problem := several_nodes(experiment.config.cluster.nodes):
        say(problem)


def plan(arguments: argparse.Namespace) -> None:
    """Show what a config will take, from what is known of it now; or run the stage."""
    if arguments.spec is not None:
        run_one_stage(arguments)
        return
    from pipeline_lib.plan.command import show_plan

    config, what_if = arguments.config, list(arguments.what_if)
    if config is None and what_if and is_file_name(what_if[-1]):  # the flag takes all that follows it
        config = Path(what_if.pop())
    show_plan(config or DEFAULT_CONFIG, what_if, arguments.explain, Store.from_env(os.environ), say)


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


def run_one_stage(arguments: argparse.Namespace) -> None:
    """Run a stage as its spec says. The store is where the spec lies."""
    store = Store(arguments.spec.parent.parent)
    spec = store.read_spec(arguments.spec)
    if spec.stage != arguments.stage:
        raise PipelineError(f"{arguments.spec}: a spec of the {spec.stage} stage, not of {arguments.stage}")
    if spec.stage == "train":
        from pipeline_lib.train.launch.stage import launcher

        plan_dir = arguments.plan.with_suffix("")
        run_stage(launcher(plan_dir, os.environ), spec, store, say, lock_digest=run_digest(spec))
    elif spec.stage == "tokenize":
        from pipeline_lib.data.tokenize.stage import run

        run_stage(partial(run, workers=arguments.workers), spec, store, say)
    else:
        run_stage(_function_of(spec.stage), spec, store, say)


def _function_of(stage: str) -> StageFunction:
    """The stage's function; imported only now, since some need torch and most do not."""
    function: Callable[..., dict[str, object]]
    if stage == "download":
        from pipeline_lib.data.download.stage import run as function
    elif stage == "shard":
        from pipeline_lib.data.shard.stage import run as function
    elif stage == "plan":
        from pipeline_lib.plan.stage import run as function
    elif stage == "merge":
        from pipeline_lib.publish.merge import run as function
    elif stage == "evaluate":
        from pipeline_lib.publish.evaluate import run as function
    else:
        from pipeline_lib.publish.report import run as function
    return function


def run_rank(arguments: argparse.Namespace) -> None:
    """Train as the rank that the environment names; a failure is left for the launcher to show once."""
    from pipeline_lib.base.lifeline import die_with_owner

    die_with_owner(os.environ)  # before the slow imports

    from pipeline_lib.train.launch.environment import dist_environment
    from pipeline_lib.train.launch.outcome import Reporting
    from pipeline_lib.train.rank import RankJob, read_plan, train_rank

    os.environ.update(dist_environment(os.environ))
    store = Store(arguments.spec.parent.parent)
    job = RankJob(
        store.read_spec(arguments.spec),
        store,
        read_plan(arguments.plan),
        arguments.out,
        arguments.attempt,
        arguments.resume_from,
    )
    try:
        with Reporting(job.run_dir, int(os.environ.get("RANK", "0"))):
            train_rank(job, os.environ, say)
    except PipelineError as error:
        if "RANK" not in os.environ:
            raise
        sys.exit(error.exit_code)


def track(arguments: argparse.Namespace) -> None:
    """Feed a tracker with the metrics of a run until standard input ends, which says that the run has."""
    from pipeline_lib.tracking.run import feed_tracker

    # Until the process ends: a tracker's library may name the address it was given, with the password in it.
    sys.stdout, sys.stderr = RedactedText(sys.stdout), RedactedText(sys.stderr)
    feed_tracker(arguments.to, arguments.run_dir, arguments.plan, os.environ)


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


def probe(arguments: argparse.Namespace) -> None:
    """Measure one thing and print it as JSON, in a process that `doctor` can give up."""
    import json

    from pipeline_lib.doctor.gpus import gpus
    from pipeline_lib.doctor.machine import disk

    if arguments.name == "gpus":
        found = gpus()
    elif arguments.name == "disk":
        found = disk(arguments.store)
    else:
        from pipeline_lib.doctor.exchange import exchange, torch_facts

        found = torch_facts() if arguments.name == "torch" else exchange(os.environ, arguments.device)
    print(json.dumps(found), flush=True)


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


def measure(arguments: argparse.Namespace) -> None:
    """Measure as the rank that the environment names, and print what was found as JSON."""
    from pipeline_lib.base.lifeline import die_with_owner

    die_with_owner(os.environ)  # before the slow imports

    import json

    from pipeline_lib.calibrate.rank import measure_rank
    from pipeline_lib.calibrate.task import Task

    found = measure_rank(Task.from_json(arguments.task.read_text(encoding="utf-8")), os.environ)
    print(json.dumps(found), flush=True)


def write_docs(_: argparse.Namespace) -> None:
    """Bring the table of the config's keys and the JSON schema up to date."""
    from pipeline_lib.base.fsio import write_text
    from pipeline_lib.config.docs import config_json_schema, config_page

    page, schema = Path("docs/config.md"), Path("workflow/schemas/config.schema.json")
    write_text(page, config_page())
    write_text(schema, config_json_schema())
    say(f"wrote {page} and {schema}")
