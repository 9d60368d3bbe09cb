"""The plan as text of 100 columns: the answers, the strategies, what would help.

On request all that they rest on (plan/formulas.py has the end of it). It reads only plan.json's
content, so that a plan can be shown again later.
"""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import StringIO

from rich.console import Console
from rich.table import Table

from pipeline_lib.config.train import read_train
from pipeline_lib.core.units import (
    GIGA,
    brief,
    count,
    gbit_per_s,
    gib,
    gigabytes,
    gpu_hours,
    rounded,
)
from pipeline_lib.plan.memory import PARTS
from pipeline_lib.plan.saving import slow_saves
from pipeline_lib.records.plan import (
    FITS,
    NOT_CHECKED,
    PART_NAMES,
    TIGHT,
    TOO_LARGE,
    Figure,
    Memory,
    PlanDocument,
    PlannedBatch,
    PlannedWay,
    bound_in_words,
)

WIDTH = 100
_BAR = 42
_LEAST_PART = 1e-4  # fraction of a step: smaller parts are rounding errors of fully overlapped work
_NOT_KNOWN = "not known: set cluster.gpu"
Row = tuple[str, str]


def render(plan: PlanDocument, is_detailed: bool = False) -> str:
    """Return the plan as text: the answers; with `is_detailed` all else."""
    return "\n".join([_title(plan), "", _text(_pairs(_answers(plan))), *_below(plan, is_detailed)])


def render_what_if(
    plan: PlanDocument,
    changed: PlanDocument,
    flags: Iterable[str],
    is_detailed: bool = False,
) -> str:
    """Return both plans' main figures side by side, then the changed one's strategies, advice."""
    table = Table(
        "", "as configured", "what if " + ", ".join(flags), box=None, padding=(0, 2, 0, 0)
    )
    before = _main_figures(plan)
    after = _main_figures(changed)
    for name in {**before, **after}:
        now = before.get(name, "")
        then = after.get(name, "")
        table.add_row(name, now, then if then != now else "the same")
    return "\n".join(
        [f"plan of {plan.experiment}", "", _text(table), *_below(changed, is_detailed)]
    )


def banded(figure: Figure, show: Callable[[float], str]) -> str:
    """Format a figure with its band, `1.24 s (1.10 to 1.41)`, or without it if all are equal."""
    value = show(figure.value)
    low = show(figure.low)
    high = show(figure.high)
    if low == high:
        return value
    units = {text.split(" ")[1] if text.count(" ") == 1 else None for text in (value, low, high)}
    if len(units) == 1 and None not in units:
        low = low.split(" ")[0]
        high = high.split(" ")[0]
    return f"{value} ({low} to {high})"


def _title(plan: PlanDocument) -> str:
    title = f"plan of {plan.experiment}: {_model(plan)}, on {_machines(plan)}"
    return textwrap.fill(title, WIDTH, break_long_words=True, break_on_hyphens=False)


def _machines(plan: PlanDocument) -> str:
    cluster = plan.cluster
    if not cluster.is_gpu:
        return _ranks(plan)
    nodes = cluster.nodes
    each = cluster.ranks // nodes
    gpus = f"{count(each, 'GPUs')} of unknown kind"
    if plan.machine is not None:
        gpus = f"{each} x {plan.machine.name}"
    return f"{f'{nodes} nodes of ' if nodes != 1 else ''}{gpus}"


def _model(plan: PlanDocument) -> str:
    model = plan.model
    trained = "all trained"
    if model.trainable_parameters != model.parameters:
        trained = (
            f"{model.trainable_parameters:,} trained "
            f"({model.trainable_parameters / model.parameters:.2%})"
        )
    return f"{model.parameters:,} parameters, {trained}"


# The head: the answers to what everybody asks first.

_LABELS = {FITS: "FITS", TIGHT: "TIGHT", TOO_LARGE: "TOO LARGE", NOT_CHECKED: "MEMORY"}


