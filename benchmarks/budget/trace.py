"""A profiler's trace taken apart: each kernel with the operators and marks that issued it."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.train.gpu_activity import Interval

MARK = "budget:"  # begins the names of ranges that rank.py marks
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ENCLOSING = ("cpu_op", "user_annotation")
_Event = Mapping[str, Any]
_Place = tuple[float | None, tuple[str, ...]]
_NOWHERE: _Place = (None, ())


@dataclass(frozen=True)
class Kernel:
    """What ran on the GPU, when, in s; `operators` gave it out, `marks` went on meanwhile.

    The operators begin with the outermost.
    """

    name: str
    time: Interval
    operators: tuple[str, ...]
    marks: frozenset[str]


def read_kernels(path: Path) -> list[Kernel]:
    """The kernels and memory operations of the trace that torch's profiler wrote to `path`."""
    return kernels_of(json.loads(path.read_text())["traceEvents"])


def kernels_of(events: Iterable[_Event]) -> list[Kernel]:
    """Those among the events of a trace.

    A launch belongs to the operators of its thread that it happened in. The marks are made by one
    thread and hold for all: while it waits for a backward pass, others give out its kernels.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    launches, outer = _launches(whole)
    marks = [
        event
        for event in whole
        if event.get("cat") == "user_annotation" and event["name"].startswith(MARK)
    ]
    found = []
    for event in whole:
        if event.get("cat") not in _ON_GPU:
            continue
        known = event.get("args", {})
        begun, operators = launches.get(known.get("correlation"), _NOWHERE)
        if not operators:  # the launch was filed under another thread than the operator
            begun, operators = outer.get(known.get("External id"), (begun, operators))
        of_marks = [
            mark["name"].removeprefix(MARK)
            for mark in marks
            if begun is not None and _holds(mark, begun)
        ]
        time = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        found.append(Kernel(event["name"], time, operators, frozenset(of_marks)))
    return found


def _holds(event: _Event, moment: float) -> bool:
    return bool(event["ts"] <= moment < event["ts"] + event["dur"])


def _launches(events: list[_Event]) -> tuple[dict[Any, _Place], dict[Any, _Place]]:
    """When the host gave something to the GPU, and the names of the operators around that.

    By the correlation of the launch, and by the number of the innermost operator.
    """
    threads: dict[Any, list[_Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") in (*_LAUNCHES, *_ENCLOSING):
            threads[event["pid"], event["tid"]].append(event)
    found, of_operators = dict[Any, _Place](), dict[Any, _Place]()
    for of_thread in threads.values():
        around: list[_Event] = []
        for event in sorted(of_thread, key=lambda event: (event["ts"], -event["dur"])):
            while around and not _holds(around[-1], event["ts"]):
                around.pop()
            if event["cat"] in _ENCLOSING:
                around.append(event)
            place = (
                event["ts"],
                tuple(one["name"] for one in around if not one["name"].startswith(MARK)),
            )
            known = event.get("args", {})
            if event["cat"] == "cpu_op":
                of_operators[known.get("External id")] = place
            elif event["cat"] in _LAUNCHES:
                found[known.get("correlation")] = place
    return found, of_operators
