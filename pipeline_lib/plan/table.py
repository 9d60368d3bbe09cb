"""The plan as text of 100 columns: what decides first, then all strategies side by side, then what would help.

Reads plan.json's content alone, so that it can be shown again later.
"""

from collections.abc import Callable, Iterable, Mapping
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline_lib.plan.memory import PARTS, host_need_of_plan
from pipeline_lib.plan.units import gbit_per_s, gib, gigabytes, gpu_hours, seconds

WIDTH = 100
_BAR = 42
_LEAST_PART = 1e-4  # of a step: what is computed in its shadow leaves rounding errors of floats
_NOT_KNOWN = "not known: name the GPU as cluster.gpu"
_WAITS_FOR = {
    "device": "computing",
    "host": "the host, which launches the kernels",
    "exchange": "the exchange",
    "offload": "copies to host memory",
}
Plan = Mapping[str, Any]
Row = tuple[str, str]


def render(plan: Plan) -> str:
    """The whole plan."""
    head = _text(_pairs([*_what(plan), *_chosen(plan), *_time(plan), *_memory(plan), *_disk(plan)]))
    return "\n".join([f"plan of {plan['experiment']}", "", head, *_below(plan)])


def render_what_if(plan: Plan, changed: Plan, flags: Iterable[str]) -> str:
    """The main figures of both side by side, then what else there is to say of the changed one."""
    table = Table("what", "as configured", "what if " + ", ".join(flags), box=None, padding=(0, 2, 0, 0))
    for (name, now), (_, then) in zip(_main_figures(plan), _main_figures(changed), strict=True):
        table.add_row(name, now, then if then != now else "the same")
    return "\n".join([f"plan of {plan['experiment']}", "", _text(table), *_below(changed)])


def banded(figure: Mapping[str, float] | None, show: Callable[[float], str]) -> str:
    """`1.24 s (1.10 to 1.41)`; without a band where there is none."""
    if figure is None:
        return "not known"
    value, low, high = (show(figure[end]) for end in ("value", "low", "high"))
    if low == high:
        return value
    units = {text.split(" ")[1] if text.count(" ") == 1 else None for text in (value, low, high)}
    if len(units) == 1 and None not in units:
        low, high = low.split(" ")[0], high.split(" ")[0]
    return f"{value} ({low} to {high})"


def _below(plan: Plan) -> list[str]:
    """What stands below the figures: the strategies, and what is said in words."""
    lines = ["", _text(_strategies(plan))] if plan["others"] else []
    words = plan["words"]
    for title, found in (("the other strategies", words["others"]), ("what would help", words["advice"])):
        if found:
            lines += ["", title, _text(_pairs([("-", sentence) for sentence in found]))]
    return lines


def _what(plan: Plan) -> list[Row]:
    model, batch = plan["model"], plan["batch"]
    trained = "all trained" if model["trainable_parameters"] == model["parameters"] else _trained(model)
    return [
        ("model", f"{model['parameters']:,} parameters, {trained}"),
        ("ranks", _ranks(plan)),
        *_rates(plan),
        ("blocks", _blocks(batch, plan["workload"])),
        *_samples(plan["words"]),
        ("batch", _batch(batch)),
        ("steps", _steps(batch)),
    ]


def _samples(words: Mapping[str, Any]) -> list[Row]:
    """What it costs that conversations become several samples, where it costs anything and that is known."""
    return [("samples", words["repetition"])] if words.get("repetition") else []


def _trained(model: Mapping[str, Any]) -> str:
    return f"{model['trainable_parameters']:,} trained ({model['trainable_parameters'] / model['parameters']:.2%})"


def _ranks(plan: Plan) -> str:
    cluster, machine = plan["cluster"], plan["machine"]
    kind = "CPUs" if cluster["device"] == "cpu" else "GPUs whose kind is not named"
    if machine is not None and machine["gpu_memory_bytes"]:
        kind = f"{machine['name']} of {gib(machine['gpu_memory_bytes'])}"
    nodes = f"{cluster['nodes']} nodes, " if cluster["nodes"] > 1 else ""
    threads = cluster["cpus_per_rank"]
    return f"{cluster['ranks']} on {kind}, {nodes}{threads} {'thread' if threads == 1 else 'threads'} each"


