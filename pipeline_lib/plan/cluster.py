"""Build the Machine of a config's cluster section, from catalogue, measurements and given rates.

Each rate is the best known: from the config, else from calibrate, else from the catalogue, whose
bands are wide. Each rate names its source.
"""

from dataclasses import replace

from pipeline_lib.config.schema import Cluster, GpuSheet
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.units import (
    from_gbit_per_s,
    from_gbyte_per_s,
    from_gigabytes,
    from_teraflops,
)
from pipeline_lib.plan.efficiency import efficiency_of
from pipeline_lib.plan.gpus import Gpu, described, find_gpu, name_words, near_names
from pipeline_lib.plan.machine import Machine, attention_share, beside_memory
from pipeline_lib.plan.measured import AGAIN, RATES, Measured
from pipeline_lib.records.plan import Rate

# The rates of small kernels (by the bytes that plan/step_time.py counts) and of launches are fitted
# to steps on H200.
_STREAM, _STREAM_BAND = 0.85, 0.1
_EAGER_ON_CHIP_BYTES_S = from_gbyte_per_s(3_600.0)
_POINTWISE_BAND = 0.3
# Typical values for hosts that have GPUs.
_LAUNCH_S, _LAUNCH_BAND = 20e-6, 0.6
_LATENCY_S, _LATENCY_BAND = 30e-6, 1.0  # of a collective over NVLink; over PCIe about the same
_NETWORK_LATENCY_S, _NETWORK_LATENCY_BAND = 60e-6, 2.0
# PCIe 4 gives 25, PCIe 5 twice that, and shared switches less
_COPY_GBYTE_S = 20.0
_COPY_BAND = 0.6
_HOST_GBYTE_S, _THREAD_GBYTE_S, _HOST_BAND = 50.0, 25.0, 0.6
# Hosts of an H100 (benchmarks/RESULTS.md): 53 to 54 GB/s each way; AdamW 28 GB/s with one thread,
# in page-locked memory 55 with 4 and 127 with 16. Neither more threads nor several GPUs at once
# were measured; H200 was not measured apart.
_HOPPER_COPY_GBYTE_S, _HOPPER_COPY_BAND = 54.0, 0.3
_HOPPER_HOST_GBYTE_S = 130.0
_HOPPER_THREAD_GBYTE_S = 26.0
_HOPPER_THREADS_POWER = 0.57
_HOPPER_HOST_BAND = 0.4
_DISK_GBYTE_S, _DISK_BAND = 1.0, 2.0
_GIVEN_BAND = 0.1
_NO_LINK = "there is no such link"
_SHEET = "`gpu: {name: ..., memory_gb: ..., bf16_tflops: ..., memory_gb_s: ..., link_gb_s: ...}`"
_IN_NODE = {"bytes_s": "in_node_bytes_s", "latency_s": "in_node_latency_s"}
# One CPU thread, and the links within a node of CPU ranks.
_CPU_TFLOP_S, _CPU_ATTENTION_TFLOP_S = 0.04, 0.02
# few CPUs compute in half precision; the others are slower in it than in fp32
_CPU_BAND = 2.0
_CPU_HALF_BAND = 9.0
_CPU_MEMORY_GBYTE_S, _CPU_POINTWISE_GBYTE_S, _CPU_LAUNCH_S = 10.0, 5.0, 10e-6
_LOOPBACK_GBYTE_S, _LOOPBACK_LATENCY_S = 1.0, 100e-6

# Rates that depend on the precision in which they were measured.
_OF_PRECISION = frozenset({"matmul_flop_s", "attention_flop_s", "pointwise_bytes_s"})
# for fp8, calibrate measures products in bf16, which plan/step_time.py converts
_RATED_AS = {"fp8": "bf16"}


