"""Render the plan as text: tables 100 columns wide, and every formula with its numbers filled in."""

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline_lib.arch.geometry import FP32_BYTES, NF4_BYTES
from pipeline_lib.arch.layers import (
    feeds_in_chunks,
    is_compiled,
    is_sharded,
    keeps_on_host,
    micro_batch_tokens,
    recompute_of,
    stays_gathered,
    tokens_at_once,
)
from pipeline_lib.config.train import read_train
from pipeline_lib.core.units import GIGA, brief, count, gbit_per_s, gib, gigabytes, gpu_hours, rounded
from pipeline_lib.plan import machine, predict
from pipeline_lib.plan.activations import compute_bytes
from pipeline_lib.plan.machine import End
from pipeline_lib.plan.memory import MARGIN, MOMENTS_BYTES, PARTS
from pipeline_lib.plan.moments import sharded_over
from pipeline_lib.plan.saving import slow_saves
from pipeline_lib.plan.search import Setting
from pipeline_lib.plan.step_time import (
    COMPILE_S,
    PhaseTime,
    ends_passes,
    layer_forward,
    layer_passes,
    step_time,
    variant_of,
)
from pipeline_lib.records.plan import (
    FITS,
    NOT_CHECKED,
    PART_NAMES,
    TIGHT,
    TOO_LARGE,
    Batch,
    Figure,
    Memory,
    PlanDocument,
    Prediction,
    bound_in_words,
    known,
)

# The plan as text of 100 columns: the answers, the strategies, what would help; on request all that they rest on.
#
# It reads only plan.json's content, so that a plan can be shown again later.

WIDTH = 100
_BAR = 42
_LEAST_PART = 1e-4  # fraction of a step: smaller parts are rounding errors of fully overlapped work
_NOT_KNOWN = "not known: set cluster.gpu"
Row = tuple[str, str]


def render(content: Mapping[str, Any], is_detailed: bool = False) -> str:
    """Return the plan, the content of a plan.json, as text: the answers, and with `is_detailed` all else below them."""
    plan = PlanDocument.model_validate(content)
    return "\n".join([_title(plan), "", _text(_pairs(_answers(plan))), *_below(plan, is_detailed)])


def render_what_if(
    content: Mapping[str, Any], changed_content: Mapping[str, Any], flags: Iterable[str], is_detailed: bool = False
) -> str:
    """Return the main figures of both plans side by side, then the strategies and advice of the changed one."""
    plan, changed = PlanDocument.model_validate(content), PlanDocument.model_validate(changed_content)
    table = Table("", "as configured", "what if " + ", ".join(flags), box=None, padding=(0, 2, 0, 0))
    before, after = _main_figures(plan), _main_figures(changed)
    for name in {**before, **after}:
        now, then = before.get(name, ""), after.get(name, "")
        table.add_row(name, now, then if then != now else "the same")
    return "\n".join([f"plan of {plan.experiment}", "", _text(table), *_below(changed, is_detailed)])


def banded(figure: Figure, show: Callable[[float], str]) -> str:
    """Format a figure with its band, `1.24 s (1.10 to 1.41)`; without the band if all three texts are equal."""
    if figure.value is None or figure.low is None or figure.high is None:
        return "not known"
    value, low, high = show(figure.value), show(figure.low), show(figure.high)
    if low == high:
        return value
    units = {text.split(" ")[1] if text.count(" ") == 1 else None for text in (value, low, high)}
    if len(units) == 1 and None not in units:
        low, high = low.split(" ")[0], high.split(" ")[0]
    return f"{value} ({low} to {high})"


def _title(plan: PlanDocument) -> str:
    title = f"plan of {plan.experiment}: {_model(plan)}, on {_machines(plan)}"
    return textwrap.fill(title, WIDTH, break_long_words=True, break_on_hyphens=False)


def _machines(plan: PlanDocument) -> str:
    cluster = plan.cluster
    if not cluster.is_gpu:
        return _ranks(plan)
    nodes, ranks = known(cluster.nodes), known(cluster.ranks)
    name, each = plan.machine.name, ranks // nodes
    gpus = f"{each} x {name}" if name else f"{count(each, 'GPUs')} of unknown kind"
    return f"{f'{nodes} nodes of ' if nodes != 1 else ''}{gpus}"


