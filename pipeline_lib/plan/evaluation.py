"""What the evaluation of a model needs and takes: the held-out loss in one pass, and the answers.

evaluate/ decides where it runs by the same functions, with the memory that it finds free.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pipeline_lib.arch.geometry import FP32_BYTES, HALF_BYTES, Geometry
from pipeline_lib.arch.layers import LOGITS_AT_ONCE
from pipeline_lib.config.schema import Cluster, Config, Evaluate
from pipeline_lib.core.units import GIB, GIGA, HOUR_S, TERA, brief, count, gib, gigabytes
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.host import AROUND_BYTES, RANK_BYTES, RESERVE_BYTES
from pipeline_lib.plan.machine import End, Machine, Speeds, figure_of
from pipeline_lib.records.plan import Figure, Workload

# The held-out loss part by part. model/streaming.py holds two parts of the model at a time, and the
# hidden states of all tokens of a pass in host memory. The base and the tuned model score the
# held-out blocks; the tuned model also scores documents with shuffled prompts (evaluate/stage.py).

MODELS = 2
MAX_SHUFFLED = 1000  # documents
BATCH_TOKENS = 4096  # of all blocks that are computed at a time
# Hidden states of one pass. A pass of so many tokens computes for longer than the model takes to be
# read.
MOST_WAITING_BYTES = 16 * GIGA
_WAITING_SHARE = 0.5  # of the host memory that is free
_LOGIT_BYTES = 10  # of a logit, its log p in fp32, and its gradient in the dtype (model/loss.py)


def largest_part_parameters(geometry: Geometry) -> int:
    """Return the weights in the model's largest part: a decoder layer, or embedding or head."""
    layers: Counter[str] = Counter()
    for name, shape in geometry.shapes().items():
        if name.startswith("model.layers."):
            layers[name.split(".")[2]] += math.prod(shape)
    return max(*layers.values(), (geometry.vocab + 1) * geometry.hidden)


def scoring_bytes(geometry: Geometry, block_tokens: int, number_bytes: int) -> int:
    """Return the device memory for the held-out loss: two parts and what is computed at a time."""
    parts = 2 * number_bytes * largest_part_parameters(geometry)
    return parts + computing_bytes(geometry, block_tokens, number_bytes)


def computing_bytes(geometry: Geometry, block_tokens: int, number_bytes: int) -> int:
    """Return the device memory for what a layer or the held-out loss computes at a time."""
    tokens = max(BATCH_TOKENS, block_tokens)
    of_loss = _LOGIT_BYTES * min(LOGITS_AT_ONCE, tokens * geometry.vocab)
    return max(_layer_bytes(geometry, tokens, number_bytes), of_loss)


def _layer_bytes(geometry: Geometry, tokens: int, number_bytes: int) -> int:
    """Return the device memory for what a layer computes of so many tokens, without gradients."""
    width = max(
        geometry.intermediate,
        geometry.experts_per_token * (geometry.expert_intermediate + geometry.hidden),
    )
    channels = geometry.heads * geometry.head_dim
    if geometry.delta is not None:
        channels = max(2 * channels, geometry.delta.channels)
    return number_bytes * tokens * (3 * width + 6 * geometry.hidden + 3 * channels)


def waiting_tokens(geometry: Geometry, number_bytes: int, free_bytes: int | None) -> int:
    """Return how many tokens' hidden states may wait in host memory in one pass.

    `free_bytes` is the host memory that is free, None if unknown.
    """
    most = (
        MOST_WAITING_BYTES
        if free_bytes is None
        else min(MOST_WAITING_BYTES, int(_WAITING_SHARE * free_bytes))
    )
    return most // (number_bytes * geometry.hidden)


# The answers, for which a whole model is held: on one GPU, on as many GPUs of a node as it takes,
# or on CPUs. There, each token reads all weights from memory, so answers are few: the same ones on
# any host with room for the model. Answers are generated in batches, of as many prompts as have
# room: a step reads the weights once for all of them.

ANSWERING_BYTES = 4 * GIB  # of a GPU beside the weights: activations, keys and values
# of host memory for each parameter of a model in fp32 on CPUs, with what loading takes
CPU_BYTES = 5
_MOST_READ = TERA  # parameters that the answers of one model may read on CPUs: at 20 GB/s, 200 s
_LEAST_TOKENS = 16  # an answer of fewer shows nothing
_ASSUMED_HOST_BYTES = 64 * GIGA  # of a host whose memory is not known
Place = Literal["gpu", "cpu", "none"]


