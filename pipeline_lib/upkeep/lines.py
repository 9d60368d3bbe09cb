"""Lines for a terminal: the contents of a store, their sizes, and what goes."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pipeline_lib.core.units import columns, count, size
from pipeline_lib.status.at_rest import shown
from pipeline_lib.upkeep.garbage import Garbage
from pipeline_lib.upkeep.inventory import Inventory, Leftover, Made, RunFolder, chosen
from pipeline_lib.upkeep.live import ago
from pipeline_lib.upkeep.removal import Removal
from pipeline_lib.upkeep.usage import Share, by_stage

LARGEST = 20  # experiments that `du` shows without being asked for
NAMES = 3  # of experiments that use a directory
OTHERS = "of another store or an unknown stage"


def experiment_lines(found: Sequence[Share], inventory: Inventory, now_s: float) -> list[str]:
    """Return a line for each experiment name, and one for what no experiment names."""
    rows = [("experiment", "configs", "stages", "own", "shared", "checkpoints", "used", "")]
    for share in found:
        row = (
            shown(share.name),
            str(len(share.configs)),
            f"{share.sealed}/{share.parts}",
            size(share.own),
            size(share.shared),
            size(share.checkpoints),
            ago(now_s - share.used_at),
            _problem(share),
        )
        rows.append(row)
    unused = [one for one in inventory.made if one.ref.digest not in inventory.users]
    lines = columns(rows) if found else [f"{inventory.store.root}: no experiments"]
    if unused or inventory.leftovers:
        total = size(_bytes(unused) + _bytes(inventory.leftovers))
        left = count(len(inventory.leftovers), "leftovers of killed jobs")
        lines.append(f"used by no experiment: {_directories(len(unused))} and {left}, {total}")
    return lines


def _problem(share: Share) -> str:
    if any(one.unreadable for one in share.configs):
        return "its file cannot be read"
    if not share.parts:
        return "not a valid experiment file; delete it and run snakemake again"
    if share.damaged:
        return f"{_directories(share.damaged)} damaged"
    return ""


def directory_lines(inventory: Inventory, digests: set[str] | None, now_s: float) -> list[str]:
    """Return a line for each stage directory, run folder and leftover, or those of `digests`."""
    rows = [("what", "digest", "size", "state", "used", "by")]
    made, runs = chosen(inventory, digests)
    aside: list[Leftover] = []
    for one in made:
        used = ago(now_s - one.used_at)
        users = _by(inventory, one)
        rows.append((one.ref.stage, one.ref.digest, size(one.bytes), one.state, used, users))
    for run in runs:
        saved = f"{size(run.checkpoint_bytes)} of checkpoints" if run.checkpoint_bytes else ""
        rows.append(("run", run.name, size(run.bytes), "", ago(now_s - run.used_at), saved))
        aside += run.set_aside
    lines = columns(rows)
    for left in aside:
        lines.append(f"set aside by rewind: {_path(left.path)}, {size(left.bytes)}")
    if digests is None:
        for left in inventory.leftovers:
            lines.append(f"left by a killed job: {_path(left.path)}, {size(left.bytes)}")
        for other in inventory.others:
            lines.append(f"{OTHERS}: {_path(other.path)}, {size(other.bytes)}")
        for path in inventory.foreign:
            lines.append(f"not made by any stage: {_path(path)}")
    for one in made:
        if one.reason:
            lines.append(f"{one.state}: {shown(one.reason)}")
    return lines


def use_lines(
    inventory: Inventory, logs: Path, found: Sequence[Share], is_named: bool
) -> list[str]:
    """Return lines of the bytes by stage and by experiment, the largest first."""
    lines = []
    if not is_named:
        uses = [("what", "count", "size")]
        total = 0
        for what, number, taken in by_stage(inventory, logs):
            uses.append((what, f"{number:,}", size(taken)))
            total += taken
        uses.append(("together", "", size(total)))
        lines += columns(uses)
        lines.append("")
    largest = sorted(found, key=lambda share: -share.own - share.checkpoints)
    some = largest if is_named else largest[:LARGEST]
    rows = [("experiment", "own", "shared", "checkpoints")]
    for one in some:
        rows.append((shown(one.name), size(one.own), size(one.shared), size(one.checkpoints)))
    lines += columns(rows)
    if others := largest[len(some) :]:
        own = size(sum(one.own + one.checkpoints for one in others))
        lines.append(
            f"and {count(len(others), 'experiments')} with {own} of their own; give their names to "
            "list them"
        )
    return lines


def garbage_lines(garbage: Garbage, is_all_kept: bool) -> Iterator[str]:
    """Yield lines of what goes, what stays without being asked for, and the total."""
    inventory = garbage.inventory
    going = {one.ref.digest for one in garbage.made}
    for experiment in garbage.experiments:
        parts = [inventory.by_digest[digest] for digest in set(experiment.parts.values()) & going]
        name = f"{shown(experiment.name)} ({experiment.path.stem})"
        yield f"experiment {name}: {_directories(len(parts))}, {size(_bytes(parts))}"
    rows = []
    for one in garbage.made:
        rows.append((one.ref.stage, one.ref.digest, size(one.bytes), _by(inventory, one)))
    for run in garbage.runs:
        rows.append(("run", run.name, size(run.bytes), ""))
    for left in garbage.leftovers:
        rows.append(("leftover", _path(left.path), size(left.bytes), ""))
    yield from columns(rows)
    for pattern in garbage.unmatched:
        yield f"warning: no experiment matches {shown(pattern)!r}, so this pattern keeps nothing"
    for path, why in garbage.spared.items():
        name = next(one.name for one in inventory.experiments if one.path == path)
        yield f"also kept: {shown(name)} ({path.stem}): {shown(why)}"
    if others := inventory.others:
        yield f"not removed from runs/, {OTHERS}: {len(others):,}, {size(_bytes(others))}"
    if is_all_kept:
        yield "all experiments are kept: --keep-experiments was not given"
    total_bytes = _bytes(garbage.made) + _bytes(garbage.runs) + _bytes(garbage.leftovers)
    totals = (
        count(len(garbage.experiments), "experiments"),
        _directories(len(garbage.made)),
        count(len(garbage.runs), "runs"),
        count(len(garbage.leftovers), "leftovers"),
        count(len(garbage.specs), "specs"),
    )
    yield (
        f"{count(len(garbage.kept), 'experiments')} kept; {', '.join(totals)} go: "
        f"{size(total_bytes)}"
    )


def removal_lines(removal: Removal) -> Iterator[str]:
    """Yield lines of the outcome of a removal."""
    for line in removal.left:
        yield f"left alone: {shown(line)}"
    yield f"removed {_directories(len(removal.removed))}, {size(_bytes(removal.removed))}"


def _by(inventory: Inventory, one: Made) -> str:
    users = inventory.users.get(one.ref.digest)
    if not users:
        return "unused: no experiment uses it"
    names = list(dict.fromkeys(shown(user.name) for user in users))
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more


def _bytes(directories: Iterable[Made | RunFolder | Leftover]) -> int:
    return sum(one.bytes for one in directories)


def _directories(number: int) -> str:
    return "1 directory" if number == 1 else f"{number:,} directories"


def _path(path: Path) -> str:
    return shown(str(path))
