"""Commands for experiments: import, check, plan, status, rewind, record, compare and more."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline_lib.cli.chat import tell
from pipeline_lib.cli.internal import run_as_rule, run_one_stage
from pipeline_lib.cli.machines import positive
from pipeline_lib.config.compile import Experiment, open_experiment, open_experiments
from pipeline_lib.config.dag import DEFAULT_CONFIG, Dag
from pipeline_lib.config.load import load_configs
from pipeline_lib.config.schema import Config
from pipeline_lib.core.errors import (
    ConfigError,
    HubOutOfReach,
    IntegrityError,
    NotToShip,
    TooFewQuestions,
)
from pipeline_lib.core.git import how_to_commit
from pipeline_lib.core.language import N_, _
from pipeline_lib.core.stage import say
from pipeline_lib.core.store import Store

EXPERIMENT = N_(
    "a name (* and ? as in file names), the beginning of a digest, a config file, or STORE:NAME"
)


def add_to(commands: Any) -> None:
    """Add the commands of this module to the subparsers `commands`."""
    _add_import(commands)
    _add_check(commands)
    _add_plan(commands)
    _add_status(commands)
    _add_rewind(commands)
    _add_summary(commands)
    _add_verdict(commands)
    _add_compare(commands)
    _add_record(commands)
    _add_publish(commands)
    _add_trace(commands)


def _add_import(commands: Any) -> None:
    text = _(
        "make a config from files or commands of LLaMA-Factory, Axolotl, ms-swift, TRL, DeepSpeed, "
        "accelerate or the Trainer, and say what differs"
    )
    sub = commands.add_parser("import", help=text, description=f"{text}; docs/from-other-tools.md")
    which = _("one or several that belong together; the kind is recognised by the content")
    sub.add_argument("files", type=Path, nargs="+", metavar="FILE", help=which)
    sub.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="CONFIG",
        help=_("write the config here; else it goes to stdout"),
    )
    sub.add_argument(
        "--gpus",
        type=positive,
        metavar="N",
        help=_("GPUs of a machine, cluster.gpus_per_node, where no file says it"),
    )
    sub.set_defaults(command=import_config, when_stopped=_("nothing was written"))


def _add_check(commands: Any) -> None:
    text = _("read a config and name all of its problems")
    sub = commands.add_parser("check", help=text, description=text)
    sub.add_argument(
        "config", type=Path, nargs="?", default=DEFAULT_CONFIG, help=_default(DEFAULT_CONFIG)
    )
    sub.set_defaults(command=check)


def _add_plan(commands: Any) -> None:
    text = _(
        "predict the memory, time and disk of a config, and choose the fastest strategy that fits"
    )
    sub = commands.add_parser("plan", help=text, description=text)
    # the plan rule runs the stage by it
    sub.add_argument("--spec", type=Path, help=argparse.SUPPRESS)
    sub.add_argument("config", type=Path, nargs="?", help=_default(DEFAULT_CONFIG))
    sub.add_argument(
        "--what-if",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help=_(
            "also show the plan with other values, such as cluster.nodes=4 "
            "workload.document_tokens=8192"
        ),
    )
    sub.add_argument(
        "--machines",
        action="extend",
        nargs="+",
        default=[],
        metavar="GPU:GPUS[xNODES][@PRICE]",
        help=_(
            "compare machines to rent, such as a10:4@0.6 h100:8x2@2.5, where the price is that of "
            "one GPU for an hour; or name a file with one on each line"
        ),
    )
    how = sub.add_mutually_exclusive_group()
    how.add_argument(
        "--details",
        action="store_true",
        help=_("also show all figures, and every formula with its numbers"),
    )
    how.add_argument("--json", action="store_true", help=_("print a JSON object instead of text"))
    run_as_rule(sub, plan, stage="plan")


def _add_status(commands: Any) -> None:
    text = _("show the state of every experiment in the store")
    sub = commands.add_parser("status", help=text, description=text)
    sub.add_argument(
        "experiments",
        nargs="*",
        metavar="EXPERIMENT",
        help=_("only these: {names}").format(names=_(EXPERIMENT)),
    )
    sub.add_argument("--all", action="store_true", help=_("also older configs of the same name"))
    how = sub.add_mutually_exclusive_group()
    how.add_argument(
        "--watch",
        nargs="?",
        const=5.0,
        type=interval,
        metavar="SECONDS",
        help=_("repeat; default: 5 s"),
    )
    how.add_argument("--json", action="store_true", help=_("print a JSON list of objects"))
    sub.set_defaults(command=status)


def _add_rewind(commands: Any) -> None:
    text = _(
        "make snakemake continue an unfinished training from an earlier checkpoint; newer ones "
        "are set aside"
    )
    sub = commands.add_parser("rewind", help=text, description=text)
    add_arguments(sub)
    sub.add_argument(
        "--step",
        type=positive,
        required=True,
        metavar="N",
        help=_("the checkpoint to continue from"),
    )
    sub.set_defaults(command=rewind)


def _add_summary(commands: Any) -> None:
    text = _("show the results of a finished experiment, or a line for each of several")
    sub = commands.add_parser("summary", help=text, description=text)
    which = f"{_(EXPERIMENT)}; {_default(DEFAULT_CONFIG)}"
    sub.add_argument(
        "experiments", nargs="*", default=[DEFAULT_CONFIG], metavar="EXPERIMENT", help=which
    )
    sub.add_argument(
        "--experiment",
        metavar="NAME",
        help=_("name of the experiment in the sweep of a config file"),
    )
    sub.set_defaults(command=summary)


def _add_verdict(commands: Any) -> None:
    text = _("say whether a tuned model may ship, by its benchmarks and the section `ship`")
    codes = _(
        "exit code: 0 if it may, {refused} if not, {unknown} if there are too few questions to tell"
    ).format(refused=NotToShip.exit_code, unknown=TooFewQuestions.exit_code)
    sub = commands.add_parser("verdict", help=text, description=text, epilog=codes)
    which = f"{_(EXPERIMENT)}; {_default(DEFAULT_CONFIG)}"
    sub.add_argument(
        "experiments", nargs="?", default=DEFAULT_CONFIG, metavar="EXPERIMENT", help=which
    )
    sub.set_defaults(command=verdict)


def _add_compare(commands: Any) -> None:
    text = _(
        "show which of several experiments is best, whether its lead is noise, and what differs"
    )
    sub = commands.add_parser("compare", help=text, description=text)
    sub.add_argument("experiments", nargs="+", metavar="EXPERIMENT", help=_(EXPERIMENT))
    sub.add_argument(
        "--page", type=Path, metavar="FILE", help=_("write a page with curves and answers as well")
    )
    sub.add_argument("--json", action="store_true", help=_("print a JSON object instead of text"))
    sub.set_defaults(command=compare)


def _add_record(commands: Any) -> None:
    text = _("publish a finished experiment and save it as a DVC experiment")
    sub = commands.add_parser("record", help=text, description=text)
    sub.add_argument("name", metavar="NAME", help=_("name of the DVC experiment"))
    add_arguments(sub)
    sub.add_argument(
        "--model",
        action="store_true",
        help=_("also store its model folder, as results/current/model"),
    )
    sub.add_argument(
        "--force", action="store_true", help=_("replace a DVC experiment of this name")
    )
    sub.set_defaults(command=record)


def _add_publish(commands: Any) -> None:
    text = _(
        "copy the small results of an experiment (the best one of a sweep) to results/current, "
        "for DVC"
    )
    sub = commands.add_parser("publish", help=text, description=text)
    add_arguments(sub)
    sub.set_defaults(command=publish)


def _add_trace(commands: Any) -> None:
    text = _(
        "show where a model folder comes from, back to hub commits and data files, and check "
        "every digest"
    )
    sub = commands.add_parser("trace", help=text, description=text)
    sub.add_argument(
        "model", type=Path, metavar="MODEL_DIR", help=_("results/NAME/model, or a copy of it")
    )
    sub.add_argument(
        "--quick", action="store_true", help=_("check the sizes of files only, not their content")
    )
    sub.add_argument("--json", action="store_true", help=_("print nested JSON objects"))
    sub.set_defaults(command=trace)


def add_those_for_rules(commands: Any) -> None:
    """Add the commands that rules and tools call, to the subparsers `commands`."""
    sub = commands.add_parser(
        "rehearse", description="say what a rehearsal found; people run `snakemake rehearse`"
    )
    sub.add_argument(
        "--frozen", type=Path, required=True, help="the frozen experiment, of the store"
    )
    sub.add_argument("--out", type=Path, help="load the merged model and write what was found here")
    run_as_rule(sub, rehearse)
    sub = commands.add_parser(
        "overrides", description="refuse what `dvc exp run -S` changed and no run reads"
    )
    sub.set_defaults(command=overrides)


def _default(value: Path) -> str:
    """Return the help of an argument that may be left out."""
    return _("default: {value}").format(value=value)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments that select an experiment; `--configfile` is snakemake's name for it."""
    sub.add_argument("config", type=Path, nargs="?", help=_default(DEFAULT_CONFIG))
    sub.add_argument(
        "--configfile",
        type=Path,
        metavar="CONFIG",
        help=_("the same, by the name that snakemake uses"),
    )
    sub.add_argument("--experiment", metavar="NAME", help=_("name of the experiment in a sweep"))