def _answers(plan: PlanDocument) -> list[Row]:
    summary = plan.summary
    rows = [
        (_LABELS[summary.verdict], _fit(plan)),
        ("TIME", _time(plan, plan.prediction) if plan.prediction else _NOT_KNOWN),
        ("MONEY", _money(plan)),
        ("STEPS", _steps(plan)),
        ("WAY", summary.way),
        ("ASSUMED", "; ".join(summary.assumed)),
        ("BEFORE", plan.words.before_packing),
        ("SAMPLES", plan.words.repetition),
        *(("WARNING", text) for text in plan.words.warnings),
        ("WARNING", _slow_saves(plan)),
        (
            "NEXT",
            "\n".join(f"{number}. {action}" for number, action in enumerate(summary.next, start=1)),
        ),
    ]
    return [(name, text) for name, text in rows if text]


def _fit(plan: PlanDocument) -> str:
    """Return the memory that a rank and the host of a node need, of what they have."""
    machine = plan.machine
    memory = plan.chosen_memory
    device_bytes = plan.gpu_memory_bytes
    needed = _needed_bytes(plan, memory)
    text = f"{gib(needed)} a {'GPU' if plan.cluster.is_gpu else 'rank'}"
    if device_bytes:
        free = 1 - needed / device_bytes
        left = f"{100 * free:.0f}% free" if free >= 0 else f"{gib(needed - device_bytes)} too much"
        text = f"{_of(gib(needed), gib(device_bytes))} a GPU ({left})"
    host = rounded(plan.summary.host_needed_bytes / GIGA, "GB")
    assumed = machine.assumed_host_memory_bytes if machine else None
    limit = (machine.host_memory_bytes if machine else None) or assumed
    if limit:
        host = _of(host, rounded(limit / GIGA, "GB")) + (
            " (assumed: set cluster.memory_gb)" if assumed else ""
        )
    else:
        host += f" (not checked: set cluster.{'gpu' if plan.cluster.is_gpu else 'memory_gb'})"
    return f"{text}; host {host}"


def _of(used: str, has: str) -> str:
    """Return `72.0 of 79.1 GiB` for two sizes; a unit that both have is said once."""
    number, _, unit = used.partition(" ")
    return f"{number if has.endswith(f' {unit}') else used} of {has}"


def _time(plan: PlanDocument, found: PlannedWay) -> str:
    speed = (
        f"{found.tokens_per_s_per_rank.value:,.0f} tokens/s a "
        f"{'GPU' if plan.cluster.is_gpu else 'rank'}"
    )
    duration = ""
    if found.run_s is not None:
        duration = f", {_inserted(found.run_s, brief, 'in all')}"
    return (
        f"{_inserted(found.step_s, brief, 'a step')}, {speed}{duration}; bound by "
        f"{bound_in_words(found.bound)}"
    )


def _money(plan: PlanDocument) -> str:
    """Return the training's cost, or an hour's while its length is unknown; empty if unpriced."""
    price = plan.summary.gpu_hour_price
    cost = plan.summary.cost
    if price is None or not plan.cluster.is_gpu:
        return ""
    hour = f"{price:,.2f} a GPU-hour"
    if cost is None or plan.prediction is None or plan.prediction.gpu_hours is None:
        return f"{price * plan.cluster.ranks:,.2f} an hour, at {hour}"
    hours = gpu_hours(plan.prediction.gpu_hours.value)
    return f"{banded(cost, lambda value: f'{value:,.2f}')} for the training: {hours} at {hour}"


def _inserted(figure: Figure, show: Callable[[float], str], words: str) -> str:
    """Format a figure with `words` before its band: `6.6 s a step (5.6 to 7.6)`."""
    value, bracket, band = banded(figure, show).partition(" (")
    return f"{value} {words}{bracket}{band}"