def machine_of(
    cluster: Cluster, precision: str, measured: Measured | None, attention: str = "auto"
) -> Machine | None:
    """Return the machine for `precision` and `train.attention`, or None if its GPUs are not named.

    Raise ConfigError for an unknown GPU, for measurements of another device, and for a missing
    rate.
    """
    is_gpu = cluster.gpus_per_node > 0
    if is_gpu and cluster.gpu is None and measured is None:
        return None
    gpu = _gpu(cluster, measured)
    if is_gpu:
        rates = _catalogue(gpu, precision, attention, cluster.cpus_per_node)
    else:
        rates = _cpus(cluster, precision)
    if measured is not None:
        rates |= _that_hold(measured, precision)
    if "pointwise_bytes_s" not in rates and "memory_bytes_s" in rates:
        by_memory = _small_kernels(rates["memory_bytes_s"].value, "by memory_bytes_s")
        rates["pointwise_bytes_s"] = by_memory
    rates |= _given(cluster)
    rates = _unused(rates, cluster) | rates
    _refuse_missing(rates, cluster, precision)
    is_same = measured is not None and measured.precision == precision
    return Machine(
        name=_name_of(gpu, measured) if is_gpu else "CPU",
        is_gpu=is_gpu,
        nodes=cluster.nodes,
        ranks_per_node=cluster.ranks_per_node,
        gpu_memory_bytes=_memory_of(gpu, measured),
        peak_flop_s=None if gpu is None else gpu.peak_flop_s(precision),
        host_memory_bytes=from_gigabytes(cluster.memory_gb) if cluster.memory_gb else None,
        rates={name: rates[name] for name in RATES},
        measured=measured.parts if measured is not None and is_same else (),
    )


def _that_hold(measured: Measured, precision: str) -> dict[str, Rate]:
    """Return the measured rates but those of another precision."""
    found = {**measured.rates, **_in_long_documents(measured)}
    of_measured = _RATED_AS.get(measured.precision, measured.precision)
    if of_measured == _RATED_AS.get(precision, precision):
        return found
    return {name: rate for name, rate in found.items() if name not in _OF_PRECISION}


def _given(cluster: Cluster) -> dict[str, Rate]:
    """Return the rates of links that the config gives."""
    rates = {}
    if cluster.intranode_gbyte_s is not None:
        rates["in_node_bytes_s"] = _gbyte_rate(
            cluster.intranode_gbyte_s, _GIVEN_BAND, "cluster.intranode_gbyte_s"
        )
    if cluster.internode_gbit_s is not None:
        value = from_gbit_per_s(cluster.internode_gbit_s)
        rates["between_bytes_s"] = Rate.around(value, _GIVEN_BAND, "cluster.internode_gbit_s")
    return rates


def _name_of(gpu: Gpu | None, measured: Measured | None) -> str:
    """Return the name of the GPUs: the catalogue's, else the driver's."""
    if gpu is not None:
        return gpu.name
    return measured.gpu or "GPU" if measured is not None else "GPU"


def _memory_of(gpu: Gpu | None, measured: Measured | None) -> int | None:
    """Return the memory of a GPU: as measured, else the catalogue's; None on CPUs."""
    if measured is not None and measured.gpu_memory_bytes is not None:
        return measured.gpu_memory_bytes
    return None if gpu is None else gpu.memory_bytes


def _in_long_documents(measured: Measured) -> dict[str, Rate]:
    """Return the attention rate in long documents, as `calibrate` measured it in its own."""
    rate = measured.rates.get("attention_flop_s")
    if rate is None or measured.gpu is None or not measured.parts:
        return {}
    factor = 1 / attention_share(measured.parts[0].document_tokens)
    return {
        "attention_flop_s": Rate(
            factor * rate.value, factor * rate.low, factor * rate.high, rate.source
        )
    }