def config_of(arguments: argparse.Namespace) -> Path:
    """Return the config file that `add_arguments` took. Raise ConfigError if two are given."""
    if arguments.config and arguments.configfile:
        raise ConfigError(
            "--configfile",
            [f"{arguments.configfile}: a config is given already: {arguments.config}"],
        )
    return arguments.config or arguments.configfile or DEFAULT_CONFIG


def interval(text: str) -> float:
    """Parse seconds between two refreshes. Raise ArgumentTypeError outside 0.2 s to one day."""
    try:
        every_s = float(text)
    except ValueError:
        every_s = 0.0
    if not 0.2 <= every_s <= 86400:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of seconds of at least 0.2; names go before --watch"
        )
    return every_s


def status(arguments: argparse.Namespace) -> None:
    """Show the state of the experiments, once or repeatedly."""
    from pipeline_lib.status.survey import Survey
    from pipeline_lib.status.watch import show, watch

    store = Store.from_env(os.environ)
    survey = Survey(store, texts=tuple(arguments.experiments), all_of_them=arguments.all)
    if arguments.watch is not None:
        watch(survey, sys.stdout, arguments.watch)
    else:
        show(survey, sys.stdout, arguments.json)


def import_config(arguments: argparse.Namespace) -> None:
    """Write a config made from files of other tools, and show what became of their keys."""
    from pipeline_lib.cli.importing import show
    from pipeline_lib.config.importing import import_files
    from pipeline_lib.core.files import is_there, write_text
    from pipeline_lib.data.read_files import count_rows

    out: Path | None = arguments.out
    if out is not None and is_there(out):
        raise ConfigError(
            str(out), ["exists already, and is not replaced: choose another name, or remove it"]
        )
    # LLaMA-Factory's own switch of the hub that a name without one means.
    uses_modelscope = os.environ.get("USE_MODELSCOPE_HUB", "0").lower() in ("1", "y", "true")
    hub = "modelscope" if uses_modelscope else "huggingface"
    imported = import_files(arguments.files, hub, count_rows, out, arguments.gpus)
    show(imported.rows, sys.stderr if out is None else sys.stdout)
    if out is None:
        say(imported.text.rstrip("\n"))
        return
    write_text(out, imported.text)
    before = (
        f"write {' and '.join(imported.missing)} into it, then run"
        if imported.missing
        else "now run"
    )
    say(f"wrote {out}; {before} `qwen3 check {out}`")


