"""Compute how much the stages ask SLURM for; for the training, with the plan's own arithmetic."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline_lib.config.content import WEIGHTS_SUFFIXES
from pipeline_lib.config.findings import Finding, Kind, refuse
from pipeline_lib.config.schema import Config
from pipeline_lib.config.stages import JobKind
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import ConfigError, DataError, IntegrityError, PipelineError
from pipeline_lib.core.files import unreadable_named
from pipeline_lib.core.run_folder import PLAN_NAME
from pipeline_lib.core.store import Store, read_manifest
from pipeline_lib.core.units import GIGA, brief, count
from pipeline_lib.plan.host import host_need_of_plan
from pipeline_lib.plan.stages import (
    FILE_BYTES_S,
    Run,
    benchmark_need,
    evaluation_need,
    loading_need,
    merge_need,
    reading_need,
    run_of_config,
    shard_need,
    tokenize_need,
    verifying_s,
)
from pipeline_lib.plan.workload import assumed_workload
from pipeline_lib.records.plan import PlanDocument, read_plan
from pipeline_lib.slurm.cluster import (
    NodeGroup,
    fitted,
    groups_of,
    limit_of,
    read_groups,
    where_set,
)
from pipeline_lib.slurm.request import JobRequest
from pipeline_lib.slurm.site import Site

if TYPE_CHECKING:
    from pipeline_lib.plan.answer import Question

_UNKNOWN_MB = 64_000

# Keys that sweeps vary and predictions ignore. Their defaults stand in, so a sweep's experiments
# share one answer.
_NO_SIZES = ("lr", "seed", "weight_decay", "beta1", "beta2", "replica")
_USUAL = {key: getattr(Train(), key) for key in _NO_SIZES}

# Before the first step and after the last: loading, warming up, hashing, sealing.
_AROUND_MINUTES = 15
_MARGIN = 1.25
_UNKNOWN_MINUTES = 240
_MINUTE_S = 60

# All other stages get half an hour to start, to wait for another's lock and to seal, plus the time
# of their work (plan/stages.py).
_STAGE_MINUTES = 30

# SLURM checks time limits about every 30 s, the ranks have to agree on a step, and an earlier save
# may be under way.
_WARNING_S = 60
_UNKNOWN_WARNING_S = 300


def training_request(
    config: Config,
    plan: PlanDocument | None,
    nodes: list[NodeGroup],
    read_bytes: int = 0,
    following: Sequence[JobRequest] = (),
) -> JobRequest:
    """Return the request of `config`'s training, which reads `read_bytes`; `plan` may be partial.

    `plan` is its plan.json, as far as known. The job goes on with what would be jobs that request
    `following`; for what they need beyond the nodes, the training does not wait. The run time is
    capped to the limit of `nodes`, unless the config sets it: a longer run is saved there and
    queued again. Memory is capped to what the nodes have only if it is a guess.
    """
    cluster = config.cluster
    memory_mb = _UNKNOWN_MB
    if cluster.memory_gb is not None:
        memory_mb = cluster.memory_gb * 1000
    elif plan is not None:
        memory_mb = 1000 * math.ceil(host_need_of_plan(plan).total_bytes / GIGA)
    # The upper end of the prediction with a margin, after verifying and loading. A job that asks
    # for too little time to finish is only interrupted once more. A job that never gets to train is
    # lost.
    minutes = math.ceil((verifying_s(read_bytes) + read_bytes / FILE_BYTES_S) / _MINUTE_S)
    way = plan.prediction if plan else None
    if way is None or way.run_s is None:
        minutes += _UNKNOWN_MINUTES
    else:
        minutes += _AROUND_MINUTES + math.ceil(_MARGIN * way.run_s.high / _MINUTE_S)
    # without the time to start and to wait for a lock, which the training has
    minutes += sum(request.runtime_minutes - _STAGE_MINUTES for request in following)
    request = JobRequest(
        nodes=cluster.nodes,
        tasks_per_node=cluster.ranks_per_node,
        cpus_per_task=cluster.cpus_per_rank,
        gpus_per_node=cluster.gpus_per_node,
        memory_mb=memory_mb,
        runtime_minutes=cluster.runtime_minutes or minutes,
        warning_s=0,
    )
    most = fitted(request, nodes)
    if plan is None and cluster.memory_gb is None:
        request = replace(request, memory_mb=most.memory_mb)
    if cluster.memory_gb is None:
        most_mb = max([request.memory_mb, *(each.memory_mb for each in following)])
        most_mb = fitted(replace(request, memory_mb=most_mb), nodes).memory_mb
        request = replace(request, memory_mb=max(request.memory_mb, most_mb))
    if cluster.runtime_minutes is None:
        request = replace(request, runtime_minutes=most.runtime_minutes)
    return replace(request, warning_s=warning_s(plan, request.runtime_minutes * _MINUTE_S))


def sealed_plan(pointer: Path) -> PlanDocument:
    """Return plan.json of the sealed plan that `pointer` points at.

    Raises IntegrityError, Unreadable.
    """
    folder = pointer.with_suffix("")
    path = folder / PLAN_NAME
    try:
        with unreadable_named(path):
            return read_plan(path)
    except OSError as error:
        raise IntegrityError(
            f"{path}: cannot be read ({error}); delete {folder} and run snakemake again"
        ) from error


class Foresight:
    """Predicts plan.json of trainings that have no sealed plan yet.

    Experiments of a sweep that differ only in what no prediction depends on share one answer.
    """

    def __init__(self, store: Store) -> None:
        """Predict from what is in `store`."""
        self._store = store
        self._answers: list[tuple[Question, PlanDocument | None]] = []

    def plan_of(self, config: Config) -> PlanDocument | None:
        """Return what is known now; None if that is too little, or if it will be refused."""
        # Imported here, and below, because it loads numpy, which a launcher does without.
        from pipeline_lib.plan.answer import question_of

        try:
            question = question_of(config, self._store)
        except (ConfigError, DataError):
            return None
        train = question.train.model_copy(update=_USUAL)
        question = replace(question, experiment="", train=train)
        for asked, plan in self._answers:
            if asked == question:
                return plan
        found = _answered(question)
        self._answers.append((question, found))
        return found


def _answered(question: "Question") -> PlanDocument | None:
    from pipeline_lib.plan.answer import answer

    try:
        return answer(question, is_explained=False).content
    except (ConfigError, DataError):
        return None


def warning_s(plan: PlanDocument | None, limit_s: int) -> int:
    """Return how many seconds before its time limit a job is warned: at most half the limit.

    The time is enough for the current step and two saves.
    """
    way = plan.prediction if plan else None
    if way is None:
        return min(_UNKNOWN_WARNING_S, limit_s // 2)
    work_s = way.step_s.high + 2 * way.checkpoint_s.high
    return min(_WARNING_S + math.ceil(work_s), limit_s // 2)


def sealed_bytes(pointers: Iterable[str], with_weights: bool) -> int:
    """Return the bytes in the sealed directories of `pointers`; 0 until all of them exist.

    Weights are counted or not, as asked.
    """
    try:
        return sum(_bytes_in(Path(pointer).with_suffix(""), with_weights) for pointer in pointers)
    except PipelineError:
        return 0


@cache
def _bytes_in(sealed: Path, with_weights: bool) -> int:
    """Return the bytes in a sealed directory. Raises PipelineError until it is sealed.

    The result is cached, since Snakemake asks for each resource separately.
    """
    files = read_manifest(sealed).files
    total = 0
    for name, entry in files.items():
        if with_weights or not name.endswith(WEIGHTS_SUFFIXES):
            total += entry.bytes
    return total


def stage_request(
    kind: JobKind, config: Config, store: Store, read_bytes: int, most_cpus: int | None = None
) -> JobRequest:
    """Return the request of a job of one task of that `kind`, which reads `read_bytes` bytes.

    What loads a model has it on GPUs, or in fp32 on CPUs: `most_cpus` is the number of CPUs of the
    largest node without GPUs, if known.
    """
    match kind:
        case "tokenize":
            need = tokenize_need(config.tokenize.near_duplicates is not None, read_bytes)
        case "pack":
            need = shard_need(read_bytes)
        case "read":
            need = reading_need("plan", read_bytes)
        case "merge":
            need = merge_need(_run_of(config, store), read_bytes)
        case "load":
            need = loading_need(_run_of(config, store), read_bytes, most_cpus)
        case "benchmark":
            need = benchmark_need(_run_of(config, store), read_bytes, most_cpus)
        case "evaluate":
            need = evaluation_need(_run_of(config, store), read_bytes, most_cpus)
    return JobRequest(
        nodes=1,
        tasks_per_node=1,
        cpus_per_task=need.cpus,
        gpus_per_node=need.gpus,
        memory_mb=1000 * math.ceil(need.host_bytes / GIGA),
        runtime_minutes=_STAGE_MINUTES + math.ceil((need.work_s or 0) / _MINUTE_S),
        warning_s=0,
    )


def too_long_evaluation(
    config: Config, store: Store, site: Site, groups: list[NodeGroup]
) -> Iterator[Finding]:
    """Yield a refusal if the evaluation may exceed its job's time limit: it saves nothing before.

    While the amount of held-out data is a guess, it is a warning.
    """
    run = _run_of(config, store)
    partition = site.partition_of(is_training=run.gpus > 0)
    nodes = groups_of(partition, groups)
    expected = run.evaluation_s(most_cpus_of(nodes))
    limit = limit_of(nodes)
    if expected is None or limit is None or expected.value <= limit * _MINUTE_S:
        return
    where = count(run.gpus, "GPUs") if run.gpus else f"{run.cpus(most_cpus_of(nodes))} CPUs"
    why = ""
    if config.cluster.gpus_per_node and not run.gpus:
        why = ", because two layers of the model do not fit one GPU"
    problem = (
        f"takes about {brief(expected.value)} on {where}{why}, and jobs of partition "
        f"{partition or nodes[0].partition} may take {brief(limit * _MINUTE_S)}; hold out less "
        "(data.validation_fraction), ask for fewer or shorter answers (evaluate.generations, "
        "evaluate.max_new_tokens), name a GPU with more memory (cluster.gpu), give each rank more "
        "CPUs (cluster.cpus_per_rank), or take a partition with more time "
        f"({where_set('partition' if run.gpus else 'cpu_partition')})"
    )
    if run.workload.is_assumed:
        held_out = "estimated from the first rows" if run.workload.is_estimated else "not counted"
        problem += f"; the held-out data is {held_out} so far"
    numbers = {"expected_s": expected.value, "limit_s": limit * _MINUTE_S}
    kind: Kind = "warning" if run.workload.is_assumed else "refusal"
    yield Finding(kind, "evaluate", problem, numbers)


def refuse_long_evaluation(config: Config, store: Store, site: Site) -> None:
    """Raise ConfigError in the training's own job if no job has the time for the evaluation.

    At submission, the amount of held-out data may have been a guess; now the blocks exist. If
    SLURM's controller does not answer, nothing is refused.
    """
    try:
        groups = read_groups()
    except ConfigError:
        return
    refuse("the cluster", too_long_evaluation(config, store, site, groups))


def _run_of(config: Config, store: Store) -> Run:
    """Return what is known of the experiment for its stages."""
    from pipeline_lib.plan.answer import question_of

    geometry = None
    machine = None
    workload = assumed_workload(config)
    with suppress(PipelineError):
        question = question_of(config, store)
        machine = question.machine
        geometry = question.geometry
        workload = question.workload
    return run_of_config(config, geometry, workload, machine)


def most_cpus_of(nodes: list[NodeGroup]) -> int | None:
    """Return the number of CPUs of the largest of `nodes`; None without nodes."""
    return max((group.cpus for group in nodes), default=None)
