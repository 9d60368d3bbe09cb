"""The plan in words: why train this way, why not the others, and which change would help most."""

from pipeline_lib.config.train import Train
from pipeline_lib.core.language import _
from pipeline_lib.core.units import brief, gib, gigabytes
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.choose import AS_GOOD, AS_GOOD_ON_CPUS, Choice
from pipeline_lib.plan.fitting import host_limit_in_words
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.memory import MARGIN, PARTS
from pipeline_lib.plan.near import NearMiss, missed
from pipeline_lib.plan.predict import Prediction, host_bytes_of_node, lacks_host_memory
from pipeline_lib.records.plan import PART_NAMES, bound_in_words

_NAMED_PARTS = 3
_NOTABLE = 0.005  # a difference that a whole percentage shows


def why_chosen(choice: Choice, case: Case, is_auto: bool) -> str:
    """Return one or two sentences about the chosen way to train."""
    way = choice.chosen
    tried = f"{choice.fitting} of {choice.considered} ways to train"
    if is_auto:
        how = (
            f"{tried} fit, and this is the simplest one within {_as_good(case):.0%} of the fastest"
        )
    else:
        how = given(way.train) + (
            f"; {tried} with this strategy fit" if choice.considered > 1 else ""
        )
    text = f"{describe(way)}: {how}. {_bound_by(way)}"
    if way.fits and way.memory.host_bytes and case.machine.is_host_assumed:
        needed = gigabytes(host_bytes_of_node(way.memory, case.machine))
        text += f" Each node needs {needed} of host memory; {host_limit_in_words(case.machine)}."
    if not way.fits:
        text += f" It does not fit: {_too_large(way, case)}."
    return text


def near_miss_in_words(choice: Choice, near: NearMiss, machine: Machine) -> str:
    """Return the near miss: the way to train, its time and what it lacks."""
    in_words = near.in_words(machine, choice.chosen, host_limit_in_words(machine))
    return f"{describe(near.way)}: {in_words}"


def why_not_others(choice: Choice, case: Case) -> list[str]:
    """Return a sentence for each other strategy's best way, fastest first, and each left out."""
    others = [way for name, way in choice.best.items() if name != choice.chosen.train.strategy]
    others.sort(key=lambda way: (not way.fits, way.step_s.value))
    sentences = [f"{describe(way)}: {_why_not(way, choice.chosen, case)}" for way in others]
    return [*sentences, *(f"{name}: {reason}" for name, reason in choice.left_out.items())]


def given(train: Train) -> str:
    """Return where the strategy of `train` comes from if the plan does not choose it."""
    is_default = train.strategy == Train().strategy
    return _("the default") if is_default else _("set in the config")


def verdicts(choice: Choice, case: Case, is_auto: bool) -> dict[str, str]:
    """Return for each strategy, in a few words, that it is chosen, or why not."""
    chosen = choice.chosen
    found = dict(choice.left_out)
    for name, way in {**choice.best, chosen.train.strategy: chosen}.items():
        if way is chosen:
            auto = _("chosen") if way.fits else _("needs the least memory")
            words = [auto if is_auto else given(way.train)]
        else:
            words = [_longer(way, chosen)] if way.fits else []
        if not way.fits:
            words.append(missed(way, case.machine).briefly(case.machine))
        elif way.bound != chosen.bound:
            words.append(_("bound by {bound}").format(bound=_(bound_in_words(way.bound))))
        found[name] = ", ".join(words)
    return found


def describe(way: Prediction) -> str:
    """Return a summary of the strategy, micro-batch, accumulation and options.

    An example is `fsdp, micro-batch 2 x accumulation 4, selective activation checkpointing,
    compiled`.
    """
    return ", ".join(way.words)


def _bound_by(way: Prediction) -> str:
    total = way.step_s.value
    parts = way.parts
    takes = f"A step is predicted to take {brief(total)}"
    if way.bound == "exchange":
        return f"{takes}, bound by communication: {_traffic(way)}."
    if way.bound == "offload":
        return (
            f"{takes}, bound by copies to host memory and the update there "
            f"({brief(parts['offload'])})."
        )
    if way.bound == "host":
        return f"{takes}, bound by the host, which launches kernels more slowly than they run."
    return f"{takes}, bound by computing ({1 - parts['exchange'] / total:.0%} of the time)."


def _traffic(way: Prediction) -> str:
    """Return the largest collectives with their bytes and the seconds of waiting.

    An example is `all-gather of weights 4 x 3.1 GB between nodes; 8.2 s of waiting, ...`.
    """
    slowest = sorted(way.exchanged, key=lambda each: -each.exposed_s)[:_NAMED_PARTS]
    places = set()
    moved = []
    for each in slowest:
        if not each.seconds:
            continue
        exchange = each.exchange
        times = each.times
        count = f"{times:g} x " if times > 1 else ""
        if times < 1:
            count = f"every {1 / times:g} steps "
        place = " between nodes" if each.crosses_nodes else " within nodes"
        places.add(place)
        moved.append(
            (
                f"{exchange.kind} of {exchange.name} {count}{gigabytes(exchange.payload_bytes)}",
                place,
            )
        )
    if len(places) == 1:
        text = ", ".join(what for what, _ in moved) + places.pop()
    else:
        text = ", ".join(what + place for what, place in moved)
    computing = way.step_s.value - way.parts["exchange"] - way.parts["offload"]
    return f"{text}; {brief(way.parts['exchange'])} of waiting, {brief(computing)} of computing"


def _why_not(way: Prediction, chosen: Prediction, case: Case) -> str:
    if not way.fits:
        return f"does not fit: {_too_large(way, case)}"
    text = _("{value} a step").format(value=brief(way.step_s.value))
    text += _(", ") + _longer(way, chosen)
    is_as_good = abs(way.step_s.value / chosen.step_s.value - 1) <= _as_good(case)
    return f"{text}; {_traffic(way)}" if way.bound == "exchange" and not is_as_good else text


def _as_good(case: Case) -> float:
    """Return the fraction by which a strategy may lag behind the fastest and still be as good."""
    return AS_GOOD if case.machine.is_gpu else AS_GOOD_ON_CPUS


def _longer(way: Prediction, chosen: Prediction) -> str:
    ratio = way.step_s.value / chosen.step_s.value
    if abs(ratio - 1) < _NOTABLE:
        return _("as long")
    if ratio < 1:
        return _("{fraction:.0%} shorter").format(fraction=1 - ratio)
    return _("{fraction:.0%} longer").format(fraction=ratio - 1)


def _too_large(way: Prediction, case: Case) -> str:
    machine = case.machine
    memory = way.memory
    if lacks_host_memory(memory, machine):
        host = gigabytes(host_bytes_of_node(memory, machine))
        return f"a node needs {host} of host memory, and {host_limit_in_words(machine)}"
    kept = max(MARGIN, memory.error)
    has = gib(machine.gpu_memory_bytes or 0)
    sizes = sorted(
        ((getattr(memory, f"{part}_bytes"), part) for part in PARTS if part != "reserve"),
        reverse=True,
    )
    largest = ", ".join(
        f"{PART_NAMES.get(part, part)} {gib(size)}" for size, part in sizes[:_NAMED_PARTS]
    )
    return (
        f"a GPU needs {gib(memory.total_bytes)} (up to {kept:.0%} more) and has {has}; largest "
        f"parts: {largest}"
    )
