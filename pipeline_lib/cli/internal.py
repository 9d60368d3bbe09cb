"""Commands that programs start: rules run stages, the launcher ranks, doctor measurements."""

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from pipeline_lib.config.compile import refuse_other_version, run_digest
from pipeline_lib.config.dag import Dag
from pipeline_lib.config.stages import OPENS_WEIGHTS, STAGES
from pipeline_lib.core.errors import Interrupted, LockLost, PipelineError
from pipeline_lib.core.files import disk_full_named, take_out_of_future
from pipeline_lib.core.processes import die_with_owner, importing
from pipeline_lib.core.run_folder import CHECKPOINTS, EVENTS_NAME, PLAN_NAME, sealed_steps
from pipeline_lib.core.stage import run_stage, say
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.core.text import RedactedText
from pipeline_lib.launch.local_gpus import taken_gpus
from pipeline_lib.slurm.job import JOB_VARIABLE

# `plan` is also for people, and `train` has options of its own.
_OTHERWISE_ADDED = ("plan", "train")


def add_to(commands: Any) -> None:
    """Add this module's commands to the subparsers `commands`; without `help=` none is listed."""
    _add_stages(commands)
    _add_training(commands)
    _add_ranks(commands)
    _add_measuring(commands)


def _add_stages(commands: Any) -> None:
    for stage in STAGES.values():
        if stage.name in _OTHERWISE_ADDED:
            continue
        sub = commands.add_parser(stage.name, description=f"run the {stage.name} stage")
        sub.add_argument("--spec", type=Path, required=True, help="STORE/specs/DIGEST.json")
        if stage.unhashed is not None:
            text = (
                "JSON object of the settings that are in no digest; by default those that the "
                "spec has at the moment"
            )
            sub.add_argument("--where", type=json.loads, help=text)
        if stage.name == "tokenize":
            sub.add_argument(
                "--workers", type=int, help="processes that encode; one for each core by default"
            )
        if stage.job in OPENS_WEIGHTS:
            text = "take so many GPUs of this machine that no other stage has"
            sub.add_argument("--gpus", type=int, default=0, help=text)
        run_as_rule(sub, run_one_stage, stage=stage.name)


def _add_training(commands: Any) -> None:
    """Add `train`, and what decides which trainings of a sweep go on."""
    sub = commands.add_parser(
        "train", description="run the train stage: start the ranks and wait for their end"
    )
    sub.add_argument("--spec", type=Path, required=True, help="STORE/specs/DIGEST.json")
    sub.add_argument("--plan", type=Path, required=True, help="STORE/plan/DIGEST.ok")
    sub.add_argument(
        "--requeue", action="store_true", help="after an interruption queue this SLURM job again"
    )
    sub.add_argument(
        "--reached", type=Path, help="of a training to a rung: write here what it came to"
    )
    run_as_rule(sub, train, stage="train")
    sub.add_argument(
        "--then",
        type=Path,
        nargs="*",
        default=[],
        metavar="SPEC",
        help="behind the training, run these stages in its SLURM job",
    )
    text = "decide which trainings of a sweep go on, as the decide rule does"
    sub = commands.add_parser("decide", description=text)
    sub.add_argument("--frozen", type=Path, required=True, help="the frozen sweep, of the store")
    sub.add_argument("--rung", required=True, metavar="DIGEST", help="which decision")
    run_as_rule(sub, decide)


def _add_ranks(commands: Any) -> None:
    """Add the processes that a training starts: its ranks, and what is beside them."""
    rank = commands.add_parser("rank", description="one rank of a training run; started by `train`")
    for option in ("--spec", "--plan", "--out"):
        rank.add_argument(option, type=Path, required=True)
    rank.add_argument("--attempt", type=int, required=True)
    rank.add_argument(
        "--lock-token", required=True, help="of the lock that `train` holds on the run"
    )
    rank.add_argument("--resume-from", type=Path)
    rank.add_argument(
        "--held",
        action="store_true",
        help="open no file before the launcher says so on standard input",
    )
    rank.set_defaults(command=run_rank)
    node = commands.add_parser(
        "node", description="starts the ranks of one node; started by srun or by an agent"
    )
    for option in ("--nodes", "--ranks-per-node"):
        node.add_argument(option, type=int, required=True)
    node.add_argument(
        "program", nargs="+", help="what each rank is: `rank` or `probe`, with its arguments"
    )
    node.set_defaults(command=run_node)
    agent = commands.add_parser(
        "agent", description="works for a training on this host; started by `train` over ssh"
    )
    agent.set_defaults(command=run_agent)
    tracker = commands.add_parser(
        "track", description="show a run in a tracker; started by `train`"
    )
    tracker.add_argument(
        "--to", choices=("tensorboard", "swanlab", "wandb", "mlflow"), required=True
    )
    for option in ("--run-dir", "--plan"):
        tracker.add_argument(option, type=Path, required=True)
    tracker.set_defaults(command=track)