def _steps(plan: PlanDocument) -> str:
    batch = plan.batch
    steps = plan.summary.steps
    each = f"{batch.tokens_per_step:,} tokens"
    epochs = _counted(batch.epochs, "epoch")
    if batch.samples_per_step is not None:
        each += f" ({count(batch.samples_per_step, 'samples')})"
    if steps is None:
        return f"{each} a step, {epochs}; the number of steps is known after packing"
    many = count(steps.value, "optimizer steps")
    if steps.low != steps.high:
        many = f"about {many} ({steps.low:,.0f} to {steps.high:,.0f} by the first rows)"
    # Before packing, steps are known for certain only by max_steps, which epochs do not count for.
    is_by_steps = batch.steps is not None and batch.blocks is None
    return f"{many}, {each} each" if is_by_steps else f"{many} in {epochs}, {each} each"


def _below(plan: PlanDocument, is_detailed: bool) -> list[str]:
    lines = ["", _text(_strategies(plan))] if plan.words.verdicts else []
    words = plan.words
    if words.near_miss:
        lines += ["", _text(_pairs([("near miss", words.near_miss)]))]
    if words.advice:
        lines += ["", "what would help", _sentences(words.advice)]
    return [*lines, *_details(plan)] if is_detailed else lines


def _sentences(sentences: Iterable[str]) -> str:
    return _text(_pairs([("-", sentence) for sentence in sentences]))


# The details: what the answers rest on.


def _details(plan: PlanDocument) -> list[str]:
    lines = ["", _text(_pairs([("why", plan.words.chosen), *_figures(plan)]))]
    if plan.words.others:
        lines += ["", "the other strategies", _sentences(plan.words.others)]
    if plan.stages:
        notes = [_text(_pairs([(need.stage, need.note)])) for need in plan.stages if need.note]
        lines += ["", "what each stage needs", _text(_stages(plan)), *notes]
    return lines


def _figures(plan: PlanDocument) -> Iterator[Row]:
    batch = plan.batch
    found = plan.prediction
    yield "ranks", _ranks(plan)
    yield from _rates(plan)
    yield "blocks", _blocks(batch)
    yield "batch", _batch(batch)
    if batch.steps_per_epoch is not None:
        last = _counted(batch.last_step_blocks, "block")
        yield "steps", f"{batch.steps_per_epoch:,} in the first epoch, whose last step has {last}"
    elif plan.words.steps:
        yield "steps", plan.words.steps
    if found is not None:
        step_s = found.step_s.value
        parts = {
            name: spent_s
            for name, spent_s in found.parts.items()
            if spent_s and spent_s > _LEAST_PART * step_s
        }
        yield from _bars("step time", parts, step_s, brief)
        yield "speed", _speed(plan, found)
        if found.gpu_hours is not None:
            yield "run", banded(found.gpu_hours, gpu_hours)
        yield from _network(plan, found)
    yield from _memory(plan)
    yield from _disk(plan)


def _ranks(plan: PlanDocument) -> str:
    cluster = plan.cluster
    machine = plan.machine
    kind = "GPUs of unknown kind" if cluster.is_gpu else "CPUs"
    if machine is not None and machine.gpu_memory_bytes:
        kind = f"{machine.name} of {gib(machine.gpu_memory_bytes)}"
    nodes = f"{cluster.nodes} nodes, " if cluster.nodes != 1 else ""
    threads = cluster.cpus_per_rank
    return f"{count(cluster.ranks, 'ranks')} on {kind}, {nodes}{count(threads, 'threads')} each"


def _rates(plan: PlanDocument) -> list[Row]:
    machine = plan.machine
    if machine is None:
        return []
    measured = [name for name, rate in machine.rates.items() if rate.source == "measured"]
    if not measured:
        return []  # the answers say what is assumed
    of_model = (
        f", and {machine.measured_parts} parts of this model" if machine.measured_parts else ""
    )
    if machine.other_parts and not of_model:
        of_model = f", and none of the {machine.other_parts} measured parts is of this model"
    return [
        (
            "rates",
            f"{len(measured)} of {len(machine.rates)} measured{of_model}; the others are typical "
            "values",
        )
    ]


