"""Functions that ranks run in tests; they have to be importable by name."""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pipeline_lib.core.errors import Interrupted, PipelineError, TrainingError
from pipeline_lib.core.files import read_jsonl
from pipeline_lib.train import rank as rank_module
from pipeline_lib.train.rank import RankJob, train_rank
from pipeline_lib.train.saved_tensors import fill_saved, find_saved, find_state


def train(environ: Mapping[str, str], job: RankJob) -> None:
    """Train without a word."""
    train_rank(job, environ, lambda _: None)


def train_and_say(environ: Mapping[str, str], job: RankJob) -> str:
    """Train; what the rank says when it fails, with the name of its error."""
    try:
        train_rank(job, environ, lambda _: None)
    except PipelineError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("was to fail")


class Killed(BaseException):
    """Stands for the end of a process, where the test process has to live on."""


def stopped(
    environ: Mapping[str, str],
    job: RankJob,
    act: Callable[[], None],
    error: type[BaseException],
    step: int,
    event: str = "step.begin",
    ranks: tuple[str, ...] = ("1",),
) -> tuple[float, str]:
    """Train; `ranks` do `act` at `event` of `step`: when this rank ended with `error`, and how.

    How is what it said; when is after how long.
    """
    reached_s = 0.0

    def observe(name: str, fields: dict[str, Any]) -> None:
        nonlocal reached_s
        if name == event and fields["step"] == step:
            reached_s = time.monotonic()
            if environ["RANK"] in ranks:
                act()

    try:
        train_rank(job, environ, lambda _: None, (observe,))
    except error as raised:
        return time.monotonic() - reached_s, str(raised)
    raise AssertionError("was to end")


def train_and_save_often(environ: Mapping[str, str], job: RankJob) -> None:
    """Train with `save_every_steps: auto` as if a minute were over at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline_lib.plan.saving._LEAST_APART_S", 0.0)
        train(environ, job)


def train_until_killed(environ: Mapping[str, str], job: RankJob, step: int) -> None:
    """Train, and die without a chance to save when `step` begins."""

    def die() -> None:
        raise Killed

    stopped(environ, job, die, Killed, step, ranks=tuple("01234567"))


def train_until_killed_on_an_older_cpu(environ: Mapping[str, str], job: RankJob, step: int) -> None:
    """The same, where the second rank's CPU is told to do without its newer instructions."""
    older = {"ATEN_CPU_CAPABILITY": "default"} if environ["RANK"] == "1" else {}
    train_until_killed({**environ, **older}, job, step)


def train_and_listen(environ: Mapping[str, str], job: RankJob) -> list[str]:
    """Train; all that the rank says."""
    said = list[str]()
    train_rank(job, environ, said.append)
    return said


def signal_this(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def train_until_one_rank_is_killed(
    environ: Mapping[str, str], job: RankJob, step: int
) -> tuple[float, str]:
    """Train; rank 1 dies in `step`: how long another rank took to notice, and what it said."""
    return stopped(environ, job, partial(signal_this, signal.SIGKILL), Interrupted, step)


def train_while_one_rank_hangs(
    environ: Mapping[str, str], job: RankJob, step: int, hang_s: float
) -> tuple[float, str]:
    """Train while rank 1 is silent for `hang_s` in `step`: how long a rank waited, its words."""
    return stopped(environ, job, partial(time.sleep, hang_s), Interrupted, step)


def train_and_signal_one_rank(environ: Mapping[str, str], job: RankJob, step: int) -> str:
    """Train while rank 1 gets a SIGTERM in `step`; what the rank says when it stops."""
    return stopped(environ, job, partial(signal_this, signal.SIGTERM), Interrupted, step)[1]


def train_and_signal_again_and_again(environ: Mapping[str, str], job: RankJob, step: int) -> str:
    """Train while rank 1 gets SIGTERM in `step` and each millisecond from then, even saving."""

    def keep_signalling() -> None:
        for _ in range(300):
            signal_this(signal.SIGTERM)
            time.sleep(0.001)

    def begin() -> None:
        signal_this(signal.SIGTERM)
        threading.Thread(target=keep_signalling, daemon=True).start()

    # what is in force again after the run, while signals still come
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return stopped(environ, job, begin, Interrupted, step)[1]


def train_with_a_flipped_bit(environ: Mapping[str, str], job: RankJob, step: int) -> str:
    """Train while the lowest bit of a weight of rank 1 flips in `step`; the rank's last words."""
    models: list[torch.nn.Module] = []
    build: Any = vars(rank_module)["build_trainable"]

    def build_and_keep(*arguments: Any) -> torch.nn.Module:
        models.append(build(*arguments))
        return models[0]

    def flip() -> None:
        next(models[0].parameters()).data.view(torch.int32)[1, 1] ^= 1

    vars(rank_module)["build_trainable"] = build_and_keep  # in a process of its own
    return stopped(environ, job, flip, TrainingError, step)[1]


def train_and_run_out(
    environ: Mapping[str, str], job: RankJob, event: str, step: int, text: str
) -> str:
    """Train until a GPU's memory is made to look full at `event` of `step`; the rank's words."""

    def fill() -> None:
        raise torch.OutOfMemoryError(text)

    return stopped(environ, job, fill, TrainingError, step, event, ranks=("0",))[1]


def load_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill `tensors` in place from `folder`, written by any world."""
    fill_saved(folder, find_saved(folder), tensors)


def load_state(checkpoint: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill `tensors` in place from a checkpoint, by their names in it."""
    fill_saved(checkpoint, find_state(checkpoint), tensors)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The full shapes of the tensors in `folder`, by name."""
    return {name: saved.shape for name, saved in find_saved(folder).items()}


def load_weights(out: Path) -> dict[str, torch.Tensor]:
    """The whole tensors that a run left, whatever ranks wrote them."""
    folder = out / "weights"
    metadata = HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(e.size)
        for name, e in metadata.items()
        if isinstance(e, TensorStorageMetadata)
    }
    load_tensors(folder, tensors)
    return tensors


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """One hash of all names and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def assert_same_result(one: Path, other: Path) -> None:
    """Two runs had the same losses, and left the same weights, bit for bit."""
    assert losses(one) == losses(other)
    assert digest_of(load_weights(one)) == digest_of(load_weights(other))


def losses(out: Path) -> list[float]:
    """The loss of each step."""
    return [row["loss"] for row in read_jsonl(out / "metrics.jsonl")]


def rows(out: Path) -> list[dict[str, Any]]:
    """The metrics of each step."""
    return read_jsonl(out / "metrics.jsonl")


def read_rows(checkpoint: Path) -> list[dict[str, Any]]:
    """The rows of all steps in a checkpoint."""
    return [row for path in sorted((checkpoint / "metrics").iterdir()) for row in read_jsonl(path)]
