"""What each stage needs of its machine: for the plan's table, for refusals, and for SLURM jobs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline_lib.arch.geometry import FP32_BYTES, HALF_BYTES, Geometry
from pipeline_lib.arch.layers import PROBE_TOKENS
from pipeline_lib.config.content import data_files
from pipeline_lib.config.exports import FP8, Q4_K_M
from pipeline_lib.config.schema import Cluster, Config, Evaluate, FileData
from pipeline_lib.config.train import Train
from pipeline_lib.core.units import GIB, gigabytes
from pipeline_lib.plan.benchmarks import Asking, asking_s, askings_of, in_words
from pipeline_lib.plan.evaluation import (
    ANSWERING_BYTES,
    BATCH_TOKENS,
    CPU_BYTES,
    Answers,
    answers_of,
    cpus_of,
    evaluation_gpu_bytes,
    evaluation_host_bytes,
    evaluation_s,
    largest_part_parameters,
    pass_s,
    scoring_bytes,
    scoring_gpus,
    will_load_once,
)
from pipeline_lib.plan.host import AROUND_BYTES, RANK_BYTES
from pipeline_lib.plan.machine import End, Machine
from pipeline_lib.plan.trained import checkpoint_bytes
from pipeline_lib.records.plan import Figure, Need, Workload

# All stages but the training get the time of their work at the slow end of usual rates. One process
# reads and writes 200 MB/s on a network file system. One core hashes 400 MB/s without SHA
# instructions and 1.8 GB/s with them (openssl, measured). It renders and tokenizes 1 MB/s of text,
# and packed files (parquet, gz) expand to up to four times their size. The search for near
# duplicates computes signatures of 0.056 MB/s of text (measured). Its index takes at least 1 kB per
# conversation, and some conversations are 200 bytes.
FILE_BYTES_S = 200e6
_HASH_BYTES_S = 400e6
_TOKENIZE_BYTES_S = 0.25e6
_SIGNATURE_BYTES_S = 0.014e6
_INDEX_BYTES = 5  # for each byte of data
TOKENIZE_CPUS = 8
_MERGE_CPUS = 8
MERGED_AT_ONCE = 8  # files, each by a thread that holds one tensor
_STAGE_BYTES = 2_000_000_000
_DATA_BYTES = 8_000_000_000
_IN_MEMORY = 0.5  # bytes per byte of the token files: lengths, order and bins of all documents
# Each thread of the merge holds a tensor of the base or a trained one in fp32, and what it becomes.
_MERGED_BYTES = FP32_BYTES + HALF_BYTES
# of adapters that the proof keeps in memory, beside those of the merge
ADAPTERS_IN_PROOF_BYTES = GIB
# The proof computes in fp32, without TF32: an A100 or an H100 does so at a sixteenth of its rate in
# bf16.
_FP32_SLOWDOWN = 16
_UNKNOWN_PARAMETERS = 10**10
# of an exported weight, with its share of scales and of what keeps 16 bits
_EXPORTED_BYTES = {"gguf-f16": 2.0, "gguf-q8_0": 1.07, Q4_K_M: 0.65, FP8: 1.3}


@dataclass(frozen=True)
class Run:
    """What is known of an experiment for its stages.

    `geometry` and `machine` are None if they are not known.
    """

    cluster: Cluster
    train: Train
    evaluate: Evaluate
    geometry: Geometry | None
    workload: Workload
    machine: Machine | None
    askings: tuple[Asking, ...] = ()
    exports: tuple[str, ...] = ()
    averaged: int = 1  # checkpoints in the merge

    @property
    def parameters(self) -> int:
        """The number of parameters; a usual one if it is not known."""
        return self.geometry.parameters if self.geometry else _UNKNOWN_PARAMETERS

    @property
    def answers(self) -> Answers | None:
        """How the evaluation answers; None if the model is not known."""
        return (
            answers_of(self.geometry, self.evaluate, self.cluster, self.machine)
            if self.geometry
            else None
        )

    @property
    def gpus(self) -> int:
        """The GPUs of the evaluation: as many as the held-out loss and the answers take."""
        if self.geometry is None or self.answers is None:
            return int(self.cluster.gpus_per_node > 0)
        scoring = scoring_gpus(
            self.geometry, self.workload.block_tokens, self.cluster, self.machine
        )
        return max(scoring, self.answers.gpus)

    def cpus(self, most_cpus: int | None) -> int:
        """Return the evaluation's CPUs: one rank's beside a GPU, else a node's, to `most_cpus`."""
        cluster = self.cluster
        return (
            cluster.cpus_per_rank
            if self.gpus
            else min(cluster.cpus_per_node, most_cpus or cluster.cpus_per_node)
        )

    def evaluating_machine(self, most_cpus: int | None) -> Machine | None:
        """Return what models are evaluated on; None if the GPU is unknown."""
        return self.machine if self.gpus else cpus_of(self.cpus(most_cpus))

    def evaluation_s(self, most_cpus: int | None) -> Figure | None:
        """Return the seconds that the evaluation computes; None if model or GPU is unknown."""
        machine = self.evaluating_machine(most_cpus)
        if self.geometry is None or self.answers is None or machine is None:
            return None
        return evaluation_s(self.geometry, self.workload, self.answers, machine)


