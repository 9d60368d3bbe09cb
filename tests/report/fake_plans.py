"""Plans as the plan stage writes them, made up: the demo's on CPUs, a larger run's on GPUs."""

from typing import Any

GIB = 2**30


def band(value: float, fraction: float = 0.15) -> dict[str, float]:
    """A figure with its band."""
    return {"value": value, "low": value * (1 - fraction), "high": value * (1 + fraction)}


def plan(steps: int) -> dict[str, Any]:
    """The plan that the training of the demo kept: the update takes longer than its band allows."""
    state = {"weights_bytes": 4_198_400, "gradients_bytes": 4_198_400, "optimizer_bytes": 8_396_800}
    memory = {
        "ddp": memory_of(**state, activations_bytes=3_686_400),
        "fsdp": memory_of(
            **{key: value // 2 for key, value in state.items()}, activations_bytes=3_686_400
        ),
    }
    chosen = prediction("ddp", 0.4, 20_480_000, 20_480_000, update_s=0.01)
    chosen |= {
        "run_s": band(118 * 0.4 + 1),
        "tokens_per_s_per_rank": band(9937),
        "gpu_hours": None,
        "mfu": None,
    }
    chosen |= {
        "checkpoint_bytes": 12_595_200,
        "checkpoint_s": band(0.03, 0.5),
        "network_bytes": band(0),
    }
    return {
        "schema": 3,
        "experiment": "demo",
        "model": {"parameters": 1_049_600, "trainable_parameters": 1_049_600, "matmul_parameters": 1_000_000,
                  "layers": 4, "hidden_size": 128, "vocab_tokens": 4096},
        "cluster": cluster(1, 2, "cpu", 1),
        "machine": machine("2 CPU ranks", 1, 2, None),
        "workload": workload(256, 90.0),
        "batch": {
            "block_tokens": 256, "blocks": 1884, "epoch_blocks": 1884, "validation_blocks": 101,
            "global_batch_blocks": 32,
            "micro_batch_blocks": 8, "accumulation": 2, "steps_per_epoch": 59, "epochs": 2, "steps": steps,
            "last_step_blocks": 28, "tokens_per_step": 8192, "padding_fraction": 0.0297,
            "samples_per_step": 124.4, "supervised_tokens_per_step": 3512,
        },
        "memory": memory,
        "chosen": {
            **{"strategy": "ddp", "micro_batch_blocks": 8, "save_every_steps": 50, "keep_last": 2, "timeout_s": 600},
            **{"attention": "auto", "compile": False, "context_ranks": 1, "deepspeed_json": None, "offload": "none"},
            **{"deterministic": False, "kept_attention_layers": "auto", "offload_activations": False, "unit_layers": 1},
            **{"profile_every_steps": None, "recompute": "none", "reshard": True, "sample_every_steps": None},
            **{"save_async": True, "shard_ranks": None, "start_timeout_s": 900},
        },
        "train": {}, "tracking": {"to": [], "project": "qwen3-pipeline"}, "stages": [], "near_miss": None,
        "summary": {
            "verdict": "fits", "host_needed_bytes": 3_000_000_000,
            "steps": {"value": steps, "low": steps, "high": steps},
            "gpu_hour_price": None, "cost": None, "way": "ddp", "assumed": [], "next": [],
        },
        "disk": {"checkpoint_bytes": 12_595_200, "needed_bytes": 37_785_600},
        "prediction": chosen,
        "others": {"fsdp": without_segments(prediction("fsdp", 0.46, 12_083_200, 12_083_200))},
        "words": {
            "chosen": "ddp, micro-batch 8 x accumulation 2: 12 of 12 ways to train fit, and this "
            "is the simplest one "
            "within 2% of the fastest. A step takes 400 ms, bound by computing (97% of the time).",
            "others": ["fsdp, micro-batch 8 x accumulation 2: 460 ms a step, 15% longer"],
            "advice": ["3% of the tokens are padding: longer blocks (shard.block_tokens) need less "
            "of it"],
            "verdicts": {},
        },
    }  # fmt: skip


def plan_without_times(steps: int) -> dict[str, Any]:
    """A plan for a machine that is not known."""
    words = {"chosen": "ddp", "verdicts": {}, "others": [], "advice": []}
    return plan(steps) | {"machine": None, "prediction": None, "others": {}, "words": words}


def gpu_plan(steps: int) -> dict[str, Any]:
    """8B on two nodes of four GPUs, with every strategy beside it; two of them do not fit."""
    held = {
        "fsdp": (11.4, 11.4, 22.9, 1.5, 2.4, 14.2, 3.1), "hsdp": (22.9, 22.9, 45.8, 1.5, 2.4, 3.6, 3.1),
        "ddp": (30.5, 30.5, 61.0, 0.0, 15.3, 14.2, 3.1), "zero1": (15.3, 30.5, 11.4, 0.0, 4.7, 7.1, 3.1),
        "zero2": (15.3, 3.8, 11.4, 0.0, 4.7, 14.2, 3.1), "zero3": (1.9, 3.8, 11.4, 4.7, 4.7, 14.2, 3.1),
    }  # fmt: skip
    names = ("weights", "gradients", "optimizer", "gathered", "exchanged", "activations", "loss")
    memory = {}
    for strategy, sizes in held.items():
        parts = {
            f"{name}_bytes": round(size * GIB) for name, size in zip(names, sizes, strict=True)
        }
        memory[strategy] = memory_of(**parts)
    seconds = {"fsdp": 3.41, "hsdp": 3.17, "ddp": 3.2, "zero1": 3.6, "zero2": 4.4, "zero3": 8.9}
    made = {
        name: prediction(name, seconds[name], one["allocated_bytes"], one["total_bytes"])
        for name, one in memory.items()
    }
    for name in ("ddp", "hsdp"):
        made[name]["fits"] = False
    chosen = made.pop("fsdp")
    chosen |= {"run_s": band(steps * 3.41 + 20), "gpu_hours": band((steps * 3.41 + 20) * 8 / 3600)}
    demo = plan(steps)
    return demo | {
        "cluster": cluster(2, 8, "cuda", 12),
        "machine": machine("NVIDIA H100 80GB", 2, 4, 85_899_345_920),
        "workload": workload(4096, 1310.0),
        "memory": memory,
        "chosen": demo["chosen"] | {"strategy": "fsdp"},
        "prediction": chosen,
        "others": {name: without_segments(one) for name, one in made.items()},
        "words": {
            "chosen": "fsdp, micro-batch 2 x accumulation 2, selective activation checkpointing: "
            "96 of 120 ways to train fit, and this is the simplest one within 2% of the fastest. "
            "A step takes 3.41 s, bound by computing (82% of the time).",
            "others": [
                "zero1, micro-batch 2 x accumulation 2: 3.60 s a step, 6% longer",
                "zero3, micro-batch 2 x accumulation 2: 8.90 s a step, 161% longer; all-gather "
                "of weights 2 x 16.38 GB, reduce-scatter of gradients 2 x 32.76 GB between "
                "nodes; 6.10 s of waiting, 2.80 s of computing",
                "ddp, micro-batch 2 x accumulation 2: does not fit: 159.2 GiB a GPU (optimizer "
                "61.0 GiB, weights 30.5 GiB, gradients 30.5 GiB) of 80.0 GiB",
            ],
            "advice": [
                "400 Gbit/s between nodes instead of 200 Gbit/s would hide the communication: 2.91 "
                "s a step"
            ],
            "verdicts": {},
        },
    }


def cluster(nodes: int, ranks: int, device: str, cpus_per_rank: int) -> dict[str, Any]:
    """Where the ranks run."""
    return {
        **{"nodes": nodes, "ranks": ranks, "device": device, "cpus_per_rank": cpus_per_rank},
        **{"launcher": "auto", "max_requeues": 20},
    }


def memory_of(**parts: int) -> dict[str, Any]:
    """The memory of a rank of these parts and a reserve."""
    names = ("gathered", "exchanged", "loss", "host", "checkpoint", "copied", "cpu_rank")
    allocated = sum(parts.values())
    reserve = round(2 * GIB + 0.02 * allocated)
    kept = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
    return {
        **dict.fromkeys((f"{name}_bytes" for name in names), 0),
        **parts,
        "reserve_bytes": reserve,
        "moment": "at the loss",
        "error": 0.05,
        "state_bytes": sum(parts[name] for name in kept),
        "allocated_bytes": allocated,
        "total_bytes": allocated + reserve,
    }


def gpu_run(files: dict[str, dict[str, Any]]) -> None:
    """Turn a demo run's results into those of a run by `gpu_plan`: peak memory leaves the band."""
    train = files["train"]
    steps = len(train["metrics.jsonl"])
    train["plan.json"] = gpu_plan(steps)
    train["summary.json"] |= {"world_size": 8, "strategy": "fsdp", "precision": "bf16"}
    for row in train["metrics.jsonl"]:
        row["step_s"] *= 3.6 / 0.41
        row |= {
            "forward_s": 0.31 * row["step_s"],
            "backward_s": 0.63 * row["step_s"],
            "update_s": 0.05 * row["step_s"],
        }
        row |= {"tokens_per_s": 8 * 8950.0, "mfu": 0.41, "elapsed_s": row["elapsed_s"] * 3.6 / 0.41}
        row |= {
            "peak_memory_bytes": 80 * GIB,
            "device_memory_bytes": 82 * GIB,
            "node_sent_bytes": 51_000_000_000,
        }
    for event in train["events.jsonl"]:
        if event["event"] == "run.start":
            event |= {"world_size": 8, "strategy": "fsdp"}


def prediction(
    strategy: str, step_s: float, peak: int, needed: int, update_s: float | None = None
) -> dict[str, Any]:
    """PlannedWay of a step of that length, with exchanges that are mostly hidden."""
    parts = {"forward": 0.26, "recompute": 0.1, "backward": 0.5, "exchange": 0.1, "update": 0.04}
    phases = {
        "forward": 0.3 * step_s,
        "backward": 0.65 * step_s,
        "update": update_s or 0.05 * step_s,
    }
    kinds = {"forward": "all-gather of weights", "backward": "reduce-scatter of gradients"}
    segments, at_s = [], 0.0
    for name, duration_s in phases.items():
        segments.append(
            {"lane": "compute", "name": name, "start_s": at_s, "duration_s": 0.9 * duration_s}
        )
        segments.append(
            {"lane": "host", "name": name, "start_s": at_s, "duration_s": 0.4 * duration_s}
        )
        if name in kinds:
            exchanged = {
                "lane": "exchange",
                "name": kinds[name],
                "start_s": at_s,
                "duration_s": 0.8 * duration_s,
            }
            segments.append(exchanged)
        at_s += duration_s
    exchanges = [
        {
            **{
                "name": kind,
                "phase": phase,
                "payload_bytes": 16.38e9,
                "times": 2,
                "link": "between nodes",
            },
            **{"seconds": 0.8 * phases[phase], "exposed_s": 0.05 * step_s},
        }
        for phase, kind in kinds.items()
    ]
    recompute = "selective" if strategy == "fsdp" else "none"
    options = ["selective activation checkpointing", "no reshard after forward", "compiled"]
    return {
        "changes": {
            "strategy": strategy, "shard_ranks": 4 if strategy == "hsdp" else None, "micro_batch_blocks": 2,
            "recompute": recompute, "offload": "none",
            "reshard": strategy != "fsdp", "compile": strategy == "fsdp", "context_ranks": 1, "save_async": True,
        },
        "words": [
            f"{strategy} over 4 ranks" if strategy == "hsdp" else strategy, "micro-batch 2 x "
            "accumulation 2",
            *(options if strategy == "fsdp" else []),
        ],
        "accumulation": 2,
        "peak_memory_bytes": band(peak, 0.05),
        "needed_memory_bytes": band(needed, 0.05),
        **{f"{name}_s": band(value) for name, value in phases.items()},
        "step_s": band(step_s),
        "tokens_per_s_per_rank": band(31_800 / step_s),
        "mfu": band(0.44, 0.12),
        "network_bytes": {"value": 49e9, "low": 49e9, "high": 57e9},
        "run_s": band(400.0),
        "gpu_hours": band(400 * 8 / 3600),
        "checkpoint_bytes": 12_595_200,
        "checkpoint_s": band(0.03, 0.5),
        "parts": {**{name: share * step_s for name, share in parts.items()}, "offload": 0.0, "data": 0.0},
        "segments": segments,
        "exchanges": exchanges,
        "bound": "device",
        "fits": True,
    }  # fmt: skip


def without_segments(one: dict[str, Any]) -> dict[str, Any]:
    """As the other strategies are kept."""
    return {key: value for key, value in one.items() if key != "segments"}


def machine(
    name: str, nodes: int, ranks_per_node: int, gpu_memory_bytes: int | None
) -> dict[str, Any]:
    """PlannedMachine."""
    rates = {
        "matmul_flop_s": (6.6e14, "catalogue: 67% of the peak"),
        "memory_bytes_s": (2.9e12, "catalogue"),
        "launch_s": (2e-5, "measured"),
        "between_bytes_s": (25e9, "cluster.internode_gbit_s"),
    }
    return {
        **{
            "name": name,
            "nodes": nodes,
            "ranks_per_node": ranks_per_node,
            "gpu_memory_bytes": gpu_memory_bytes,
        },
        **{
            "peak_flop_s": None,
            "host_memory_bytes": 64 * GIB,
            "assumed_host_memory_bytes": None,
            "other_parts": 0,
            "measured_parts": 2 if gpu_memory_bytes else 0,
        },
        "rates": {
            key: {**band(value, 0.1), "source": source} for key, (value, source) in rates.items()
        },
    }


def workload(block_tokens: int, document_tokens: float) -> dict[str, Any]:
    """Workload."""
    return {
        **{"block_tokens": block_tokens, "real_fraction": 0.97, "supervised_fraction": 0.63},
        **{
            "document_tokens": document_tokens,
            "blocks": 1884,
            "epoch_blocks": 1884,
            "validation_blocks": 101,
        },
        **{
            "is_assumed": False,
            "is_estimated": False,
            "samples_per_block": 4.0,
            "document_band": None,
        },
    }


def hostile_plan(found: dict[str, Any], attack: str) -> dict[str, Any]:
    """`found` with every name and sentence in it turned into `attack`."""
    one = found["prediction"]
    of_names = {"name": attack, "phase": attack, "link": attack}
    hostile = one | {
        "changes": one["changes"] | {"strategy": attack, "recompute": attack, "offload": attack},
        "words": [attack, attack],
        "parts": {attack: 0.1, **one["parts"]},
        "segments": [each | {"name": attack} for each in one["segments"]]
        + [{"lane": attack, "name": attack, "start_s": 0.0, "duration_s": 0.1}],
        "exchanges": [each | of_names for each in one["exchanges"]],
    }
    rate = {"value": 1.0, "low": 1.0, "high": 1.0, "source": attack}
    return found | {
        "memory": {attack: found["memory"]["ddp"]},
        "chosen": found["chosen"] | {"strategy": attack},
        "machine": found["machine"] | {"name": attack, "rates": {attack: rate}},
        "prediction": hostile,
        "others": {attack: without_segments(hostile)},
        "words": {"chosen": attack, "others": [attack], "advice": [attack], "verdicts": {}},
    }
