"""A calibration run: the task, one process for each rank, the content of cluster.json, and the printed report."""

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.schema import Cluster, Config, ModelSource
from pipeline_lib.config.section import read_settings, settings_of
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.files import write_text
from pipeline_lib.core.processes import OWNER_VARIABLE, describe_owner
from pipeline_lib.core.units import GIGA, TERA, brief, gbit_per_s
from pipeline_lib.doctor import probes
from pipeline_lib.doctor.facts import UNMEASURED, Unmeasured, measured
from pipeline_lib.launch.environment import (
    PLACE_IN_WORLD,
    allocator_settings,
    dist_environment,
    private_rendezvous,
    rank_environments,
)
from pipeline_lib.plan.cluster import SCHEMA
from pipeline_lib.plan.machine import Gpu, Pass, find_gpu
from pipeline_lib.plan.workload import Workload

# The task that the ranks of a calibration measure.

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


_LAYERS = ("expert_layers", "delta_layers")  # sets of numbers in a Geometry


_MOST_LOAD = 1.0  # processes that want a core, beside those that measure


def busy(load: float) -> str:
    """Return what is wrong with measuring while so many processes want a core; empty if nothing is."""
    if load <= _MOST_LOAD:
        return ""
    return f"{load:.1f} processes are at work on this machine, so it measures slower than it is; wait until it is idle"


@dataclass(frozen=True)
class Task:
    """A measurement task: the model's shapes, its training settings and workload, and the device, `cuda` or `cpu`."""

    geometry: Geometry
    train: Train
    workload: Workload
    device: str
    parts_budget_s: float

    def as_json(self) -> str:
        """Return the task as JSON for the measuring processes."""
        fields: dict[str, Any] = {"device": self.device, "parts_budget_s": self.parts_budget_s}
        fields |= {"train": settings_of(self.train), "workload": asdict(self.workload)}
        geometry = asdict(self.geometry) | {key: sorted(getattr(self.geometry, key)) for key in _LAYERS}
        return json.dumps({**fields, "geometry": geometry})

    @staticmethod
    def from_json(text: str) -> "Task":
        """Return the task that `as_json` wrote."""
        fields = json.loads(text)
        geometry = fields["geometry"]
        geometry |= {"biased": tuple(geometry["biased"]), **{key: frozenset(geometry[key]) for key in _LAYERS}}
        return Task(
            Geometry(**geometry),
            read_settings(Train, fields["train"]),
            Workload(**fields["workload"]),
            fields["device"],
            fields["parts_budget_s"],
        )


def with_layers(geometry: Geometry, layers: int) -> Geometry:
    """Return `geometry` with `layers` layers, all of which have experts if any layer had."""
    return replace(
        geometry, layers=layers, expert_layers=frozenset(range(layers)) if geometry.expert_layers else frozenset()
    )


def _name_of(model: ModelSource) -> str:
    if model.source == "tiny":
        return "tiny"
    return Path(model.path).name if model.source == "local" else model.name