def _gpu(cluster: Cluster, measured: Measured | None) -> Gpu | None:
    measured_name = measured.gpu if measured is not None else None
    if measured is not None and (measured_name is not None) != (cluster.gpus_per_node > 0):
        was = measured_name or "CPUs"
        is_now = f"cluster.gpus_per_node is {cluster.gpus_per_node}"
        raise _error(
            f"cluster.measured: measured on {was}, and {is_now}; {AGAIN} where training will run"
        )
    if not cluster.gpus_per_node:
        return None
    if cluster.gpu is None:
        return find_gpu(measured_name or "")
    if isinstance(cluster.gpu, GpuSheet):
        return described(cluster.gpu)
    found = find_gpu(cluster.gpu)
    if measured_name is not None:
        of_measured = find_gpu(measured_name)
        is_same = found is not None and found == of_measured
        if not (is_same or name_words(cluster.gpu) <= name_words(measured_name)):
            text = (
                f"cluster.gpu: {cluster.gpu!r}, and cluster.measured was measured on "
                f"{measured_name!r}"
            )
            raise _error(f"{text}; remove one of the two, or {AGAIN} on the GPUs that will train")
        return of_measured or found
    if found is None:
        text = f"cluster.gpu: {cluster.gpu!r} is not known; {near_names(cluster.gpu)}"
        raise _error(
            f"{text}. Describe any other as {_SHEET}, or let `qwen3 calibrate CONFIG` measure what "
            "cluster.measured names"
        )
    return found


def _catalogue(gpu: Gpu | None, precision: str, attention: str, threads: int) -> dict[str, Rate]:
    """Return the rates of the GPU and a typical host's `threads`; the host's if `gpu` is None."""
    copies = _gbyte_rate(_COPY_GBYTE_S, _COPY_BAND, "a usual host")
    updates = _gbyte_rate(min(_HOST_GBYTE_S, threads * _THREAD_GBYTE_S), _HOST_BAND, "a usual host")
    if gpu is not None and gpu.is_hopper:
        source = "a host like those of H100"
        of_threads = _HOPPER_THREAD_GBYTE_S * threads**_HOPPER_THREADS_POWER
        copies = _gbyte_rate(_HOPPER_COPY_GBYTE_S, _HOPPER_COPY_BAND, source)
        updates = _gbyte_rate(min(_HOPPER_HOST_GBYTE_S, of_threads), _HOPPER_HOST_BAND, source)
    rates = {
        "launch_s": Rate.around(_LAUNCH_S, _LAUNCH_BAND, "a usual host"),
        "copy_bytes_s": copies,
        "host_bytes_s": updates,
        "disk_bytes_s": _gbyte_rate(_DISK_GBYTE_S, _DISK_BAND, "a usual disk"),
        "in_node_latency_s": Rate.around(_LATENCY_S, _LATENCY_BAND, "a usual host"),
    }
    if gpu is None:
        return rates
    source = f"catalogue: {gpu.name}"
    peak = gpu.peak_flop_s(precision)
    if peak is None:
        others = " or ".join(other for other in ("bf16", "fp16", "fp32") if gpu.computes_in(other))
        raise _error(
            f"train.precision: {precision}, which a {gpu.name} does not compute in; it may be "
            f"{others}"
        )
    memory = gpu.memory_bytes_per_s
    reached = efficiency_of(gpu, precision)
    attended = reached.flash if attention == "flash" or not gpu.is_hopper else reached.cudnn
    return rates | {
        "matmul_flop_s": Rate.around(
            reached.products * peak, reached.products_band, f"{source}, {reached.known}"
        ),
        "attention_flop_s": Rate.around(
            attended * peak, reached.attention_band, f"{source}, {reached.known}"
        ),
        "memory_bytes_s": Rate.around(_STREAM * memory, _STREAM_BAND, source),
        "pointwise_bytes_s": _small_kernels(_STREAM * memory, source),
        "in_node_bytes_s": Rate.around(
            gpu.link.bytes_per_s, gpu.link.factor - 1, f"{source}, {gpu.link.name}"
        ),
    }