def _blocks(batch: PlannedBatch) -> str:
    if batch.blocks is None:
        return f"of {batch.block_tokens:,} tokens, not packed yet"
    used = (
        ""
        if batch.epoch_blocks == batch.blocks
        else f"; the first epoch uses {batch.epoch_blocks:,}"
    )
    weighted = f"{used}, by the weights of the sources" if used else ""
    return (
        f"{batch.blocks:,} of {batch.block_tokens:,} tokens, {batch.padding_fraction:.2%} "
        f"padding{weighted}"
    )


def _batch(batch: PlannedBatch) -> str:
    held = ""
    if batch.samples_per_step is not None and batch.supervised_tokens_per_step is not None:
        supervised = f"{batch.supervised_tokens_per_step:,.0f} supervised tokens"
        held = f", with {batch.samples_per_step:,.0f} samples and {supervised}"
    return (
        f"{_counted(batch.global_batch_blocks, 'block')} = {batch.tokens_per_step:,} tokens a "
        f"step{held}: "
        f"micro-batch {batch.micro_batch_blocks} x accumulation {batch.accumulation} on each rank"
    )


def _counted(number: float | None, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _speed(plan: PlanDocument, found: PlannedWay) -> str:
    speed = banded(found.tokens_per_s_per_rank, lambda each: f"{each:,.0f} tokens/s")
    speed += f" a {'GPU' if plan.cluster.is_gpu else 'rank'}"
    if found.mfu is not None:
        # Others count all of the attention's products, or fp8 against its own peak, which is twice
        # that of bf16.
        of_peak = " of bf16's peak" if plan.train.get("precision") == "fp8" else ""
        speed += (
            f"; causal MFU {banded(found.mfu, lambda fraction: f'{fraction * 100:.1f}%')}{of_peak}"
        )
    return speed


def _network(plan: PlanDocument, found: PlannedWay) -> list[Row]:
    if plan.machine is None or plan.cluster.nodes == 1:
        return []
    rate = plan.machine.rates["between_bytes_s"].value
    sent = banded(found.network_bytes, gigabytes)
    return [("network", f"{sent} sent by each node in a step, at {gbit_per_s(rate)}")]


def _memory(plan: PlanDocument) -> list[Row]:
    is_gpu = plan.cluster.is_gpu
    memory = plan.chosen_memory
    sizes = {
        part: getattr(memory, f"{part}_bytes") for part in PARTS if is_gpu or part != "reserve"
    }
    whole = max(_needed_bytes(plan, memory), plan.gpu_memory_bytes or 0)
    peak = (
        f"{_needed(plan, memory, plan.prediction)} a {'GPU' if is_gpu else 'rank'}; peak "
        f"{memory.moment}"
    )
    return [("memory", peak), *_bars("", sizes, whole, gib)]


def _needed(plan: PlanDocument, memory: Memory, predicted: PlannedWay | None) -> str:
    if plan.cluster.is_gpu and predicted is not None:
        return banded(predicted.needed_memory_bytes, gib)
    return gib(_needed_bytes(plan, memory))


def _needed_bytes(plan: PlanDocument, memory: Memory) -> int:
    """Return the bytes that a rank needs; only GPUs need the reserve."""
    return memory.total_bytes if plan.cluster.is_gpu else memory.allocated_bytes


def _disk(plan: PlanDocument) -> list[Row]:
    disk = plan.disk
    train = read_train(plan.train)
    found = plan.prediction
    takes = f", {banded(found.checkpoint_s, brief)} to write" if found else ""
    does = "goes on" if plan.chosen.save_async else "waits"
    return [
        (
            "checkpoint",
            f"{gigabytes(disk.checkpoint_bytes)} each{takes}, {train.intervals_in_words}, "
            f"while the training {does}; {gigabytes(disk.needed_bytes)} for "
            f"{train.kept_in_words}",
        )
    ]


def _slow_saves(plan: PlanDocument) -> str:
    """Return the warning that the training is expected to wait for its checkpoints, or nothing."""
    train = read_train(plan.train)
    steps = plan.batch.steps
    epoch_steps = plan.batch.steps_per_epoch
    found = plan.prediction
    if found is None or steps is None or epoch_steps is None:
        return ""
    if train.saves(steps, epoch_steps) <= 1:
        return ""
    save_s = found.checkpoint_s.value
    return slow_saves(train, epoch_steps, plan.disk.checkpoint_bytes, save_s, found.step_s.value)


def _bars(
    title: str, parts: Mapping[str, float | None], whole: float, show: Callable[[float], str]
) -> list[Row]:
    """Return a row for each part that counts: name, size, and a bar that continues the last one's.

    The first row has the title.
    """
    before = 0.0
    rows = list[Row]()
    named = {PART_NAMES.get(name, name): size for name, size in parts.items() if size}
    longest = max(map(len, named), default=0)
    for name, size in named.items():
        first = min(_BAR - 1, round(_BAR * before / whole))
        end = max(first + 1, round(_BAR * (before + size) / whole))
        bar = "·" * first + "█" * (end - first) + "·" * (_BAR - end)
        rows.append(("" if rows else title, f"{name:<{longest}}  {show(size):>10}  {bar}"))
        before += size
    return rows


def _strategies(plan: PlanDocument) -> Table:
    """Return a table of the best way to train per strategy: the chosen, starred, then fastest."""
    chosen = plan.chosen.strategy
    found = dict(plan.others)
    others = sorted(found, key=lambda name: (not found[name].fits, found[name].step_s.value))
    if plan.prediction is not None:
        found[chosen] = plan.prediction
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "strategy", "memory", "step time"):
        table.add_column(name, no_wrap=True)
    table.add_column("verdict")
    for name in (chosen, *others, *sorted(plan.words.verdicts.keys() - found.keys())):
        needed, took = "", ""
        if name in found:
            needed = gib(_needed_bytes(plan, plan.memory[name]))
            took = banded(found[name].step_s, brief)
        table.add_row(
            "*" if name == chosen else "", name, needed, took, plan.words.verdicts.get(name, "")
        )
    return table


