"""Commands that run a stage, as the workflow's rules do; and `plan`, which people also run on a config."""

import argparse
import os
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.dag import DEFAULT_CONFIG, Dag
from pipeline_lib.core.errors import Interrupted, LockLost, PipelineError
from pipeline_lib.core.run_folder import CHECKPOINTS, EVENTS_NAME, PLAN_NAME, sealed_steps
from pipeline_lib.core.stage import StageFunction, run_stage, say
from pipeline_lib.core.store import Store
from pipeline_lib.slurm.job import JOB_VARIABLE

STAGES = ("download", "tokenize", "shard", "plan", "train", "merge", "evaluate", "report")


def add_to(commands: Any) -> None:
    """Add the commands of this module to the subparsers `commands`."""
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
    text = "train, as the train rule does"
    sub = commands.add_parser("launch", help=text, description=text)
    for option in ("--spec", "--plan"):
        sub.add_argument(option, type=Path, required=True)
    sub.add_argument("--requeue", action="store_true", help="after an interruption queue this SLURM job again")
    sub.add_argument("--reached", type=Path, help="of a training to a rung: write here what it came to")
    sub.set_defaults(command=launch, stage="train")
    text = "decide which trainings of a sweep go on, as the decide rule does"
    sub = commands.add_parser("decide", help=text, description=text)
    sub.add_argument("--frozen", type=Path, required=True, help="the frozen sweep, of the store")
    sub.add_argument("--rung", required=True, metavar="DIGEST", help="which decision")
    sub.set_defaults(command=decide)


def plan(arguments: argparse.Namespace) -> None:
    """Show what a config will take, from what is known now; or with `--spec` run the plan stage."""
    if arguments.spec is not None:
        run_one_stage(arguments)
        return
    from pipeline_lib.plan.preflight import show_plan

    config, what_if = arguments.config, list(arguments.what_if)
    if config is None and what_if and "=" not in what_if[-1] and what_if[-1].endswith((".yaml", ".yml")):
        config = Path(what_if.pop())  # --what-if also takes a config that follows it
    show_plan(config or DEFAULT_CONFIG, what_if, arguments.explain, Store.from_env(os.environ), say)


def launch(arguments: argparse.Namespace) -> None:
    """Train to the end, or up to a rung."""
    if arguments.reached is None:
        train(arguments)
        return
    from pipeline_lib.report.sweep import reach

    store = Store.around(arguments.spec, os.environ)
    reach(store.read_spec(arguments.spec), store, arguments.reached, lambda: train(arguments), say)


def decide(arguments: argparse.Namespace) -> None:
    """Decide which trainings of a frozen sweep continue after a rung."""
    from pipeline_lib.report.sweep import conclude_rung

    conclude_rung(Dag.thaw(arguments.frozen, Store.around(arguments.frozen, os.environ)), arguments.rung, say)


def train(arguments: argparse.Namespace) -> None:
    """Train; with --requeue, requeue this SLURM job after an interruption as long as the run progresses.

    A run that lost its lock is not requeued, because another process owns it.
    """
    say(f"---- {datetime.now().astimezone().isoformat(timespec='seconds')}")  # SLURM's log holds all attempts
    try:
        run_one_stage(arguments)
    except LockLost:
        raise
    except PipelineError as error:
        if error.exit_code != Interrupted.exit_code or not arguments.requeue or JOB_VARIABLE not in os.environ:
            raise
        from pipeline_lib.plan.content import known, read_plan
        from pipeline_lib.slurm.job import Run, queue_again

        store = Store.around(arguments.spec, os.environ)
        folder = store.run_dir(run_digest(store.read_spec(arguments.spec)))
        steps = [step for step, _ in sealed_steps(folder / CHECKPOINTS)]
        most = known(read_plan(arguments.plan.with_suffix("") / PLAN_NAME).cluster.max_requeues)
        run = Run(int(os.environ[JOB_VARIABLE]), folder / EVENTS_NAME, steps[-1] if steps else 0, most)
        raise Interrupted(f"{error}\nnot queued again: {queue_again(run, error, say)}") from error


def run_one_stage(arguments: argparse.Namespace) -> None:
    """Run a stage as its spec says, in the store that contains the spec."""
    store = Store.around(arguments.spec, os.environ)
    spec = store.read_spec(arguments.spec)
    if spec.stage != arguments.stage:
        raise PipelineError(f"{arguments.spec}: a spec of the {spec.stage} stage, not of {arguments.stage}")
    note = {"slurm_job": os.environ[JOB_VARIABLE]} if JOB_VARIABLE in os.environ else {}
    if spec.stage == "train":
        from pipeline_lib.launch.stage import launcher, next_attempt

        digest = run_digest(spec)
        stage = launcher(arguments.plan.with_suffix(""), os.environ)
        attempt = {"attempt": next_attempt(store.run_dir(digest))}
        run_stage(stage, spec, store, say, lock_digest=digest, lock_note={**note, **attempt})
    elif spec.stage == "tokenize":
        from pipeline_lib.data.tokenize import run

        run_stage(partial(run, workers=arguments.workers), spec, store, say, lock_note=note)
    else:
        run_stage(_function_of(spec.stage), spec, store, say, lock_note=note)
    if spec.stage == "report":
        from pipeline_lib.report.stage import REPORT_NAME, SUMMARY_NAME
        from pipeline_lib.tracking.feed import hand_over

        hand_over(spec, store, REPORT_NAME, SUMMARY_NAME, say)


def _function_of(stage: str) -> StageFunction:
    """Return the stage's function, imported only when needed: some stages need torch and most do not."""
    function: Callable[..., dict[str, object]]
    if stage == "download":
        from pipeline_lib.data.download import run as function
    elif stage == "shard":
        from pipeline_lib.data.shard import run as function
    elif stage == "plan":
        from pipeline_lib.plan.stage import run as function
    elif stage == "merge":
        from pipeline_lib.export.merge import run as function
    elif stage == "evaluate":
        from pipeline_lib.evaluate.stage import run as function
    else:
        from pipeline_lib.report.stage import run as function
    return function
