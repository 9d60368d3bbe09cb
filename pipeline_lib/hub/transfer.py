"""Files brought side by side, with two deadlines: for silence, and for the whole.

A client that hangs cannot be stopped from outside: its thread is left behind, ends when it next tells of bytes,
and does not keep the process.
"""

import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path

from pipeline_lib.base.errors import HubError
from pipeline_lib.hub.repository import Arrived, RemoteFile

WORKERS = 8
SILENCE_S = 600.0  # without LEAST_BYTES: a server that drips is as good as silent
LEAST_BYTES = 1_000_000
SLOWEST_BYTES_PER_S = 100_000
EXTRA_S = 3600.0
_POLL_S = 0.5

Bring = Callable[[RemoteFile, Arrived], Path]
Tell = Callable[[int, int], None]  # told the bytes that are here, and how many there will be


class _GivenUpError(Exception):
    """Ends a thread that was left behind."""


class Transfer:
    """Brings files by `bring`, several at a time; `doing` names the work in errors."""

    def __init__(self, bring: Bring, doing: str) -> None:
        """Nothing begins yet."""
        self._bring = bring
        self._doing = doing
        self._lock = threading.Lock()
        self._given_up = False
        self._here_bytes = 0
        self._unsigned_bytes = 0
        self._sign_s = time.monotonic()

    def run(self, files: Sequence[RemoteFile], tell: Tell) -> dict[str, Path]:
        """The paths of `files` by name. Raises what the first failure raised; HubError when a deadline passes."""
        paths: dict[str, Path] = {}
        if not files:
            return paths
        total_bytes = sum(file.size for file in files)
        self._sign_s = time.monotonic()
        deadline_s = self._sign_s + EXTRA_S + total_bytes / SLOWEST_BYTES_PER_S
        with ThreadPool(min(WORKERS, len(files))) as pool:
            results = pool.imap_unordered(self._one, sorted(files, key=lambda file: -file.size))
            try:
                while len(paths) < len(files):
                    tell(min(self._here_bytes, total_bytes), total_bytes)
                    self._check(deadline_s)
                    try:
                        name, path = results.next(timeout=_POLL_S)
                    except multiprocessing.TimeoutError:
                        continue
                    paths[name] = path
                    self._sign_s = time.monotonic()
            finally:
                self._given_up = True
        return paths

    def _one(self, file: RemoteFile) -> tuple[str, Path]:
        return file.name, self._bring(file, self._arrived)

    def _arrived(self, new_bytes: int) -> None:
        """Count bytes of a file. None at all is a sign of other work: hashing, or bytes on the wire."""
        if self._given_up:
            raise _GivenUpError
        with self._lock:
            self._here_bytes += new_bytes
            self._unsigned_bytes += max(0, new_bytes)
            if new_bytes == 0 or self._unsigned_bytes >= LEAST_BYTES:
                self._unsigned_bytes = 0
                self._sign_s = time.monotonic()

    def _check(self, deadline_s: float) -> None:
        now_s = time.monotonic()
        if now_s - self._sign_s > SILENCE_S:
            why = f"less than {LEAST_BYTES / 1e6:.1f} MB came in {SILENCE_S:.0f} s"
        elif now_s > deadline_s:
            why = f"slower than {SLOWEST_BYTES_PER_S / 1e6:.1f} MB/s for more than {EXTRA_S:.0f} s"
        else:
            return
        raise HubError(f"{self._doing}: {why}; run again, what has arrived is kept")
