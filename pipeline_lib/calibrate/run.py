"""A calibration from outside: what to measure, a process for each rank, and what becomes cluster.json."""

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline_lib.config.schema import Cluster, Config, Train, read_settings, settings_of
from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.files import write_text
from pipeline_lib.core.processes import OWNER_VARIABLE, describe_owner
from pipeline_lib.core.units import GIGA, TERA, brief, gbit_per_s
from pipeline_lib.doctor import machine
from pipeline_lib.doctor.machine import UNMEASURED, Unmeasured, measured
from pipeline_lib.launch.environment import LOOPBACK, PLACE_IN_WORLD, dist_environment, free_port
from pipeline_lib.model.geometry import Geometry
from pipeline_lib.plan.machine import Gpu, Pass, find_gpu
from pipeline_lib.plan.workload import Workload

# What the ranks of a calibration are told to measure.

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


@dataclass(frozen=True)
class Task:
    """The model's shapes, how it is trained, and on what; `device` is `cuda` or `cpu`."""

    geometry: Geometry
    train: Train
    workload: Workload
    device: str
    parts_budget_s: float

    def as_json(self) -> str:
        """For the processes that measure."""
        fields: dict[str, Any] = {"device": self.device, "parts_budget_s": self.parts_budget_s}
        fields |= {"train": settings_of(self.train), "workload": asdict(self.workload)}
        geometry = asdict(self.geometry) | {"expert_layers": sorted(self.geometry.expert_layers)}
        return json.dumps({**fields, "geometry": geometry})

    @staticmethod
    def from_json(text: str) -> "Task":
        """What `as_json` gave."""
        fields = json.loads(text)
        geometry = fields["geometry"]
        geometry |= {"biased": tuple(geometry["biased"]), "expert_layers": frozenset(geometry["expert_layers"])}
        return Task(
            Geometry(**geometry),
            read_settings(Train, fields["train"]),
            Workload(**fields["workload"]),
            fields["device"],
            fields["parts_budget_s"],
        )


def with_layers(geometry: Geometry, layers: int) -> Geometry:
    """The same widths with so many layers, all of which have experts if any has."""
    return replace(
        geometry, layers=layers, expert_layers=frozenset(range(layers)) if geometry.expert_layers else frozenset()
    )


def config_json(geometry: Geometry) -> dict[str, Any]:
    """A config.json from which `Geometry.from_config` reads `geometry`; its layers have experts all, or none."""
    kind = "qwen3_moe" if geometry.expert_layers else "qwen3" if geometry.normed_heads else "qwen2"
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


# From seconds to costs and rates: lines through a few points, and how far repetitions are apart.

LEAST_SPREAD = 0.03  # of a rate: what the same machine differs by from one day to the next
HOST_BOUND = 1.2  # a run that takes at most so many times as long as that of a few tokens says nothing of the device
_LEAST_LATENCY_S = 1e-7


def pass_of(tokens: tuple[int, int], tiny_s: float, half_s: float, full_s: float) -> Pass:
    """The cost of a pass from three runs: of a few tokens, where the host decides, and of `tokens` (half, full).

    The line through the last two, if it has a part of the tokens and a fixed one; else in proportion to the tokens.
    """
    tiny_s, half_s, full_s = max(0.0, tiny_s), max(0.0, half_s), max(0.0, full_s)
    half, full = tokens
    per_token_s = (full_s - half_s) / (full - half)
    fixed_s = full_s - per_token_s * full
    if half_s <= HOST_BOUND * tiny_s or per_token_s <= 0 or fixed_s < 0:
        return Pass(0.0, full_s / full, tiny_s)
    return Pass(fixed_s, per_token_s, tiny_s)


def link_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Bandwidth in bytes a second, and latency in seconds, of t = latency + bytes / bandwidth.

    `points` are (bytes, seconds), of two sizes or more; the sum of the squares of relative errors is the smallest.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (t - mean_t) for w, (x, t) in zip(weights, points, strict=True)) / spread
    latency_s = mean_t - slope * mean_x
    if slope <= 0 or latency_s <= 0:  # what there is of a latency is lost in the noise
        most_bytes = max(x for x, _ in points)
        slope = statistics.median(t / x for x, t in points if x == most_bytes)
        latency_s = max(_LEAST_LATENCY_S, min(t - slope * x for x, t in points))
    return 1 / slope, latency_s


def rate_of(values: Sequence[float], least_spread: float = LEAST_SPREAD) -> dict[str, float]:
    """The median of repetitions, and the band that holds all of them and is not narrower than `least_spread`."""
    value = statistics.median(values)
    low, high = min(*values, value / (1 + least_spread)), max(*values, value * (1 + least_spread))
    return {"value": value, "low": low, "high": high}


# A calibration from outside: a process for each rank, under a deadline, and what becomes cluster.json.

SCHEMA = 1
DEADLINE_S = 420.0  # for all ranks, the start of their interpreters included
# On GPUs a minute for each way to train that is compiled, and some seconds for each that is not.
PARTS_BUDGET_S = {"cuda": 210.0, "cpu": 10.0}
DISK_DEADLINE_S = 15.0
DISK_SPREAD = 0.2  # measured once, of what others may use too


