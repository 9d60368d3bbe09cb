"""Advice on several nodes: differences, slow links, and what cannot be reached."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations
from statistics import median

from pipeline_lib.core.units import count
from pipeline_lib.doctor.advice import advice
from pipeline_lib.doctor.facts import UNMEASURED
from pipeline_lib.doctor.nodes import Findings
from pipeline_lib.doctor.report import flat

SLOW = 0.5  # of the rate of other pairs
SLOW_OF_LINK = 0.25  # of the nominal speed of the interfaces
CPU_LINK_MBIT = 10_000  # a single gloo stream cannot saturate a faster link
LESS = 0.95
CLOCK_S = 1.0
GBIT = 8 / 1e9

# Facts that must be equal on all nodes, and the remedy if they are not.
_SAME = {
    "versions": "run the same environment on all nodes: a shared folder, or the same container",
    "torch": "run the same environment on all nodes: a shared folder, or the same container",
    "GPUs": "ask for nodes of one kind (`constraint` in the site file)",
    "processors": "ask for nodes of one kind (`constraint` in the site file)",
    "limits": "have the limits of the nodes made equal",
}
_NOT_COMPARED = (
    "memory_used",
    "sm_clock_mhz",
    "load_1_min",
    "allowed",
    "cgroup_limit",
    "_free_bytes",
    "system",
)


def together(found: Findings) -> list[str]:
    """Return what is wrong by every rule, in the order of the report."""
    rules = (_failures, _stores, _differences, _odd_nodes, _slow_pairs, _slow_links, _sockets)
    problems: list[str] = []
    for rule in rules:
        problems += rule(found)
    problems += _once({name: advice(facts) for name, facts in found.nodes.items()})
    return problems


def _once(problems: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield each text of `problems`, which are by node, once, after the names of all its nodes."""
    by_text: dict[str, list[str]] = {}
    for name, texts in problems.items():
        for text in texts:
            by_text.setdefault(text, []).append(name)
    for text, names in by_text.items():
        yield f"{', '.join(names)}: {text}"


def _failures(found: Findings) -> Iterator[str]:
    yield from _once(found.failures)
    for number, name in sorted(found.numbers.items()):
        if "versions" not in found.nodes.get(name, {}):
            yield f"{name}: node {number} told nothing of itself in time"
    if (silent := found.asked - len(found.numbers)) > 0:
        yield f"{silent} of {count(found.asked, 'nodes')} told nothing at all"
    all_pairs = found.asked * (found.asked - 1) // 2
    is_incomplete = silent > 0 or found.failures or len(found.pairs) < all_pairs
    if found.said and is_incomplete:
        speaker = "SLURM says:" if found.job else "the hosts say:"
        yield "\n      ".join([speaker, *found.said[:6]])
    names = [found.numbers[number] for number in sorted(found.numbers)]
    if len(found.pairs) < len(names) * (len(names) - 1) // 2:
        measured = {frozenset((pair.first, pair.second)) for pair in found.pairs}
        missing = [f"{a} <-> {b}" for a, b in combinations(names, 2) if {a, b} not in measured]
        more = " ..." if len(missing) > 8 else ""
        yield (
            f"no exchange between {', '.join(missing[:8])}{more}: "
            "can the nodes reach each other by the interface that was taken? Name another in "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        )


def _stores(found: Findings) -> Iterator[str]:
    for name, facts in found.nodes.items():
        if reason := facts.get("store", {}).get(UNMEASURED):
            yield (
                f"{name} cannot use the store: {reason}; PIPELINE_STORE has to be a folder that "
                "all nodes share"
            )
    for name in found.unseen:
        yield (
            f"{name} wrote into the store, and it is not seen here: its folder of that name is "
            "another one; set PIPELINE_STORE to a folder that all nodes share"
        )


def _differences(found: Findings) -> Iterator[str]:
    for section, remedy in _SAME.items():
        names = {name: dict(flat(facts.get(section, {}))) for name, facts in found.nodes.items()}
        for what in sorted(set(chain(*names.values()))):
            if any(part in what for part in _NOT_COMPARED):
                continue
            values = {name: str(facts.get(what, "nothing")) for name, facts in names.items()}
            if len(set(values.values())) > 1 and UNMEASURED not in what:
                yield f"{section} {what}: {grouped(values)}; {remedy}"


def grouped(values: dict[str, str]) -> str:
    """Return text like `2.11 on n1, n2; 2.10 on n3`, the most common value first."""
    counts = Counter(values.values())
    parts = []
    for value, _ in counts.most_common():
        names = [name for name, own in values.items() if own == value]
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        parts.append(f"{value} on {', '.join(names[:6])}{more}")
    return "; ".join(parts)