def _rates(plan: Plan) -> list[Row]:
    """Whose word the prediction takes for what the machine can do."""
    machine = plan["machine"]
    if machine is None:
        return []
    measured = [name for name, rate in machine["rates"].items() if rate["source"] == "measured"]
    if not measured:
        is_gpu = plan["cluster"]["device"] == "cuda"
        usual = "what is usual of these" if is_gpu else "of a usual CPU: times are right to their order of magnitude"
        return [("rates", f"{usual}; `python -m pipeline_lib calibrate` measures yours")]
    of_model = f", and {machine['measured_parts']} parts of this model" if machine["measured_parts"] else ""
    if machine["other_parts"] and not of_model:
        of_model = f", and none of the {machine['other_parts']} measured parts is of this model"
    return [("rates", f"{len(measured)} of {len(machine['rates'])} measured{of_model}; the others are what is usual")]


def _blocks(batch: Mapping[str, Any], workload: Mapping[str, Any]) -> str:
    if batch["blocks"] is None:
        return (
            f"of {batch['block_tokens']:,} tokens, not made yet; assumed {workload['real_fraction']:.0%} full, "
            f"{workload['supervised_fraction']:.0%} trained on, in documents of {workload['document_tokens']:,.0f}"
        )
    used = "" if batch["epoch_blocks"] == batch["blocks"] else f"; the first epoch uses {batch['epoch_blocks']:,}"
    weighted = f"{used}, as weighted" if used else ""
    return f"{batch['blocks']:,} of {batch['block_tokens']:,} tokens, {batch['padding_fraction']:.2%} padding{weighted}"


def _batch(batch: Mapping[str, Any]) -> str:
    return (
        f"{_counted(batch['global_batch_blocks'], 'block')} = {batch['tokens_per_step']:,} tokens a step: "
        f"micro-batch {batch['micro_batch_blocks']} x accumulation {batch['accumulation']} on each rank"
    )


def _steps(batch: Mapping[str, Any]) -> str:
    if batch["steps"] is None:
        epochs = batch["epochs"]
        return f"as many as {_counted(epochs, 'epoch')} of the blocks {'makes' if epochs == 1 else 'make'}"
    return (
        f"{batch['steps']:,} in {_counted(batch['epochs'], 'epoch')} ({batch['steps_per_epoch']:,} in the first, "
        f"the last of them of {_counted(batch['last_step_blocks'], 'block')})"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _chosen(plan: Plan) -> list[Row]:
    chosen = plan["chosen"]
    return [("strategy", _settings(chosen)), ("why", plan["words"]["chosen"])]


def _settings(chosen: Mapping[str, Any]) -> str:
    return f"{_strategy(chosen)}, micro-batch {chosen['micro_batch_blocks']}"


def _strategy(chosen: Mapping[str, Any]) -> str:
    """With what belongs to it, but for the micro-batch."""
    said = [chosen["strategy"]]
    if chosen["strategy"] == "hsdp" and chosen.get("shard_ranks"):
        said[0] += f" over {chosen['shard_ranks']} ranks"
    said += [f"{key} {chosen[key]}" for key in ("recompute", "offload") if chosen[key] != "none"]
    if chosen.get("reshard") is False:
        said.append("layers stay gathered")
    return ", ".join([*said, "compiled"] if chosen.get("compile") else said)


def _time(plan: Plan) -> list[Row]:
    found = plan["prediction"]
    if found is None:
        return [("step time", _NOT_KNOWN)]
    step_s = found["step_s"]["value"]
    parts = {name: spent_s for name, spent_s in found["parts"].items() if spent_s > _LEAST_PART * step_s}
    rows = [("step time", f"{banded(found['step_s'], seconds)}; it waits for {_WAITS_FOR[found['bound']]}")]
    rows += [("", line) for line in _waterfall(parts, step_s, seconds)]
    return [*rows, *_figures(plan)]


def _figures(plan: Plan) -> list[Row]:
    """Speed, duration and network."""
    found, is_gpu = plan["prediction"], plan["cluster"]["device"] == "cuda"
    a_rank = "a GPU" if is_gpu else "a rank"
    speed = f"{banded(found['tokens_per_s_per_rank'], lambda each: f'{each:,.0f} tokens/s')} {a_rank}"
    if found["mfu"] is not None:
        speed += f"; MFU {banded(found['mfu'], _percent)}"
    duration = "not known before there are blocks"
    if found["run_s"] is not None:
        duration = banded(found["run_s"], seconds)
        if is_gpu:
            duration += f"; {banded(found['gpu_hours'], gpu_hours)}"
    return [("speed", speed), ("run", duration), ("network", _network(plan))]


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.1f} %"


def _network(plan: Plan) -> str:
    if plan["cluster"]["nodes"] == 1:
        return "nothing between nodes: there is one"
    rate = plan["machine"]["rates"]["between_bytes_s"]["value"]
    sent = banded(plan["prediction"]["network_bytes"], gigabytes)
    return f"{sent} sent by each node in a step, at {gbit_per_s(rate)}"