@dataclass(frozen=True)
class Calibration:
    """What to measure and where: the store's disk, and a process for each of `environs`, or for one of a launcher's.

    `is_first` says whether this process speaks and writes for all that a launcher started.
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
        """For the model and the method of `config`, on the GPUs that are here, else on CPU ranks.

        Under torchrun or srun with several ranks it is this process's rank that is measured, and no others are started.
        Raises PipelineError if torch does not start.
        """
        facts = measured(lambda: machine.probe("torch", environ, DEADLINE_S))
        if UNMEASURED in facts:
            raise PipelineError(f"calibrate: torch does not start ({facts[UNMEASURED]}); see `doctor`")
        device = "cuda" if facts["cuda_works"] else "cpu"
        task = Task(geometry, config.train, workload, device, PARTS_BUDGET_S[device])
        common = {OWNER_VARIABLE: describe_owner()}
        common["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS", str(config.cluster.cpus_per_rank))
        if device == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in environ:
            common["PYTORCH_ALLOC_CONF"] = environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        launched = launched_environment(environ)
        if device == "cuda":
            ranks = min(ranks or config.cluster.gpus_per_node or facts["gpus"], facts["gpus"])
        local = rank_environments({**environ, **common}, ranks or config.cluster.cpu_ranks)
        environs = local if launched is None else ({**launched, **common},)
        return Calibration(task, model_name(config), store, environs, environs[0]["RANK"] == "0")

    def measure(self, say: Callable[[str], None]) -> tuple[dict[str, Any], list[str]]:
        """The content of cluster.json, and what was left out. Raises PipelineError if a rank fails or does not end."""
        ranks = int(self.environs[0]["WORLD_SIZE"])
        if self.is_first:
            say(f"calibrate: {ranks} rank{'s' if ranks > 1 else ''} on {self.task.device}, for {self.model}")
        with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
            path = Path(folder) / "task.json"
            write_text(path, self.task.as_json())
            try:
                answers = machine.run_children(["measure", "--task", str(path)], self.environs, self.deadline_s)
            except Unmeasured as error:
                advice = "`python -m pipeline_lib doctor` says what is wrong with this machine"
                raise PipelineError(f"calibrate: a rank did not measure: {error}; {advice}") from error
        found = answers[0]
        left_out = list(found.pop("left_out"))
        if self.is_first:
            left_out += self._add_disk(found["rates"])
        now = datetime.now(UTC).isoformat(timespec="seconds")
        head = {"schema": SCHEMA, "measured_at": now, "model": self.model, "precision": self.task.train.precision}
        return {**head, **found}, left_out

    def _add_disk(self, rates: dict[str, Any]) -> list[str]:
        """Measure the store's disk, once the ranks are done; returns why it could not be."""
        arguments = ("--store", str(self.store.absolute()))
        facts = measured(lambda: machine.probe("disk", self.environs[0], DISK_DEADLINE_S, *arguments))
        if UNMEASURED in facts:
            return [f"disk_bytes_s: {facts[UNMEASURED]}"]
        rates["disk_bytes_s"] = rate_of([facts["write_bytes_per_s"]], DISK_SPREAD)
        return []


def launched_environment(environ: Mapping[str, str]) -> dict[str, str] | None:
    """The place that torchrun or srun has given this process among several; None if it was started by itself.

    In a batch script SLURM names the tasks that there could be; only srun's own variables say that they are there.
    """
    if "RANK" not in environ and "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    placed = dist_environment(environ)
    return placed if int(placed.get("WORLD_SIZE", "1")) > 1 else None


def rank_environments(environ: Mapping[str, str], ranks: int) -> tuple[dict[str, str], ...]:
    """What ranks of this machine need to find each other, beside all of `environ`."""
    common = {key: value for key, value in environ.items() if key not in PLACE_IN_WORLD}
    common |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return tuple({**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks))


def model_name(config: Config) -> str:
    """The model as people know it."""
    model = config.model
    if model.source == "tiny":
        return "tiny"
    return Path(model.path).name if model.source == "local" else model.name


# What a calibration found, as tables with units, beside what the makers of the GPUs say.

# By the names of plan/machine.py's Speeds, in the order of the table.
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
    """Text for a terminal: rates, parts, what is missing and why, and how to use what was written to `path`."""
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
    known = _data_sheet(task, gpu)
    for name, text in NAMES.items():
        if name in measured["rates"]:
            rate, best = measured["rates"][name], known.get(name)
            figures = [_quantity(name, rate[key]) for key in ("value", "low", "high")]
            share = f"{rate['value'] / best:.0%}" if best else "-"
            table.add_row(text, *figures, _quantity(name, best) if best else "-", share)
    return table


def _data_sheet(task: Task, gpu: Gpu | None) -> dict[str, float | None]:
    if gpu is None:
        return {}
    peak = gpu.peak_flop_s(task.train.precision)
    sheet = {"matmul_flop_s": peak, "attention_flop_s": peak, "memory_bytes_s": gpu.memory_bytes_per_s}
    return sheet | {"in_node_bytes_s": gpu.link_bytes_per_s}


def _quantity(name: str, value: float) -> str:
    if name == "between_bytes_s":
        return gbit_per_s(value)
    if name.endswith("_flop_s"):
        return f"{value / TERA:.3g} TFLOP/s" if value >= TERA else f"{value / GIGA:.3g} GFLOP/s"
    return f"{value / GIGA:.3g} GB/s" if name.endswith("_bytes_s") else brief(value)


def _parts(task: Task, measured: Mapping[str, Any], gpu: Gpu | None) -> Table:
    """Costs of a pass through a part; the share of the peak is that of a layer's forward and backward pass."""
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
    """Of the FLOPs that a layer needs, as MFU counts them: what is computed again is none."""
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