def _odd_nodes(found: Findings) -> Iterator[str]:
    """Report nodes with other code, less host memory than others, or a clock that differs.

    The code is compared with this machine's.
    """
    other = []
    totals: dict[str, int] = {}
    for name, facts in found.nodes.items():
        if "code" in facts and facts["code"]["pipeline_lib"] != found.code_here:
            other.append(name)
        total = facts.get("memory", {}).get("total_bytes")
        if total is not None:
            totals[name] = total
    if other:
        yield (
            f"{', '.join(other)}: pipeline_lib is not the one of this machine; run from a clone "
            "that all nodes share"
        )
    most = max(totals.values(), default=0)
    for name, total in totals.items():
        if total < LESS * most:
            yield (
                f"{name} has {total / 1e9:.0f} GB of host memory, where others have "
                f"{most / 1e9:.0f} GB; ask for no more (cluster.memory_gb), or leave it out"
            )
    for name, ahead_s in found.clocks.items():
        if abs(ahead_s) > CLOCK_S:
            way = "ahead of" if ahead_s > 0 else "behind"
            yield (
                f"the clock of {name} is {abs(ahead_s):.1f} s {way} that of {found.name_of(0)}; "
                "have its time service"
                " checked: whether a lock is stale is told by the times of files"
            )


def _slow_pairs(found: Findings) -> Iterator[str]:
    pairs = found.pairs
    if not pairs:
        return
    rates = sorted(pair.worst for pair in pairs)
    # A good pair is the 80th percentile: with 3 nodes, one slow node makes 2 of 3 pairs slow.
    good = rates[min(len(rates) - 1, int(0.8 * len(rates)))]
    middle = median(rates)
    slow = [pair for pair in pairs if pair.worst < SLOW * good]
    for pair in sorted(slow, key=lambda pair: pair.worst):
        yield (
            f"{pair.first} <-> {pair.second}: {pair.worst * GBIT:.3g} Gbit/s, the median of the "
            f"pairs is {middle * GBIT:.3g}, the fast ones have {good * GBIT:.3g}"
        )
    for name in found.numbers.values():
        own = [pair for pair in pairs if name in (pair.first, pair.second)]
        if len(pairs) > len(own) and own and all(pair in slow for pair in own):
            yield (
                f"{name}: all of its pairs are slow, so it is its own link; have it checked, and "
                "leave the node out"
            )
    for pair in pairs:
        fast = max(pair.there, pair.back)
        low = pair.worst
        if pair not in slow and low < SLOW * fast:
            way = f"{pair.first} -> {pair.second}"
            if pair.back <= pair.there:
                way = f"{pair.second} -> {pair.first}"
            yield (
                f"{way}: {low * GBIT:.3g} Gbit/s, and {fast * GBIT:.3g} the other "
                "way; have the link checked"
            )


def _slow_links(found: Findings) -> Iterator[str]:
    """Report if the best pair is far below the nominal speed; two nodes have no other pair.

    The nominal speed is that of the interfaces.
    """
    speeds = []
    for facts in found.nodes.values():
        interface = facts.get("between nodes", {}).get("interface", "")
        speed = facts.get("network", {}).get(interface, {}).get("mbit_per_s", "?")
        if isinstance(speed, int | float) and speed > 0:
            speeds.append(float(speed))
    if not speeds or not found.pairs:
        return
    link = min(speeds)
    if found.device != "cuda":
        link = min(link, CPU_LINK_MBIT)
    good = max(max(pair.there, pair.back) for pair in found.pairs) * GBIT
    if good < SLOW_OF_LINK * link / 1000:
        yield (
            f"the best pairs send {good:.3g} Gbit/s through interfaces of {link / 1000:g} Gbit/s; "
            "is the network shared or limited, or another interface the right one "
            "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)?"
        )


def _sockets(found: Findings) -> Iterator[str]:
    for name, facts in found.nodes.items():
        active = []
        for port, text in facts.get("network", {}).items():
            if " port " in port and "ACTIVE" in str(text):
                active.append(port)
        used = facts.get("between nodes", {}).get("transports", [])
        if active and any(transport.startswith("NET/Socket") for transport in used):
            yield (
                f"{name}: NCCL sends through TCP sockets, although {', '.join(active)} is active; "
                "unset NCCL_IB_DISABLE, name it in NCCL_IB_HCA, and let the job lock memory "
                "(`ulimit -l unlimited`)"
            )


def to_set(found: Findings) -> list[str]:
    """Return the settings for the config and the environment that follow from the measurements."""
    lines = []
    nodes = len(found.numbers)
    if rate := found.sent_gbit_s:
        why = f"what a node sends while all ranks reduce {max(found.all_reduce) / 1e6:.3g} MB"
        lines.append(f"cluster.internode_gbit_s: {rate:.3g}   # {why}")
    used = {}
    transports = set()
    for name, facts in found.nodes.items():
        between = facts.get("between nodes", {})
        used[name] = between.get("interface", "")
        transports.update(between.get("transports", []))
    if any(used.values()) and nodes > 1:
        kinds = sorted(set(filter(None, used.values())))
        how = f"NCCL_SOCKET_IFNAME={','.join(kinds)} and GLOO_SOCKET_IFNAME={kinds[0]}"
        if not found.job:
            how = f"`interface: {kinds[0]}` in the site file, or PIPELINE_INTERFACE"
        named = grouped(used) if len(kinds) > 1 else kinds[0]
        lines.append(f"interface between the nodes: {named}   # to name it: {how}")
    if transports:
        lines.append(f"NCCL sends through {', '.join(sorted(transports))}")
    return lines