def check(arguments: argparse.Namespace) -> None:
    """Check a config and say that it has no problems. Raise ConfigError with all of its problems.

    Where a hub is out of reach, say what can be said without it. Raise HubError if it refuses.
    """
    from pipeline_lib.plan.known import learn_architecture
    from pipeline_lib.workflow.findings import ThisMachine, findings_of, refuse_impossible

    store = Store.from_env(os.environ)
    source = str(arguments.config)

    def say_more(configs: Sequence[Config]) -> None:
        for finding in findings_of(configs, store, ThisMachine(os.environ)):
            if finding.kind != "refusal":
                say(f"{source}: {finding.line}")

    try:
        found = open_experiments(
            arguments.config,
            store,
            lambda config: refuse_impossible(config, store),
            lambda config: learn_architecture(config, store, say),
        )
    except ConfigError:
        say_more(_with_data_and_plan(arguments.config, store))
        raise
    except HubOutOfReach as error:
        say_more(load_configs(arguments.config))
        text = _("{source}: note: the hub could not be asked; the download will check the rest")
        say(text.format(source=source))
        say(f"  {error}")
        say(_("{source}: no problems that can be seen without the hub").format(source=source))
        return
    say_more([experiment.config for experiment in found])
    if len(found) == 1:
        text = _("{source}: no problems; experiment {name!r} has {stages} stages")
        say(text.format(source=source, name=found[0].name, stages=len(found[0].specs)))
        return
    stages = {spec.digest for experiment in found for spec in experiment.specs.values()}
    text = _("{source}: no problems; {experiments} experiments have {stages} stages:")
    say(text.format(source=source, experiments=len(found), stages=len(stages)))
    for experiment in found:
        say(f"  {experiment.name}")


