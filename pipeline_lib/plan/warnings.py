"""The length of runs, and early warnings about them: few steps, long evaluations, little memory."""

from collections.abc import Iterator, Sequence

from pipeline_lib.config.schema import Config
from pipeline_lib.config.sweep import collapsed
from pipeline_lib.core.errors import ConfigError, DataError, PipelineError
from pipeline_lib.core.store import Store
from pipeline_lib.plan.amounts import expected_workload
from pipeline_lib.plan.answer import lacking, question_of
from pipeline_lib.plan.choose import Wanted, leanest
from pipeline_lib.plan.evaluation import evaluation_warnings
from pipeline_lib.plan.known import (
    blocks_of,
    is_sealed,
    vocabulary_of,
)
from pipeline_lib.plan.predict import lacks_host_memory
from pipeline_lib.plan.search import Setting
from pipeline_lib.plan.steps import (
    Steps,
    estimated_steps,
    expected_misfit,
    idle_ranks,
    plan_batches,
    step_warnings,
)


def lengths_of_runs(
    configs: Sequence[Config], store: Store, source: str
) -> tuple[list[str], list[str]]:
    """Return each run's optimizer steps, if known, and warnings about them; equal ones are merged.

    They are exact once the data is packed into blocks, or where `max_steps` is given. Raises
    ConfigError, which begins with `source`, for batches and steps that the plan of the packed data
    will refuse.
    """
    lengths, warnings, problems = [], [], []
    for config in configs:
        try:
            found, own = _length_of_run(config, store)
        except DataError as error:
            problems.append((config.experiment, [str(error)]))
            continue
        except (PipelineError, OSError):  # the plan says by itself what is wrong
            continue
        lengths.append((config.experiment, found))
        warnings.append((config.experiment, own))
    if problems:
        raise ConfigError(source, collapsed(problems))
    return collapsed(lengths), collapsed(warnings)


def _length_of_run(config: Config, store: Store) -> tuple[list[str], list[str]]:
    train = config.train
    ranks = config.cluster.ranks
    blocks = blocks_of(config, store)
    vocabulary = vocabulary_of(config, store)
    workload = blocks.workload if blocks else expected_workload(config, vocabulary)
    batch = plan_batches(train, ranks, blocks.training if blocks else None, workload)
    steps = (None if blocks else estimated_steps(config, batch, vocabulary)) or Steps.of(batch)
    if steps is None:
        return [], []
    warnings = list(step_warnings(train, batch, steps, ranks))
    misfit = _expected_misfit(config, store)
    idle = idle_ranks(train, ranks, workload) if blocks or workload.is_estimated else None
    if idle and not misfit:
        warnings.append(idle)
    return [steps.in_words()], [*warnings, *misfit]


def expected_misfits(configs: Sequence[Config], store: Store) -> list[str]:
    """Return warnings that `global_batch_samples` would refuse packed data; equal ones merge."""
    return collapsed([(config.experiment, _expected_misfit(config, store)) for config in configs])


def _expected_misfit(config: Config, store: Store) -> list[str]:
    """Return the warning that `global_batch_samples` would refuse the packed data, if likely."""
    if config.train.global_batch_samples is None or blocks_of(config, store):
        return []
    problem = expected_misfit(config, vocabulary_of(config, store))
    return [problem] if problem else []


def long_evaluations(configs: Sequence[Config], store: Store) -> list[str]:
    """Return warnings about evaluations on CPUs and bounded answers; a sweep's are merged."""
    return collapsed([(config.experiment, _long_evaluation(config, store)) for config in configs])


def _long_evaluation(config: Config, store: Store) -> list[str]:
    try:
        question = question_of(config, store)
        machine = question.machine
    except PipelineError:
        return []
    return (
        list(evaluation_warnings(config, question.geometry, question.workload, machine))
        if machine
        else []
    )


def little_memory(configs: Sequence[Config], store: Store) -> list[str]:
    """Return warnings about trainings that do not fit but may run: on CPUs memory may be more."""
    return collapsed(
        [(config.experiment, list(_little_memory(config, store))) for config in configs]
    )


def _little_memory(config: Config, store: Store) -> Iterator[str]:
    try:
        question = question_of(config, store)
        machine = question.machine
        batch = question.batch(question.train)
    except PipelineError:
        return
    if machine is None or machine.is_gpu or is_sealed(config, store, "train"):
        return
    setting = Setting(
        question.geometry, machine, question.workload, batch.global_batch_blocks, batch.steps
    )
    ways = leanest(Wanted(setting, question.train, question.held, question.has_deepspeed))
    if ways and lacks_host_memory(ways[0][1], machine):
        yield lacking(*ways[0], machine)