def _model(plan: PlanDocument) -> str:
    model, trained = plan.model, "all trained"
    if model.trainable_parameters != model.parameters:
        trained = f"{model.trainable_parameters:,} trained ({model.trainable_parameters / model.parameters:.2%})"
    return f"{model.parameters:,} parameters, {trained}"


# The head: the answers to what everybody asks first.

_LABELS = {FITS: "FITS", TIGHT: "TIGHT", TOO_LARGE: "TOO LARGE", NOT_CHECKED: "MEMORY"}


def _answers(plan: PlanDocument) -> list[Row]:
    summary = plan.summary
    rows = [
        (_LABELS.get(summary.verdict or "", "MEMORY"), _fit(plan)),
        ("TIME", _time(plan) if plan.has_prediction else _NOT_KNOWN),
        ("MONEY", _money(plan)),
        ("STEPS", _steps(plan)),
        ("WAY", summary.way),
        ("ASSUMED", "; ".join(summary.assumed)),
        ("SAMPLES", plan.words.repetition or ""),
        *(("WARNING", text) for text in plan.words.warnings),
        ("WARNING", _slow_saves(plan)),
        ("NEXT", "\n".join(f"{number}. {action}" for number, action in enumerate(summary.next, start=1))),
    ]
    return [(name, text) for name, text in rows if text]


def _fit(plan: PlanDocument) -> str:
    """Return the memory that a rank and the host of a node need, of what they have."""
    machine, memory, device_bytes = plan.machine, plan.chosen_memory, plan.machine.gpu_memory_bytes
    needed = _needed_bytes(plan, memory)
    text = f"{gib(needed)} a {'GPU' if plan.cluster.is_gpu else 'rank'}"
    if device_bytes:
        free = 1 - needed / device_bytes
        left = f"{100 * free:.0f}% free" if free >= 0 else f"{gib(needed - device_bytes)} too much"
        text = f"{_of(gib(needed), gib(device_bytes))} a GPU ({left})"
    host, assumed = rounded(known(plan.summary.host_needed_bytes) / GIGA, "GB"), machine.assumed_host_memory_bytes
    if limit := machine.host_memory_bytes or assumed:
        host = _of(host, rounded(limit / GIGA, "GB")) + (" (assumed: set cluster.memory_gb)" if assumed else "")
    else:
        host += f" (not checked: set cluster.{'gpu' if plan.cluster.is_gpu else 'memory_gb'})"
    return f"{text}; host {host}"


def _of(used: str, has: str) -> str:
    """Return `72.0 of 79.1 GiB` for two sizes; a unit that both have is said once."""
    number, _, unit = used.partition(" ")
    return f"{number if has.endswith(f' {unit}') else used} of {has}"


def _time(plan: PlanDocument) -> str:
    found = plan.prediction
    speed = f"{known(found.tokens_per_s_per_rank.value):,.0f} tokens/s a {'GPU' if plan.cluster.is_gpu else 'rank'}"
    duration = ""
    if found.run_s.value is not None:
        duration = f", {_inserted(found.run_s, brief, 'in all')}"
    return f"{_inserted(found.step_s, brief, 'a step')}, {speed}{duration}; bound by {bound_in_words(found.bound)}"


def _money(plan: PlanDocument) -> str:
    """Return what the training costs, or an hour of it while its length is not known; empty without a price."""
    price, cost = plan.summary.gpu_hour_price, plan.summary.cost
    if price is None or not plan.cluster.is_gpu:
        return ""
    hour = f"{price:,.2f} a GPU-hour"
    if cost.value is None:
        return f"{price * known(plan.cluster.ranks):,.2f} an hour, at {hour}"
    hours = gpu_hours(known(plan.prediction.gpu_hours.value))
    return f"{banded(cost, lambda value: f'{value:,.2f}')} for the training: {hours} at {hour}"


def _inserted(figure: Figure, show: Callable[[float], str], words: str) -> str:
    """Format a figure with `words` before its band: `6.6 s a step (5.6 to 7.6)`."""
    value, bracket, band = banded(figure, show).partition(" (")
    return f"{value} {words}{bracket}{band}"


