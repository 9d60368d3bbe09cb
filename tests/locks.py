"""Locks that a test holds without an owner that beats."""

from pathlib import Path

from pipeline_lib.core.files import write_json
from pipeline_lib.core.lock import Lock


def hold(path: Path) -> Lock:
    """The lock at `path`, held; another process that calls this holds it too, as ranks do.

    Theirs is their launcher's.
    """
    write_json(path, {"host": "a test", "pid": 1, "token": "ours"})
    return Lock(path, "ours")


def take_over(path: Path) -> str:
    """Let another host's owner hold the lock at `path`, without a heartbeat; its content then.

    The other is one that saw no heartbeat.
    """
    write_json(path, {"host": "elsewhere", "pid": 4711, "token": "theirs"})
    return path.read_text()
