"""What signals to stop become: an interruption of what is asked, or the end of the command."""

import os
import signal
import subprocess
import sys

import pytest

# It stands for `chat`, which goes on after Ctrl-C: it waits for a signal, and says what it was
# told. A signal may come while it speaks: what is written at once is not written again.
WAITING = """
import os, signal, sys, time
from pipeline_lib.core.signals import Terminated, stops_interrupt

with stops_interrupt(is_once=sys.argv[1] == "once"):
    for _ in range(2):
        try:
            os.write(1, b"ready\\n")
            time.sleep(30)
        except KeyboardInterrupt:
            os.write(1, b"interrupted\\n")
        except Terminated:
            os.write(1, b"terminated\\n")
"""


def waiting(is_once: bool, *ignored: signal.Signals) -> "subprocess.Popen[str]":
    def ignore() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    command = [sys.executable, "-c", WAITING, "once" if is_once else "always"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=ignore)
    assert said(process) == "ready"
    return process


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "terminated"),
        (signal.SIGHUP, "terminated"),
        (signal.SIGUSR1, "terminated"),
    ],
)
def test_only_ctrl_c_is_an_interruption(number: signal.Signals, expected: str) -> None:
    with waiting(False) as process:
        for _ in range(2):
            os.kill(process.pid, number)
            assert said(process) == expected
            said(process)  # ready, or the end
        assert process.wait(10) == 0


def test_with_once_later_signals_are_ignored_and_ignored_ones_stay_so() -> None:
    with waiting(True, signal.SIGHUP) as process:
        os.kill(process.pid, signal.SIGHUP)
        os.kill(process.pid, signal.SIGTERM)
        assert said(process) == "terminated"
        assert said(process) == "ready"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(process.pid, number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.kill()
