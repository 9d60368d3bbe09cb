"""How much the stages ask SLURM for, the training by the plan's own arithmetic."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import ConfigError, DataError, IntegrityError
from pipeline_lib.base.fsio import read_json
from pipeline_lib.base.run_folder import PLAN_NAME
from pipeline_lib.base.store import Store
from pipeline_lib.config.schema import Config, Train
from pipeline_lib.plan.command import question_of
from pipeline_lib.plan.document import Question, answer
from pipeline_lib.plan.memory import AROUND_BYTES, RANK_BYTES, can_evaluate, host_need_of_plan
from pipeline_lib.plan.units import GIGA
from pipeline_lib.slurm.partitions import Group, fitted
from pipeline_lib.slurm.request import Request

_MB = 10**6
_UNKNOWN_MB = 64_000
_MERGE_MB_PER_MILLION = 0.7
_UNKNOWN_MILLIONS = 10_000.0

# What sweeps vary, and no prediction reads: so one answer is enough for all experiments of a sweep.
_USUAL = {key: getattr(Train(), key) for key in ("lr", "seed", "weight_decay", "beta1", "beta2", "replica")}

# From the start of a job to the first step and from the last one to the end: loading, warming up, hashing, sealing.
_AROUND_MINUTES = 15
_MARGIN = 1.25
_UNKNOWN_MINUTES = 240
_STAGE_MINUTES = 120  # of the merge and the evaluation
_MINUTE_S = 60

# SLURM looks at its clocks every half a minute or so; the ranks agree on a step, and an earlier save may be under way.
_WARNING_S = 60
_UNKNOWN_WARNING_S = 300


def training_request(config: Config, plan: Mapping[str, Any] | None, nodes: list[Group]) -> Request:
    """For the training of `config`, given what plan.json says of it, as far as that is known.

    A run that takes longer than jobs may on `nodes` is saved there and queued again. What is only guessed is no more
    than they have.
    """
    cluster = config.cluster
    request = Request(
        nodes=cluster.nodes,
        tasks_per_node=cluster.ranks_per_node,
        cpus_per_task=cluster.cpus_per_rank,
        gpus_per_node=cluster.gpus_per_node,
        memory_mb=cluster.memory_gb * 1000 if cluster.memory_gb else _memory_mb(plan),
        runtime_minutes=cluster.runtime_minutes or _minutes(plan),
        warning_s=0,
    )
    most = fitted(request, nodes)
    if plan is None and cluster.memory_gb is None:
        request = replace(request, memory_mb=most.memory_mb)
    if cluster.runtime_minutes is None:
        request = replace(request, runtime_minutes=most.runtime_minutes)
    return replace(request, warning_s=warning_s(plan, request.runtime_minutes * _MINUTE_S))


def sealed_plan(pointer: Path) -> Mapping[str, Any]:
    """plan.json of the sealed plan that `pointer` points at. Raises IntegrityError."""
    path = pointer.with_suffix("") / PLAN_NAME
    try:
        return dict(read_json(path))
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path}: cannot be read ({error}); delete {pointer} and run again") from error


def foreseen(config: Config, store: Store) -> Mapping[str, Any] | None:
    """What plan.json will say, from what is known now; None if nothing is known, or the plan stage will refuse."""
    try:
        question = question_of(config, store)
    except (ConfigError, DataError):
        return None
    train = question.train.model_copy(update=_USUAL)
    question = replace(question, experiment="", train=train)
    return _answered(_Asked(repr(question), question))


@dataclass(frozen=True)
class _Asked:
    """A question, which is the same as another of the same words."""

    words: str
    question: Question = field(compare=False)


@lru_cache(maxsize=256)
def _answered(asked: _Asked) -> Mapping[str, Any] | None:
    try:
        return answer(asked.question, is_explained=False).content
    except (ConfigError, DataError):
        return None


def _minutes(plan: Mapping[str, Any] | None) -> int:
    """The end of the predicted band with a margin: a job that asks for too little is only interrupted once more."""
    run_s = ((plan or {}).get("prediction") or {}).get("run_s")
    if run_s is None:
        return _UNKNOWN_MINUTES
    return _AROUND_MINUTES + math.ceil(_MARGIN * float(run_s["high"]) / _MINUTE_S)


def _memory_mb(plan: Mapping[str, Any] | None) -> int:
    """Host memory of a node, to the next GB."""
    return _UNKNOWN_MB if plan is None else 1000 * math.ceil(host_need_of_plan(plan).total_bytes / GIGA)


def warning_s(plan: Mapping[str, Any] | None, limit_s: int) -> int:
    """How long before its end a job is told: for the step that is being made, and two saves; at most half its time."""
    prediction = (plan or {}).get("prediction")
    if prediction is None:
        return min(_UNKNOWN_WARNING_S, limit_s // 2)
    work_s = float(prediction["step_s"]["high"] + 2 * prediction["checkpoint_s"]["high"])
    return min(_WARNING_S + math.ceil(work_s), limit_s // 2)


def light_request(memory_mb: int, minutes: int, cpus: int = 1) -> Request:
    """For a stage that needs as much whatever the experiment."""
    return Request(1, 1, cpus, 0, memory_mb, minutes, 0)


def merge_request(config: Config, store: Store) -> Request:
    """For the merge, which reads the model in parts: 4.2 GB at the sizes of Qwen3-8B."""
    return _of_one_task(config, AROUND_BYTES / _MB + _MERGE_MB_PER_MILLION * _millions(config, store), gpus=0)


def evaluation_request(config: Config, store: Store) -> Request:
    """For the evaluation, by one process that holds a whole model at a time: on a GPU, or in fp32 in host memory."""
    has_gpu = config.cluster.gpus_per_node > 0 and _fits_one_gpu(foreseen(config, store))
    gpus = 1 if has_gpu else 0
    bytes_each = 2 if gpus else 5
    own_mb = (AROUND_BYTES + RANK_BYTES["cuda" if gpus else "cpu"]) / _MB
    return _of_one_task(config, own_mb + bytes_each * _millions(config, store), gpus)


def _fits_one_gpu(plan: Mapping[str, Any] | None) -> bool:
    """Whether the evaluation does, as far as is known: publish/device.py decides where it runs."""
    if plan is None or plan["machine"] is None:
        return True
    return can_evaluate(plan["model"]["parameters"], plan["machine"]["gpu_memory_bytes"])


def _of_one_task(config: Config, memory_mb: float, gpus: int) -> Request:
    cluster = config.cluster
    return Request(
        nodes=1,
        tasks_per_node=1,
        cpus_per_task=cluster.cpus_per_rank,
        gpus_per_node=gpus,
        memory_mb=1000 * math.ceil(memory_mb / 1000),
        runtime_minutes=_STAGE_MINUTES,
        warning_s=0,
    )


def _millions(config: Config, store: Store) -> float:
    """Millions of parameters of the model: MB of one byte each."""
    plan = foreseen(config, store)
    return _UNKNOWN_MILLIONS if plan is None else int(plan["model"]["parameters"]) / 1e6
