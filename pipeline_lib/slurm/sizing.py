"""Compute how much the stages ask SLURM for; for the training, with the plan's own arithmetic."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path

from pipeline_lib.config.content import WEIGHTS_SUFFIXES, data_files
from pipeline_lib.config.schema import Config, FileData, Train
from pipeline_lib.core.errors import ConfigError, DataError, IntegrityError, PipelineError
from pipeline_lib.core.files import read_json, unreadable_named
from pipeline_lib.core.run_folder import PLAN_NAME
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import Store, read_manifest
from pipeline_lib.core.units import GIGA, brief
from pipeline_lib.plan.content import PlanDocument, known
from pipeline_lib.plan.document import Question, answer
from pipeline_lib.plan.machine import End, Figure, Machine
from pipeline_lib.plan.memory import AROUND_BYTES, RANK_BYTES, can_evaluate, host_need_of_plan
from pipeline_lib.plan.predict import cpus_of, evaluation_s, pass_s
from pipeline_lib.plan.preflight import question_of
from pipeline_lib.slurm.cluster import Group, Request, fitted, groups_of, limit_of, read_groups, where_set
from pipeline_lib.slurm.site import Site

_MB = 10**6
_UNKNOWN_MB = 64_000
_MERGE_MB_PER_MILLION = 0.7
_UNKNOWN_MILLIONS = 10_000.0

# Keys that sweeps vary and predictions ignore. Their defaults stand in, so a sweep's experiments share one answer.
_USUAL = {key: getattr(Train(), key) for key in ("lr", "seed", "weight_decay", "beta1", "beta2", "replica")}

# Before the first step and after the last: loading, warming up, hashing, sealing.
_AROUND_MINUTES = 15
_MARGIN = 1.25
_UNKNOWN_MINUTES = 240
_MINUTE_S = 60

# All other stages get half an hour to start, to wait for another's lock and to seal, plus the time of their work at the
# slow end of usual rates. One process reads and writes 200 MB/s on a network file system. One core hashes 400 MB/s
# without SHA instructions and 1.8 GB/s with them (openssl, measured). It renders and tokenizes 1 MB/s of text, and
# packed files (parquet, gz) expand to up to four times their size. The search for near duplicates computes signatures
# of 0.056 MB/s of text (measured). Its index takes at least 1 kB per conversation, and some conversations are 200
# bytes.
_STAGE_MINUTES = 30
_FILE_BYTES_S = 200e6
_HASH_BYTES_S = 400e6
_TOKENIZE_BYTES_S = 0.25e6
_SIGNATURE_BYTES_S = 0.014e6
_INDEX_BYTES = 5  # for each byte of data
TOKENIZE_CPUS = 8
_MERGE_CPUS = 8
_STAGE_MB = 2000
_DATA_MB = 8000
_IN_MEMORY = 0.5  # bytes per byte of the token files: lengths, order and bins of all documents
_TEXT_BYTES_OF_TOKEN = 3  # less than in English, more than in Chinese

# SLURM checks time limits about every 30 s, the ranks have to agree on a step, and an earlier save may be under way.
_WARNING_S = 60
_UNKNOWN_WARNING_S = 300


def training_request(config: Config, plan: PlanDocument | None, nodes: list[Group], read_bytes: int = 0) -> Request:
    """Return the request of `config`'s training, which reads `read_bytes`; `plan` is its plan.json, as far as known.

    The run time is capped to the limit of `nodes`, unless the config sets it: a longer run is saved there and queued
    again. Memory is capped to what the nodes have only if it is a guess.
    """
    cluster = config.cluster
    memory_mb = _UNKNOWN_MB
    if cluster.memory_gb is not None:
        memory_mb = cluster.memory_gb * 1000
    elif plan is not None:
        memory_mb = 1000 * math.ceil(host_need_of_plan(plan).total_bytes / GIGA)
    # The upper end of the prediction with a margin, after verifying and loading. A job that asks for too little time to
    # finish is only interrupted once more. A job that never gets to train is lost.
    minutes = math.ceil((_verifying_s(read_bytes) + read_bytes / _FILE_BYTES_S) / _MINUTE_S)
    most_s = plan.prediction.run_s.high if plan else None
    if most_s is None:
        minutes += _UNKNOWN_MINUTES
    else:
        minutes += _AROUND_MINUTES + math.ceil(_MARGIN * most_s / _MINUTE_S)
    request = Request(
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
    if cluster.runtime_minutes is None:
        request = replace(request, runtime_minutes=most.runtime_minutes)
    return replace(request, warning_s=warning_s(plan, request.runtime_minutes * _MINUTE_S))


def sealed_plan(pointer: Path) -> PlanDocument:
    """Return plan.json of the sealed plan that `pointer` points at. Raises IntegrityError, Unreadable."""
    folder = pointer.with_suffix("")
    path = folder / PLAN_NAME
    try:
        with unreadable_named(path):
            return PlanDocument.model_validate(read_json(path))
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path}: cannot be read ({error}); delete {folder} and run snakemake again") from error


def foreseen(config: Config, store: Store) -> PlanDocument | None:
    """Predict plan.json from what is known now; None if that is not enough, or if the plan stage will refuse."""
    try:
        question = question_of(config, store)
    except (ConfigError, DataError):
        return None
    train = question.train.model_copy(update=_USUAL)
    question = replace(question, experiment="", train=train)
    return _answered(_CacheKey(repr(question), question))


@dataclass(frozen=True)
class _CacheKey:
    """A question as a cache key: questions with the same text are equal."""

    text: str
    question: Question = field(compare=False)


@lru_cache(maxsize=256)
def _answered(key: _CacheKey) -> PlanDocument | None:
    try:
        return PlanDocument.model_validate(answer(key.question, is_explained=False).content)
    except (ConfigError, DataError):
        return None


def warning_s(plan: PlanDocument | None, limit_s: int) -> int:
    """Return how many seconds before its time limit a job is warned: at most half the limit.

    The time is enough for the current step and two saves.
    """
    if plan is None or not plan.has_prediction:
        return min(_UNKNOWN_WARNING_S, limit_s // 2)
    work_s = known(plan.prediction.step_s.high) + 2 * known(plan.prediction.checkpoint_s.high)
    return min(_WARNING_S + math.ceil(work_s), limit_s // 2)


def sealed_bytes(pointers: Iterable[str], with_weights: bool) -> int:
    """Return the bytes in the sealed directories of `pointers`, with or without weights; 0 until all of them exist."""
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
    return sum(entry.bytes for name, entry in files.items() if with_weights or not name.endswith(WEIGHTS_SUFFIXES))


def tokenize_request(config: Config, store: Store, read_bytes: int) -> Request:
    """Return the request to tokenize files of `read_bytes` bytes."""
    work_s = _verifying_s(read_bytes) + read_bytes / (TOKENIZE_CPUS * _TOKENIZE_BYTES_S) + _writing_s(read_bytes)
    memory_mb: float = _DATA_MB
    if config.tokenize.near_duplicates is not None:
        work_s += read_bytes / (TOKENIZE_CPUS * _SIGNATURE_BYTES_S)
        memory_mb += _INDEX_BYTES * read_bytes / _MB
    return _of_one_task(TOKENIZE_CPUS, memory_mb, work_s)


def shard_request(config: Config, store: Store, read_bytes: int) -> Request:
    """Return the request to pack token files of `read_bytes` bytes, which are read again in their order."""
    work_s = _verifying_s(read_bytes) + read_bytes / _FILE_BYTES_S + _writing_s(read_bytes)
    return _of_one_task(1, max(_DATA_MB, _STAGE_MB + _IN_MEMORY * read_bytes / _MB), work_s)


def reading_request(config: Config, store: Store, read_bytes: int) -> Request:
    """Return the request of a stage that does little but read: the plan, the report."""
    return _of_one_task(1, _STAGE_MB, _verifying_s(read_bytes))


def merge_request(config: Config, store: Store, read_bytes: int) -> Request:
    """Return the request to merge a base model and trained weights of `read_bytes` bytes together.

    They are verified and read, a model no larger is written and read again, and one block passes through it. The model
    is read in parts: 4.2 GB of memory at the sizes of Qwen3-8B.
    """
    model, cpus = _Model.of(config, store), min(_MERGE_CPUS, config.cluster.cpus_per_node)
    work_s = _verifying_s(read_bytes) + 2 * read_bytes / _FILE_BYTES_S + _writing_s(read_bytes)
    if model.question is not None:
        speeds = cpus_of(cpus, "bf16").speeds(End.BAD)
        work_s += pass_s(model.question.geometry, config.shard.block_tokens, speeds)
    return _of_one_task(cpus, AROUND_BYTES / _MB + _MERGE_MB_PER_MILLION * model.millions, work_s)


def loading_request(config: Config, store: Store, read_bytes: int, most_cpus: int | None = None) -> Request:
    """Return the request of one process that reads `read_bytes` bytes and holds a whole model.

    The model is on a GPU, or in fp32 on CPUs. `most_cpus` is the number of CPUs of the largest node without GPUs, if
    known.
    """
    return _Model.of(config, store).loading_request(read_bytes, most_cpus)


def evaluation_request(config: Config, store: Store, read_bytes: int, most_cpus: int | None = None) -> Request:
    """Return `loading_request` plus the upper end of the predicted evaluation time."""
    model = _Model.of(config, store)
    request, computing = model.loading_request(read_bytes, most_cpus), model.evaluation_s(most_cpus)
    minutes = math.ceil(computing.high / _MINUTE_S) if computing else 0
    return replace(request, runtime_minutes=request.runtime_minutes + minutes)


def too_long_evaluation(config: Config, store: Store, site: Site, groups: list[Group], warn: Say) -> Iterator[str]:
    """Yield a problem if the evaluation is expected to exceed its job's time limit: it saves nothing halfway.

    While the amount of held-out data is a guess, `warn` gets the message instead.
    """
    model = _Model.of(config, store)
    partition = site.partition_of(is_training=model.gpus > 0)
    nodes = groups_of(partition, groups)
    expected, limit = model.evaluation_s(most_cpus_of(nodes)), limit_of(nodes)
    if expected is None or limit is None or expected.value <= limit * _MINUTE_S:
        return
    where = "one GPU" if model.gpus else f"{model.cpus(most_cpus_of(nodes))} CPUs"
    why = ", because the model does not fit one GPU" if config.cluster.gpus_per_node and not model.gpus else ""
    problem = (
        f"evaluate: takes about {brief(expected.value)} on {where}{why}, and jobs of partition "
        f"{partition or nodes[0].partition} may take {brief(limit * _MINUTE_S)}; hold out less "
        "(data.validation_fraction), ask for fewer or shorter answers (evaluate.generations, evaluate.max_new_tokens), "
        "name a GPU with more memory (cluster.gpu), give each rank more CPUs (cluster.cpus_per_rank), or take a "
        f"partition with more time ({where_set('partition' if model.gpus else 'cpu_partition')})"
    )
    if model.question is None or model.question.workload.is_assumed:
        warn(f"{problem}; the amount of held-out data is only estimated from the file sizes so far")
    else:
        yield problem


def refuse_long_evaluation(config: Config, store: Store, site: Site) -> None:
    """Raise ConfigError, in the training's own job, if no job has the time for the evaluation that follows.

    At submission, the amount of held-out data may have been a guess; now the blocks exist. If SLURM's controller does
    not answer, nothing is refused.
    """
    try:
        groups = read_groups()
    except ConfigError:
        return
    if problems := list(too_long_evaluation(config, store, site, groups, lambda _: None)):
        raise ConfigError("the cluster", problems)


@dataclass(frozen=True)
class _Model:
    """What is known of an experiment's model where it is held whole; `question` is None if nothing is known.

    `gpus` is 1 if a GPU has room for the model, as far as is known. evaluate/answers.py decides where it runs.
    """

    config: Config
    question: Question | None
    machine: Machine | None
    gpus: int

    @staticmethod
    def of(config: Config, store: Store) -> "_Model":
        has_gpus = config.cluster.gpus_per_node > 0
        try:
            question = question_of(config, store)
            machine = question.machine
        except PipelineError:
            return _Model(config, None, None, int(has_gpus))
        gpu_bytes = machine.gpu_memory_bytes if machine else None
        fits = gpu_bytes is None or can_evaluate(question.geometry.parameters, gpu_bytes)
        return _Model(config, question, machine, int(has_gpus and fits))

    @property
    def millions(self) -> float:
        """The millions of parameters, which are the size in MB at one byte each."""
        return _UNKNOWN_MILLIONS if self.question is None else self.question.geometry.parameters / 1e6

    def cpus(self, most_cpus: int | None) -> int:
        """Return the CPUs of the process: those of one rank on a GPU, else of a node's ranks, at most `most_cpus`."""
        cluster = self.config.cluster
        return cluster.cpus_per_rank if self.gpus else min(cluster.cpus_per_node, most_cpus or cluster.cpus_per_node)

    def loading_request(self, read_bytes: int, most_cpus: int | None) -> Request:
        """Return the request of one process that holds the model."""
        bytes_each = 2 if self.gpus else 5
        own_mb = (AROUND_BYTES + RANK_BYTES["cuda" if self.gpus else "cpu"]) / _MB
        work_s = _verifying_s(read_bytes) + read_bytes / _FILE_BYTES_S
        return _of_one_task(self.cpus(most_cpus), own_mb + bytes_each * self.millions, work_s, self.gpus)

    def evaluation_s(self, most_cpus: int | None) -> Figure | None:
        """Predict the seconds that the evaluation computes; None if the model or the GPU is not known."""
        machine = self.machine if self.gpus else cpus_of(self.cpus(most_cpus))
        if self.question is None or machine is None:
            return None
        workload = self.question.workload
        if workload.is_assumed:  # there are no blocks yet: the sizes of local files tell, and other data counts as 0
            data = self.config.data
            files = [
                path for one in data.train if isinstance(one, FileData) for path in data_files(one.path, one.split)
            ]
            size_bytes = sum(path.stat().st_size for path in files)
            held_out_tokens = round(data.validation_fraction * size_bytes / _TEXT_BYTES_OF_TOKEN)
            workload = replace(workload, validation_blocks=held_out_tokens // workload.block_tokens)
        return evaluation_s(self.question.geometry, workload, self.config.evaluate, machine)


def most_cpus_of(nodes: list[Group]) -> int | None:
    """Return the number of CPUs of the largest of `nodes`; None without nodes."""
    return max((group.cpus for group in nodes), default=None)


def _verifying_s(size_bytes: float) -> float:
    """Return the seconds to read `size_bytes` bytes and to hash them on one core."""
    return size_bytes / _FILE_BYTES_S + size_bytes / _HASH_BYTES_S


def _writing_s(size_bytes: float) -> float:
    """Return the seconds to write `size_bytes` bytes, and to read and hash them for the manifest."""
    return size_bytes / _FILE_BYTES_S + _verifying_s(size_bytes)


def _of_one_task(cpus: int, memory_mb: float, work_s: float, gpus: int = 0) -> Request:
    return Request(
        nodes=1,
        tasks_per_node=1,
        cpus_per_task=cpus,
        gpus_per_node=gpus,
        memory_mb=1000 * math.ceil(memory_mb / 1000),
        runtime_minutes=_STAGE_MINUTES + math.ceil(work_s / _MINUTE_S),
        warning_s=0,
    )
