"""Who holds a lock, asked from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pipeline_lib.core.lock import DEAD_AFTER_S, holder

ROOT = Path(__file__).parents[2]
HOLD = (
    "import sys, time; from pathlib import Path; from pipeline_lib.core.lock import locked\n"
    "with locked(Path(sys.argv[1]), print, note={'slurm_job': '12'}):\n"
    "    print('held', flush=True); time.sleep(60)\n"
)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_living_owner_is_named_and_a_killed_one_is_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert holder(path) is None
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"

        owner = holder(path)

        assert owner is not None
        assert (owner["pid"], owner["slurm_job"]) == (process.pid, "12")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)

    assert path.exists()
    assert holder(path) is None
    assert files_in(tmp_path) == ["lock"]  # left for the next owner to remove, and no probe stays


def test_an_owner_on_another_host_counts_by_its_heartbeat(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1}))

    assert holder(path) == {"host": "elsewhere", "pid": 1}

    long_ago = time.time() - DEAD_AFTER_S - 10
    os.utime(path, (long_ago, long_ago))
    assert holder(path) is None
    assert files_in(tmp_path) == ["lock"]


def test_a_lock_that_cannot_be_read_is_held_until_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text('{"host": "els')

    assert holder(path) == {}

    os.utime(path, (0, 0))
    assert holder(path) is None