def _steps(plan: PlanDocument) -> str:
    batch, steps = plan.batch, plan.summary.steps
    each, epochs = f"{known(batch.tokens_per_step):,} tokens", _counted(batch.epochs, "epoch")
    if batch.samples_per_step is not None:
        each += f" ({count(batch.samples_per_step, 'samples')})"
    if steps.value is None:
        return f"{each} a step, {epochs}; the number of steps is known after packing"
    many = count(steps.value, "optimizer steps")
    if steps.low != steps.high:
        many = f"about {many} ({steps.low:,.0f} to {steps.high:,.0f} by the first rows)"
    # Before packing, steps are known for certain only by max_steps, which epochs do not count for.
    is_by_steps = batch.steps is not None and batch.blocks is None
    return f"{many}, {each} each" if is_by_steps else f"{many} in {epochs}, {each} each"


def _below(plan: PlanDocument, is_detailed: bool) -> list[str]:
    lines, words = (["", _text(_strategies(plan))] if plan.words.verdicts else []), plan.words
    if words.near_miss:
        lines += ["", _text(_pairs([("near miss", words.near_miss)]))]
    if words.advice:
        lines += ["", "what would help", _sentences(words.advice)]
    return [*lines, *_details(plan)] if is_detailed else lines


def _sentences(sentences: list[str]) -> str:
    return _text(_pairs([("-", sentence) for sentence in sentences]))


# The details: what the answers rest on.


def _details(plan: PlanDocument) -> list[str]:
    lines = ["", _text(_pairs([("why", plan.words.chosen or ""), *_figures(plan)]))]
    if plan.words.others:
        lines += ["", "the other strategies", _sentences(plan.words.others)]
    if plan.stages:
        notes = [_text(_pairs([(need.stage, need.note)])) for need in plan.stages if need.note]
        lines += ["", "what each stage needs", _text(_stages(plan)), *notes]
    return lines


def _figures(plan: PlanDocument) -> Iterator[Row]:
    batch, found = plan.batch, plan.prediction
    yield "ranks", _ranks(plan)
    yield from _rates(plan)
    yield "blocks", _blocks(batch)
    yield "batch", _batch(batch)
    if batch.steps_per_epoch is not None:
        last = _counted(batch.last_step_blocks, "block")
        yield "steps", f"{batch.steps_per_epoch:,} in the first epoch, whose last step has {last}"
    elif plan.words.steps:
        yield "steps", plan.words.steps
    if plan.has_prediction:
        step_s = known(found.step_s.value)
        parts = {name: spent_s for name, spent_s in found.parts.items() if spent_s and spent_s > _LEAST_PART * step_s}
        yield from _bars("step time", parts, step_s, brief)
        yield "speed", _speed(plan)
        if found.gpu_hours.value is not None:
            yield "run", banded(found.gpu_hours, gpu_hours)
        yield from _network(plan)
    yield from _memory(plan)
    yield from _disk(plan)


def _ranks(plan: PlanDocument) -> str:
    cluster, machine = plan.cluster, plan.machine
    kind = "GPUs of unknown kind" if cluster.is_gpu else "CPUs"
    if machine.gpu_memory_bytes:
        kind = f"{machine.name} of {gib(machine.gpu_memory_bytes)}"
    nodes = f"{cluster.nodes} nodes, " if cluster.nodes != 1 else ""
    threads = cluster.cpus_per_rank
    return f"{count(cluster.ranks, 'ranks')} on {kind}, {nodes}{count(threads, 'threads')} each"


def _rates(plan: PlanDocument) -> list[Row]:
    machine = plan.machine
    measured = [name for name, rate in machine.rates.items() if rate.source == "measured"]
    if not measured:
        return []  # the answers say what is assumed
    of_model = f", and {machine.measured_parts} parts of this model" if machine.measured_parts else ""
    if machine.other_parts and not of_model:
        of_model = f", and none of the {machine.other_parts} measured parts is of this model"
    return [("rates", f"{len(measured)} of {len(machine.rates)} measured{of_model}; the others are typical values")]


def _blocks(batch: Batch) -> str:
    if batch.blocks is None:
        return f"of {batch.block_tokens:,} tokens, not packed yet"
    used = "" if batch.epoch_blocks == batch.blocks else f"; the first epoch uses {batch.epoch_blocks:,}"
    weighted = f"{used}, by the weights of the sources" if used else ""
    return f"{batch.blocks:,} of {batch.block_tokens:,} tokens, {batch.padding_fraction:.2%} padding{weighted}"


