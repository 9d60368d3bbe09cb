"""Machines and models that tests of the plan share."""

from collections.abc import Collection
from dataclasses import replace

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.train import Train
from pipeline_lib.core.units import (
    GIB,
    from_gbit_per_s,
    from_gbyte_per_s,
    from_gigabytes,
    from_teraflops,
)
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.choose import leanest
from pipeline_lib.plan.machine import Machine
from pipeline_lib.records.plan import Memory, Rate, Workload

QWEN3_06B = Geometry(151936, 1024, 3072, 28, 16, 8, 128, True, 40960)
QWEN3_17B = Geometry(151936, 2048, 6144, 28, 16, 8, 128, True, 40960)
QWEN3_8B = Geometry(151936, 4096, 12288, 36, 32, 8, 128, False, 40960)
# Qwen2-1.5B: config.json of the checkpoint.
QWEN2_15B = Geometry(
    151936,
    1536,
    8960,
    28,
    12,
    2,
    128,
    True,
    131072,
    biased=("q_proj", "k_proj", "v_proj"),
    normed_heads=False,
)


def rate(value: float) -> Rate:
    return Rate.around(value, 0.1, "given by the test")


def machine(
    nodes: int = 1,
    per_node: int = 8,
    between_gbit_s: float = 400.0,
    *,
    memory_gib: float = 140.0,
    half_teraflops: float = 640.0,
    stream_gbyte_s: float = 4100.0,
    in_node_gbyte_s: float = 359.0,
    launch_s: float = 20e-6,
    host_memory_gb: float = 2000.0,
) -> Machine:
    """An H200 server, unless told otherwise."""
    rates = {
        "matmul_flop_s": from_teraflops(half_teraflops),
        "attention_flop_s": from_teraflops(half_teraflops / 3),
        "memory_bytes_s": from_gbyte_per_s(stream_gbyte_s),
        "pointwise_bytes_s": from_gbyte_per_s(stream_gbyte_s / 2),
        "launch_s": launch_s,
        "in_node_bytes_s": from_gbyte_per_s(in_node_gbyte_s),
        "in_node_latency_s": 30e-6,
        "between_bytes_s": from_gbit_per_s(between_gbit_s),
        "between_latency_s": 50e-6,
        "copy_bytes_s": from_gbyte_per_s(20),
        "host_bytes_s": from_gbyte_per_s(50),
        "disk_bytes_s": from_gbyte_per_s(1),
    }
    return Machine(
        name="test GPU",
        is_gpu=True,
        nodes=nodes,
        ranks_per_node=per_node,
        gpu_memory_bytes=round(memory_gib * GIB),
        peak_flop_s=from_teraflops(half_teraflops * 1.5),
        host_memory_bytes=from_gigabytes(host_memory_gb),
        rates={name: rate(value) for name, value in rates.items()},
    )


def a10s(nodes: int, between_gbit_s: float = 9.0) -> Machine:
    """Nodes of two A10s without P2P: 125 TFLOP/s at best, 600 GB/s, 24 GB (data sheet)."""
    return machine(
        nodes,
        2,
        between_gbit_s,
        memory_gib=22.5,
        half_teraflops=70,
        stream_gbyte_s=500,
        in_node_gbyte_s=4.3,
    )


def case_of(
    geometry: Geometry,
    machine: Machine,
    data: Workload,
    batch_blocks: int,
    steps: int | None = None,
) -> Case:
    """A training of which tests say later how it is to be done."""
    return Case(geometry, Train(), machine, data, batch_blocks, steps)


def asking(
    case: Case, train: Train, fixed: Collection[str] = (), has_deepspeed: bool = True
) -> Case:
    return replace(case, train=train, fixed=fixed, has_deepspeed=has_deepspeed)


def lean(case: Case) -> tuple[Train, Memory]:
    """The legal way that lacks least memory; there has to be one."""
    way = leanest(case)
    assert way is not None
    return way


def workload(block_tokens: int = 4096, document_tokens: float = 500.0) -> Workload:
    return Workload(block_tokens, 1.0, 0.5, document_tokens, None, None)