def _cpus(cluster: Cluster, precision: str) -> dict[str, Rate]:
    source = "a usual CPU"
    threads = cluster.cpus_per_rank
    band = _CPU_BAND if precision == "fp32" else _CPU_HALF_BAND
    memory = _gbyte_rate(_CPU_MEMORY_GBYTE_S, _CPU_BAND, source)
    return {
        "matmul_flop_s": Rate.around(from_teraflops(_CPU_TFLOP_S) * threads, band, source),
        "attention_flop_s": Rate.around(
            from_teraflops(_CPU_ATTENTION_TFLOP_S) * threads, band, source
        ),
        "memory_bytes_s": memory,
        "pointwise_bytes_s": _gbyte_rate(_CPU_POINTWISE_GBYTE_S, _CPU_BAND, source),
        "launch_s": Rate.around(_CPU_LAUNCH_S, _CPU_BAND, source),
        "in_node_bytes_s": _gbyte_rate(_LOOPBACK_GBYTE_S, _CPU_BAND, "gloo over loopback"),
        "in_node_latency_s": Rate.around(_LOOPBACK_LATENCY_S, _CPU_BAND, "gloo over loopback"),
        "copy_bytes_s": memory,
        "host_bytes_s": memory,
        "disk_bytes_s": _gbyte_rate(_DISK_GBYTE_S, _DISK_BAND, "a usual disk"),
    }


def _unused(rates: dict[str, Rate], cluster: Cluster) -> dict[str, Rate]:
    """Return rates for links that do not exist, where any value will do, and a typical latency."""
    unused = {
        "between_latency_s": Rate.around(
            _NETWORK_LATENCY_S, _NETWORK_LATENCY_BAND, "a usual network"
        )
    }
    if (cluster.gpus_per_node or cluster.cpu_ranks) == 1:
        unused["in_node_bytes_s"] = replace(rates["copy_bytes_s"], source=_NO_LINK)
    if cluster.nodes == 1:
        within = unused | rates
        links = {
            f"between_{what}": within[name] for what, name in _IN_NODE.items() if name in within
        }
        unused |= {name: replace(rate, source=_NO_LINK) for name, rate in links.items()}
    return unused


def _refuse_missing(rates: dict[str, Rate], cluster: Cluster, precision: str) -> None:
    missing = [name for name in RATES if name not in rates]
    if missing == ["between_bytes_s"]:
        text = (
            f"missing, and cluster.nodes is {cluster.nodes}: what a node sends to another "
            "decides the plan"
        )
        raise _error(
            f"cluster.internode_gbit_s: {text}; give what `doctor --hosts A,B CONFIG`, in SLURM "
            "`doctor --profile slurm CONFIG` or iperf3 measures, in Gbit/s"
        )
    if (
        missing
        and missing[0] == "in_node_bytes_s"
        and set(missing) <= {"in_node_bytes_s", "between_bytes_s"}
    ):
        text = (
            "missing, and the GPU is not in the catalogue; give the bus bandwidth that "
            "nccl-tests measures in GB/s"
        )
        raise _error(f"cluster.intranode_gbyte_s: {text}, or {AGAIN} on two ranks or more")
    if missing:
        text = f"lacks {', '.join(missing)}, and the GPU is not in the catalogue; {AGAIN}"
        raise _error(f"cluster.measured: {text} in {precision}, on two ranks or more")


def _small_kernels(memory_bytes_s: float, source: str) -> Rate:
    value = beside_memory(memory_bytes_s, _EAGER_ON_CHIP_BYTES_S)
    return Rate.around(value, _POINTWISE_BAND, source)


def _gbyte_rate(gbyte_s: float, fraction: float, source: str) -> Rate:
    return Rate.around(from_gbyte_per_s(gbyte_s), fraction, source)


def _error(problem: str) -> ConfigError:
    return ConfigError("cluster", [problem])
