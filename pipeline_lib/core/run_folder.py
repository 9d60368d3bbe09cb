"""The folder of a run: its file names, and which checkpoints exist, are valid and are kept."""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pipeline_lib.core import files
from pipeline_lib.core.errors import IntegrityError, Interrupted, PipelineError
from pipeline_lib.core.events import EventLog, EventName
from pipeline_lib.core.files import is_there
from pipeline_lib.core.lock import locked
from pipeline_lib.core.store import MANIFEST_NAME, verify

CHECKPOINTS, ERRORS, HEARTBEATS = "checkpoints", "errors", "heartbeats"
SET_ASIDE = "set-aside"  # whole checkpoints after the one that their run was rewound to
STATE_NAME = "state.json"  # of a checkpoint: its scalars
WEIGHTS = "weights"  # folder of a checkpoint, and of the result
EVENTS_NAME, METRICS_NAME = "events.jsonl", "metrics.jsonl"
# Sealed by the training stage together with these two.
PLAN_NAME, SUMMARY_NAME = "plan.json", "summary.json"

Reject = Callable[[Path, str], None]
_STEP_NAME = re.compile(r"step-(\d{8})")
_REJECTED = "rejected-"
_ASIDE_NAME = re.compile(r"(step-\d{8})(?:\.\d+)?")


def step_name(step: int) -> str:
    """Return the folder name of the checkpoint after `step`."""
    return f"step-{step:08d}"


def sealed_steps(folder: Path) -> list[tuple[int, Path]]:
    """Return the steps whose checkpoint has a manifest, with their folders, ascending.

    Raises Unreadable if that cannot be determined.
    """
    try:
        with files.unreadable_named(folder):
            found = [(_STEP_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
            return sorted(
                (int(match[1]), path)
                for match, path in found
                if match and is_there(path / MANIFEST_NAME)
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def newest_valid(folder: Path, max_step: int, reject: Reject) -> Path | None:
    """Return the latest checkpoint up to `max_step` whose every byte verifies, or None.

    Each damaged one is set aside and reported to `reject`. Raises Unreadable as `first_valid` does.
    """
    return first_valid(
        (path for step, path in reversed(sealed_steps(folder)) if step <= max_step), reject
    )


def first_valid(checkpoints: Iterable[Path], reject: Reject) -> Path | None:
    """Return the first of `checkpoints` whose every byte verifies, or None.

    Each damaged one before it is set aside and reported to `reject`. Raises Unreadable if a
    checkpoint cannot be read; it is then not set aside.
    """
    for path in checkpoints:
        try:
            verify(path)
        except IntegrityError as error:
            aside = path.with_name(f"{_REJECTED}{path.name}")
            files.remove_dir(aside)
            path.rename(aside)
            command = f"qwen3 store restore {shlex.quote(str(aside))}"
            reject(aside, f"{error}; if you mend it, `{command}` brings it back")
            continue
        return path
    return None


def steps_after(folder: Path, step: int) -> list[Path]:
    """Return the sealed checkpoints after `step`, the newest first.

    Set aside in this order, they leave at any moment a run that was interrupted earlier. Raises as
    `sealed_steps`.
    """
    return [path for saved, path in reversed(sealed_steps(folder)) if saved > step]


def set_all_aside(newer: Sequence[Path], step: int, events: EventLog) -> dict[str, Path]:
    """Set checkpoints `newer` than `step` aside, in order; return each one's new path by name."""
    # The event comes first, since a kill could separate the two.
    events.emit(EventName.RUN_REWOUND, step=step, set_aside=[path.name for path in newer])
    return {path.name: set_aside(path) for path in newer}


def set_aside(checkpoint: Path) -> Path:
    """Move `checkpoint` in one step from the run's checkpoints to SET_ASIDE; return its new path.

    SET_ASIDE is a folder of the run. A number is appended to its name if an earlier checkpoint of
    this step is there. The caller holds the run's lock.
    """
    folder = checkpoint.parent.parent / SET_ASIDE
    folder.mkdir(exist_ok=True)
    aside = folder / checkpoint.name
    number = 1
    while is_there(aside):
        number += 1
        aside = folder / f"{checkpoint.name}.{number}"
    checkpoint.rename(aside)
    os.utime(aside)  # its age counts from now
    for changed in (folder, checkpoint.parent):
        files.fsync_path(changed)
    return aside


def restore(aside: Path) -> Path:
    """Rename the checkpoint set aside as `aside` back, if it now verifies; return its path.

    Raises IntegrityError if it is damaged, Interrupted while another process works on its run, and
    PipelineError if it was not set aside or its step was saved again.
    """
    run = aside.parent.parent
    name = _name_before(aside)
    if name is None:
        raise PipelineError(
            f"{aside}: not a checkpoint that was set aside, runs/DIGEST/{SET_ASIDE}/step-N or "
            f"runs/DIGEST/{CHECKPOINTS}/{_REJECTED}step-N"
        )
    path = run / CHECKPOINTS / name

    def refuse(busy: str) -> None:
        raise Interrupted(f"{busy}; end that first")

    with locked(run.parent / "locks" / run.name, refuse):
        if is_there(path):
            raise PipelineError(f"{path}: this step was saved again; delete that, or {aside}")
        verify(aside)
        aside.rename(path)
    return path


def _name_before(aside: Path) -> str | None:
    """Return the name a checkpoint had before it was set aside as `aside`, or None."""
    if aside.parent.name == SET_ASIDE:
        match = _ASIDE_NAME.fullmatch(aside.name)
        return match[1] if match else None
    name = aside.name.removeprefix(_REJECTED)
    is_rejected = (
        name != aside.name and _STEP_NAME.fullmatch(name) and aside.parent.name == CHECKPOINTS
    )
    return name if is_rejected else None


def retain(
    folder: Path,
    keep_last: int,
    step: int,
    best_step: int = 0,
    kept_with: Callable[[int], set[int]] = lambda _: set(),
) -> None:
    """Delete sealed checkpoints up to `step` except `keep_last` of them and the one of `best_step`.

    These are the newest, with what a run that continues from the oldest of them needs by
    `kept_with`: that counts as one of them, beside at least the newest. Checkpoints after `step`
    belong to a longer run and stay.
    """
    reached = {saved: path for saved, path in sealed_steps(folder) if saved <= step}
    newest = list(reached)[-keep_last:]
    needed = kept_with(min(newest, default=0)) & reached.keys()
    if keep_last > 1 and not needed.issubset(newest):
        newest = newest[1:]
        needed = kept_with(min(newest, default=0)) & reached.keys()
    for saved, path in reached.items():
        if saved not in {*newest, *needed, best_step}:
            files.remove_dir(path)
