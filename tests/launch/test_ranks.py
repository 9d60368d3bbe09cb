"""How a rank hears of a request to stop."""

import signal
import subprocess
import sys

import pytest

FAILS = """
import os, signal
from contextlib import suppress
from pipeline_lib.launch.ranks import StopRequest

with suppress(ValueError), StopRequest():
    {error}
os.kill(os.getpid(), signal.SIGTERM)
print("reported", flush=True)
"""


@pytest.mark.parametrize(
    ("error", "exit_code", "said"),
    [("raise ValueError('a peer is gone')", 0, "reported\n"), ("pass", -signal.SIGTERM, "")],
    ids=["after an error", "after its work"],
)
def test_a_rank_that_failed_reports_before_its_launcher_can_end_it(error: str, exit_code: int, said: str) -> None:
    code = FAILS.format(error=error)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (exit_code, said), ended.stderr
