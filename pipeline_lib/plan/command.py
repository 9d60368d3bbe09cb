"""`python -m pipeline_lib plan CONFIG`: the plan at once, from what is known without network, GPU or data."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from pipeline_lib.base.errors import ConfigError, PipelineError
from pipeline_lib.base.fsio import write_json
from pipeline_lib.base.run_folder import PLAN_NAME
from pipeline_lib.base.stage import Say
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import held_keys
from pipeline_lib.config.content import measured_content
from pipeline_lib.config.dag import RESULTS
from pipeline_lib.config.load import load_config, load_configs
from pipeline_lib.config.schema import Config
from pipeline_lib.config.sweep import collapsed
from pipeline_lib.config.unusual import warnings_of
from pipeline_lib.plan.document import Answer, Question, answer
from pipeline_lib.plan.evaluation import long_on_cpus
from pipeline_lib.plan.explain import explain
from pipeline_lib.plan.known import blocks_of, geometry_of, is_sealed, repetition_of
from pipeline_lib.plan.measured import measured_of
from pipeline_lib.plan.preflight import too_little_disk
from pipeline_lib.plan.table import render, render_what_if
from pipeline_lib.plan.workload import Workload


def show_plan(path: Path, what_if: Sequence[str], is_explained: bool, store: Store, say: Say) -> None:
    """Show the plan of the config at `path`, and keep it in RESULTS/NAME/plan.json until there is a report beside it.

    Of a sweep it is the first experiment's.
    With `what_if`, texts KEY=VALUE, show it beside that of the config with those keys. That is not kept, nor is what
    cannot be run. Raises ConfigError after the table if the run cannot be, and DataError if the model's sizes are not
    known here.
    """
    configs = load_configs(path)
    config = configs[0]
    found = _answer(path, config, store)
    if what_if:
        now, config = found, load_config(path, what_if)
        found = _answer(path, config, store)
        say(render_what_if(now.content, found.content, what_if))
    else:
        say(render(found.content))
    if len(configs) > 1:
        say(f"\nof the first of {len(configs)} experiments; `snakemake plan` makes the plans of all")
    shown = configs if not what_if else [config]
    for text in (*warnings_of(shown), *long_evaluations(shown, store)):
        say(f"\nwarning: {text}")
    if not is_sealed(config, store, "train"):
        for problem in too_little_disk(found.content["disk"]["needed_bytes"], config, store):
            say(f"\nthe training would be refused: {problem}")
    if not what_if and found.refusal is None:
        _keep(found, RESULTS / config.experiment, say)
    if is_explained:
        say(f"\n{_explained(found)}")
    if found.refusal is not None:
        raise ConfigError(str(path), [found.refusal])


def _keep(found: Answer, folder: Path, say: Say) -> None:
    """What a finished run has beside its report is the plan that it was made from."""
    kept = folder / PLAN_NAME
    if (folder / "report.html").exists():
        say(f"\nnot written to {kept}: the run that this folder is of has finished")
    else:
        write_json(kept, found.content)
        say(f"\nwrote {kept}")


def _answer(path: Path, config: Config, store: Store) -> Answer:
    """The plan. Raises ConfigError, which names the config."""
    try:
        question = question_of(config, store)
        if problems := [
            *question.geometry.too_long(config.shard.block_tokens),
            *question.geometry.rank_too_high(config.train),
        ]:
            raise ConfigError(str(path), problems)
        return answer(question)
    except ConfigError as error:
        raise ConfigError(str(path), error.problems) from error


def question_of(config: Config, store: Store) -> Question:
    """What is asked of the config. Raises DataError if its model is not known here, ConfigError for cluster.json."""
    measured_of(config)  # whose errors name the file
    geometry, blocks = geometry_of(config, store), blocks_of(config, store)
    return Question(
        experiment=config.experiment,
        geometry=geometry,
        train=config.train,
        cluster=config.cluster,
        tracking=config.tracking,
        workload=blocks.workload if blocks else Workload.assumed(config),
        blocks=blocks,
        held=held_keys(config.train),
        measured=measured_content(config),
        has_deepspeed=find_spec("deepspeed") is not None,
        repetition=repetition_of(config, store),
    )


def long_evaluations(configs: Sequence[Config], store: Store) -> list[str]:
    """A warning for each evaluation that will take long on CPUs, as far as that is known; of a sweep each once."""
    return collapsed([(config.experiment, _long_evaluation(config, store)) for config in configs])


def _long_evaluation(config: Config, store: Store) -> list[str]:
    try:
        question = question_of(config, store)
        machine = question.machine
    except PipelineError:
        return []
    return long_on_cpus(config, question.geometry, question.workload, machine) if machine else []


def _explained(found: Answer) -> str:
    if found.wanted is None or found.choice is None:
        return "nothing to explain before the GPUs are named: cluster.gpu"
    return explain(found.choice.chosen, found.wanted.setting)