@dataclass(frozen=True)
class Answers:
    """Where and how one model answers: with `place` gpu on `gpus` GPUs, in up to `new_tokens`."""

    place: Place
    gpus: int
    answers: int
    new_tokens: int
    asked: int
    asked_tokens: int
    why: str = ""

    @property
    def is_bounded(self) -> bool:
        """Whether there are fewer or shorter answers than the config asks for."""
        return (self.answers, self.new_tokens) != (self.asked, self.asked_tokens)

    def __str__(self) -> str:
        """Return what is answered, in words."""
        if not self.asked:
            return "no answers asked for"
        if self.place == "none":
            return f"no answers: {self.why}"
        where = count(self.gpus, "GPUs") if self.place == "gpu" else "CPUs"
        what = (
            f"{count(self.answers, 'answers')} of up to {self.new_tokens} tokens from each "
            f"model on {where}"
        )
        return (
            f"{what} instead of {self.asked} of up to {self.asked_tokens}: {self.why}"
            if self.is_bounded
            else what
        )


def gpus_to_hold(geometry: Geometry, gpu_bytes: int, number_bytes: int = HALF_BYTES) -> int:
    """Return how many GPUs with `gpu_bytes` free hold a whole model that answers, in whole layers.

    Return 0 if no number does.
    """
    weights = number_bytes * geometry.parameters
    if weights + ANSWERING_BYTES <= gpu_bytes:
        return 1
    room = gpu_bytes - ANSWERING_BYTES - number_bytes * largest_part_parameters(geometry)
    return math.ceil(weights / room) if room > 0 else 0