def _batch(batch: Batch) -> str:
    held = ""
    if batch.samples_per_step is not None and batch.supervised_tokens_per_step is not None:
        supervised = f"{batch.supervised_tokens_per_step:,.0f} supervised tokens"
        held = f", with {batch.samples_per_step:,.0f} samples and {supervised}"
    return (
        f"{_counted(batch.global_batch_blocks, 'block')} = {batch.tokens_per_step:,} tokens a step{held}: "
        f"micro-batch {batch.micro_batch_blocks} x accumulation {batch.accumulation} on each rank"
    )


def _counted(number: float | None, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _speed(plan: PlanDocument) -> str:
    found = plan.prediction
    speed = banded(found.tokens_per_s_per_rank, lambda each: f"{each:,.0f} tokens/s")
    speed += f" a {'GPU' if plan.cluster.is_gpu else 'rank'}"
    if found.mfu.value is not None:
        # Others count all of the attention's products, or fp8 against its own peak, which is twice that of bf16.
        of_peak = " of bf16's peak" if (plan.train or {}).get("precision") == "fp8" else ""
        speed += f"; causal MFU {banded(found.mfu, lambda fraction: f'{fraction * 100:.1f}%')}{of_peak}"
    return speed


def _network(plan: PlanDocument) -> list[Row]:
    if plan.cluster.nodes == 1:
        return []
    rate = known(plan.machine.rates["between_bytes_s"].value)
    sent = banded(plan.prediction.network_bytes, gigabytes)
    return [("network", f"{sent} sent by each node in a step, at {gbit_per_s(rate)}")]


def _memory(plan: PlanDocument) -> list[Row]:
    is_gpu, memory = plan.cluster.is_gpu, plan.chosen_memory
    sizes = {part: getattr(memory, f"{part}_bytes") for part in PARTS if is_gpu or part != "reserve"}
    whole = max(_needed_bytes(plan, memory), plan.machine.gpu_memory_bytes or 0)
    peak = f"{_needed(plan, memory, plan.prediction)} a {'GPU' if is_gpu else 'rank'}; peak {memory.moment}"
    return [("memory", peak), *_bars("", sizes, whole, gib)]


def _needed(plan: PlanDocument, memory: Memory, predicted: Prediction) -> str:
    if plan.cluster.is_gpu and predicted.step_s.value is not None:
        return banded(predicted.needed_memory_bytes, gib)
    return gib(_needed_bytes(plan, memory))


def _needed_bytes(plan: PlanDocument, memory: Memory) -> int:
    """Return the bytes that a rank needs; only GPUs need the reserve."""
    return known(memory.total_bytes if plan.cluster.is_gpu else memory.allocated_bytes)


def _disk(plan: PlanDocument) -> list[Row]:
    disk, train, found = plan.disk, read_train(plan.train or {}), plan.prediction
    takes = f", {banded(found.checkpoint_s, brief)} to write" if plan.has_prediction else ""
    does = "goes on" if plan.chosen.save_async else "waits"
    return [
        (
            "checkpoint",
            f"{gigabytes(known(disk.checkpoint_bytes))} each{takes}, {train.intervals_in_words}, "
            f"while the training {does}; {gigabytes(known(disk.needed_bytes))} for {train.kept_in_words}",
        )
    ]


def _slow_saves(plan: PlanDocument) -> str:
    """Return the warning that the training is expected to wait for its checkpoints, or nothing."""
    train, steps, epoch_steps = read_train(plan.train or {}), plan.batch.steps, plan.batch.steps_per_epoch
    if not plan.has_prediction or steps is None or epoch_steps is None or train.saves(steps, epoch_steps) <= 1:
        return ""
    save_s, step_s = known(plan.prediction.checkpoint_s.value), known(plan.prediction.step_s.value)
    return slow_saves(train, epoch_steps, known(plan.disk.checkpoint_bytes), save_s, step_s)


def _bars(title: str, parts: Mapping[str, float | None], whole: float, show: Callable[[float], str]) -> list[Row]:
    """Return a row for each part that counts: its name, its size, and a bar that starts where the previous one ended.

    The first row has the title.
    """
    before, rows = 0.0, list[Row]()
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
    """Return a table with the best way to train with each strategy: the chosen one, with a star, then the fastest."""
    chosen = plan.chosen.strategy or ""
    found = {**plan.others, chosen: plan.prediction}
    others = sorted(plan.others, key=lambda name: (not found[name].fits, found[name].step_s.value or 0.0))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "strategy", "memory", "step time"):
        table.add_column(name, no_wrap=True)
    table.add_column("verdict")
    for name in (chosen, *others, *sorted(plan.words.verdicts.keys() - found.keys())):
        needed, took = "", ""
        if name in found:
            needed = gib(_needed_bytes(plan, plan.memory[name]))
            took = banded(found[name].step_s, brief)
        table.add_row("*" if name == chosen else "", name, needed, took, plan.words.verdicts.get(name, ""))
    return table


