"""The plan as text of 100 columns: the answers, the strategies, what would help.

On request all that they rest on (plan/formulas.py has the end of it). It reads only plan.json's
content, so that a plan can be shown again later.
"""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import StringIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table

from pipeline_lib.config.train import read_train
from pipeline_lib.core.language import N_, _
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
from pipeline_lib.plan.road import total
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
_NOT_KNOWN = N_("not known: set cluster.gpu")
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
    changed_title = _("what if {flags}").format(flags=", ".join(flags))
    table = Table("", _("as configured"), changed_title, box=None, padding=(0, 2, 0, 0))
    before = _main_figures(plan)
    after = _main_figures(changed)
    for name in {**before, **after}:
        now = before.get(name, "")
        then = after.get(name, "")
        table.add_row(name, now, then if then != now else _("the same"))
    title = _("plan of {experiment}").format(experiment=plan.experiment)
    return "\n".join([title, "", _text(table), *_below(changed, is_detailed)])


def banded(figure: Figure, show: Callable[[float], str], words: str = "{value}") -> str:
    """Format a figure with its band, `1.24 s (1.10 to 1.41)`, or without it if all are equal.

    The value stands in `words`: `{value} a step` makes `6.6 s a step (5.6 to 7.6)`.
    """
    value = show(figure.value)
    low = show(figure.low)
    high = show(figure.high)
    worded = words.format(value=value)
    if low == high:
        return worded
    units = {text.split(" ")[1] if text.count(" ") == 1 else None for text in (value, low, high)}
    if len(units) == 1 and None not in units:
        low = low.split(" ")[0]
        high = high.split(" ")[0]
    return _("{value} ({low} to {high})").format(value=worded, low=low, high=high)


def _title(plan: PlanDocument) -> str:
    title = _("plan of {experiment}: {model}, on {machines}").format(
        experiment=plan.experiment, model=_model(plan), machines=_machines(plan)
    )
    return textwrap.fill(title, WIDTH, break_long_words=True, break_on_hyphens=False)


def _machines(plan: PlanDocument) -> str:
    cluster = plan.cluster
    if not cluster.is_gpu:
        return _ranks(plan)
    nodes = cluster.nodes
    each = cluster.ranks // nodes
    gpus = _("{gpus} of unknown kind").format(gpus=count(each, _("GPUs")))
    if plan.machine is not None:
        gpus = f"{each} x {plan.machine.name}"
    return gpus if nodes == 1 else _("{nodes} nodes of {gpus}").format(nodes=nodes, gpus=gpus)


def _model(plan: PlanDocument) -> str:
    model = plan.model
    if model.trainable_parameters == model.parameters:
        return _("{parameters:,} parameters, all trained").format(parameters=model.parameters)
    return _("{parameters:,} parameters, {trained:,} trained ({fraction:.2%})").format(
        parameters=model.parameters,
        trained=model.trainable_parameters,
        fraction=model.trainable_parameters / model.parameters,
    )


# The head: the answers to what everybody asks first.

_LABELS = {
    FITS: N_("FITS"),
    TIGHT: N_("TIGHT"),
    TOO_LARGE: N_("TOO LARGE"),
    NOT_CHECKED: N_("MEMORY"),
}