def plan_answers(
    geometry: Geometry, settings: Evaluate, gpus: int, gpu_bytes: int, host_bytes: int | None
) -> Answers:
    """Return how a model answers on a node with `gpus` GPUs of `gpu_bytes` and `host_bytes`."""
    asked = settings.generations + len(settings.prompts)
    tokens = settings.max_new_tokens
    bounded = partial(Answers, asked=asked, asked_tokens=tokens)
    if not asked:
        return bounded("none", gpus=0, answers=0, new_tokens=tokens)
    needed = gpus_to_hold(geometry, gpu_bytes) if gpus else 0
    if 0 < needed <= gpus:
        return bounded("gpu", gpus=needed, answers=asked, new_tokens=tokens)
    size = gigabytes(HALF_BYTES * geometry.parameters)
    no_gpus = (
        f"the whole model, {size} in bf16, has no room on {count(gpus, 'GPUs')} of {gib(gpu_bytes)}"
    )
    if not gpus:
        no_gpus = "there is no GPU"
    on_cpus = CPU_BYTES * geometry.parameters
    if on_cpus > (_ASSUMED_HOST_BYTES if host_bytes is None else host_bytes):
        why = f"{no_gpus}, and on CPUs it would take {gigabytes(on_cpus)} of host memory"
        return bounded("none", gpus=0, answers=0, new_tokens=tokens, why=why)
    most = int(_MOST_READ / geometry.parameters)
    if asked * tokens <= most:
        return bounded("cpu", gpus=0, answers=asked, new_tokens=tokens)
    new_tokens = min(tokens, max(_LEAST_TOKENS, most))
    why = f"{no_gpus}, and CPUs read all weights for each token"
    answers = min(asked, max(1, most // new_tokens))
    return bounded("cpu", gpus=0, answers=answers, new_tokens=new_tokens, why=why)


def answer_bytes(geometry: Geometry, prompt_tokens: int, new_tokens: int, number_bytes: int) -> int:
    """Return the memory of one answer in a batch with prompts padded to `prompt_tokens` tokens.

    It keeps keys, values and states of all layers. Beside them there are what one layer computes of
    the prompt, the mask of its attention, and the logits of one token.
    """
    kept = 2 * number_bytes * geometry.attention_layers * geometry.kv_heads * geometry.head_dim
    kept *= prompt_tokens + new_tokens
    if geometry.delta is not None:
        states = (
            geometry.delta.values * geometry.delta.key_dim
            + geometry.delta.channels * geometry.delta.width
        )
        kept += FP32_BYTES * len(geometry.delta_layers) * states
    mask = (1 + number_bytes) * prompt_tokens**2
    return (
        kept
        + _layer_bytes(geometry, prompt_tokens, number_bytes)
        + mask
        + _LOGIT_BYTES * geometry.vocab
    )


def answers_at_once(
    geometry: Geometry,
    prompt_tokens: int,
    new_tokens: int,
    number_bytes: int,
    room_bytes: int = ANSWERING_BYTES,
) -> int:
    """Return how many answers a batch generates in `room_bytes` of memory beside the model."""
    return max(1, room_bytes // answer_bytes(geometry, prompt_tokens, new_tokens, number_bytes))


def answers_of(
    geometry: Geometry, settings: Evaluate, cluster: Cluster, machine: Machine | None
) -> Answers:
    """Return how that cluster's evaluation will answer; an unknown GPU shall hold the model."""
    host_bytes = machine.host_memory_bytes if machine else None
    gpu_bytes = _gpu_bytes(geometry, cluster, machine)
    return plan_answers(geometry, settings, cluster.gpus_per_node, gpu_bytes, host_bytes)


def _gpu_bytes(geometry: Geometry, cluster: Cluster, machine: Machine | None) -> int:
    """Return a GPU's memory, 0 without GPUs; an unknown one has what the model and answers take."""
    if not cluster.gpus_per_node:
        return 0
    if machine is None or machine.gpu_memory_bytes is None:
        return HALF_BYTES * geometry.parameters + ANSWERING_BYTES
    return machine.gpu_memory_bytes


# A model that answers on the device that computes the held-out loss is loaded once for both, if
# that has the room.


def is_loaded_once(
    geometry: Geometry, block_tokens: int, answers: Answers, gpu_bytes: int, host_bytes: int | None
) -> bool:
    """Return whether the model that answers computes the held-out loss of such blocks too.

    `gpu_bytes` of the first GPU are free, 0 without one, and `host_bytes` of the host, None if not
    known.
    """
    if answers.gpus == 1:
        return (
            HALF_BYTES * geometry.parameters + computing_bytes(geometry, block_tokens, HALF_BYTES)
            <= gpu_bytes
        )
    if answers.place != "cpu" or scoring_bytes(geometry, block_tokens, HALF_BYTES) <= gpu_bytes:
        return False
    needed = CPU_BYTES * geometry.parameters + computing_bytes(geometry, block_tokens, FP32_BYTES)
    return needed <= (_ASSUMED_HOST_BYTES if host_bytes is None else host_bytes)


def will_load_once(
    geometry: Geometry,
    block_tokens: int,
    answers: Answers,
    cluster: Cluster,
    machine: Machine | None,
) -> bool:
    """Return what `is_loaded_once` will say on that cluster, as far as is known."""
    gpu_bytes = _gpu_bytes(geometry, cluster, machine) - RESERVE_BYTES
    host_bytes = machine.host_memory_bytes if machine else None
    return is_loaded_once(geometry, block_tokens, answers, gpu_bytes, host_bytes)


# Memory and time of the whole evaluation.

_LONG_S = HOUR_S / 2  # on CPUs: worth a warning
# operations of a layer for one token of an answer: 77 eager ones (plan/step_time.py), and the cache
_LAUNCHES = 100


def cpus_of(threads: int, precision: str = "fp32") -> Machine:
    """Return one process's CPUs with `threads` threads; evaluation on CPUs computes in fp32."""
    found = machine_of(Cluster(cpu_ranks=1, cpus_per_rank=threads), precision, None)
    if found is None:
        raise TypeError("CPUs need no name to be known")
    return found


def pass_s(geometry: Geometry, tokens: float, speeds: Speeds) -> float:
    """Return the seconds of the products for `tokens` tokens that pass through the model once."""
    return 2 * geometry.matmul_parameters * tokens / speeds.matmul_flop_s


def step_s(geometry: Geometry, rows: float, number_bytes: int, speeds: Speeds) -> float:
    """Return the seconds of the next token of a batch of `rows` answers.

    It reads all weights that the batch multiplies.
    """
    weights_bytes = number_bytes * geometry.matmul_parameters
    reading_s = weights_bytes / speeds.memory_bytes_s
    launching_s = geometry.layers * _LAUNCHES * speeds.launch_s
    return max(reading_s, launching_s, pass_s(geometry, rows, speeds))


def scored_tokens(workload: Workload) -> tuple[float, float]:
    """Return the tokens that the base and the tuned model score, padding included.

    The held-out blocks are those of `workload`; there are none before the blocks are made.
    """
    held_out = workload.validation_blocks * workload.block_tokens
    shuffled = min(held_out, MAX_SHUFFLED * workload.document_tokens / workload.real_fraction)
    return held_out, held_out + shuffled


def evaluation_host_bytes(
    geometry: Geometry,
    workload: Workload,
    answers: Answers,
    is_gpu: bool,
    is_once: bool,
    has_bytes: int | None,
) -> int:
    """Return the evaluation's host memory: for hidden states, or for the whole answering model.

    A model that is loaded once for both (`is_once`) passes whole, and no hidden states wait.
    `has_bytes` is the host's memory, None if not known.
    """
    number = HALF_BYTES if is_gpu else FP32_BYTES
    tokens = min(max(scored_tokens(workload)), waiting_tokens(geometry, number, has_bytes))
    scoring = number * geometry.hidden * tokens
    scoring += number * largest_part_parameters(geometry)  # on a GPU: read on its way there
    if not is_gpu:
        scoring += scoring_bytes(geometry, workload.block_tokens, number)
    own = AROUND_BYTES + RANK_BYTES["cuda" if is_gpu else "cpu"]
    whole = {"gpu": HALF_BYTES, "cpu": CPU_BYTES, "none": 0}[answers.place] * geometry.parameters
    # pages of mapped files, which the system may drop
    if answers.place == "gpu" and has_bytes is not None:
        whole = min(whole, has_bytes - own)
    if is_once:
        computing = 0 if is_gpu else computing_bytes(geometry, workload.block_tokens, FP32_BYTES)
        return math.ceil(own + whole + computing)
    return math.ceil(own + max(scoring, whole))


def evaluation_gpu_bytes(
    geometry: Geometry, workload: Workload, answers: Answers, is_once: bool
) -> int:
    """Return the first GPU's memory: for the held-out loss, or its share of the answering model.

    With `is_once` the model that answers computes the loss too.
    """
    weights = HALF_BYTES * geometry.parameters
    scoring = scoring_bytes(geometry, workload.block_tokens, HALF_BYTES) + RESERVE_BYTES
    if answers.place != "gpu":
        return scoring
    if is_once:
        scoring = (
            weights + computing_bytes(geometry, workload.block_tokens, HALF_BYTES) + RESERVE_BYTES
        )
    return max(scoring, math.ceil(weights / answers.gpus) + ANSWERING_BYTES)


def evaluation_s(
    geometry: Geometry, workload: Workload, answers: Answers, machine: Machine
) -> Figure:
    """Return the seconds of computing in an evaluation, without reading the models.

    On several GPUs each token of an answer passes through them one after the other.
    """
    number_bytes = HALF_BYTES if machine.is_gpu else FP32_BYTES
    prompts = MODELS * answers.answers * workload.document_tokens
    # fp32 products of two to eight rows take CPUs as long as the rows one by one (measured)
    most = 1
    if machine.is_gpu:
        most = answers_at_once(
            geometry, math.ceil(workload.document_tokens), answers.new_tokens, number_bytes
        )
    batches = math.ceil(answers.answers / most)
    rows = answers.answers / max(1, batches)

    def computing_s(speeds: Speeds) -> float:
        """Return the seconds at these speeds."""
        one_s = step_s(geometry, rows, number_bytes, speeds)
        passed = pass_s(geometry, sum(scored_tokens(workload)) + prompts, speeds)
        return passed + MODELS * batches * answers.new_tokens * one_s

    return figure_of({end: computing_s(machine.speeds(end)) for end in End})


def scoring_gpus(
    geometry: Geometry,
    block_tokens: int,
    cluster: Cluster,
    machine: Machine | None,
    number_bytes: int = HALF_BYTES,
) -> int:
    """Return 1 if the cluster has GPUs that a block may pass through part by part, else 0.

    So is the held-out loss computed, and in fp32 the logits of the proof of a merge.
    """
    gpu_bytes = machine.gpu_memory_bytes if machine else None
    fits = (
        gpu_bytes is None
        or scoring_bytes(geometry, block_tokens, number_bytes) <= gpu_bytes - RESERVE_BYTES
    )
    return int(cluster.gpus_per_node > 0 and fits)


def evaluation_warnings(
    config: Config, geometry: Geometry, workload: Workload, machine: Machine
) -> Iterator[str]:
    """Yield warnings about a long evaluation on CPUs, and answers left out or cut short."""
    gpus = scoring_gpus(geometry, workload.block_tokens, config.cluster, machine)
    answers = answers_of(geometry, config.asked, config.cluster, machine)
    if answers.is_bounded:
        yield f"evaluate: gives {answers}"
    if gpus:
        return
    threads = config.cluster.cpus_per_node
    took_s = evaluation_s(geometry, workload, answers, cpus_of(threads)).value
    is_long = took_s >= _LONG_S
    if not machine.is_gpu and not is_long:
        return
    why = ""
    if machine.is_gpu:
        needed = gib(scoring_bytes(geometry, workload.block_tokens, HALF_BYTES) + RESERVE_BYTES)
        why = f"needs {needed} of GPU memory, more than one {machine.name} has: it "
    took = f"takes about {brief(took_s)} on {threads} of them"
    if workload.is_assumed and not workload.is_estimated:  # then no held-out blocks are counted
        took = f"takes more than {brief(took_s)} on {threads} of them" if is_long else "takes hours"
    yield (
        f"evaluate: {why}will be done on CPUs, which {took}; a smaller "
        "data.validation_fraction, evaluate.generations or evaluate.max_new_tokens takes less"
    )