def _stages(plan: PlanDocument) -> Table:
    """Return a table of where each stage runs and what it takes; the training's time is above."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("stage", "runs on", "memory", "disk"):
        table.add_column(name, no_wrap=True)
    table.add_column("takes at most", no_wrap=True)
    for need in plan.stages:
        gpus = f"{count(need.gpus, 'GPUs')} and " if need.gpus else ""
        on_gpu = f"{gib(need.gpu_bytes)} a GPU, " if need.gpus and need.gpu_bytes else ""
        table.add_row(
            need.stage,
            f"{gpus}{count(need.cpus, 'CPUs')}",
            f"{on_gpu}{gigabytes(need.host_bytes)}",
            gigabytes(need.disk_bytes) if need.disk_bytes else "",
            brief(need.work_s) if need.work_s else "",
        )
    return table


def _main_figures(plan: PlanDocument) -> dict[str, str]:
    """Return the answers, without what to do next, and the figures that a change affects most."""
    (verdict, fit), *answers = _answers(plan)
    figures = [
        ("batch", _batch(plan.batch)),
        *(_network(plan, plan.prediction) if plan.prediction else []),
        *_disk(plan),
    ]
    rows = {
        "model": _model(plan),
        "ranks": _ranks(plan),
        "MEMORY": fit if verdict == "MEMORY" else f"{verdict}: {fit}",
    }
    return rows | {name: text for name, text in (*answers, *figures) if name != "NEXT"}


def _pairs(rows: Iterable[Row]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def _text(table: Table) -> str:
    file = StringIO()
    Console(
        file=file, width=WIDTH, force_terminal=False, color_system=None, markup=False, emoji=False
    ).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())
