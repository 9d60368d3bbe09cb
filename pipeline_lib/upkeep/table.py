"""What lies in a store, what it takes and what goes of it, as lines for a terminal."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline_lib.publish.units import columns, count, size
from pipeline_lib.status.rest import shown
from pipeline_lib.upkeep.gc import Garbage
from pipeline_lib.upkeep.inventory import Inventory, Made
from pipeline_lib.upkeep.live import ago
from pipeline_lib.upkeep.removal import Removal
from pipeline_lib.upkeep.shares import Share, by_stage

LARGEST = 20  # experiments that `du` shows without being asked for
NAMES = 3  # of experiments that use a directory
OTHERS = "of another store, or of no stage that is known here"


def experiment_lines(found: Sequence[Share], inventory: Inventory, now_s: float) -> list[str]:
    """A line for each name, and what no experiment names."""
    rows: list[tuple[str, ...]] = [("experiment", "configs", "stages", "own", "shared", "checkpoints", "used", "")]
    rows += [_share_row(share, now_s) for share in found]
    orphans = [one for one in inventory.made if one.ref.digest not in inventory.users]
    lines = columns(rows) if found else [f"{inventory.store.root}: no experiments"]
    if orphans or inventory.leftovers:
        taken = size(sum(one.bytes for one in orphans) + sum(one.bytes for one in inventory.leftovers))
        left = count(len(inventory.leftovers), "leftovers of killed jobs")
        lines.append(f"named by no experiment: {_directories(len(orphans))} and {left}, {taken}")
    return lines


def directory_lines(inventory: Inventory, digests: set[str] | None, now_s: float) -> list[str]:
    """A line for each stage directory, run folder and leftover; with `digests` only for those."""
    rows = [("what", "digest", "size", "state", "used", "by")]
    made = [one for one in inventory.made if digests is None or one.ref.digest in digests]
    rows += [
        (one.ref.stage, one.ref.digest, size(one.bytes), one.state, ago(now_s - one.used_at), _by(inventory, one))
        for one in made
    ]
    for run in inventory.runs:
        if digests is None or run.name in digests:
            saved = f"{size(run.checkpoint_bytes)} of checkpoints" if run.checkpoint_bytes else ""
            rows.append(("run", run.name, size(run.bytes), "", ago(now_s - run.used_at), saved))
    lines = columns(rows)
    if digests is None:
        lines += [f"left by a killed job: {_path(left.path)}, {size(left.bytes)}" for left in inventory.leftovers]
        lines += [f"{OTHERS}: {_path(one.path)}, {size(one.bytes)}" for one in inventory.others]
        lines += [f"nothing that a stage makes: {_path(path)}" for path in inventory.foreign]
    lines += [f"{one.state}: {shown(one.reason)}" for one in made if one.reason]
    return lines


def use_lines(inventory: Inventory, logs: Path, found: Sequence[Share], is_named: bool) -> list[str]:
    """Bytes by stage and by experiment, the largest first."""
    uses = [] if is_named else by_stage(inventory, logs)
    rows = [(use.what, f"{use.count:,}", size(use.bytes)) for use in uses]
    whole = [("together", "", size(sum(use.bytes for use in uses)))]
    lines = [*columns([("what", "count", "size"), *rows, *whole]), ""] if rows else []
    largest = sorted(found, key=lambda share: -share.own - share.checkpoints)
    some = largest if is_named else largest[:LARGEST]
    lines += columns(
        [("experiment", "own", "shared", "checkpoints")]
        + [(shown(one.name), size(one.own), size(one.shared), size(one.checkpoints)) for one in some]
    )
    if others := largest[len(some) :]:
        own = size(sum(one.own + one.checkpoints for one in others))
        lines.append(f"and {count(len(others), 'experiments')} with {own} of their own; name them to see them")
    return lines


def garbage_lines(garbage: Garbage, is_all_kept: bool) -> Iterator[str]:
    """What goes, what stays though it was not asked for, and the sum."""
    inventory = garbage.inventory
    going = {one.ref.digest for one in garbage.made}
    for experiment in garbage.experiments:
        parts = [inventory.by_digest[digest] for digest in set(experiment.parts.values()) & going]
        name = f"{shown(experiment.name)} ({experiment.path.stem})"
        yield f"experiment {name}: {_directories(len(parts))}, {size(sum(one.bytes for one in parts))}"
    rows = [(one.ref.stage, one.ref.digest, size(one.bytes), _by(inventory, one)) for one in garbage.made]
    rows += [("run", run.name, size(run.bytes), "") for run in garbage.runs]
    rows += [("leftover", _path(left.path), size(left.bytes), "") for left in garbage.leftovers]
    yield from columns(rows)
    for pattern in garbage.unmatched:
        yield f"warning: no experiment matches {shown(pattern)!r}, which keeps nothing"
    for path, why in garbage.spared.items():
        name = next(one.name for one in inventory.experiments if one.path == path)
        yield f"kept though not named: {shown(name)} ({path.stem}): {shown(why)}"
    if others := inventory.others:
        yield f"left alone in runs/, {OTHERS}: {len(others):,}, {size(sum(one.bytes for one in others))}"
    if is_all_kept:
        yield "all experiments are kept, since --keep-experiments does not say which"
    yield f"{count(len(garbage.kept), 'experiments')} kept; {_sum_line(garbage)}"


def removal_lines(removal: Removal) -> Iterator[str]:
    """What came of it."""
    for line in removal.left:
        yield f"left alone: {shown(line)}"
    yield f"removed {_directories(len(removal.removed))}, {size(removal.bytes)}"


def _sum_line(garbage: Garbage) -> str:
    parts = (
        count(len(garbage.experiments), "experiments"),
        _directories(len(garbage.made)),
        count(len(garbage.runs), "runs"),
        count(len(garbage.leftovers), "leftovers"),
        count(len(garbage.specs), "specs"),
    )
    return f"{', '.join(parts)} go: {size(garbage.bytes)}"


def _share_row(share: Share, now_s: float) -> tuple[str, ...]:
    said = f"{_directories(share.damaged)} damaged" if share.damaged else ""
    if any(one.unreadable for one in share.configs):
        said = "its file cannot be read"
    elif not share.parts:
        said = "not a frozen experiment; delete it and run snakemake anew"
    stages = f"{share.sealed}/{share.parts}"
    sizes = (size(share.own), size(share.shared), size(share.checkpoints))
    return shown(share.name), str(len(share.configs)), stages, *sizes, ago(now_s - share.used_at), said


def _by(inventory: Inventory, one: Made) -> str:
    names = list(dict.fromkeys(shown(user.name) for user in inventory.users.get(one.ref.digest, [])))
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more if names else "orphan: no experiment names it"


def _directories(number: int) -> str:
    return "1 directory" if number == 1 else f"{number:,} directories"


def _path(path: Path) -> str:
    return shown(str(path))