def _memory(plan: Plan) -> list[Row]:
    """Part by part against what the device has."""
    is_gpu, memory = plan["cluster"]["device"] == "cuda", plan["memory"][plan["chosen"]["strategy"]]
    total = memory["total_bytes" if is_gpu else "allocated_bytes"]  # the reserve is that of a GPU
    shown = [part for part in PARTS if is_gpu or part != "reserve"]
    parts = {part: memory[f"{part}_bytes"] for part in shown if memory[f"{part}_bytes"]}
    device_bytes = plan["machine"]["gpu_memory_bytes"] if plan["machine"] else None
    has = f" of {gib(device_bytes)}" if device_bytes else ""
    needed = _needed(plan, plan["chosen"]["strategy"], plan["prediction"])
    rows = [("memory", f"{needed}{has} {'a GPU' if is_gpu else 'a rank'}, most of it {memory['moment']}")]
    rows += [("", line) for line in _waterfall(parts, max(total, device_bytes or 0), gib)]
    return [*rows, *_host_memory(plan)]


def _host_memory(plan: Plan) -> list[Row]:
    """What a node has to have, beside what the config says that it has."""
    limit = plan["machine"]["host_memory_bytes"] if plan["machine"] else None
    has = f"of {gigabytes(limit)}" if limit else "if the nodes have as much: cluster.memory_gb does not say"
    return [("host memory", f"{gigabytes(host_need_of_plan(plan).total_bytes)} on each node, {has}")]


def _needed(plan: Plan, strategy: str, predicted: Plan | None) -> str:
    """What a rank needs of its device."""
    if plan["cluster"]["device"] == "cpu":
        return gib(plan["memory"][strategy]["allocated_bytes"])
    if predicted is None:
        return gib(plan["memory"][strategy]["total_bytes"])
    return banded(predicted["needed_memory_bytes"], gib)


def _disk(plan: Plan) -> list[Row]:
    disk, chosen, found = plan["disk"], plan["chosen"], plan["prediction"]
    best = ", the best" if plan["train"].get("keep_best") else ""
    takes = f", {banded(found['checkpoint_s'], seconds)} to write" if found else ""
    return [
        (
            "checkpoint",
            f"{gigabytes(disk['checkpoint_bytes'])} each{takes}, every {chosen['save_every_steps']} steps; "
            f"{gigabytes(disk['needed_bytes'])} for {chosen['keep_last']} kept{best} and one being written",
        )
    ]


def _waterfall(parts: Mapping[str, float], whole: float, show: Callable[[float], str]) -> list[str]:
    """A line for each part: its name, size and a bar that begins where the one before ended."""
    lines, before = [], 0.0
    longest = max((len(name) for name in parts), default=0)
    for name, size in parts.items():
        first = min(_BAR - 1, round(_BAR * before / whole))
        end = max(first + 1, round(_BAR * (before + size) / whole))
        bar = "·" * first + "█" * (end - first) + "·" * (_BAR - end)
        lines.append(f"{name:<{longest}}  {show(size):>10}  {bar}")
        before += size
    return lines


def _strategies(plan: Plan) -> Table:
    """The best of each, the chosen one first, which has a star."""
    chosen = plan["chosen"]["strategy"]
    heads = ("", "strategy", "micro", "memory", "step time", "waits for", "fits")
    table = Table(*heads, box=None, padding=(0, 2, 0, 0))
    found = {chosen: plan["prediction"], **plan["others"]}
    for name, each in found.items():
        mark, time = "*" if name == chosen else "", banded(each["step_s"], seconds)
        fits = "yes" if each["fits"] else "no"
        way = each["changes"]
        micro = str(way["micro_batch_blocks"])
        table.add_row(mark, _strategy(way), micro, _needed(plan, name, each), time, each["bound"], fits)
    return table


def _main_figures(plan: Plan) -> list[Row]:
    found, chosen = plan["prediction"], plan["chosen"]
    rows = [("ranks", _ranks(plan)), ("batch", _batch(plan["batch"])), ("strategy", _settings(chosen))]
    if found is None:
        rows.append(("memory", _needed(plan, chosen["strategy"], None)))
        rows += [(name, _NOT_KNOWN) for name in ("fits", "step time", "speed", "run", "network")]
    else:
        rows += [
            ("memory", _needed(plan, chosen["strategy"], found)),
            ("fits", "yes" if found["fits"] else "no"),
            ("step time", f"{banded(found['step_s'], seconds)}; waits for the {found['bound']}"),
            *_figures(plan),
        ]
    return [*rows, *_disk(plan)]


def _pairs(rows: Iterable[Row]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def _text(table: Table) -> str:
    file = StringIO()
    Console(file=file, width=WIDTH, force_terminal=False, color_system=None, markup=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())
