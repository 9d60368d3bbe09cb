"""What processes take beside the tensors of a training, and the host memory of a node by purpose."""

import math
from dataclasses import dataclass

from pipeline_lib.core.units import GIB, count, gigabytes
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.records.plan import PlanDocument

# Memory that torch's allocator does not count: the CUDA context with its kernels, NCCL's buffers,
# and fragmentation.
RESERVE_BYTES = 2 * GIB
# Host memory beside what is counted here: for each rank an interpreter with torch, on GPUs also
# CUDA's and NCCL's pinned buffers; and the processes around the ranks (Snakemake, the stage, srun).
# On CPUs these are for merge and evaluation: a training's are below.
RANK_BYTES = {"cpu": 1_200_000_000, "cuda": 6_000_000_000}
AROUND_BYTES = 2_500_000_000
STAGE_BYTES = 175_000_000  # the stage's own process, which imports no torch: 172 MB
# Of a job: Snakemake's job step, the Snakemake that this starts (125 MB each, by a dry run), and
# shells and srun.
SNAKEMAKE_BYTES = 260_000_000
# What is asked for beyond the peak: for errors of this prediction, up to 7 % where it was measured
# (ddp, fsdp and zero2 on one node, fp32) and unknown elsewhere; and for the code of libraries, 130
# MB of a process, which is file cache that has to be read again where it has no room.
CPU_MARGIN, LIBRARIES_BYTES = 0.3, 200_000_000


@dataclass(frozen=True)
class HostNeed:
    """Bytes that the host of a node needs, by purpose.

    With GPUs, `state_bytes` are what its ranks offload, `copied_bytes` what they copy of a
    checkpoint at a time, and `own_bytes` are for `ranks` interpreters and the processes around
    them. On CPUs, `state_bytes` are all that the ranks hold, `own_bytes` are for the processes
    around them, and `margin_bytes` are asked for beyond the peak. With GPUs there is no margin,
    since the other parts are generous.
    """

    state_bytes: int
    copied_bytes: int
    own_bytes: int
    margin_bytes: int
    ranks: int
    is_gpu: bool

    @property
    def peak_bytes(self) -> int:
        """The most that the processes of a node are expected to hold, in bytes."""
        return self.state_bytes + self.copied_bytes + self.own_bytes

    @property
    def total_bytes(self) -> int:
        """What is needed, with the margin, in bytes."""
        return self.peak_bytes + self.margin_bytes

    def __str__(self) -> str:
        """Return the parts, in words."""
        if not self.is_gpu:
            hold = "holds" if self.ranks == 1 else "hold"
            return (
                f"{gigabytes(self.state_bytes)} for what {count(self.ranks, 'ranks')} {hold}, "
                f"copies of a checkpoint included, {gigabytes(self.own_bytes)} for what is around "
                f"them, {gigabytes(self.margin_bytes)} to spare"
            )
        parts = [f"{gigabytes(self.state_bytes)} for what is offloaded"] if self.state_bytes else []
        parts.append(
            f"{gigabytes(self.copied_bytes)} for what is copied of a checkpoint before it is "
            "written"
        )
        parts.append(
            f"{gigabytes(self.own_bytes)} for {count(self.ranks, 'interpreters')} and what is "
            "around them"
        )
        return ", ".join(parts)


def host_need(
    host_bytes: int, copied_bytes: int, cpu_rank_bytes: int, ranks: Ranks, is_gpu: bool
) -> HostNeed:
    """Return what a node's host needs for its ranks, each with the given bytes of Memory."""
    if is_gpu:
        own_bytes = AROUND_BYTES + ranks.per_node * RANK_BYTES["cuda"]
        state_bytes = ranks.per_node * host_bytes
        copied_bytes = ranks.per_node * copied_bytes
        return HostNeed(state_bytes, copied_bytes, own_bytes, 0, ranks.per_node, is_gpu)
    state_bytes = ranks.per_node * cpu_rank_bytes
    own_bytes = STAGE_BYTES + SNAKEMAKE_BYTES
    margin_bytes = math.ceil(CPU_MARGIN * (state_bytes + own_bytes)) + LIBRARIES_BYTES
    return HostNeed(state_bytes, 0, own_bytes, margin_bytes, ranks.per_node, is_gpu)


def host_need_of_plan(plan: PlanDocument) -> HostNeed:
    """Return the host memory that a node needs for the way to train that plan.json has chosen."""
    cluster = plan.cluster
    memory = plan.chosen_memory
    ranks = Ranks(cluster.ranks, cluster.ranks // cluster.nodes)
    sizes = memory.host_bytes, memory.copied_bytes, memory.cpu_rank_bytes
    return host_need(*sizes, ranks, is_gpu=cluster.is_gpu)