def _stages(plan: PlanDocument) -> Table:
    """Return a table with where each stage runs and what it takes; the training's time is in the figures above."""
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
            f"{on_gpu}{gigabytes(need.host_bytes or 0)}",
            gigabytes(need.disk_bytes) if need.disk_bytes else "",
            brief(need.work_s) if need.work_s else "",
        )
    return table


def _main_figures(plan: PlanDocument) -> dict[str, str]:
    """Return the answers, without what to do next, and the figures that a changed config changes most."""
    (verdict, fit), *answers = _answers(plan)
    figures = [("batch", _batch(plan.batch)), *(_network(plan) if plan.has_prediction else []), *_disk(plan)]
    rows = {"model": _model(plan), "ranks": _ranks(plan), "MEMORY": fit if verdict == "MEMORY" else f"{verdict}: {fit}"}
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
    Console(file=file, width=WIDTH, force_terminal=False, color_system=None, markup=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


# The end of `--details`: the formulas of a plan with the numbers filled in.
#
# Every result shown is taken from the prediction; a test evaluates the formulas beside it.


def explain(one: predict.Prediction, setting: Setting) -> str:
    """Return the formulas of sizes, rates, memory, computation, communication, the step and the run, with numbers."""
    rates = (
        f"{name:<18} {rate.value:>9.3g} ({rate.low:.3g} to {rate.high:.3g})  {rate.source}"
        for name, rate in setting.machine.rates.items()
    )
    sections = (
        ("sizes", _sizes(one, setting)),
        ("rates, as expected (low to high)", rates),
        ("memory of a rank", _explain_memory(one, setting)),
        ("one micro-batch through one layer and through the ends", _passes(one, setting)),
        ("communication of a step", _exchanges(one)),
        ("the step", _step(one, setting)),
        ("the run", _run(one, setting)),
    )
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections)


def _sizes(one: predict.Prediction, setting: Setting) -> Iterator[str]:
    geometry, train, workload = setting.geometry, one.train, setting.workload
    trained, ranks = geometry.trained_parameters(train), setting.ranks.total
    yield f"parameters P = {geometry.parameters:,}; trained T = {trained:,}"
    yield f"weights in matrix products M = {geometry.matmul_parameters:,}, in {geometry.layers} layers"
    yield f"bytes of a number in {train.precision} b = {compute_bytes(train)}; in fp32 4"
    share = sharded_over(train, setting.ranks)
    yield f"ranks N = {ranks}, {setting.ranks.per_node} on each node; {share} share one copy of the weights"
    of_step = f"{setting.batch_blocks} x {workload.block_tokens} = {setting.batch_blocks * workload.block_tokens:,}"
    gathered = ""
    if is_sharded(train):
        gathered = ", no reshard after forward" if stays_gathered(train) else ", reshard after forward"
    how = "compiled" if is_compiled(train) else "eager"
    yield f"layers run {how}, activation checkpointing {recompute_of(train)}{gathered}"
    yield f"tokens of a step = {of_step}, {1 - workload.real_fraction:.1%} of them padding"
    micro, groups = f"{train.micro_batch_blocks} x {workload.block_tokens}", str(ranks)
    if train.ranks_per_block > 1:
        micro, groups = f"{micro} / {train.ranks_per_block}", f"{ranks} / {train.ranks_per_block}"
    tokens = micro_batch_tokens(train, workload.block_tokens)
    chunks = ""
    if feeds_in_chunks(train, bool(geometry.expert_layers), tokens):
        chunks = f"; the MLP of a layer takes {tokens_at_once(tokens):,} at a time"
    yield f"tokens of a micro-batch on a rank t = {micro} = {tokens:,}{chunks}"
    blocks = f"{setting.batch_blocks} / ({groups} x {train.micro_batch_blocks})"
    yield f"micro-batches of a rank in a step (accumulation) A = {blocks} = {one.accumulation}"
    yield f"mean document d = sum(n^2) / sum(n) = {workload.document_tokens:,.0f} tokens"