def config_json(geometry: Geometry) -> dict[str, Any]:
    """Return a config.json for `geometry`, the inverse of `geometry_in`.

    Either all layers of `geometry` must have experts, or none.
    """
    kind = "qwen2"
    if geometry.normed_heads:
        kind = "qwen3"
    if geometry.expert_layers:
        kind = "qwen3_moe"
    config: dict[str, Any] = {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": geometry.vocab,
        "hidden_size": geometry.hidden,
        "intermediate_size": geometry.intermediate,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "tie_word_embeddings": geometry.tied,
        "max_position_embeddings": geometry.max_positions,
        "rms_norm_eps": 1e-6,
    }
    if kind != "qwen2":
        config["attention_bias"] = bool(geometry.biased)
    if kind == "qwen3_moe":
        config |= {
            "num_experts": geometry.experts,
            "num_experts_per_tok": geometry.experts_per_token,
            "moe_intermediate_size": geometry.expert_intermediate,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    return config


# From measured seconds to costs and rates: fits through a few points, and the spread of repetitions.

LEAST_SPREAD = 0.03  # relative; the day-to-day variation of one machine
HOST_BOUND = 1.2  # a run of at most this multiple of the few-token run's time is bound by the host, not the device
_LEAST_LATENCY_S = 1e-7


def pass_of(tokens: tuple[int, int], tiny_s: float, half_s: float, full_s: float) -> Pass:
    """Return the cost of a pass from three runs: one of a few tokens, bound by the host, and two of `tokens`.

    `tokens` are the token counts (half, full) of the last two runs. The cost is the line through these two if its slope
    is positive, its intercept is not negative, and the half run is not host-bound; else it is proportional to tokens.
    """
    tiny_s, half_s, full_s = max(0.0, tiny_s), max(0.0, half_s), max(0.0, full_s)
    half, full = tokens
    per_token_s = (full_s - half_s) / (full - half)
    fixed_s = full_s - per_token_s * full
    if half_s <= HOST_BOUND * tiny_s or per_token_s <= 0 or fixed_s < 0:
        return Pass(0.0, full_s / full, tiny_s)
    return Pass(fixed_s, per_token_s, tiny_s)


def link_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (bandwidth in bytes/s, latency in s), fitted to t = latency + bytes / bandwidth.

    `points` are (bytes, seconds) of at least two sizes. The fit minimizes the sum of squared relative errors.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (t - mean_t) for w, (x, t) in zip(weights, points, strict=True)) / spread
    latency_s = mean_t - slope * mean_x
    if slope <= 0 or latency_s <= 0:  # the latency is lost in the noise
        most_bytes = max(x for x, _ in points)
        slope = statistics.median(t / x for x, t in points if x == most_bytes)
        latency_s = max(_LEAST_LATENCY_S, min(t - slope * x for x, t in points))
    return 1 / slope, latency_s


def rate_of(values: Sequence[float], least_spread: float = LEAST_SPREAD) -> dict[str, float]:
    """Return the median of repetitions as `value`, and a band from `low` to `high` that contains all of them.

    The band extends from the median by at least a factor of 1 + `least_spread` in each direction.
    """
    value = statistics.median(values)
    low, high = min(*values, value / (1 + least_spread)), max(*values, value * (1 + least_spread))
    return {"value": value, "low": low, "high": high}


# The run itself: one process for each rank under a deadline, and the content of cluster.json.

DEADLINE_S = 420.0  # for all ranks, including the start of their interpreters
# A compiled variant takes about a minute on GPUs, any other some seconds.
PARTS_BUDGET_S = {"cuda": 210.0, "cpu": 10.0}
DISK_DEADLINE_S = 15.0
DISK_SPREAD = 0.2  # wide, since the disk is measured only once and may be shared


