"""The training loop of one rank, from the newest checkpoint to the last step."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipeline_lib.arch.geometry import FP32_BYTES
from pipeline_lib.config.train import AUTO, EPOCH, Train
from pipeline_lib.core.errors import CONTINUES, Diverged, IntegrityError, Interrupted
from pipeline_lib.core.events import EventLog, EventName
from pipeline_lib.core.run_folder import (
    SET_ASIDE,
    WEIGHTS,
    first_valid,
    newest_valid,
    sealed_steps,
    set_all_aside,
    step_name,
    steps_after,
)
from pipeline_lib.data import order
from pipeline_lib.data.blocks import BlockReader
from pipeline_lib.data.documents import key_of
from pipeline_lib.model.batch import Batch, BatchShare
from pipeline_lib.records.record import to_json
from pipeline_lib.records.training import Step
from pipeline_lib.train import checkpoint, saved_tensors, state
from pipeline_lib.train.checkpoint import StateSnapshot
from pipeline_lib.train.dist import LOADING
from pipeline_lib.train.guards import Verdict, Window, judge
from pipeline_lib.train.measure import Instruments
from pipeline_lib.train.metrics import MetricsRows
from pipeline_lib.train.replicas import refuse_differing_replicas
from pipeline_lib.train.saver import Saver
from pipeline_lib.train.state import state_kinds
from pipeline_lib.train.step import Stepper, StepResult
from pipeline_lib.train.together import together
from pipeline_lib.train.validation import Sampler, Validations, held_out_loss


def learning_rate(train: Train, step: int, steps: int) -> float:
    """Return the learning rate of the update that makes `step` (from 1) of `steps`.

    It rises linearly over the warm-up to the peak, and falls so that an update after the last one
    would have `min_lr_fraction` of the peak: every update learns. `wsd` falls only over the last
    `decay_fraction` of the steps, and `constant` not at all. Cosine and linear are transformers'
    rates: without a warm-up those of as many steps; with one those of a step more, whose first
    update has a rate of 0 there.
    """
    warmup_steps = (
        math.ceil(train.warmup_fraction * steps)
        if train.warmup_steps is None
        else train.warmup_steps
    )
    if step <= warmup_steps:
        return train.lr * step / warmup_steps
    if train.lr_schedule == "constant":
        return train.lr
    decay_steps = math.ceil(train.decay_fraction * steps) if train.lr_schedule == "wsd" else steps
    peak = max(1, warmup_steps, steps - decay_steps)  # the last step before the rate falls
    progress = max(0, step - peak) / (steps - peak + 1)
    remaining = (
        (1 + math.cos(math.pi * progress)) / 2 if train.lr_schedule == "cosine" else 1 - progress
    )
    return train.lr * (train.min_lr_fraction + (1 - train.min_lr_fraction) * remaining)


LISTED_BLOCKS = 16  # per step, in a message; the events name all
LISTED_TENSORS = 3


@dataclass(frozen=True)
class Batches:
    """This rank's micro-batches of every step, from (seed, step): resuming needs one integer."""

    reader: BlockReader
    seed: int
    batch_blocks: int
    micro_batch_blocks: int
    share: BatchShare

    def of_step(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of global step `step`, from 0."""
        blocks = self.blocks_of_step(step)
        key = key_of(self.seed, step)
        return list(self.share.batches(self.reader, blocks, self.micro_batch_blocks, key))

    def blocks_of_step(self, step: int) -> NDArray[np.int64]:
        """Return the numbers of the blocks of the whole global step `step`, from 0."""
        return order.step_blocks(self.seed, step, self.reader.index.groups, self.batch_blocks)

    def total_steps(self, train: Train) -> int:
        """Return the optimizer steps that the schedule of `train` spans."""
        return order.run_steps(train, self.reader.index.groups, self.batch_blocks)

    @property
    def epoch_steps(self) -> int:
        """Return the optimizer steps of the first epoch."""
        return order.epoch_steps(self.reader.index.groups, self.batch_blocks)

    def epochs(self, train: Train) -> float:
        """Return the epochs that the schedule of `train` spans."""
        return order.run_epochs(train, self.reader.index.groups, self.batch_blocks)

    def epoch_of(self, step: int) -> int:
        """Return the epoch that global step `step` belongs to, both from 0."""
        return order.epoch_of(step, self.reader.index.groups, self.batch_blocks)


@dataclass
class Loop:
    """Everything one rank needs to train.

    `last_step` is where to stop, `total_steps` what the schedule spans. `step` is the last global
    batch that was used; `updates` of those up to it changed the weights. `processor` is this rank's
    kind of CPU or GPU, `processors` the kinds of all ranks.
    """

    train: Train
    rows: MetricsRows
    stepper: Stepper
    instruments: Instruments
    batches: Batches
    held_out: BlockReader
    saver: Saver
    sampler: Sampler | None
    events: EventLog
    total_steps: int
    last_step: int
    attempt: int
    processor: str = ""
    processors: str = field(default="", init=False)
    window: Window = field(init=False)
    validations: Validations = field(default_factory=Validations, init=False)
    step: int = field(default=0, init=False)
    updates: int = field(default=0, init=False)
    saved_step: int = field(default=0, init=False)
    has_saved: bool = field(default=False, init=False)  # in this process
    checkpoint_wait_s: float = field(default=0.0, init=False)  # since the last row

    def __post_init__(self) -> None:
        """Begin with no steps."""
        self.window = Window(self.train.guards)

    def run(self, resume_from: Path | None) -> None:
        """Train up to `last_step`, saving on the way.

        Raises Interrupted after a save if asked to stop. Raises Diverged if the guards give up, and
        DiskFull or SaveFailed at the step after a save that failed.
        """
        self.stepper.warm_up(self.batches.of_step(self.step)[0])
        self.processors = " and ".join(self.agree_on([self.processor]))
        if resume_from is not None:
            self.restore(resume_from)
        self.events.emit(EventName.RUN_STEPS, step=self.step)
        start_s = time.monotonic()
        for step in range(self.step + 1, self.last_step + 1):
            if self.is_done:  # stopped early, before an interruption
                break
            batches, data_wait_s = self.instruments.prefetcher.take(step - 1)
            self.events.notify(EventName.STEP_BEGIN, step=step)
            with self.instruments.profiler.around(step):
                judge_step = partial(judge, self.window, self.train.precision == "fp16", step)
                readings = self.instruments.ranks.take(step)
                result = self.stepper.step(
                    batches,
                    self.lr_of(step),
                    judge_step,
                    self.saver.has_failed,
                    self.asks_to_save,
                    readings,
                )
            measured = self.instruments.fields(result, data_wait_s)
            self.step = step
            self.follow(result)
            self.record(
                step, result, time.monotonic() - start_s, self.validate_if_due(), **measured
            )
            every = self.train.sample_every_steps
            if self.sampler is not None and every is not None and step % every == 0:
                self.events.notify(EventName.RANK_DOING, what="sampling")
                self.sampler.answer(self.stepper.wrapped, self.stepper.strategy, step, self.events)
            if result.save_failed:
                self.saver.wait()
            self.saver.emit_completed()
            if self.must_save(result):
                self.save()
            if result.stop_agreed and self.saved_step == step and not self.is_done:
                self.saver.wait()
                raise Interrupted(
                    f"stopped by a signal after step {step}, which is saved; {CONTINUES}"
                )
        self.saver.wait()

    def lr_of(self, step: int) -> float:
        """Return the learning rate of `step`, from 1; steps without an update count too."""
        return learning_rate(self.train, step, self.total_steps)

    @property
    def is_done(self) -> bool:
        """Return whether there is nothing left to train."""
        return self.step >= self.last_step or self.has_stopped_early

    @property
    def has_stopped_early(self) -> bool:
        """Return whether the held-out loss has not improved for as long as the config allows."""
        patience = self.train.early_stop_validations
        return patience is not None and self.validations.without_gain >= patience

    @property
    def ranks_agree(self) -> bool:
        """Return whether all ranks hold the same model: with local SGD only after averaging."""
        return self.updates % self.train.local_sgd_steps == 0

    def follow(self, result: StepResult) -> None:
        """Carry out the guards' decision on the step. Raises Diverged if they gave up."""
        step = self.step
        verdict = result.judgement.verdict
        if verdict == Verdict.APPLY:
            self.updates += 1
            return
        self.events.emit(
            EventName.STEP_SKIPPED,
            step=step,
            verdict=verdict,
            reason=result.judgement.reason,
            loss=finite(result.loss),
            grad_norm=finite(result.grad_norm),
            blocks=self.batches.blocks_of_step(step - 1).tolist(),
        )
        if verdict == Verdict.ABORT:
            raise self.gave_up(result, "after going back to a checkpoint once")
        if verdict == Verdict.ROLL_BACK:
            self.roll_back(result)

    def roll_back(self, result: StepResult) -> None:
        """Undo the updates since the last step that is saved for this; its later batches stay used.

        Only the number of the first refused step decides which step that is. Raises Interrupted if
        it is not there.
        """
        first = min(self.window.recently_skipped(self.step), default=self.step)
        to_step = self.train.guards.step_before(first)
        self.events.notify(EventName.RANK_DOING, what=LOADING)
        self.saver.wait()
        if to_step == 0:
            self.stepper.strategy.begin_anew()
            self.updates, before = 0, Window(self.train.guards)
        else:
            path = self.choose(lambda: newest_valid(self.saver.folder, to_step, self.reject))
            if path is None or path.name != step_name(to_step):
                raise self.rewound(to_step, path)
            scalars = self.load(path)
            self.updates = int(scalars["updates"])
            before = Window.from_json(self.train.guards, scalars["window"])
        self.rows.undo_after(to_step)
        # refused steps stay refused
        self.window.accepted = before.accepted
        self.window.sizes = before.sizes
        self.events.emit(EventName.RUN_ROLLED_BACK, step=self.step, to_step=to_step)

    def rewound(self, to_step: int, before: Path | None) -> Interrupted:
        """Set aside the checkpoints after `before`, or all; return the error that ends the attempt.

        The checkpoint of `to_step` is missing. The next attempt computes the steps from `before` on
        again and saves `to_step` on the way, so its result is that of a run that had it. To go on
        from `before` at once would make the result depend on what happened to be saved.
        """
        folder = self.saver.folder
        is_first = self.stepper.world.is_first
        from_step = 0 if before is None else int(checkpoint.read_state(before)["step"])

        def set_newer_aside() -> None:
            if not is_first:
                return
            self.saver.lock.require()
            set_all_aside(steps_after(folder, from_step), from_step, self.events)

        together(self.saver.group, folder, set_newer_aside)
        start = "the start" if before is None else before.name
        return Interrupted(
            f"the guards go back from step {self.step} to step {to_step}, and "
            f"{folder / step_name(to_step)} is missing or damaged (earlier versions saved "
            f"multiples of train.save_every_steps alone). The run has to continue from {start}, "
            f"and saves step {to_step} on the way; later checkpoints are in "
            f"{folder.parent / SET_ASIDE} now; {CONTINUES}"
        )

    def gave_up(self, result: StepResult, why: str) -> Diverged:
        """Return the error of a run whose steps cannot be trusted."""
        steps = [*self.window.recently_skipped(self.step), self.step]
        texts = []
        for step in steps:
            blocks = self.batches.blocks_of_step(step - 1).tolist()
            more = f" and {len(blocks) - LISTED_BLOCKS} more" if len(blocks) > LISTED_BLOCKS else ""
            texts.append(f"step {step}: {', '.join(map(str, blocks[:LISTED_BLOCKS]))}{more}")
        return Diverged(
            f"gave up at step {self.step}: {result.judgement.reason} (loss {result.loss:.4g}, "
            f"gradient norm {result.grad_norm:.4g}). It is the last of {len(steps)} such steps "
            f"within {self.train.guards.window_steps}, {why}. Try a lower train.lr or a longer "
            f"warm-up, and look at the rows in these blocks of {self.batches.reader.folder}: "
            f"{'; '.join(texts)}"
        )

    def validate_if_due(self) -> float | None:
        """Return the held-out loss if due or at the end, NaN if it is not finite; else None."""
        every = self.train.validate_every_steps
        if every is None:
            return None
        is_due = self.ranks_agree and self.is_due(every, self.validations.last_step)
        if self.step < self.total_steps and not is_due:
            return None
        self.events.notify(EventName.RANK_DOING, what="validating")
        wrapped = self.stepper.wrapped
        strategy = self.stepper.strategy
        self.let_ranks_agree()
        micro_batch_blocks = self.train.micro_batch_blocks
        loss = held_out_loss(
            wrapped,
            strategy,
            self.held_out,
            micro_batch_blocks,
            self.batches.share,
            self.stepper.world.device,
        )
        return loss if math.isfinite(loss) else math.nan

    def is_due(self, every: int | str, last: int) -> bool:
        """Return whether a turn lies after step `last` up to this one, to make up for misses.

        Turns are the multiples of `every` or, if that is EPOCH, the last step of each epoch.
        """
        if every == EPOCH:  # the steps from 0: the next one belongs to a later epoch
            return self.batches.epoch_of(self.step) > self.batches.epoch_of(last)
        return self.step // int(every) > last // int(every)

    def let_ranks_agree(self) -> None:
        """Average the models of ranks that have made updates alone."""
        if not self.ranks_agree:
            self.stepper.strategy.snapshot(())

    def must_save(self, result: StepResult) -> bool:
        """Return whether a checkpoint is saved after this step."""
        guards = self.train.guards
        if self.is_done or (
            self.step % guards.rollback_every_steps == 0 and not self.window.has_rolled_back
        ):
            return True
        is_best = self.train.keep_best and self.validations.best_step == self.step
        is_wanted = is_best or result.stop_agreed or result.judgement.verdict == Verdict.ROLL_BACK
        every = self.train.save_every_steps
        is_due = result.save_due if every == AUTO else self.is_due(every, self.saved_step)
        return self.ranks_agree and (is_wanted or is_due)

    @property
    def asks_to_save(self) -> bool:
        """Return whether a checkpoint is due by the first rank's clock, told in the next step."""
        return (
            self.stepper.world.is_first
            and self.train.save_every_steps == AUTO
            and self.saver.is_due
        )

    def save(self) -> None:
        """Copy the state, and let it be written while the training goes on."""
        start_s = time.monotonic()
        self.events.notify(EventName.RANK_DOING, what="saving")
        self.saver.wait()
        self.let_ranks_agree()
        strategy = self.stepper.strategy
        world = self.stepper.world
        kinds = self.kinds_at(self.step)
        snapshot = StateSnapshot(
            step=self.step,
            parts=self.saver.parts(strategy, kinds),
            tensor_bytes=FP32_BYTES * sum(strategy.state_sizes(kinds).values()),
            own=checkpoint.own_tensors(world, strategy.own_state()),
            scalars={
                "attempt": self.attempt,
                "strategy": self.train.strategy,
                "processors": self.processors,
                "updates": self.updates,
                "window": self.window.to_json(),
                "validations": self.validations.to_json(),
            },
            rows=self.rows.saved(),
        )
        # No step writes to what is frozen: once is enough to see that all ranks have loaded the
        # same.
        refuse_differing_replicas(
            self.stepper.wrapped, world, self.saver.group, with_frozen=not self.has_saved
        )
        best_step = self.validations.best_step if self.train.keep_best else 0
        self.saver.save(
            snapshot, best_step, time.monotonic() - start_s, self.window.step_before(self.step)
        )
        self.saved_step = self.step
        self.has_saved = True
        self.checkpoint_wait_s += time.monotonic() - start_s

    def kinds_at(self, step: int) -> tuple[str, ...]:
        """Return the kinds of tensors in the checkpoint of `step`: after the last one no moments.

        No step would use them, and with AdamW they are two thirds of the bytes. A run that is
        killed after it still leaves its result without computing a step again.
        """
        return state_kinds(self.train) if step < self.total_steps else (WEIGHTS,)

    def restore(self, path: Path) -> None:
        """Continue from the verified checkpoint `path`."""
        scalars = self.load(path)
        self.step, self.updates = int(scalars["step"]), int(scalars["updates"])
        self.window = Window.from_json(self.train.guards, scalars["window"])
        self.validations = Validations.from_json(scalars["validations"])
        if self.stepper.world.is_first:
            self.rows.restore(path)
        self.saved_step = self.step
        checkpoint.restore_random_state(path, self.stepper.world)
        self.events.emit(EventName.RUN_RESUMED, step=self.step, checkpoint=path.name)
        before = scalars.get("processors", self.processors)  # older checkpoints do not say it
        if before != self.processors:
            self.events.emit(
                EventName.RUN_PROCESSOR_CHANGED, step=self.step, before=before, now=self.processors
            )

    def load(self, path: Path) -> dict[str, Any]:
        """Load weights, moments and the strategy's own state from `path`; return its scalars."""
        self.events.notify(EventName.RANK_DOING, what=LOADING)
        scalars = checkpoint.read_state(path)
        strategy = self.stepper.strategy
        saved = saved_tensors.find_state(path)
        kinds = tuple(f"{kind}." for kind in self.kinds_at(int(scalars["step"])))
        damaged: list[str] = []

        def read(tensors: Mapping[str, Tensor]) -> None:
            kept = {name: it for name, it in tensors.items() if name.startswith(kinds)}
            for name in tensors.keys() - kept.keys():  # no step will use them
                tensors[name].zero_()
            saved_tensors.fill_saved(path, saved, kept)
            damaged.extend(state.not_finite(tensors))

        strategy.restore(read, int(scalars["updates"]))
        if names := self.agree_on(damaged):
            raise IntegrityError(
                f"{path}: {listed(names)} hold NaN or infinity, so no step from there can be "
                f"applied; remove {path}, and run the same command again: it continues from the "
                "checkpoint before, or begins anew"
            )
        strategy.load_own_state(
            checkpoint.strategy_state(path, self.stepper.world, self.train.strategy)
        )
        return scalars

    def agree_on(self, names: list[str]) -> list[str]:
        """Return the names that any rank has found, sorted; the same on all ranks."""
        of_ranks = together(self.saver.group, self.saver.folder, lambda: names)
        return sorted({name for of_rank in of_ranks for name in of_rank})

    def take_best(self) -> int:
        """Load the validated step of the lowest loss if the config asks; return the step loaded.

        If its checkpoint is damaged, the next best is taken.
        """
        if not self.train.keep_best or self.validations.best_step in (0, self.step):
            return self.step

        def best() -> Path | None:  # only the first rank has the rows for it
            validated = [row for row in self.rows.all() if row.get("validation_loss") is not None]
            validated.sort(key=lambda row: row["validation_loss"])
            saved = dict(sealed_steps(self.saver.folder))
            return first_valid(
                [saved[row["step"]] for row in validated if row["step"] in saved], self.reject
            )

        path = self.choose(best)
        return self.step if path is None else int(self.load(path)["step"])

    def choose(self, choice: Callable[[], Path | None]) -> Path | None:
        """Return on all ranks what `choice` returns on the first."""
        is_first = self.stepper.world.is_first
        folder = self.saver.folder
        name = together(
            self.saver.group, folder, lambda: str((choice() if is_first else None) or "")
        )[0]
        return Path(name) if name else None

    def reject(self, path: Path, reason: str) -> None:
        """Emit the event of a checkpoint that was damaged and set aside."""
        self.events.emit(EventName.CHECKPOINT_REJECTED, path=str(path), reason=reason)

    def record(
        self,
        step: int,
        result: StepResult,
        elapsed_s: float,
        validation_loss: float | None,
        **measured: Any,
    ) -> None:
        """Add the step's row to the metrics, notify the observers; non-finite values are null."""
        verdict = result.judgement.verdict
        row: dict[str, Any] = to_json(
            Step(
                step=step,
                epoch=self.batches.epoch_of(step - 1),
                loss=finite(result.loss),
                lr=self.lr_of(step),
                grad_norm=finite(result.grad_norm),
                tokens=result.tokens,
                supervised_tokens=result.supervised_tokens,
                step_s=round(result.duration_s, 6),
                checkpoint_wait_s=round(self.checkpoint_wait_s, 6),
                elapsed_s=round(elapsed_s, 3),
                attempt=self.attempt,
                verdict=None if verdict == Verdict.APPLY else verdict,
                validation_loss=validation_loss,
                forward_s=result.phases["forward_s"],
                backward_s=result.phases["backward_s"],
                update_s=result.phases["update_s"],
                **measured,
            )
        )
        self.checkpoint_wait_s = 0.0
        if self.stepper.world.is_first:
            self.rows.add(row)
        self.window.add(row)
        self.validations.add(row)
        self.events.notify(EventName.STEP_END, **row)


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - LISTED_TENSORS} more" if len(names) > LISTED_TENSORS else ""
    return ", ".join(names[:LISTED_TENSORS]) + more


def finite(value: float) -> float | None:
    """Return `value`, or None if it is not finite: JSON has no number for it."""
    return value if math.isfinite(value) else None
