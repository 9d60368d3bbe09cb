"""What a training leaves in files: its summary, and a row of metrics for each step."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from pipeline_lib.core.run_folder import METRICS_NAME, SUMMARY_NAME
from pipeline_lib.records.record import Record, parse, read_records, read_sealed_json


def _nan_of_null(value: Any) -> Any:
    return math.nan if value is None else value


@dataclass(frozen=True, kw_only=True)
class Training(Record):
    """The summary of a training run; losses in nats per supervised token, times in seconds.

    `result_step` is the step whose weights are left, `best_step` the one with the lowest held-out
    loss. `train_s` is the time in steps alone, `training_time_s` the time from the first step to
    the last over all attempts. `final_loss` is that of the last step that was applied.
    """

    steps: int
    updates: int
    total_steps: int
    result_step: int
    best_step: int | None
    best_validation_loss: float | None
    stopped_early: bool
    skipped_steps: int
    epochs: int | float
    world_size: int
    strategy: str
    method: str
    precision: str
    parameters: int
    trainable_parameters: int
    tokens: int
    supervised_tokens: int
    train_s: float
    training_time_s: float | None
    tokens_per_s: float | None
    attempts: int
    final_loss: float | None
    blocks: int
    batch_blocks: int

    def has_lost_best(self, keeps_best: bool) -> bool:
        """Return whether the best step should be the result but its checkpoint was lost.

        `keeps_best` is `train.keep_best` of the run.
        """
        return keeps_best and self.best_step is not None and self.result_step != self.best_step


@dataclass(frozen=True, kw_only=True)
class Step(Record):
    """A line of metrics.jsonl: a step of the optimizer and the attempt that took it.

    `loss` and `grad_norm` are None if they were not finite, and `validation_loss` is NaN then; it
    is None in a step without validation. A step without `verdict` was applied. `mfu` counts
    attention causally, `mfu_full_attention` as if each token saw its whole document. Memory is that
    of the first rank; lists `of_ranks` are in some rows only.
    """

    step: int
    epoch: int
    loss: float | None
    lr: float
    grad_norm: float | None
    tokens: int
    supervised_tokens: int
    step_s: float
    forward_s: float
    backward_s: float
    update_s: float
    checkpoint_wait_s: float
    elapsed_s: float
    attempt: int
    verdict: str | None = None
    tokens_per_s: float
    supervised_tokens_per_s: float
    data_wait_s: float
    peak_memory_bytes: int
    reserved_memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    mfu: float | None = None
    mfu_full_attention: float | None = None
    node_sent_bytes: int | None = None
    gpu_utilization: float | None = None
    gpu_memory_used_bytes: float | None = None
    gpu_power_w: float | None = None
    gpu_temperature_c: float | None = None
    profile_compute_s: float | None = None
    profile_exposed_communication_s: float | None = None
    profile_exposed_copy_s: float | None = None
    profile_idle_s: float | None = None
    gpu_utilization_of_ranks: tuple[float, ...] | None = None
    peak_memory_bytes_of_ranks: tuple[int, ...] | None = None
    validation_loss: Annotated[float | None, BeforeValidator(_nan_of_null)] = None

    @property
    def peak_memory_mb(self) -> float:
        """The peak memory in MB (1e6 bytes), the unit of experiment tables."""
        return self.peak_memory_bytes / 1e6


def read_training(folder: Path) -> Training:
    """Return the summary of the sealed training in `folder`.

    Speed and time are computed from the rows if an older version of the code left them out. Raise
    OSError, or IntegrityError naming the file and the key if it is damaged or of another schema.
    """
    path = folder / SUMMARY_NAME
    found = read_sealed_json(path)
    if isinstance(found, dict) and not {"tokens_per_s", "training_time_s"} <= found.keys():
        steps = read_records(Step, folder / METRICS_NAME)
        computed = {
            "tokens_per_s": speed(step.tokens_per_s for step in steps),
            "training_time_s": training_time_s((step.attempt, step.elapsed_s) for step in steps),
        }
        found = {**computed, **found}
    return parse(Training, found, path)


def speed(steps_tokens_per_s: Iterable[float | None]) -> float | None:
    """Return the tokens per second of a run: the median over its steps. None if none is known.

    The rate of a step counts all ranks, without padding, and includes the wait for its data but not
    saving.
    """
    known = [value for value in steps_tokens_per_s if value is not None]
    return float(statistics.median(known)) if known else None


def training_time_s(steps: Iterable[tuple[int | None, float | None]]) -> float | None:
    """Return the seconds from a run's first step to its last, over its attempts, saving included.

    Validating is included too. `steps` are the attempt and `elapsed_s` of each step, in order. None
    if no time is known.
    """
    last_s = {attempt: elapsed_s for attempt, elapsed_s in steps if elapsed_s is not None}
    return sum(last_s.values()) if last_s else None