def _explain_memory(one: predict.Prediction, setting: Setting) -> Iterator[str]:
    memory, formulas = one.memory, _state_formulas(one, setting)
    for part in PARTS:
        size = getattr(memory, f"{part}_bytes")
        if size:
            formula = f" = {formulas[part]}" if part in formulas else ""
            yield f"{part:<12}{formula} = {size:,} B = {gib(size)}"
    yield f"peak {memory.moment} = {gib(memory.total_bytes)}; without the reserve {gib(memory.allocated_bytes)}"
    if memory.host_bytes:
        away = [f"{one.train.offload} offloaded"] if one.train.offload != "none" else []
        away += ["activations"] if keeps_on_host(one.train) else []
        yield f"in host memory {gib(memory.host_bytes)}: {', '.join(away)}"
    limit = setting.machine.gpu_memory_bytes
    if limit is not None:
        most = f"(1 - {MARGIN}) x {gib(limit)} = {gib(limit * (1 - MARGIN))}"
        yield f"fits if the peak is at most {most}: {'yes' if one.fits else 'no'}"


def _state_formulas(one: predict.Prediction, setting: Setting) -> dict[str, str]:
    """Return the formulas of what is kept between steps, as arithmetic that a test evaluates."""
    train, geometry = one.train, setting.geometry
    if train.offload != "none" or train.optimizer != "adamw":
        return {}
    trained, number = geometry.trained_parameters(train), compute_bytes(train)
    frozen = geometry.parameters - (trained if train.method == "full" else 0)
    share, ranks = sharded_over(train, setting.ranks), setting.ranks.total
    if not train.uses_deepspeed:
        quantized = geometry.quantized_parameters(train)
        in_four_bits = f" + {NF4_BYTES} x {quantized:,}" if quantized else ""
        found = {
            "weights": f"({FP32_BYTES} x {trained:,} + {number} x {frozen - quantized:,}{in_four_bits}) / {share}",
            "optimizer": f"{MOMENTS_BYTES} x {trained:,} / {share}",
        }
        return found | ({"gradients": f"{FP32_BYTES} x {trained:,} / {share}"} if one.memory.gradients_bytes else {})
    of_weights = ranks if train.strategy == "zero3" else 1
    of_gradients = 1 if train.strategy == "zero1" else ranks
    return {
        "weights": f"{number} x ({trained:,} + {frozen:,}) / {of_weights}",
        "gradients": f"{FP32_BYTES} x {trained:,} / {of_gradients}",
        "optimizer": f"({MOMENTS_BYTES} + {FP32_BYTES}) x {trained:,} / {ranks}",
    }


def _passes(one: predict.Prediction, setting: Setting) -> Iterator[str]:
    case = setting.case(one.train)
    tokens = case.micro_batch_tokens
    parts = {"layer": layer_passes(case, End.EXPECTED), "ends": ends_passes(case, End.EXPECTED)}
    yield "device time = fixed + t x time of a token; host time = launching the kernels; the longer one counts"
    for name, passes in parts.items():
        source = f"measured as {variant_of(one.train)}" if passes.is_measured else "by formula"
        for direction, cost in (("forward", passes.forward), ("backward", passes.backward)):
            device = f"{cost.fixed_s:.6g} + {tokens} x {cost.per_token_s:.6g} = {cost.device_s(tokens):.6g} s"
            yield f"{name} {direction}: device {device}, host {cost.host_s:.6g} s; {source}"
    layer = parts["layer"]
    if layer.is_measured:
        return
    yield from _token_forward(one, setting, layer.forward.per_token_s)


