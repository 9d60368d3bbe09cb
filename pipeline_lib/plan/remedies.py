"""What would fit when a GPU's memory is full in the middle of a run.

The changes are those of plan/fitting.py. Of the machine only the memory is known there, so rates
are those of a usual one: they say no more than which change is the fastest.
"""

from dataclasses import dataclass, replace

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.schema import Cluster
from pipeline_lib.config.train import AUTO, Train
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.fitting import (
    ANY_BYTES,
    AT_MOST,
    Remedy,
    leanest_remedy,
    other_trainings,
    remedies_of,
)
from pipeline_lib.plan.machine import Machine, Ranks
from pipeline_lib.plan.memory import predict
from pipeline_lib.plan.predict import memory_of
from pipeline_lib.plan.workload import settled
from pipeline_lib.records.plan import Memory, Workload

# a usual machine, and the name of a card for which Triton does not compile
_USUAL, _USUAL_GBIT_S, _WITHOUT_TRITON = "A100 80GB SXM", 100.0, "T4"
_REAL, _SUPERVISED = 0.98, 0.5  # of the positions of blocks; the time hardly depends on them
_LEAST_SAVING = 0.97  # of the present memory: a change that leaves more than this is no remedy


@dataclass(frozen=True)
class Load:
    """What ranks train: a step has `batch_blocks` blocks of `block_tokens` tokens in all."""

    geometry: Geometry
    train: Train
    ranks: Ranks
    block_tokens: int
    batch_blocks: int

    @property
    def memory(self) -> Memory:
        """The predicted memory of one rank."""
        accumulation = self.train.accumulation(self.batch_blocks, self.ranks.total)
        return predict(self.geometry, self.train, self.ranks, self.block_tokens, accumulation)

    def case(self, device_bytes: int, has_deepspeed: bool) -> Case:
        """Return it as the plan asks for it, on GPUs of that memory and hosts that have enough."""
        train = settled(self.train, self.ranks.has_triton)
        if train.kept_attention_layers == AUTO:  # it is no longer the plan's to choose
            kept = {"kept_attention_layers": self.geometry.attention_layers}
            train = train.model_copy(update=kept)
        tokens = self.block_tokens
        return Case(
            geometry=self.geometry,
            train=train,
            machine=_machine(self.ranks, train.precision, device_bytes),
            workload=Workload(tokens, _REAL, _SUPERVISED, tokens, None, None, is_assumed=True),
            batch_blocks=self.batch_blocks,
            has_deepspeed=has_deepspeed,
        )


def _machine(ranks: Ranks, precision: str, device_bytes: int) -> Machine:
    cluster = Cluster(
        nodes=ranks.total // ranks.per_node,
        gpus_per_node=ranks.per_node,
        gpu=_USUAL,
        internode_gbit_s=_USUAL_GBIT_S,
    )
    usual = machine_of(cluster, "fp32" if precision == "fp32" else "bf16", None)
    if usual is None:
        raise ValueError(f"{_USUAL} is not in the catalogue of plan/gpus.py")
    name = usual.name if ranks.has_triton else _WITHOUT_TRITON
    return replace(usual, name=name, gpu_memory_bytes=device_bytes, host_memory_bytes=ANY_BYTES)


@dataclass(frozen=True)
class ScaledRemedy:
    """A remedy, and its memory, scaled up by what was predicted too low."""

    remedy: Remedy
    needed_bytes: int

    def __str__(self) -> str:
        """Return the remedy as one line for a message."""
        return self.remedy.with_memory(self.needed_bytes)


def remedies(
    load: Load, device_bytes: int, ratio: float, has_deepspeed: bool
) -> list[ScaledRemedy]:
    """Return up to AT_MOST remedies, those that train the same first; empty if nothing is enough.

    `ratio` is measured over predicted memory, as far as known; predictions are multiplied by it if
    it is above 1.
    """
    scale = max(1.0, ratio)
    found = remedies_of(load.case(int(device_bytes / scale), has_deepspeed))
    return [_scaled(remedy, scale) for remedy in found[:AT_MOST]]


def least(load: Load, ratio: float, has_deepspeed: bool) -> ScaledRemedy | None:
    """Return the change that needs least memory, fit or not; None if nothing can be changed."""
    case = load.case(0, has_deepspeed)
    found = [leanest_remedy(case, {}, "")]
    for keys, other, effect in other_trainings(case):
        found.append(leanest_remedy(other, keys, effect))
    scaled = [_scaled(remedy, max(1.0, ratio)) for remedy in found if remedy is not None]
    enough_bytes = _LEAST_SAVING * load.memory.total_bytes * max(1.0, ratio)
    leaner = [each for each in scaled if each.needed_bytes <= enough_bytes]
    return min(leaner, key=lambda each: each.needed_bytes, default=None)


def _scaled(remedy: Remedy, scale: float) -> ScaledRemedy:
    return ScaledRemedy(remedy, round(memory_of(remedy.case).total_bytes * scale))
