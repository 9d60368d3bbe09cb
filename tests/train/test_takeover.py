"""A run whose lock another host took over: the first owner ends, and leaves the second's work."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline_lib.config.compile import run_digest
from pipeline_lib.core.events import read_events
from pipeline_lib.core.store import verify
from tests.processes import wait_for
from tests.train.conftest import Arena
from tests.train.launching import ENDLESS, make_stage

pytestmark = pytest.mark.slow


def owner_of(lock: Path) -> dict[str, Any]:
    owner: dict[str, Any] = json.loads(lock.read_text()) if lock.exists() else {}
    return owner


def silence(owner: "subprocess.Popen[bytes]", lock: Path) -> None:
    """Stop the process that owns `lock`, and make it look like a silent one on another host."""
    owner.send_signal(signal.SIGSTOP)
    # until then its threads may read the lock, which they must never find half written
    wait_for(lambda: psutil.Process(owner.pid).status() == psutil.STATUS_STOPPED, "the stop")
    lock.write_text(json.dumps(owner_of(lock) | {"host": "elsewhere"}))
    os.utime(lock, (0, 0))


@contextmanager
def killed_at_the_end(process: "subprocess.Popen[bytes]") -> Iterator["subprocess.Popen[bytes]"]:
    """`process`, which the block may leave stopped if it fails."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_the_first_owner_ends_and_the_checkpoints_of_the_second_are_whole(arena: Arena) -> None:
    first = make_stage(arena, ranks=1, save_every_steps=5, **ENDLESS)
    lock = arena.store.lock_path(run_digest(first.spec))
    with ExitStack() as ends:
        stopped = ends.enter_context(killed_at_the_end(first.start()))
        first.wait_for_checkpoint()
        ranks_of_first = [rank.pid for rank in first.processes()]
        silence(stopped, lock)

        second = make_stage(arena, ranks=1, save_every_steps=5, **ENDLESS)
        second = type(second)(
            second.arena, second.spec, second.plan_dir, second.log.with_suffix(".second")
        )
        going_on = ends.enter_context(killed_at_the_end(second.start()))
        wait_for(lambda: owner_of(lock).get("pid") == going_on.pid, "the second owner")
        taken = owner_of(lock)
        wait_for(
            lambda: not {rank.pid for rank in first.processes()} & set(ranks_of_first),
            "the end of the first ranks",
        )
        first_ended_s = time.time()
        stopped.send_signal(signal.SIGCONT)

        assert stopped.wait(120) == 75, first.output
        assert (
            f"error: the lock {lock} was taken over by process {going_on.pid} on " in first.output
        )
        assert "Traceback" not in first.output
        assert owner_of(lock) == taken
        log = second.run_dir / "events.jsonl"
        wait_for(
            lambda: any(event.get("attempt") == 2 for event in read_events(log)),
            "the second attempt",
        )
        events = read_events(log)
        launched = next(number for number, event in enumerate(events) if event.get("attempt") == 2)
        assert [
            event
            for event in events[launched:]
            if event["event"] in ("run.failed", "run.interrupted")
        ] == []
        assert not (second.run_dir / "errors").exists()

        done = max(second.steps_done())
        second.wait_for_step(done + 10)
        going_on.send_signal(signal.SIGTERM)
        assert going_on.wait(120) == 75, second.output
        assert "stopped by a signal after step" in second.output
        checkpoints = sorted(second.run_dir.glob("checkpoints/step-*"))
        attempts = [
            json.loads((path / "state.json").read_text())["attempt"] for path in checkpoints
        ]
        assert attempts[-1] == 2
        for path, attempt in zip(checkpoints, attempts, strict=True):
            verify(path)
            # One of the first, to which the guards may go back, is older than the second owner's.
            assert attempt == 2 or path.stat().st_mtime < first_ended_s
        # What the ranks of the first were writing may be left; the next start sweeps it away.
        left = second.run_dir.glob("checkpoints/.*")
        assert [path for path in left if path.stat().st_mtime > first_ended_s] == []
        assert second.processes() == []