@dataclass(frozen=True)
class Calibration:
    """A calibration to run: the task, the store whose disk is measured, and the environment of each rank to start.

    Under a launcher `environs` has only this process's own rank, and `is_first` is True on rank 0, which alone prints
    and writes.
    """

    task: Task
    model: str
    store: Path
    environs: tuple[dict[str, str], ...]
    is_first: bool = True
    deadline_s: float = DEADLINE_S

    @staticmethod
    def of(
        config: Config,
        geometry: Geometry,
        workload: Workload,
        ranks: int | None,
        store: Path,
        environ: Mapping[str, str],
    ) -> "Calibration":
        """Build the calibration for the model and training of `config`, on this machine's GPUs, else on CPU ranks.

        Under torchrun or srun with several ranks only this process's rank is measured, and no others are started.
        Raises PipelineError if torch does not start.
        """
        facts = measured(lambda: probes.probe("torch", environ, DEADLINE_S))
        if UNMEASURED in facts:
            raise PipelineError(f"calibrate: torch does not start ({facts[UNMEASURED]}); see `doctor`")
        device = "cuda" if facts["cuda_works"] else "cpu"
        task = Task(geometry, config.train, workload, device, PARTS_BUDGET_S[device])
        common = {OWNER_VARIABLE: describe_owner()}
        common["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS", str(config.cluster.cpus_per_rank))
        common |= allocator_settings(environ, device == "cuda")
        launched = launched_environment(environ)
        if device == "cuda":
            ranks = min(ranks or config.cluster.gpus_per_node or facts["gpus"], facts["gpus"])
        local = local_environments({**environ, **common}, ranks or config.cluster.cpu_ranks)
        environs = local if launched is None else ({**launched, **common},)
        return Calibration(task, _name_of(config.model), store, environs, environs[0]["RANK"] == "0")

    def measure(self, say: Callable[[str], None]) -> tuple[dict[str, Any], list[str]]:
        """Return the content of cluster.json, and the reasons for everything left out.

        Raises PipelineError if a rank fails or exceeds the deadline.
        """
        ranks = int(self.environs[0]["WORLD_SIZE"])
        if self.is_first:
            say(f"calibrate: {ranks} rank{'s' if ranks > 1 else ''} on {self.task.device}, for {self.model}")
        is_launched = "MASTER_ADDR" in self.environs[0]
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="calibrate-"))
            rendezvous = {} if is_launched else stack.enter_context(private_rendezvous())
            path = Path(folder) / "task.json"
            write_text(path, self.task.as_json())
            environs = [{**environ, **rendezvous} for environ in self.environs]
            try:
                answers = probes.run_children(["measure", "--task", str(path)], environs, self.deadline_s)
            except Unmeasured as error:
                advice = "`python -m pipeline_lib doctor` says what is wrong with this machine"
                raise PipelineError(f"calibrate: a rank did not measure: {error}; {advice}") from error
        found = answers[0]
        left_out = list(found.pop("left_out"))
        if self.is_first:
            arguments = ("--store", str(self.store.absolute()))
            disk = measured(lambda: probes.probe("disk", self.environs[0], DISK_DEADLINE_S, *arguments))
            if UNMEASURED in disk:
                left_out.append(f"disk_bytes_s: {disk[UNMEASURED]}")
            else:
                found["rates"]["disk_bytes_s"] = rate_of([disk["write_bytes_per_s"]], DISK_SPREAD)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        head = {"schema": SCHEMA, "measured_at": now, "model": self.model, "precision": self.task.train.precision}
        return {**head, **found}, left_out


