"""How long one process computes that holds a whole model, on one GPU or on CPUs, whatever trains the model.

In the evaluation base and tuned score what was held out, the tuned model scores the documents whose prompts are
shuffled twice more, and both answer (publish/evaluate.py).
"""

from pipeline_lib.config.schema import Cluster, Config, Evaluate
from pipeline_lib.plan.activations import FP32_BYTES, HALF_BYTES
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.machine import Figure, Luck, Machine, Speeds
from pipeline_lib.plan.memory import can_evaluate
from pipeline_lib.plan.units import HOUR_S, gigabytes, seconds
from pipeline_lib.plan.workload import Workload

MAX_SHUFFLED = 1000  # documents, each in a block of its own
_MODELS = 2
_LONG_S = HOUR_S / 2  # on CPUs: worth a word
_LAUNCHES = 100  # operations of a layer for one token of an answer: 77 eager ones (plan/compute.py), and its cache


def cpus_of(threads: int, precision: str = "fp32") -> Machine:
    """The CPUs of one process with so many threads; the evaluation computes in fp32 there."""
    found = machine_of(Cluster(cpu_ranks=1, cpus_per_rank=threads), precision, None)
    if found is None:
        raise TypeError("CPUs need no name to be known")
    return found


def pass_s(geometry: Geometry, tokens: float, speeds: Speeds) -> float:
    """Seconds of the products of so many tokens that pass through the model once."""
    return 2 * geometry.matmul_parameters * tokens / speeds.matmul_flop_s


def evaluation_s(geometry: Geometry, workload: Workload, settings: Evaluate, machine: Machine) -> Figure:
    """Seconds of computing, without the reading of the models.

    How much was held out `workload` says; while there are no blocks, that is nothing.
    """
    held_out = workload.validation_blocks * workload.block_tokens
    shuffled = min(MAX_SHUFFLED, held_out * workload.real_fraction / workload.document_tokens) * workload.block_tokens
    answers = _MODELS * (settings.generations + len(settings.prompts))
    passed = _MODELS * held_out + 2 * shuffled + answers * workload.document_tokens
    weights_bytes = (HALF_BYTES if machine.is_gpu else FP32_BYTES) * geometry.matmul_parameters

    def computing_s(speeds: Speeds) -> float:
        """A token of an answer reads all weights that it is multiplied by."""
        token_s = max(weights_bytes / speeds.memory_bytes_s, geometry.layers * _LAUNCHES * speeds.launch_s)
        return pass_s(geometry, passed, speeds) + answers * settings.max_new_tokens * token_s

    return Figure.of({luck: computing_s(machine.speeds(luck)) for luck in Luck})


def long_on_cpus(config: Config, geometry: Geometry, workload: Workload, machine: Machine) -> list[str]:
    """What to know of it beforehand, if anything: whatever trains the model, the evaluation has one GPU, or CPUs."""
    threads = config.cluster.cpus_per_node
    if machine.is_gpu and can_evaluate(geometry.parameters, machine.gpu_memory_bytes or 0):
        return []
    took_s = evaluation_s(geometry, workload, config.evaluate, cpus_of(threads)).value
    is_long = took_s >= _LONG_S
    if not machine.is_gpu and not is_long:
        return []
    why = ""
    if machine.is_gpu:
        size = gigabytes(HALF_BYTES * geometry.parameters)
        why = f"holds the whole model, {size}, for which one {machine.name} has no room: it "
    took = f"takes about {seconds(took_s)} on {threads} of them"
    if workload.is_assumed:  # of which nothing is held out
        took = f"takes more than {seconds(took_s)} on {threads} of them" if is_long else "takes hours"
    return [
        f"the evaluation {why}will be done on CPUs, which {took}; a smaller data.validation_fraction, "
        "evaluate.generations or evaluate.max_new_tokens takes less"
    ]