def _token_forward(one: predict.Prediction, setting: Setting, per_token_s: float) -> Iterator[str]:
    """Yield the parts of the forward pass of one token through a layer, which takes `per_token_s` seconds."""
    geometry, document = setting.geometry, setting.workload.documents_at(End.EXPECTED)
    speeds = setting.machine.speeds_in(document)
    forward = layer_forward(geometry, one.train, speeds, document)
    weights = f"{forward.weights:.10g}"
    if forward.adapters:
        weights = f"({weights} + {forward.adapters:.10g})"
    products = f"2 x {weights} / {speeds.matmul_flop_s:.6g}"
    attention = f"2 x {geometry.heads * geometry.head_dim} x {document:.6g} / {speeds.attention_flop_s:.6g}"
    if geometry.delta is not None:
        attention = f"{geometry.attention_layers / geometry.layers:.4g} x {attention}"
    counted = "; experts counted as the dense products that take as long" if geometry.expert_layers else ""
    counted += "; fp8 as the products in bf16 that take as long" if one.train.precision == "fp8" else ""
    yield f"forward of one token, matrix products: {products} = {forward.products_s:.6g} s{counted}"
    yield f"forward of one token, attention: {attention} = {forward.attention_s:.6g} s"
    if forward.delta_s:
        yield f"forward of one token, delta rule: {forward.delta_s:.6g} s"
    yield f"forward of one token, small kernels: {forward.pointwise_s:.6g} s"
    corrected = per_token_s / forward.sum_s
    yield f"forward of one token, in all: {forward.sum_s:.6g} s"
    if not math.isclose(corrected, 1.0):
        yield f"times {corrected:.4g}, as in similar layers that were measured: {per_token_s:.6g} s"


def _exchanges(one: predict.Prediction) -> Iterator[str]:
    if not one.exchanges:
        yield "none: there is one rank"
    for each in one.exchanges:
        exchange, link = each.exchange, "between nodes" if each.crosses_nodes else "within nodes"
        yield (
            f"{exchange.kind} of {exchange.name} ({exchange.phase}): {exchange.times:g} times "
            f"{gigabytes(exchange.payload_bytes)} in {exchange.pieces} pieces {link}: {brief(each.seconds)} in all, "
            f"{brief(each.exposed_s)} of it not hidden"
        )


def _step(one: predict.Prediction, setting: Setting) -> Iterator[str]:
    time = step_time(setting.case(one.train), End.EXPECTED)
    for name in ("forward", "backward", "update"):
        phase: PhaseTime = getattr(time, name)
        yield (
            f"{name}: device {phase.device_s:.6g} s beside host {phase.host_s:.6g} s take {phase.computing_s:.6g} s; "
            f"copies add {phase.copying_s:.6g} s, communication {phase.exchanging_s:.6g} s: {phase.total_s:.6g} s"
        )
    total = " + ".join(f"{getattr(time, name).total_s:.6g}" for name in ("forward", "backward", "update"))
    yield f"step = {total} = {time.total_s:.6g} s, {_band(one.step_s)}"
    spent = ((PART_NAMES.get(name, name), seconds) for name, seconds in one.parts.items() if seconds > 0)
    yield f"by purpose: {', '.join(f'{name} {brief(seconds)}' for name, seconds in spent)}"


def _run(one: predict.Prediction, setting: Setting) -> Iterator[str]:
    workload, ranks = setting.workload, setting.ranks.total
    real = f"{setting.batch_blocks} x {workload.block_tokens} x {workload.real_fraction:.6g}"
    yield (
        f"tokens/s a rank = {real} / {one.step_s.value:.6g} / {ranks} = {one.tokens_per_s_per_rank.value:.6g}, "
        f"{_band(one.tokens_per_s_per_rank)}"
    )
    if one.mfu is not None and setting.machine.peak_flop_s is not None:
        peak = f"{count(ranks, 'ranks')} of {setting.machine.peak_flop_s:.4g} FLOP/s"
        of_bf16 = (
            ", of bf16, as attention, head and norms are, so it may exceed 100%" if one.train.precision == "fp8" else ""
        )
        yield f"causal MFU = FLOPs of the step / (step x {peak}) = {one.mfu.value:.2%}{of_bf16}"
    trained = setting.geometry.trained_parameters(one.train)
    formula = f"({FP32_BYTES} + {MOMENTS_BYTES}) x {trained:,}"
    yield f"checkpoint = {formula} = {one.checkpoint_bytes:,} B = {gigabytes(one.checkpoint_bytes)}"
    if one.run_s is not None:
        steps = f"{count(setting.steps, 'steps')} of {one.step_s.value:.6g} s"
        compiling = f" and {brief(COMPILE_S)} of compilation" if is_compiled(one.train) else ""
        yield f"run = {steps}, with saves and validations{compiling}: {brief(one.run_s.value)}"


def _band(figure: machine.Figure) -> str:
    return f"between {figure.low:.4g} and {figure.high:.4g}"