def _with_data_and_plan(path: Path, store: Store) -> Sequence[Config]:
    """Return the experiments at `path` if nothing but their training is refused; else none."""
    from pipeline_lib.workflow.findings import refuse_wrong

    with suppress(ConfigError):
        configs = load_configs(path)
        for config in configs:
            refuse_wrong(config, store)
        return configs
    return ()


def plan(arguments: argparse.Namespace) -> None:
    """Show what a config will take, from what is known now; or with `--spec` run the plan stage."""
    if arguments.spec is not None:
        run_one_stage(arguments)
        return
    from pipeline_lib.plan.command import show_offers, show_plan, show_plan_as_json
    from pipeline_lib.workflow.findings import ThisMachine, findings_of

    config = arguments.config
    what_if = list(arguments.what_if)
    store = Store.from_env(os.environ)
    if (
        config is None
        and what_if
        and "=" not in what_if[-1]
        and what_if[-1].endswith((".yaml", ".yml"))
    ):
        config = Path(what_if.pop())  # --what-if also takes a config that follows it
    if arguments.json and what_if:
        raise ConfigError("--json", ["it shows the plan of the config alone; leave out --what-if"])
    machines = list(arguments.machines)
    if machines and (arguments.json or what_if or arguments.details):
        raise ConfigError("--machines", ["it is a table of its own; leave out the other flags"])
    if machines:
        if config is None and machines[-1].endswith((".yaml", ".yml")):
            config = Path(machines.pop())
        show_offers(config or DEFAULT_CONFIG, machines, store, say)
    elif arguments.json:
        show_plan_as_json(config or DEFAULT_CONFIG, store, say)
    else:
        this_machine = ThisMachine(os.environ)
        show_plan(
            config or DEFAULT_CONFIG,
            what_if,
            arguments.details,
            store,
            lambda configs: findings_of(configs, store, this_machine),
            say,
        )


def verdict(arguments: argparse.Namespace) -> None:
    """Show each rule of `ship` with what it came to; end with the code of the verdict.

    Raise NotToShip or TooFewQuestions unless the model may ship, and ConfigError without rules.
    """
    from pipeline_lib.report.outcomes import ship_verdict_of
    from pipeline_lib.report.ship import ShipDecision
    from pipeline_lib.status.selection import Selector, notes_on

    selector = Selector(Store.from_env(os.environ), wants_finished=True)
    chosen = selector.chosen([str(arguments.experiments)])
    for note in notes_on(chosen):
        tell(note)
    if len(chosen) > 1:
        raise ConfigError(str(arguments.experiments), ["is a sweep; name one experiment of it"])
    dag, experiment = selector.opened(chosen[0])
    found = ship_verdict_of(experiment, dag.store)
    if found is None:
        problem = "has no rule under `ship`; docs/benchmarks.md says how to write one"
        raise ConfigError(f"experiment {experiment.name!r}", [problem])
    for rule in found.rules:
        say(f"{rule.key}: {rule.text}: {rule.decision}")
    if found.decision == ShipDecision.STAY:
        raise NotToShip(found.text)
    if found.decision == ShipDecision.UNKNOWN:
        raise TooFewQuestions(found.text)
    say(found.text)


def summary(arguments: argparse.Namespace) -> None:
    """Show the table of a finished experiment; of several, a line each, or --experiment's table."""
    from pipeline_lib.report.outcomes import outcome_table, outcomes_of
    from pipeline_lib.report.publish import print_summary
    from pipeline_lib.status.selection import Selector, notes_on

    selector = Selector(Store.from_env(os.environ), wants_finished=True)
    texts = [str(text) for text in arguments.experiments]
    if arguments.experiment is not None:
        if len(texts) > 1:
            raise ConfigError(
                "--experiment", [f"it chooses from one config file, and {len(texts)} were given"]
            )
        print_summary(
            open_experiment(Path(texts[0]), selector.store, arguments.experiment), selector.store
        )
        return
    chosen = selector.chosen(texts)
    for note in notes_on(chosen):
        tell(note)
    opened = [selector.opened(one) for one in chosen]
    if len(opened) > 1:
        say(outcome_table(outcomes_of(opened)))
    else:
        [(dag, experiment)] = opened
        print_summary(
            experiment,
            dag.store,
            is_linked=dag.store.root.resolve() == selector.store.root.resolve(),
        )


