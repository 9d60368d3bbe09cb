"""Stages that run at a time on one machine take different GPUs, and wait where none is left."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline_lib.launch.local_gpus import VISIBLE, taken_gpus, visible_gpus

NAMES = ("GPU-aa1", "GPU-ab2", "GPU-cc3")
HOLDER = """
import os, sys
from pipeline_lib.launch.local_gpus import taken_gpus
with taken_gpus(int(sys.argv[1]), os.environ, lambda text: print(text, flush=True)):
    print("has", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    sys.stdin.read()
"""
Start = Callable[[int], "subprocess.Popen[str]"]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The environment of a user on a machine whose driver shows three GPUs."""
    program = tmp_path / "nvidia-smi"
    lines = "".join(f"echo '{number}, {name}'\n" for number, name in enumerate(NAMES))
    program.write_text("#!/bin/sh\n" + lines)
    program.chmod(0o755)
    made = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    for name in (VISIBLE, "XDG_CACHE_HOME"):
        made.pop(name, None)
    return made


@pytest.fixture
def start(environ: dict[str, str]) -> Iterator[Start]:
    """What starts a process that takes so many GPUs until its input ends."""
    with ExitStack() as processes:

        def begin(wanted: int) -> "subprocess.Popen[str]":
            process = subprocess.Popen(
                [sys.executable, "-c", HOLDER, str(wanted)],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.enter_context(process)
            processes.callback(process.kill)
            return process

        yield begin


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def seen(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, visible: str) -> tuple[str, ...]:
    monkeypatch.setenv("PATH", environ["PATH"])
    return visible_gpus({**environ, VISIBLE: visible})


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", ("GPU-cc3", "GPU-aa1")),
        ("GPU-c", ("GPU-cc3",)),
        ("GPU-a", ()),  # of two
        ("1,7,0", ("GPU-ab2",)),
        ("", ()),
        ("MIG-5,MIG-6", ("MIG-5", "MIG-6")),
    ],
)
def test_they_are_those_that_cuda_would_see(
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    expected: tuple[str, ...],
) -> None:
    assert seen(environ, monkeypatch, visible) == expected


def test_each_stage_has_its_own_until_none_is_left(start: Start) -> None:
    first, second = start(1), start(2)
    shown = {line_of(first), line_of(second)}
    taken = [name for line in shown for name in line.removeprefix("has ").split(",")]
    assert sorted(taken) == list(NAMES)
    third = start(1)
    assert line_of(third) == "waiting for 1 GPU of 3: other stages of yours have the rest"
    first.kill()  # as by SIGKILL of a training
    assert line_of(third) in shown


def test_one_that_wants_all_waits_and_sees_what_it_saw(start: Start) -> None:
    first = start(1)
    line_of(first)
    whole = start(3)
    assert line_of(whole).startswith("waiting for 3 GPUs of 3")
    first.communicate()  # its input ends
    assert line_of(whole) == "has None"


def test_what_was_visible_before_is_so_again(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", environ["PATH"])
    for before in (None, "2,1"):
        own = environ if before is None else {**environ, VISIBLE: before}
        with taken_gpus(1, own, print):
            assert own[VISIBLE] == ("GPU-aa1" if before is None else "GPU-cc3")
        assert own.get(VISIBLE) == before


@pytest.mark.parametrize("wanted", [0, 4])
def test_nothing_is_waited_for_that_can_never_be(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, wanted: int
) -> None:
    monkeypatch.setenv("PATH", environ["PATH"])
    with taken_gpus(wanted, environ, print):
        assert VISIBLE not in environ


def test_a_machine_without_a_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert visible_gpus({}) == ()


def test_a_stage_without_gpus_does_not_ask_the_driver(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", environ["PATH"])
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    with taken_gpus(0, environ, print):
        assert not (tmp_path / "asked").exists()
    visible_gpus(environ)
    assert (tmp_path / "asked").exists()
