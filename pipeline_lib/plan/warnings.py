"""What the plan's arithmetic finds early: the steps, long evaluations, little memory on CPUs."""

from collections.abc import Iterator
from dataclasses import replace

from pipeline_lib.config.findings import Finding, finding_of
from pipeline_lib.config.schema import Config
from pipeline_lib.core.errors import DataError, PipelineError
from pipeline_lib.core.store import Store
from pipeline_lib.plan.amounts import expected_workload
from pipeline_lib.plan.answer import lacking, question_of
from pipeline_lib.plan.choose import leanest
from pipeline_lib.plan.evaluation import evaluation_warnings
from pipeline_lib.plan.known import (
    blocks_of,
    is_sealed,
    vocabulary_of,
)
from pipeline_lib.plan.predict import host_bytes_of_node, lacks_host_memory
from pipeline_lib.plan.steps import (
    Steps,
    estimated_steps,
    expected_misfit,
    idle_ranks,
    plan_batches,
    step_warnings,
)


def on_steps(config: Config, store: Store) -> Iterator[Finding]:
    """Yield the number of optimizer steps as a note, if it is known, and warnings about them.

    They are exact once the data is packed into blocks, or where `max_steps` is given. A refusal is
    yielded instead for batches and steps that the plan of the packed data will refuse.
    """
    try:
        yield from _on_steps(config, store)
    except DataError as error:
        yield finding_of("refusal", str(error))
    except (PipelineError, OSError):  # the plan says by itself what is wrong
        return


def _on_steps(config: Config, store: Store) -> Iterator[Finding]:
    train = config.train
    ranks = config.cluster.ranks
    blocks = blocks_of(config, store)
    vocabulary = vocabulary_of(config, store)
    workload = blocks.workload if blocks else expected_workload(config, vocabulary)
    batch = plan_batches(train, ranks, blocks.training if blocks else None, workload)
    steps = (None if blocks else estimated_steps(config, batch, vocabulary)) or Steps.of(batch)
    if steps is None:
        return
    low, value, high = steps.run
    yield Finding("note", "", steps.in_words(), {"low": low, "steps": value, "high": high})
    for text in step_warnings(train, batch, steps, ranks):
        yield finding_of("warning", text)
    misfit = None if blocks else expected_misfit(config, vocabulary)
    idle = idle_ranks(train, ranks, workload) if blocks or workload.is_estimated else None
    if misfit:
        yield finding_of("warning", misfit)
    elif idle:
        yield finding_of("warning", idle)


def on_evaluation(config: Config, store: Store) -> Iterator[Finding]:
    """Yield warnings about an evaluation on CPUs, and about answers left out or cut short."""
    try:
        question = question_of(config, store)
        machine = question.machine
    except PipelineError:
        return
    if machine is None:
        return
    for text in evaluation_warnings(config, question.geometry, question.workload, machine):
        yield finding_of("warning", text)


def on_memory(config: Config, store: Store) -> Iterator[Finding]:
    """Yield a warning if a training on CPUs does not fit: they may have more than is asked for."""
    try:
        question = question_of(config, store)
        machine = question.machine
        batch = question.batch(question.train)
    except PipelineError:
        return
    if machine is None or machine.is_gpu or is_sealed(config, store, "train"):
        return
    way = leanest(question.case(machine, batch))
    if way is None:
        return
    train, memory = way
    if lacks_host_memory(memory, machine):
        found = finding_of("warning", lacking(train, memory, machine))
        yield replace(found, numbers={"needed_bytes": host_bytes_of_node(memory, machine)})
