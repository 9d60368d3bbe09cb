"""Rewind a training run: set its checkpoints after a step aside, so that it resumes there.

Promises: nothing is deleted, and nothing is moved unless the run is idle and the checkpoint to
continue from is whole. A kill leaves a run that continues from one of its checkpoints; the same
command then moves the rest.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.train import Train, read_train
from pipeline_lib.core.errors import ConfigError, IntegrityError, Interrupted, PipelineError
from pipeline_lib.core.events import EventLog
from pipeline_lib.core.files import read_json
from pipeline_lib.core.lock import describe, holder, locked
from pipeline_lib.core.run_folder import (
    CHECKPOINTS,
    EVENTS_NAME,
    STATE_NAME,
    sealed_steps,
    set_all_aside,
    steps_after,
)
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import Spec, Store, verify
from pipeline_lib.train.guards import Window

COMMAND = "rewind --step"


def rewind(training: Spec, step: int, store: Store, say: Say) -> None:
    """Set the checkpoints of `training` after `step` aside.

    Raises ConfigError if there is no checkpoint of `step`, IntegrityError if it is damaged,
    Interrupted while a process works on the run, and PipelineError if the training is finished.
    """
    run = store.run_dir(run_digest(training))
    lock = store.lock_path(run.name)

    def refuse(_: str) -> None:
        owner = holder(lock) or {}
        job = owner.get("slurm_job")
        how = f"`scancel {job}`" if job else "Ctrl-C where it runs"
        raise Interrupted(
            f"{run}: {describe(owner)} works on this run; stop that first ({how}); nothing was "
            "moved"
        )

    with locked(lock, refuse):
        if store.is_sealed(training.ref):
            raise _finished(store.sealed(training.ref), step)
        saved = dict(sealed_steps(run / CHECKPOINTS))
        if step not in saved:
            raise ConfigError(COMMAND, [_no_checkpoint(run, step, list(saved))])
        _require_whole(saved, step)
        for warning in _warnings(saved, step, read_train(training.settings)):
            say(f"warning: {warning}")
        newer = steps_after(run / CHECKPOINTS, step)
        if not newer:
            say(
                f"{run}: step {step} is the newest checkpoint, so nothing was moved; snakemake "
                "continues from it"
            )
            return
        for name, aside in set_all_aside(newer, step, EventLog(run / EVENTS_NAME)).items():
            say(f"{name} is now {aside}")
    say(
        f"{run}: snakemake continues from step {step}. `qwen3 store restore PATH` "
        "brings a checkpoint back, and `store gc` removes those in set-aside"
    )


def _finished(sealed: Path, step: int) -> PipelineError:
    return PipelineError(
        f"{sealed}: this training is finished, and snakemake has nothing to continue. To use the "
        f"model of step {step}, set train.until_step: {step}. To start another run, change the "
        f"config or set train.replica. To repeat the steps after {step}, remove {sealed} first"
    )


def _no_checkpoint(run: Path, step: int, steps: list[int]) -> str:
    if not steps:
        return f"{step}: this run has no checkpoints ({run})"
    known = ", ".join(map(str, steps))
    return f"{step}: no checkpoint of this step; available steps: {known} ({run / CHECKPOINTS})"


def _require_whole(saved: Mapping[int, Path], step: int) -> None:
    """Raise IntegrityError unless every byte of the checkpoint of `step` verifies."""
    try:
        verify(saved[step])
    except IntegrityError as error:
        others = ", ".join(str(other) for other in saved if other != step)
        remedy = "without it the training starts over"
        if others:
            remedy = f"rewind to another step: {others}"
        raise IntegrityError(
            f"step {step} is damaged, so nothing was moved; {remedy} ({error})"
        ) from error


def _warnings(saved: Mapping[int, Path], step: int, train: Train) -> Iterator[str]:
    """Yield what the run had at `step` and lost since, as it keeps `keep_last` checkpoints."""
    state = read_json(saved[step] / STATE_NAME)
    window = Window(train.guards)
    if "window" in state:
        window = Window.from_json(train.guards, state["window"])
    back = window.step_before(step)
    if back > 0 and back not in saved and not window.has_rolled_back:
        earlier = max((one for one in saved if one < back), default=0)
        yield (
            f"step {back}, to which the guards would go back from there, has no checkpoint any "
            f"more: if they skip too many steps, the run computes the steps after {earlier} again"
        )
    best = state.get("validations", {}).get("best_step")
    if train.keep_best and best and best not in saved:
        yield (
            f"step {best} had the lowest held-out loss by then, but its checkpoint is gone: it "
            "cannot be the result"
        )
