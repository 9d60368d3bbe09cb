"""`qwen3 store` in this process, or as one of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline_lib.cli.main import parser

ROOT = Path(__file__).parents[2]


def store(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says; raises what it raises."""
    capsys.readouterr()
    given = parser().parse_args(["store", *arguments])
    given.command(given)
    return capsys.readouterr().out


def begin(*arguments: str) -> "subprocess.Popen[str]":
    """The command as a process that has just begun."""
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline_lib", "store", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Its exit code and all that it said."""
    said, complaint = process.communicate(timeout=60)
    return process.returncode, said + complaint