def _add_measuring(commands: Any) -> None:
    """Add what `doctor`, `calibrate` and jobs start."""
    asked = commands.add_parser("probe", description="one measurement; started by `doctor`")
    asked.add_argument("name", choices=("gpus", "torch", "disk", "exchange", "node"))
    asked.add_argument("--store", type=Path, default=Path())
    asked.add_argument("--token", default="", help="name of a file in the store, for `node`")
    asked.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    asked.set_defaults(command=probe)
    site = commands.add_parser(
        "site", description="the variables of the site file, for a job's shell"
    )
    site.set_defaults(command=tell_site)
    one = commands.add_parser(
        "measure", description="one rank of a calibration; started by `calibrate`"
    )
    one.add_argument("--task", type=Path, required=True)
    one.set_defaults(command=measure)


def run_as_rule(
    sub: argparse.ArgumentParser, command: Callable[[argparse.Namespace], None], **defaults: str
) -> None:
    """Let `sub` run `command` with `defaults`, and take inputs that outputs must not predate."""
    sub.add_argument(
        "--after", type=Path, nargs="*", default=[], metavar="INPUT", help=argparse.SUPPRESS
    )

    def run(arguments: argparse.Namespace) -> None:
        command(arguments)
        take_out_of_future(arguments.after)

    sub.set_defaults(command=run, **defaults)


def train(arguments: argparse.Namespace) -> None:
    """Train to the end, or up to a rung."""
    if arguments.reached is None:
        train_once(arguments)
        _go_on(arguments)
        return
    from pipeline_lib.workflow.rungs import reach

    store = Store.around(arguments.spec, os.environ)
    reach(
        store.read_spec(arguments.spec),
        store,
        arguments.reached,
        lambda: train_once(arguments),
        say,
    )


def _go_on(arguments: argparse.Namespace) -> None:
    """Run the stages that follow the training, on the first node of its job."""
    if not arguments.then:
        return
    from pipeline_lib.launch.following import run_following
    from pipeline_lib.records.plan import read_plan

    store = Store.around(arguments.spec, os.environ)
    cluster = read_plan(arguments.plan.with_suffix("") / PLAN_NAME).cluster
    run_following(
        [store.read_spec(path) for path in arguments.then], store, cluster, os.environ, say
    )


def decide(arguments: argparse.Namespace) -> None:
    """Decide which trainings of a frozen sweep continue after a rung."""
    from pipeline_lib.workflow.rungs import conclude_rung

    conclude_rung(
        Dag.thaw(arguments.frozen, Store.around(arguments.frozen, os.environ)), arguments.rung, say
    )


def train_once(arguments: argparse.Namespace) -> None:
    """Make one attempt; --requeue requeues an interrupted SLURM job while the run progresses.

    A run that lost its lock is not requeued, because another process owns it.
    """
    # SLURM's log holds all attempts
    say(f"---- {datetime.now().astimezone().isoformat(timespec='seconds')}")
    try:
        _run_training(arguments)
    except LockLost:
        raise
    except PipelineError as error:
        if (
            error.exit_code != Interrupted.exit_code
            or not arguments.requeue
            or JOB_VARIABLE not in os.environ
        ):
            raise
        from pipeline_lib.records.plan import read_plan
        from pipeline_lib.slurm.requeue import TrainingJob, queue_again

        store = Store.around(arguments.spec, os.environ)
        folder = store.run_dir(run_digest(store.read_spec(arguments.spec)))
        steps = [step for step, _ in sealed_steps(folder / CHECKPOINTS)]
        most = read_plan(arguments.plan.with_suffix("") / PLAN_NAME).cluster.max_requeues
        run = TrainingJob(
            int(os.environ[JOB_VARIABLE]), folder / EVENTS_NAME, steps[-1] if steps else 0, most
        )
        raise Interrupted(f"{error}\nnot queued again: {queue_again(run, error, say)}") from error


