"""`qwen3 status` as a process."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.status.stubs import ROOT, Desk, stub_squeue

COMMAND = [sys.executable, "-m", "pipeline_lib", "status"]


def environment(desk: Desk) -> dict[str, str]:
    known = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm",
        "COLUMNS": "100",
        "LINES": "40",
    }
    return known | {"PIPELINE_STORE": str(desk.store.root)}


def status(desk: Desk, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, *arguments]
    return subprocess.run(
        command,
        cwd=desk.folder,
        env=environment(desk),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_it_prints_plain_lines_and_json(desk: Desk) -> None:
    desk.freeze("a")
    desk.log(desk.freeze("b"), "tokenize", "")

    plain = status(desk)
    as_json = status(desk, "--json", "a")

    assert (plain.returncode, plain.stderr) == (0, "")
    lines = [line.rstrip() for line in plain.stdout.splitlines()]
    assert lines[:3] == [
        "experiment  stage     state",
        "a           download  not begun",
        "b           download  not begun",
    ]
    assert "\x1b" not in plain.stdout
    assert [(found["experiment"], found["state"]) for found in json.loads(as_json.stdout)] == [
        ("a", "not begun")
    ]


def test_an_empty_store_and_none_at_all(desk: Desk) -> None:
    said = " ".join(status(desk).stdout.split())
    assert said.startswith(
        f"{desk.store.root}/experiments: no experiments yet; snakemake adds them"
    )
    assert json.loads(status(desk, "--json").stdout) == []
    assert not desk.store.root.exists()  # looking makes nothing


def test_a_queue_that_does_not_answer_is_told(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.freeze("a")
    assert "squeue" not in status(desk).stdout
    stub_squeue(desk.folder / "bin", monkeypatch, "", exit_code=1)

    assert (
        "squeue does not answer, so it is unknown which jobs are in the queue"
        in status(desk).stdout
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("c",), "c: no experiment of that name, and no config file; known: a"),
        (("--watch", "a"), "'a' is no number of seconds of at least 0.2; names go before --watch"),
        (("--watch", "0"), "'0' is no number of seconds of at least 0.2"),
        (("--json", "--watch"), "not allowed with"),
    ],
)
def test_mistakes_are_told_in_a_line(desk: Desk, arguments: tuple[str, ...], said: str) -> None:
    desk.freeze("a")

    done = status(desk, *arguments)

    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def read_until(descriptor: int, wanted: bytes, deadline_s: float = 30.0) -> bytes:
    seen, end_s = b"", time.monotonic() + deadline_s
    while wanted not in seen:
        left_s = end_s - time.monotonic()
        assert left_s > 0, seen
        if select.select([descriptor], [], [], left_s)[0]:
            seen += os.read(descriptor, 65536)
    return seen


def test_it_is_watched_in_place_until_ctrl_c(desk: Desk) -> None:
    demo = desk.freeze("a")
    ours, theirs = pty.openpty()
    command = [*COMMAND, "--watch", "0.3"]
    process = subprocess.Popen(
        command,
        cwd=desk.folder,
        env=environment(desk),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        read_until(ours, b"until Ctrl-C")
        desk.seal(demo, "model", "data.0")
        seen = read_until(ours, b"tokenize")
        assert b"\x1b[" in seen  # moves the cursor up
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
        os.close(ours)


def test_watched_into_a_file_it_is_written_again_and_again(desk: Desk) -> None:
    desk.freeze("a")
    path = Path(desk.folder / "out")
    with path.open("wb") as file:
        process = subprocess.Popen(
            [*COMMAND, "--watch", "0.3"], cwd=desk.folder, env=environment(desk), stdout=file
        )
        try:
            end_s = time.monotonic() + 30
            while path.read_bytes().count(b"experiment  stage") < 3:
                assert time.monotonic() < end_s
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(10)
    assert b"\x1b" not in path.read_bytes()
