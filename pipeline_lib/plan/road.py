"""How long a run takes from its command to its report, stage by stage.

The arrival of model and data is left out: a network or a disk decides it. So is the time in a queue.
"""

from collections.abc import Iterator

from pipeline_lib.arch.geometry import FP32_BYTES, HALF_BYTES
from pipeline_lib.arch.layers import PROBE_TOKENS
from pipeline_lib.core.units import from_gbyte_per_s
from pipeline_lib.plan.benchmarks import asking_s
from pipeline_lib.plan.evaluation import cpus_of, pass_s
from pipeline_lib.plan.machine import End, figure_of
from pipeline_lib.plan.stages import Run, trained_bytes
from pipeline_lib.records.plan import Figure, RoadPart


def _gbyte_per_s(value: float, low: float, high: float) -> Figure:
    """Return a rate in bytes a second from one in GB/s."""
    return Figure(from_gbyte_per_s(value), from_gbyte_per_s(low), from_gbyte_per_s(high))


# Seconds and bytes a second, with their bands, by what computes. Measured on one H200 with 16 cores
# (benchmarks/RESULTS.md, 8B and 4B with LoRA, cold and warm) and on two cores without a GPU (the
# demo); the bands reach to half and twice of that where only two kinds of machines were seen.
_COMMAND_S = Figure(4.0, 2.5, 8.0)  # to the first stage, and from the last to the end
_LIGHT_STAGE_S = Figure(1.0, 0.5, 2.5)  # a process that needs no torch, and Snakemake around it
_PROCESS_S = {"cuda": Figure(5.5, 4.0, 9.0), "cpu": Figure(2.8, 2.0, 8.0)}  # that imports torch
_LOADED_BYTES_S = {"cuda": _gbyte_per_s(6.5, 3.0, 20.0), "cpu": _gbyte_per_s(1.0, 0.3, 3.0)}
_COMPILE_S = Figure(12.0, 5.0, 40.0)  # layers, the head and the optimizer; less with a warm cache
_WRITTEN_BYTES_S = _gbyte_per_s(1.6, 0.3, 2.5)
_COMPARED_BYTES_S = {"cuda": _gbyte_per_s(4.5, 2.0, 8.0), "cpu": _gbyte_per_s(1.0, 0.3, 3.0)}
_PROVEN_BYTES_S = _gbyte_per_s(3.4, 1.5, 6.0)  # read by a GPU for the proof's logits
_SEAL_S = Figure(2.0, 0.3, 4.0)
_LIGHT_STAGES = 4  # tokenize, shard, plan and report, as far as their data does not decide
_MODELS = 2  # that are evaluated: the base and the tuned one


def road_of(run: Run, training_s: Figure | None) -> tuple[RoadPart, ...]:
    """Return the parts of a run whose training takes `training_s`; none if that is not known."""
    if training_s is None or run.geometry is None or run.machine is None:
        return ()
    parts = [
        RoadPart("start", _COMMAND_S + _LIGHT_STAGE_S.scaled(_LIGHT_STAGES)),
        RoadPart("train", _sum(_around_training(run)) + training_s),
        RoadPart("merge", _sum(_merge(run))),
        RoadPart("evaluate", _sum(_evaluation(run))),
    ]
    if run.askings:
        parts.append(RoadPart("benchmark", _sum(_benchmarks(run))))
    if run.exports:  # each is written, read back and proven as the merge is
        parts.append(RoadPart("export", _sum(_merge(run)).scaled(len(run.exports))))
    return tuple(parts)


def total(parts: tuple[RoadPart, ...]) -> Figure:
    """Return the seconds of all parts together."""
    return _sum(part.seconds for part in parts)


def _sum(figures: Iterator[Figure]) -> Figure:
    return sum(figures, Figure(0.0, 0.0, 0.0))


def _device(run: Run) -> str:
    return "cuda" if run.cluster.gpus_per_node else "cpu"


def _model_bytes(run: Run) -> int:
    return HALF_BYTES * run.parameters


def _around_training(run: Run) -> Iterator[Figure]:
    """Yield what a training takes beside its steps, saves and measurements of the held-out loss."""
    device = _device(run)
    yield _PROCESS_S[device]
    yield _LOADED_BYTES_S[device].inverse(_model_bytes(run))
    if run.train.compile is True:
        yield _COMPILE_S
    yield _WRITTEN_BYTES_S.inverse(trained_bytes(run))
    yield _SEAL_S


def _merge(run: Run) -> Iterator[Figure]:
    """Yield what a merge takes: the files, the comparison of each tensor, that of the logits."""
    device = _device(run)
    model_bytes = _model_bytes(run)
    yield _PROCESS_S[device]
    yield _WRITTEN_BYTES_S.inverse(model_bytes)
    yield _COMPARED_BYTES_S[device].inverse(model_bytes)
    if device == "cuda":
        yield _PROVEN_BYTES_S.inverse(model_bytes)
    else:
        yield _proof_on_cpus_s(run)
    yield _SEAL_S


def _proof_on_cpus_s(run: Run) -> Figure:
    """Return the seconds that the probe's tokens take through the model in fp32."""
    if run.geometry is None:
        raise TypeError("the road of an unknown model is not asked for")
    geometry = run.geometry
    tokens = min(run.workload.block_tokens, PROBE_TOKENS)
    machine = cpus_of(run.cluster.cpus_per_node)
    return figure_of({end: pass_s(geometry, tokens, machine.speeds(end)) for end in End})


def _both_loaded(run: Run) -> Iterator[Figure]:
    """Yield what it takes to have base and tuned model in memory, each in a process of its own."""
    device = _device(run)
    yield (_PROCESS_S[device] + _SEAL_S).scaled(_MODELS)
    number_bytes = HALF_BYTES if device == "cuda" else FP32_BYTES
    yield _LOADED_BYTES_S[device].inverse(_MODELS * number_bytes * run.parameters)


def _benchmarks(run: Run) -> Iterator[Figure]:
    """Yield what the benchmarks of both models take, if every answer is as long as it may get."""
    yield from _both_loaded(run)
    machine = run.evaluating_machine(most_cpus=None)
    if run.geometry is not None and machine is not None:
        yield asking_s(run.geometry, run.askings, machine).scaled(_MODELS)


def _evaluation(run: Run) -> Iterator[Figure]:
    """Yield what the evaluations of base and tuned model take; a sweep shares the base's."""
    yield from _both_loaded(run)
    if computing := run.evaluation_s(most_cpus=None):
        yield computing