def _run_training(arguments: argparse.Namespace) -> None:
    """Run the train stage on the ranks that its plan places, under the lock of the whole run."""
    spec, store = _spec_to_run(arguments)
    from pipeline_lib.launch.stage import launcher, next_attempt

    lock_digest = run_digest(spec)
    note = _job_note() | {"attempt": next_attempt(store.run_dir(lock_digest))}
    function = launcher(arguments.plan.with_suffix(""), os.environ)
    run_stage(function, spec, store, say, lock_digest, note, os.environ)


def run_one_stage(arguments: argparse.Namespace) -> None:
    """Run a stage as its spec says, in the store that contains the spec."""
    spec, store = _spec_to_run(arguments)
    # before any import that looks for GPUs
    with taken_gpus(getattr(arguments, "gpus", 0), os.environ, say):
        function = _function_of(spec.stage)
        if spec.stage == "tokenize":
            function = partial(function, workers=arguments.workers)
        run_stage(function, spec, store, say, lock_note=_job_note(), environ=os.environ)
    if spec.stage == "tokenize":
        from pipeline_lib.data.tokenize import refuse_losses

        refuse_losses(spec, store)
    if spec.stage == "report":
        from pipeline_lib.report.stage import REPORT_NAME, SUMMARY_NAME
        from pipeline_lib.tracking.feed import hand_over

        hand_over(spec, store, REPORT_NAME, SUMMARY_NAME, say)


def _spec_to_run(arguments: argparse.Namespace) -> tuple[Spec, Store]:
    """Return the spec that a command is given, with what `--where` says, and its store.

    Raises PipelineError for another stage's spec, ConfigError for one of another code version whose
    result is not there.
    """
    store = Store.around(arguments.spec, os.environ)
    spec = store.read_spec(arguments.spec)
    if getattr(arguments, "where", None) is not None:
        spec = replace(spec, where=arguments.where)
    if spec.stage != arguments.stage:
        raise PipelineError(
            f"{arguments.spec}: a spec of the {spec.stage} stage, not of {arguments.stage}"
        )
    if not store.is_sealed(spec.ref):
        refuse_other_version(spec)
    return spec, store


def _job_note() -> dict[str, Any]:
    """Return what a stage's lock says of the SLURM job that it runs in."""
    return {"slurm_job": os.environ[JOB_VARIABLE]} if JOB_VARIABLE in os.environ else {}


def _function_of(stage: str) -> Callable[..., dict[str, Any]]:
    """Return the stage's function, imported when needed: most stages do not need torch."""
    if stage == "download":
        # such as that models need torch: none is loaded
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    with importing():
        module = importlib.import_module(STAGES[stage].module)
    function: Callable[..., dict[str, Any]] = module.run
    return function