def _answers(plan: PlanDocument) -> list[Row]:
    summary = plan.summary
    rows = [
        (_(_LABELS[summary.verdict]), _fit(plan)),
        (_("TIME"), _time(plan, plan.prediction) if plan.prediction else _(_NOT_KNOWN)),
        (_("RUN"), _road(plan)),
        (_("COST"), _money(plan)),
        (_("STEPS"), _steps(plan)),
        (_("WAY"), summary.way),
        (_("ASSUMED"), _("; ").join(summary.assumed)),
        (_("BEFORE"), plan.words.before_packing),
        (_("SAMPLES"), plan.words.repetition),
        *((_("WARNING"), text) for text in plan.words.warnings),
        (_("WARNING"), _slow_saves(plan)),
        (
            _("NEXT"),
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
    text = _per_rank(plan, gib(needed))
    if device_bytes:
        free = 1 - needed / device_bytes
        left = _("{free:.0%} free").format(free=free)
        if free < 0:
            left = _("{size} too much").format(size=gib(needed - device_bytes))
        text = _per_rank(plan, _of(gib(needed), gib(device_bytes)))
        text = _("{memory} ({left})").format(memory=text, left=left)
    host = rounded(plan.summary.host_needed_bytes / GIGA, "GB")
    assumed = machine.assumed_host_memory_bytes if machine else None
    limit = (machine.host_memory_bytes if machine else None) or assumed
    if limit:
        host = _of(host, rounded(limit / GIGA, "GB"))
        if assumed:
            host += _(" (assumed: set cluster.memory_gb)")
    else:
        key = "cluster.gpu" if plan.cluster.is_gpu else "cluster.memory_gb"
        host += _(" (not checked: set {key})").format(key=key)
    return _("{device}; host {host}").format(device=text, host=host)


def _per_rank(plan: PlanDocument, amount: str) -> str:
    """Return `17.2 GiB a GPU`, or `a rank` where ranks have no GPU."""
    if plan.cluster.is_gpu:
        return _("{amount} a GPU").format(amount=amount)
    return _("{amount} a rank").format(amount=amount)


def _of(used: str, has: str) -> str:
    """Return `72.0 of 79.1 GiB` for two sizes; a unit that both have is said once."""
    number, _space, unit = used.partition(" ")
    short = number if has.endswith(f" {unit}") else used
    return _("{used} of {has}").format(used=short, has=has)


def _time(plan: PlanDocument, found: PlannedWay) -> str:
    parts = [
        banded(found.step_s, brief, _("{value} a step")),
        _per_rank(plan, f"{found.tokens_per_s_per_rank.value:,.0f} tokens/s"),
    ]
    if found.run_s is not None:
        parts.append(banded(found.run_s, brief, _("{value} in all")))
    bound = _(bound_in_words(found.bound))
    return _("{times}; bound by {bound}").format(times=_(", ").join(parts), bound=bound)


def _road(plan: PlanDocument) -> str:
    """Return what the run takes from its command to its report; empty if that is not known."""
    if not plan.road:
        return ""
    each = [f"{_(part.stage)} {brief(part.seconds.value)}" for part in plan.road]
    text = _("{time} from the command to the report: {parts}; beside the arrival of model and data")
    return text.format(time=banded(total(plan.road), brief), parts=_(", ").join(each))


def _money(plan: PlanDocument) -> str:
    """Return the training's cost, or an hour's while its length is unknown; empty if unpriced."""
    price = plan.summary.gpu_hour_price
    cost = plan.summary.cost
    if price is None or not plan.cluster.is_gpu:
        return ""
    if cost is None or plan.prediction is None or plan.prediction.gpu_hours is None:
        return _("{cost:,.2f} an hour, at {price:,.2f} a GPU-hour").format(
            cost=price * plan.cluster.ranks, price=price
        )
    return _("{cost} for the training: {hours} at {price:,.2f} a GPU-hour").format(
        cost=banded(cost, lambda value: f"{value:,.2f}"),
        hours=gpu_hours(plan.prediction.gpu_hours.value),
        price=price,
    )


def _steps(plan: PlanDocument) -> str:
    batch = plan.batch
    steps = plan.summary.steps
    each = f"{batch.tokens_per_step:,} tokens"
    epochs = _counted(batch.epochs, _("epochs"))
    if batch.samples_per_step is not None:
        each += f" ({count(batch.samples_per_step, _('samples'))})"
    if steps is None:
        return _("{tokens} a step, {epochs}; the number of steps is known after packing").format(
            tokens=each, epochs=epochs
        )
    many = count(steps.value, _("optimizer steps"))
    if steps.low != steps.high:
        many = _("about {steps} ({low:,.0f} to {high:,.0f} by the first rows)").format(
            steps=many, low=steps.low, high=steps.high
        )
    # Before packing, steps are known for certain only by max_steps, which epochs do not count for.
    is_by_steps = batch.steps is not None and batch.blocks is None
    if not is_by_steps:
        many = _("{steps} in {epochs}").format(steps=many, epochs=epochs)
    return _("{steps}, {tokens} each").format(steps=many, tokens=each)


def _below(plan: PlanDocument, is_detailed: bool) -> list[str]:
    lines = ["", _text(_strategies(plan))] if plan.words.verdicts else []
    words = plan.words
    if words.near_miss:
        lines += ["", _text(_pairs([(_("near miss"), words.near_miss)]))]
    if words.advice:
        lines += ["", _("what would help"), _sentences(words.advice)]
    return [*lines, *_details(plan)] if is_detailed else lines


def _sentences(sentences: Iterable[str]) -> str:
    return _text(_pairs([("-", sentence) for sentence in sentences]))


# The details: what the answers rest on.


def _details(plan: PlanDocument) -> list[str]:
    lines = ["", _text(_pairs([(_("why"), plan.words.chosen), *_figures(plan)]))]
    if plan.words.others:
        lines += ["", _("the other strategies"), _sentences(plan.words.others)]
    if plan.stages:
        notes = [_text(_pairs([(need.stage, need.note)])) for need in plan.stages if need.note]
        lines += ["", _("what each stage needs"), _text(_stages(plan)), *notes]
    return lines


def _figures(plan: PlanDocument) -> Iterator[Row]:
    batch = plan.batch
    found = plan.prediction
    yield _("ranks"), _ranks(plan)
    yield from _rates(plan)
    yield _("blocks"), _blocks(batch)
    yield _("batch"), _batch(batch)
    if batch.steps_per_epoch is not None:
        text = _("{steps:,} in the first epoch, whose last step has {blocks}").format(
            steps=batch.steps_per_epoch, blocks=_counted(batch.last_step_blocks, _("blocks"))
        )
        yield _("steps"), text
    elif plan.words.steps:
        yield _("steps"), plan.words.steps
    if found is not None:
        step_s = found.step_s.value
        parts = {
            name: spent_s
            for name, spent_s in found.parts.items()
            if spent_s and spent_s > _LEAST_PART * step_s
        }
        yield from _bars(_("step time"), parts, step_s, brief)
        yield _("speed"), _speed(plan, found)
        if found.gpu_hours is not None:
            yield _("run"), banded(found.gpu_hours, gpu_hours)
        yield from _network(plan, found)
    yield from _memory(plan)
    yield from _disk(plan)


def _ranks(plan: PlanDocument) -> str:
    cluster = plan.cluster
    machine = plan.machine
    kind = _("GPUs of unknown kind") if cluster.is_gpu else _("CPUs")
    if machine is not None and machine.gpu_memory_bytes:
        kind = _("{gpu} of {memory}").format(gpu=machine.name, memory=gib(machine.gpu_memory_bytes))
    if cluster.nodes != 1:
        kind += _(", {nodes} nodes").format(nodes=cluster.nodes)
    return _("{ranks} on {kind}, {threads} each").format(
        ranks=count(cluster.ranks, _("ranks")),
        kind=kind,
        threads=count(cluster.cpus_per_rank, _("threads")),
    )


def _rates(plan: PlanDocument) -> list[Row]:
    machine = plan.machine
    if machine is None:
        return []
    measured = [name for name, rate in machine.rates.items() if rate.source == "measured"]
    if not measured:
        return []  # the answers say what is assumed
    of_model = ""
    if machine.measured_parts:
        of_model = _(", and {parts} parts of this model").format(parts=machine.measured_parts)
    elif machine.other_parts:
        of_model = _(", and none of the {parts} measured parts is of this model").format(
            parts=machine.other_parts
        )
    text = _("{measured} of {rates} measured{of_model}; the others are typical values").format(
        measured=len(measured), rates=len(machine.rates), of_model=of_model
    )
    return [(_("rates"), text)]


def _blocks(batch: PlannedBatch) -> str:
    if batch.blocks is None:
        return _("of {tokens:,} tokens, not packed yet").format(tokens=batch.block_tokens)
    text = _("{blocks:,} of {tokens:,} tokens, {padding:.2%} padding").format(
        blocks=batch.blocks, tokens=batch.block_tokens, padding=batch.padding_fraction
    )
    if batch.epoch_blocks != batch.blocks:
        text += _("; the first epoch uses {blocks:,}, by the weights of the sources").format(
            blocks=batch.epoch_blocks
        )
    return text


def _batch(batch: PlannedBatch) -> str:
    held = ""
    if batch.samples_per_step is not None and batch.supervised_tokens_per_step is not None:
        held = _(", with {samples:,.0f} samples and {tokens:,.0f} supervised tokens").format(
            samples=batch.samples_per_step, tokens=batch.supervised_tokens_per_step
        )
    return _(
        "{blocks} = {tokens:,} tokens a step{held}: micro-batch {micro_batch} x accumulation "
        "{accumulation} on each rank"
    ).format(
        blocks=_counted(batch.global_batch_blocks, _("blocks")),
        tokens=batch.tokens_per_step,
        held=held,
        micro_batch=batch.micro_batch_blocks,
        accumulation=batch.accumulation,
    )


def _counted(number: float | None, nouns: str) -> str:
    """Return a number, which may be a fraction, with the plural `nouns`, or the singular for 1."""
    return f"{number:,} {nouns.removesuffix('s') if number == 1 else nouns}"


def _speed(plan: PlanDocument, found: PlannedWay) -> str:
    speed = _per_rank(
        plan, banded(found.tokens_per_s_per_rank, lambda each: f"{each:,.0f} tokens/s")
    )
    if found.mfu is not None:
        mfu = banded(found.mfu, lambda fraction: f"{fraction * 100:.1f}%")
        speed += _("; causal MFU {mfu}").format(mfu=mfu)
        # Others count all of the attention's products, or fp8 against its own peak, which is twice
        # that of bf16.
        if plan.train.get("precision") == "fp8":
            speed += _(" of bf16's peak")
    return speed


def _network(plan: PlanDocument, found: PlannedWay) -> list[Row]:
    if plan.machine is None or plan.cluster.nodes == 1:
        return []
    rate = plan.machine.rates["between_bytes_s"].value
    text = _("{sent} sent by each node in a step, at {rate}").format(
        sent=banded(found.network_bytes, gigabytes), rate=gbit_per_s(rate)
    )
    return [(_("network"), text)]


def _memory(plan: PlanDocument) -> list[Row]:
    is_gpu = plan.cluster.is_gpu
    memory = plan.chosen_memory
    sizes = {
        part: getattr(memory, f"{part}_bytes") for part in PARTS if is_gpu or part != "reserve"
    }
    whole = max(_needed_bytes(plan, memory), plan.gpu_memory_bytes or 0)
    needed = _per_rank(plan, _needed(plan, memory, plan.prediction))
    peak = _("{needed}; peak {moment}").format(needed=needed, moment=memory.moment)
    return [(_("memory"), peak), *_bars("", sizes, whole, gib)]


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
    takes = ""
    if found:
        takes = _(", {time} to write").format(time=banded(found.checkpoint_s, brief))
    does = _("goes on") if plan.chosen.save_async else _("waits")
    text = _(
        "{size} each{takes}, {intervals}, while the training {does}; {needed} for {kept}"
    ).format(
        size=gigabytes(disk.checkpoint_bytes),
        takes=takes,
        intervals=train.intervals_in_words,
        does=does,
        needed=gigabytes(disk.needed_bytes),
        kept=train.kept_in_words,
    )
    return [(_("checkpoint"), text)]


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
    named = {_(PART_NAMES.get(name, name)): size for name, size in parts.items() if size}
    longest = max(map(cell_len, named), default=0)
    for name, size in named.items():
        first = min(_BAR - 1, round(_BAR * before / whole))
        end = max(first + 1, round(_BAR * (before + size) / whole))
        bar = "·" * first + "█" * (end - first) + "·" * (_BAR - end)
        padded = set_cell_size(name, longest)
        rows.append(("" if rows else title, f"{padded}  {show(size):>10}  {bar}"))
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
    for name in ("", _("strategy"), _("memory"), _("step time")):
        table.add_column(name, no_wrap=True)
    table.add_column(_("verdict"))
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
    for name in (_("stage"), _("runs on"), _("memory"), _("disk"), _("takes at most")):
        table.add_column(name, no_wrap=True)
    for need in plan.stages:
        runs_on = count(need.cpus, _("CPUs"))
        memory = gigabytes(need.host_bytes)
        if need.gpus:
            runs_on = _("{gpus} and {cpus}").format(gpus=count(need.gpus, _("GPUs")), cpus=runs_on)
        if need.gpus and need.gpu_bytes:
            on_gpu = _("{amount} a GPU").format(amount=gib(need.gpu_bytes))
            memory = f"{on_gpu}, {memory}"
        table.add_row(
            need.stage,
            runs_on,
            memory,
            gigabytes(need.disk_bytes) if need.disk_bytes else "",
            brief(need.work_s) if need.work_s else "",
        )
    return table


def _main_figures(plan: PlanDocument) -> dict[str, str]:
    """Return the answers, without what to do next, and the figures that a change affects most."""
    (verdict, fit), *answers = _answers(plan)
    figures = [
        (_("batch"), _batch(plan.batch)),
        *(_network(plan, plan.prediction) if plan.prediction else []),
        *_disk(plan),
    ]
    rows = {
        _("model"): _model(plan),
        _("ranks"): _ranks(plan),
        _("MEMORY"): fit if verdict == _("MEMORY") else f"{verdict}: {fit}",
    }
    return rows | {name: text for name, text in (*answers, *figures) if name != _("NEXT")}


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