def run_of_config(
    config: Config, geometry: Geometry | None, workload: Workload, machine: Machine | None
) -> Run:
    """Return what is known of the experiment of `config` for its stages."""
    return Run(
        config.cluster,
        config.train,
        config.asked,
        geometry,
        workload,
        machine,
        askings_of(config),
        config.export,
        config.merge.averaged,
    )


def local_data_bytes(config: Config) -> int:
    """Return the size of the local files of all sources."""
    local = [source for source in config.data.sources if isinstance(source, FileData)]
    files = [path for source in local for path in data_files(source.path, source.split)]
    return sum(path.stat().st_size for path in files)


def verifying_s(size_bytes: float) -> float:
    """Return the seconds to read `size_bytes` bytes and to hash them on one core."""
    return size_bytes / FILE_BYTES_S + size_bytes / _HASH_BYTES_S


def _writing_s(size_bytes: float) -> float:
    """Return the seconds to write `size_bytes` bytes and to read and hash them again."""
    return size_bytes / FILE_BYTES_S + verifying_s(size_bytes)


def tokenize_need(has_near_duplicates: bool, read_bytes: int) -> Need:
    """Return what it takes to tokenize files of `read_bytes` bytes."""
    work_s = (
        verifying_s(read_bytes)
        + read_bytes / (TOKENIZE_CPUS * _TOKENIZE_BYTES_S)
        + _writing_s(read_bytes)
    )
    host_bytes = _DATA_BYTES
    if has_near_duplicates:
        work_s += read_bytes / (TOKENIZE_CPUS * _SIGNATURE_BYTES_S)
        host_bytes += _INDEX_BYTES * read_bytes
    return Need("tokenize", TOKENIZE_CPUS, host_bytes, work_s)


def shard_need(read_bytes: int) -> Need:
    """Return what it takes to pack token files of `read_bytes` bytes and read them again."""
    work_s = verifying_s(read_bytes) + read_bytes / FILE_BYTES_S + _writing_s(read_bytes)
    return Need("shard", 1, max(_DATA_BYTES, round(_STAGE_BYTES + _IN_MEMORY * read_bytes)), work_s)


def reading_need(stage: str, read_bytes: int) -> Need:
    """Return what a stage takes that does little but read: the plan, the report."""
    return Need(stage, 1, _STAGE_BYTES, verifying_s(read_bytes))


def merge_need(run: Run, read_bytes: int) -> Need:
    """Return what it takes to merge a base model and trained weights of `read_bytes` in all.

    They are verified and read, and a model no larger is written, which is hashed meanwhile. For the
    proof all are read again, the first two twice, and one block passes through the model, cut to
    PROBE_TOKENS, on a GPU if one has room. The model is read tensor by tensor, one for each thread,
    and for the proof part by part. Adapters stay in memory.
    """
    cpus = min(_MERGE_CPUS, run.cluster.cpus_per_node)
    gpus = int(run.cluster.gpus_per_node > 0)
    gpu_bytes = 0
    work_s = verifying_s(read_bytes) + 5 * read_bytes / FILE_BYTES_S + read_bytes / _HASH_BYTES_S
    work_s += 3 * (run.averaged - 1) * trained_bytes(run) / FILE_BYTES_S
    largest = max_tensor = _UNKNOWN_PARAMETERS // 10
    at_once = 2 * max_tensor  # of the embedding and the head; all others are small
    if run.geometry is not None:
        largest = largest_part_parameters(run.geometry)
        max_tensor = run.geometry.largest_tensor
        sizes = sorted((math.prod(shape) for shape in run.geometry.shapes().values()), reverse=True)
        at_once = sum(sizes[: min(MERGED_AT_ONCE, cpus)])
        tokens = min(run.workload.block_tokens, PROBE_TOKENS)
        gpus = scoring_gpus(run.geometry, PROBE_TOKENS, run.cluster, run.machine, FP32_BYTES)
        gpu_bytes = scoring_bytes(run.geometry, PROBE_TOKENS, FP32_BYTES) if gpus else 0
        if not gpus:
            work_s += pass_s(run.geometry, tokens, cpus_of(cpus, "fp32").speeds(End.BAD))
        elif run.machine is not None:
            work_s += _FP32_SLOWDOWN * pass_s(run.geometry, tokens, run.machine.speeds(End.BAD))
    # a part, and a tensor that is read
    proof_bytes = FP32_BYTES * largest + HALF_BYTES * max_tensor
    if run.train.method == "lora" and run.train.lora.of_experts:
        # peft's product of the factors, before and after scaling
        proof_bytes += 2 * FP32_BYTES * max_tensor
    host_bytes = (
        AROUND_BYTES
        + RANK_BYTES["cuda" if gpus else "cpu"]
        + max(_MERGED_BYTES * at_once, proof_bytes)
    )
    if run.train.method == "lora":
        adapters_bytes = trained_bytes(run)
        kept_bytes = adapters_bytes + min(adapters_bytes, ADAPTERS_IN_PROOF_BYTES)
        host_bytes += run.averaged * kept_bytes
    return Need(
        "merge", cpus, host_bytes, work_s, gpus, gpu_bytes, disk_bytes=HALF_BYTES * run.parameters
    )