def run_rank(arguments: argparse.Namespace) -> None:
    """Train as the rank that the environment names.

    If a launcher started it, leave error messages to the launcher.
    """
    # Before the slow imports. An agent has SIGTERM ignored; SIGUSR1, SLURM's warning, waits until
    # the run can save.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    die_with_owner(os.environ)

    from pipeline_lib.launch.environment import compile_caches, dist_environment

    os.environ.update(dist_environment(os.environ) | compile_caches(os.environ))
    with importing():
        from pipeline_lib.core.lock import Lock
        from pipeline_lib.launch.heartbeat import Heartbeat, host_of
        from pipeline_lib.launch.rank_report import Reporting
        from pipeline_lib.launch.spawn import checkpoint_in
        from pipeline_lib.records.plan import read_plan
        from pipeline_lib.train.rank import RankJob, train_rank

    resume_from = arguments.resume_from
    if arguments.held:
        word = sys.stdin.readline()
        if not word:
            sys.exit(Interrupted.exit_code)
        resume_from = checkpoint_in(word)
    store = Store.around(arguments.spec, os.environ)
    spec = store.read_spec(arguments.spec)
    job = RankJob(
        spec=spec,
        store=store,
        plan=read_plan(arguments.plan / PLAN_NAME),
        out=arguments.out,
        attempt=arguments.attempt,
        lock=Lock(store.lock_path(run_digest(spec)), arguments.lock_token),
        resume_from=resume_from,
    )
    job.lock.end_process_when_lost()
    try:
        rank = int(os.environ.get("RANK", "0"))
        heartbeat = Heartbeat(job.run_dir, rank, host_of(os.environ), job.train.timeout_s)
        with (
            Reporting(job.run_dir, rank),
            heartbeat,
            job.lock.required(),
            disk_full_named(job.run_dir),
        ):
            train_rank(job, os.environ, say, (heartbeat.observe,))
    except PipelineError as error:
        if "RANK" not in os.environ:
            raise
        sys.exit(error.exit_code)


def run_node(arguments: argparse.Namespace) -> None:
    """Start this node's ranks and exit with the first failing code; the stage reports the error.

    SLURM's warnings reach every process of a step. This program ignores them; its ranks handle
    them, and save first.
    """
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_owner(os.environ)

    from pipeline_lib.launch.environment import NODE_VARIABLE
    from pipeline_lib.launch.spawn import run_ranks

    node = int(os.environ.get(NODE_VARIABLE) or os.environ["SLURM_NODEID"])
    failed = run_ranks(
        arguments.program, os.environ, arguments.ranks_per_node, arguments.nodes, node
    )
    if failed is None:
        return
    code = failed.exit_code
    sys.exit(code if code > 0 else 128 - code)  # as a shell says that a signal killed it


def run_agent(_: argparse.Namespace) -> None:
    """Work for the training stage at the other end of standard input and output."""
    from pipeline_lib.launch.agent import serve_on_pipes

    sys.exit(serve_on_pipes(os.environ))


def track(arguments: argparse.Namespace) -> None:
    """Send a run's metrics to a tracker until standard input ends, which marks its end."""
    from pipeline_lib.tracking.run import feed_tracker

    # Until the process ends: a tracker's library may print the address it was given, with the
    # password in it.
    sys.stdout, sys.stderr = RedactedText(sys.stdout), RedactedText(sys.stderr)
    feed_tracker(arguments.to, arguments.run_dir, arguments.plan, os.environ)


def probe(arguments: argparse.Namespace) -> None:
    """Measure one thing and print it as JSON, in a process that `doctor` can abandon."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what starts it on a host has SIGTERM ignored
    die_with_owner(os.environ)

    from pipeline_lib.doctor.gpus import gpus
    from pipeline_lib.doctor.resources import disk

    if arguments.name == "node":
        with importing():
            from pipeline_lib.doctor.task import run_task

        run_task(os.environ, arguments.store, arguments.token, arguments.device, say)
        return
    if arguments.name == "gpus":
        found = gpus()
    elif arguments.name == "disk":
        found = disk(arguments.store)
    else:
        with importing():
            from pipeline_lib.doctor.exchange import exchange, torch_facts

        found = (
            torch_facts() if arguments.name == "torch" else exchange(os.environ, arguments.device)
        )
    print(json.dumps(found), flush=True)


def measure(arguments: argparse.Namespace) -> None:
    """Measure as the rank that the environment names, and print the results as JSON."""
    die_with_owner(os.environ)  # before the slow imports

    from pipeline_lib.launch.environment import compile_caches

    os.environ.update(compile_caches(os.environ))
    with importing():
        from pipeline_lib.calibrate.rank import measure_rank
        from pipeline_lib.calibrate.task import Task

    found = measure_rank(Task.from_json(arguments.task.read_text(encoding="utf-8")), os.environ)
    print(json.dumps(found), flush=True)


def tell_site(_: argparse.Namespace) -> None:
    """Print the site's variables for a shell's `eval`; arguments would be visible to others."""
    from pipeline_lib.slurm.site import Site

    print(Site.load(os.environ).exports(), end="")