def rewind(arguments: argparse.Namespace) -> None:
    """Set the checkpoints after a step aside."""
    from pipeline_lib.upkeep.rewind import rewind as rewind_run

    store = Store.from_env(os.environ)
    experiment = open_experiment(config_of(arguments), store, arguments.experiment)
    rewind_run(experiment.specs["train"], arguments.step, store, say)


def rehearse(arguments: argparse.Namespace) -> None:
    """With --out, load a rehearsal's merged model and write findings; else show and clean up."""
    from pipeline_lib.workflow.rehearsal import conclude, write_findings

    dag = Dag.thaw(arguments.frozen, Store.around(arguments.frozen, os.environ))
    if arguments.out is None:
        conclude(dag, say)
    else:
        write_findings(dag, arguments.out, say)


def publish(arguments: argparse.Namespace) -> None:
    """Rewrite results/current from a finished experiment: a sweep's best, or --experiment."""
    from pipeline_lib.core.lock import locked
    from pipeline_lib.report.publish import RECORDING, best_of
    from pipeline_lib.report.publish import publish as publish_results

    store = Store.from_env(os.environ)
    config = config_of(arguments)
    if arguments.experiment is None:
        dag = Dag.open(config, store)
        experiment = best_of(dag)
        if len(dag.experiments) > 1:
            say(
                f"of the sweep, {experiment.name!r} has the lowest held-out loss; for another say "
                "--experiment NAME"
            )
    else:
        experiment = open_experiment(config, store, arguments.experiment)
    with locked(RECORDING, say):
        for path in publish_results(experiment, store):
            say(f"wrote {path}")
    if "DVC_ROOT" not in os.environ:  # `dvc exp run` saves these files itself
        _say_how_to_commit(experiment)


def record(arguments: argparse.Namespace) -> None:
    """Publish the experiment and save it as a DVC experiment."""
    from pipeline_lib.report.record import record as record_experiment

    store = Store.from_env(os.environ)
    config = config_of(arguments)
    experiment = open_experiment(config, store, arguments.experiment)
    record_experiment(
        arguments.name,
        experiment,
        store,
        say,
        with_model=arguments.model,
        force=arguments.force,
        is_of_default_config=config == DEFAULT_CONFIG and arguments.experiment is None,
    )
    _say_how_to_commit(experiment)


def overrides(_: argparse.Namespace) -> None:
    """Refuse parameters that `dvc exp run` changed in a file that its run does not read."""
    from pipeline_lib.report.overrides import refuse_overrides

    refuse_overrides(say)


def _say_how_to_commit(experiment: Experiment) -> None:
    from pipeline_lib.report.publish import FOR_GIT

    if command := how_to_commit(FOR_GIT, f"Results of {experiment.name}"):
        say(command)


def compare(arguments: argparse.Namespace) -> None:
    """Show the comparison, and write its page if --page is given."""
    from pipeline_lib.compare.comparison import Comparison
    from pipeline_lib.compare.show import render
    from pipeline_lib.compare.subjects import select
    from pipeline_lib.compare.verdict import verdict
    from pipeline_lib.status.watch import console_on

    comparison = Comparison.of(select(arguments.experiments, Store.from_env(os.environ), tell))
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
            say(
                f"wrote {arguments.page} ({size_bytes / 1e6:.1f} MB); open it in any browser, it "
                "needs no network"
            )


def trace(arguments: argparse.Namespace) -> None:
    """Show the origin of a model folder.

    Raise IntegrityError afterwards if anything in the chain has changed.
    """
    from pipeline_lib.lineage.show import problems_of, show, status_line_on, to_json
    from pipeline_lib.lineage.trace import trace as trace_model

    with status_line_on(sys.stderr) as tell:
        found = trace_model(arguments.model, Store.from_env(os.environ), arguments.quick, tell)
    if arguments.json:
        say(to_json(found))
    else:
        show(found, sys.stdout)
    if problems := problems_of(found):
        raise IntegrityError(
            "\n".join(
                [f"{arguments.model}: this chain does not hold:", *(f"  - {p}" for p in problems)]
            )
        )