def launched_environment(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return the distributed environment from torchrun or srun; None if this process was not started among several.

    In a batch script SLURM's variables describe the allocated tasks; only srun's own variables show that the tasks
    were started.
    """
    if "RANK" not in environ and "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    placed = dist_environment(environ)
    return placed if int(placed.get("WORLD_SIZE", "1")) > 1 else None


def local_environments(environ: Mapping[str, str], ranks: int) -> tuple[dict[str, str], ...]:
    """Return an environment for each of `ranks` ranks of this machine, without where they meet."""
    common = {key: value for key, value in environ.items() if key not in PLACE_IN_WORLD}
    return tuple(dist_environment(made) for made in rank_environments(common, ranks))


# The printed report: measured rates and costs with units, beside the figures of the GPUs' data sheets.

# Labels by the field names of Speeds in plan/machine.py, in the order of the table.
NAMES = {
    "matmul_flop_s": "products of a layer",
    "attention_flop_s": "attention",
    "memory_bytes_s": "memory of a rank",
    "launch_s": "host, for an operation",
    "in_node_bytes_s": "bus within a node",
    "in_node_latency_s": "latency of it",
    "between_bytes_s": "sent between nodes",
    "between_latency_s": "latency of it",
    "copy_bytes_s": "copies, host and GPU",
    "host_bytes_s": "memory of the host",
    "disk_bytes_s": "disk, writing",
}
WIDTH = 110


def report(task: Task, measured: Mapping[str, Any], left_out: list[str], path: Path, cluster: Cluster) -> str:
    """Return the report for a terminal: rates, parts, what was left out and why, and how to use the file `path`."""
    gpu = find_gpu(measured["gpu"]) if measured["gpu"] else None
    lines = [_text(_rates(task, measured, gpu)), _text(_parts(task, measured, gpu))]
    if left_out:
        lines += ["left out:", *(f"  - {text}" for text in left_out)]
    on_gpus = measured["gpu"] is not None
    needs = ""
    if on_gpus != (cluster.device == "cuda"):
        needs = f"gpus_per_node: {measured['ranks'] // measured['nodes'] if on_gpus else 0}, "
    lines.append(f"wrote {path}; the plan uses it with  cluster: {{{needs}measured: {path}}}")
    return "\n".join(lines)


def _rates(task: Task, measured: Mapping[str, Any], gpu: Gpu | None) -> Table:
    table = Table("rate", "measured", "from", "to", "data sheet", "share of it", title_justify="left")
    table.title = f"{measured['host']}, {measured['precision']}, shapes of {measured['model']}"
    known: dict[str, float | None] = {}
    if gpu is not None:
        peak = gpu.peak_flop_s(task.train.precision)
        known = {"matmul_flop_s": peak, "attention_flop_s": peak, "memory_bytes_s": gpu.memory_bytes_per_s}
        known["in_node_bytes_s"] = gpu.link.bytes_per_s
    for name, text in NAMES.items():
        if name in measured["rates"]:
            rate, best = measured["rates"][name], known.get(name)
            figures = [_quantity(name, rate[key]) for key in ("value", "low", "high")]
            share = f"{rate['value'] / best:.0%}" if best else "-"
            table.add_row(text, *figures, _quantity(name, best) if best else "-", share)
    return table


def _quantity(name: str, value: float) -> str:
    if name == "between_bytes_s":
        return gbit_per_s(value)
    if name.endswith("_flop_s"):
        return f"{value / TERA:.3g} TFLOP/s" if value >= TERA else f"{value / GIGA:.3g} GFLOP/s"
    return f"{value / GIGA:.3g} GB/s" if name.endswith("_bytes_s") else brief(value)


def _parts(task: Task, measured: Mapping[str, Any], gpu: Gpu | None) -> Table:
    """Return the table of costs per pass; the share of peak covers a layer's forward and backward pass together."""
    columns = ("variant", "part", "pass", "for 1,000 tokens", "and fixed", "the host", "share of peak")
    table = Table(*columns, title="passes of one micro-batch", title_justify="left")
    for part in measured["parts"]:
        for name in ("forward", "backward"):
            one = part[name]
            first = [part["variant"], part["part"]] if name == "forward" else ["", ""]
            share = _share(task, part, gpu) if name == "forward" else ""
            costs = (brief(value) for value in (1000 * one["per_token_s"], one["fixed_s"], one["host_s"]))
            table.add_row(*first, name, *costs, share)
    return table


def _share(task: Task, part: Mapping[str, Any], gpu: Gpu | None) -> str:
    """Return a layer's MFU in percent; recomputed FLOPs do not count."""
    peak = gpu.peak_flop_s(task.train.precision) if gpu else None
    per_token_s = part["forward"]["per_token_s"] + part["backward"]["per_token_s"]
    if part["part"] != "layer" or not peak or not per_token_s:
        return "-" if part["part"] == "layer" else ""
    one = with_layers(task.geometry, 1)
    products = one.matmul_parameters - one.vocab * one.hidden
    flops = (6.0 if task.train.method == "full" else 4.0) * products
    flops += 6.0 * one.heads * one.head_dim * part["document_tokens"]
    return f"{flops / per_token_s / peak:.0%}"


def _text(table: Table) -> str:
    console = Console(file=StringIO(), width=WIDTH)
    console.print(table)
    return str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]