def loading_need(run: Run, read_bytes: int, most_cpus: int | None = None) -> Need:
    """Return what a process takes that reads `read_bytes` bytes and holds a model, on GPUs or CPUs.

    A model that has no room on either is not loaded, and takes none. `most_cpus` is the number of
    CPUs of the largest node without GPUs, if known.
    """
    answers = replace(run, evaluate=Evaluate(generations=1)).answers
    gpus = run.gpus
    of_each = HALF_BYTES if run.gpus else CPU_BYTES
    if answers is not None:
        gpus = answers.gpus
        of_each = {"gpu": HALF_BYTES, "cpu": CPU_BYTES, "none": 0}[answers.place]
    host_bytes = AROUND_BYTES + RANK_BYTES["cuda" if gpus else "cpu"] + of_each * run.parameters
    cluster = run.cluster
    cpus = (
        cluster.cpus_per_rank
        if gpus
        else min(cluster.cpus_per_node, most_cpus or cluster.cpus_per_node)
    )
    return Need("load", cpus, host_bytes, verifying_s(read_bytes) + read_bytes / FILE_BYTES_S, gpus)


def evaluation_need(run: Run, read_bytes: int, most_cpus: int | None = None) -> Need:
    """Return what the evaluation takes of two models of `read_bytes` bytes together.

    Each is loaded once if it has room beside what the held-out loss computes. Else it is read for
    that while it computes, and once more for the answers. `most_cpus` is the number of CPUs of the
    largest node without GPUs, if known.
    """
    geometry = run.geometry
    workload = run.workload
    answers = run.answers
    if geometry is None or answers is None:
        return replace(loading_need(run, read_bytes, most_cpus), stage="evaluate")
    gpus = run.gpus
    computing = run.evaluation_s(most_cpus)
    has_bytes = run.machine.host_memory_bytes if run.machine else None
    is_once = will_load_once(geometry, workload.block_tokens, answers, run.cluster, run.machine)
    is_read_again = answers.answers > 0 and not is_once
    work_s = verifying_s(read_bytes) + (2 if is_read_again else 1) * read_bytes / FILE_BYTES_S
    how = "through the whole model" if is_once else "layer by layer"
    return Need(
        "evaluate",
        run.cpus(most_cpus),
        evaluation_host_bytes(geometry, workload, answers, gpus > 0, is_once, has_bytes),
        work_s + (computing.high if computing else 0),
        gpus,
        evaluation_gpu_bytes(geometry, workload, answers, is_once) if gpus else 0,
        note=f"batches of {max(BATCH_TOKENS, workload.block_tokens):,} tokens, {how}; {answers}",
    )


def benchmark_need(run: Run, read_bytes: int, most_cpus: int | None = None) -> Need:
    """Return what one of both models takes to answer the benchmarks, of `read_bytes` bytes.

    It is loaded once. `most_cpus` is the number of CPUs of the largest node without GPUs, if known.
    """
    loading = replace(loading_need(run, read_bytes, most_cpus), stage="benchmark")
    if run.geometry is None or not run.askings:
        return loading
    gpu_bytes = 0
    host_bytes = loading.host_bytes
    if loading.gpus:
        gpu_bytes = math.ceil(HALF_BYTES * run.parameters / loading.gpus) + ANSWERING_BYTES
    else:
        host_bytes += ANSWERING_BYTES
    machine = run.machine if loading.gpus else cpus_of(loading.cpus)
    work_s = loading.work_s or 0.0
    if machine is not None:
        work_s += asking_s(run.geometry, run.askings, machine).high
    return replace(
        loading,
        host_bytes=host_bytes,
        gpu_bytes=gpu_bytes,
        work_s=work_s,
        note=in_words(run.askings),
    )


