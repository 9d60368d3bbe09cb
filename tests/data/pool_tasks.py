"""What the workers in test_pool.py do. A module of its own, since each worker imports it."""

import ctypes
import os
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pipeline_lib.config.schema import Tokenize
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.encode import Drop, Encoder, Rendered, Sample
from pipeline_lib.data.pool import Guard

STATE = 1000


def load() -> int:
    return STATE


def fail_to_load() -> int:
    raise DataError("no such model")


def crash_while_loading() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


@dataclass(frozen=True)
class Add:
    number: int
    wait_s: float = 0.0

    def __call__(self, state: int, guard: Guard) -> int:
        with guard.at(0):
            time.sleep(self.wait_s)
        return state + self.number


@dataclass(frozen=True)
class Harm:
    """Does harm of some `kind` at position 7."""

    kind: str

    def __call__(self, state: int, guard: Guard) -> int:
        for position in (3, 7):
            with guard.at(position):
                if position == 7:
                    HARM[self.kind]()
        return state


@dataclass(frozen=True)
class Look:
    def __call__(self, state: int, guard: Guard) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "sum": float(
                np.ones((400, 400)).dot(np.ones((400, 400))).sum()
            ),  # on all threads that BLAS has
            "threads": psutil.Process().num_threads(),
            "core": resource.getrlimit(resource.RLIMIT_CORE),
        }


def spin() -> None:
    """Without an end, and without a call in which Python looks for signals."""
    sum(iter(int, 1))


def take_memory() -> None:
    taken = []
    while True:
        taken.append(b"a" * 50_000_000)


def refuse() -> None:
    raise DataError("row 7 is bad")


def stumble() -> None:
    raise ZeroDivisionError("a bug of ours")


class WrongEncoder(Encoder):
    """What a worker has, with a fast way that gives other ids for texts with a "7"."""

    def __init__(self, folder: Path, settings: Tokenize, fast: bool = True) -> None:
        """Load it, and damage it."""
        super().__init__(folder, settings, fast)
        batches = self._batches
        right = batches._tiktoken
        batches._tiktoken = right and (lambda piece: [0] if "7" in piece else right(piece))


class LossyEncoder(Encoder):
    """What a worker has, with an encoder that loses a turn, or samples where 7 is asked about.

    The turn that it loses is the last of three.
    """

    def __init__(self, folder: Path, settings: Tokenize, fast: bool = True) -> None:
        """Load it, and damage it."""
        super().__init__(folder, settings, fast)
        whole = self.encode_rendered

        def lossy(batch: Sequence[Sequence[Rendered]]) -> list[list[Sample | Drop]]:
            outcomes = whole([turns[:2] for turns in batch])
            asked = [turns[0].full for turns in batch]
            return [
                [] if "is 7?" in text else samples
                for text, samples in zip(asked, outcomes, strict=True)
            ]

        self.encode_rendered = lossy  # type: ignore[method-assign]


HARM = {
    "cpu": spin,
    "memory": take_memory,
    "abort": os.abort,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashed": lambda: ctypes.string_at(0),
    "silent": lambda: time.sleep(3600),
    "refused": refuse,
    "bug": stumble,
}
