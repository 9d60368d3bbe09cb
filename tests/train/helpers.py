"""Functions that ranks run in tests; they have to be importable by name."""

import hashlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pipeline_lib.base.errors import Interrupted
from pipeline_lib.base.fsio import read_jsonl
from pipeline_lib.train.checkpoint import load_tensors
from pipeline_lib.train.rank import RankJob, train_rank


def train(environ: Mapping[str, str], job: RankJob) -> None:
    """Train without a word."""
    train_rank(job, environ, lambda _: None)


class Killed(BaseException):
    """Stands for the end of a process, where the test process has to live on."""


def train_until_killed(environ: Mapping[str, str], job: RankJob, step: int) -> None:
    """Train, and die without a chance to save when `step` begins."""

    def die(name: str, fields: dict[str, Any]) -> None:
        if name == "step.begin" and fields["step"] == step:
            raise Killed

    try:
        train_rank(job, environ, lambda _: None, (die,))
    except Killed:
        return
    raise AssertionError("was to be killed")


def train_and_signal_one_rank(environ: Mapping[str, str], job: RankJob, step: int) -> str:
    """Train while rank 1 gets a SIGTERM in `step`; what the rank says when it stops."""

    def signal_me(name: str, fields: dict[str, Any]) -> None:
        if name == "step.begin" and fields["step"] == step and environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        train_rank(job, environ, lambda _: None, (signal_me,))
    except Interrupted as stopped:
        return str(stopped)
    raise AssertionError("was to be stopped")


def train_while_one_rank_hangs(environ: Mapping[str, str], job: RankJob, step: int, hang_s: float) -> tuple[float, str]:
    """Train while rank 1 does not answer for `hang_s` in `step`: how long a rank waited then, and what it said."""
    reached_s = 0.0

    def hang(name: str, fields: dict[str, Any]) -> None:
        nonlocal reached_s
        if name == "step.begin" and fields["step"] == step:
            reached_s = time.monotonic()
            time.sleep(hang_s if environ["RANK"] == "1" else 0)

    try:
        train_rank(job, environ, lambda _: None, (hang,))
    except Interrupted as stopped:
        return time.monotonic() - reached_s, str(stopped)
    raise AssertionError("was to give up")


def load_weights(out: Path) -> dict[str, torch.Tensor]:
    """The whole tensors that a run left, whatever ranks wrote them."""
    folder = out / "weights"
    metadata = HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(e.size) for name, e in metadata.items() if isinstance(e, TensorStorageMetadata)}
    load_tensors(folder, tensors)
    return tensors


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """One hash of all names and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def losses(out: Path) -> list[float]:
    """The loss of each step."""
    return [row["loss"] for row in read_jsonl(out / "metrics.jsonl")]


def rows(out: Path) -> list[dict[str, Any]]:
    """The metrics of each step."""
    return read_jsonl(out / "metrics.jsonl")