def export_need(run: Run, kind: str, read_bytes: int) -> Need:
    """Return what the export `kind` of the merged model takes, of `read_bytes` bytes.

    It is written, read back and proven as the merge is, which takes no less.
    """
    return replace(
        merge_need(run, read_bytes), stage=kind, disk_bytes=exported_bytes(run.parameters, kind)
    )


def exported_bytes(parameters: int, kind: str) -> int:
    """Return what the export `kind` of so many parameters takes on the disk, roughly."""
    return math.ceil(_EXPORTED_BYTES[kind] * parameters)


# The stages of a run in order, before it has begun.


def needs_of(
    run: Run,
    train_host_bytes: int,
    train_gpu_bytes: int,
    data_bytes: int | None,
    has_near_duplicates: bool,
) -> list[Need]:
    """Return what each stage of a run needs; `data_bytes` is the raw data's size, None if unknown.

    The training's host memory is that of a node, its GPU memory that of each GPU. Its time is in
    the plan's figures.
    """
    model_bytes = HALF_BYTES * run.parameters
    of_train = replace(
        Need("train", run.cluster.cpus_per_node, train_host_bytes),
        gpus=run.cluster.gpus_per_node,
        gpu_bytes=train_gpu_bytes if run.cluster.gpus_per_node else 0,
        disk_bytes=sum(
            stored_bytes(run, is_downloaded=False)[name]
            for name in ("checkpoints", "trained weights")
        ),
        note=f"{run.cluster.nodes} nodes; each of them" if run.cluster.nodes > 1 else "",
    )
    data = []
    if data_bytes is not None:
        data = [replace(tokenize_need(has_near_duplicates, data_bytes), disk_bytes=2 * data_bytes)]
        data.append(replace(shard_need(2 * data_bytes), disk_bytes=2 * data_bytes))
    merged = merge_need(run, model_bytes + trained_bytes(run))
    exports = [export_need(run, kind, model_bytes) for kind in run.exports]
    benchmarks = [benchmark_need(run, model_bytes)] if run.askings else []
    return [
        Need(
            "download",
            1,
            _STAGE_BYTES,
            disk_bytes=model_bytes + (data_bytes or 0),
            note="needs the network, unless model and data are local",
        ),
        *data,
        of_train,
        merged,
        *exports,
        evaluation_need(run, 2 * model_bytes),
        *benchmarks,
    ]


def trained_bytes(run: Run) -> int:
    """Return the size of the trained weights in fp32."""
    return FP32_BYTES * (
        run.geometry.trained_parameters(run.train) if run.geometry else _UNKNOWN_PARAMETERS
    )


def stored_bytes(run: Run, is_downloaded: bool) -> dict[str, int]:
    """Return what a run writes to the store's disk from now on, by name; the data is left out."""
    model_bytes = HALF_BYTES * run.parameters
    checkpoint = checkpoint_bytes(run.geometry, run.train) if run.geometry else 0
    found = {
        **({} if is_downloaded else {"base model": model_bytes}),
        "checkpoints": checkpoint * run.train.checkpoints_on_disk,
        "trained weights": trained_bytes(run),
        "merged model": model_bytes,
    }
    if run.averaged > 1:
        found["merged model of the last checkpoint"] = model_bytes
    for kind in run.exports:
        found[kind] = exported_bytes(run.parameters, kind)
    return found


def later_problems(run: Run) -> Iterator[str]:
    """Yield what the merge or the evaluation lacks on this cluster, as far as it is known.

    Without GPUs cluster.memory_gb is what a job asks for, and a machine may have more: then nothing
    is refused.
    """
    has = run.machine.host_memory_bytes if run.machine else None
    if run.geometry is None or has is None or not run.cluster.gpus_per_node:
        return
    for need in (merge_need(run, 0), evaluation_need(run, 0)):
        if need.host_bytes > has:
            yield (
                f"{need.stage}: needs {gigabytes(need.host_bytes)} of host memory, and "
                "cluster.memory_gb gives "
                f"{gigabytes(has)}; take a node with more, or a smaller model"
            )
