"""How ranks hear of a request to stop, each run's alone, and that none outlives its launcher."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

from pipeline_lib.core.errors import Interrupted
from pipeline_lib.launch import ranks
from pipeline_lib.launch.ranks import (
    rank_processes,
    ranks_asked_to_stop,
    run_launcher,
    stop_requests_passed_on,
)
from tests.processes import lines_of, wait_for

FAILS = """
import os, signal
from contextlib import suppress
from pipeline_lib.launch.ranks import StopRequest

with suppress(ValueError), StopRequest():
    {error}
os.kill(os.getpid(), signal.SIGTERM)
print("reported", flush=True)
"""
WARNED = """
import os, signal
from pipeline_lib.launch.ranks import EARLY_SIGNAL, StopRequest

signal.pthread_sigmask(signal.SIG_BLOCK, {EARLY_SIGNAL})  # as a rank begins
with StopRequest() as stop:
    os.kill(os.getpid(), EARLY_SIGNAL)
    print(stop.is_set, flush=True)
os.kill(os.getpid(), EARLY_SIGNAL)  # too late: it stays blocked
print("ended", flush=True)
"""
# Stands for `python -m pipeline_lib rank ... OUT`, without the seconds of its imports: notes each
# SIGTERM and goes on. SIGTERM is blocked when it starts, so that one that comes early is noted too.
RANK = """
import signal, subprocess, sys, time
from pathlib import Path

out = Path(sys.argv[-1])

def note(number, frame):
    with (out / "heard").open("a") as file:
        file.write("SIGTERM\\n")

signal.signal(signal.SIGTERM, note)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
if "parent" in sys.argv:
    subprocess.Popen([sys.executable, "-m", "pipeline_lib", "rank", str(out)])
(out / "ready").touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("error", "exit_code", "said"),
    [("raise ValueError('a peer is gone')", 0, "reported\n"), ("pass", -signal.SIGTERM, "")],
    ids=["after an error", "after its work"],
)
def test_a_rank_that_failed_reports_before_its_launcher_can_end_it(
    error: str, exit_code: int, said: str
) -> None:
    code = FAILS.format(error=error)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (exit_code, said), ended.stderr


def test_a_rank_hears_the_early_warning_while_it_can_save_and_not_afterwards() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WARNED], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (0, "True\nended\n"), ended.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `python -m pipeline_lib rank OUT` is a stand-in, with the folders of two runs."""
    (tmp_path / "pipeline_lib").mkdir()
    (
        tmp_path / "pipeline_lib" / "__init__.py"
    ).touch()  # else a later folder of the path would come before it
    (tmp_path / "pipeline_lib" / "__main__.py").write_text(RANK)
    for run in ("ours", "theirs"):
        (tmp_path / run).mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def rank_of(out: Path, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A rank that writes to `out`; it is killed in the end, with those that it has started."""
    (out / "ready").unlink(missing_ok=True)
    command = [sys.executable, "-m", "pipeline_lib", "rank", *arguments, str(out)]
    process = subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
    )
    try:
        wait_for(
            lambda: (out / "ready").exists() or process.poll() is not None, "the start of a rank"
        )
        assert process.poll() is None
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def has_heard(out: Path, times: int) -> bool:
    """Whether ranks of `out` have heard SIGTERM so often within a few seconds."""
    deadline_s = monotonic() + 10.0
    while len(lines_of(out / "heard")) < times and monotonic() < deadline_s:
        sleep(0.01)
    return len(lines_of(out / "heard")) == times


def test_the_ranks_of_a_run_are_those_that_write_to_its_folder(folder: Path) -> None:
    with rank_of(folder / "ours", "parent") as ours, rank_of(folder / "theirs") as theirs:
        wait_for(lambda: len(psutil.Process(ours.pid).children()) == 1, "what the rank starts")
        assert [process.pid for process in rank_processes(folder / "ours")] == [ours.pid]
        assert [process.pid for process in rank_processes(folder / "theirs")] == [theirs.pid]
        assert rank_processes(folder / "none") == []


def test_each_rank_is_told_to_stop_once_also_a_late_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "RETELL_S", 0.02)
    out, asked = folder / "ours", threading.Event()
    with ranks_asked_to_stop(out, asked), rank_of(out):
        sleep(0.1)
        assert lines_of(out / "heard") == []
        asked.set()
        assert has_heard(out, 1)
        with rank_of(out):
            assert has_heard(out, 2)
            sleep(0.2)
            assert has_heard(out, 2)


def test_ranks_are_told_when_their_time_is_over_though_no_signal_came(folder: Path) -> None:
    with rank_of(folder / "ours"), stop_requests_passed_on(folder / "ours", stop_in_s=0.05):
        assert has_heard(folder / "ours", 1)


def test_a_rank_that_stays_after_its_launcher_is_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "END_S", 0.1)
    out = folder / "ours"
    begin = (
        '"$0" -m pipeline_lib rank "$1" & while kill -0 $! && [ ! -e "$1/ready" ]; do sleep '
        "0.02; done; exit 3"
    )
    assert (
        run_launcher(["sh", "-c", begin, sys.executable, str(out)], os.environ, out, lambda: False)
        == 3
    )
    assert rank_processes(out) == []


def test_a_launcher_that_is_given_up_is_killed_with_what_it_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "LOOK_S", 0.02)
    out = folder / "ours"
    begin = 'sleep 60 & echo $! > "$0/helper"; wait'
    command = ["sh", "-c", begin, str(out)]
    code = run_launcher(
        command, os.environ, out, lambda: bool(lines_of(out / "helper")), give_up_s=0.0
    )
    assert code == Interrupted.exit_code
    helper = int((out / "helper").read_text())
    deadline_s = monotonic() + 5.0
    while is_running(helper) and monotonic() < deadline_s:
        sleep(0.01)
    assert not is_running(helper)


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
