"""A lock per digest: one process at a time works on it, across snakemakes, clones, users and hosts.

The lock is a file that only one process can create; flock is not used because some network file
systems ignore it. The file names its owner, and its mtime is the owner's heartbeat. Other processes
wait while the owner lives. The lock of a dead owner (its process is gone; seen from another host:
its heartbeat has stopped) is replaced. An owner that was only suspended notices this at its next
heartbeat, at the latest before it publishes, and its process ends at once.

The clocks of two machines may differ by hours, so a waiter never decides by the heartbeat's time
alone: it watches whether that time changes.
"""

import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pipeline_lib.core.errors import CONTINUES, LockLost, exit_line
from pipeline_lib.core.files import disk_full_named, time_on_disk_ns

HIDDEN = "hidden"
HEARTBEAT_S = 10.0
DEAD_AFTER_S = 120.0  # without a change of the heartbeat
# the same for a heartbeat that is older than DEAD_AFTER_S by the disk's clock
DEAD_IF_OLD_AFTER_S = 30.0
# to report why a process ends; the reader of its output may have stopped reading
LAST_WORDS_S = 2.0
REMOVAL_S = 5.0  # removing a lock takes microseconds; a process that takes longer was killed
# FAT, some of FUSE and SMB
NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass(frozen=True)
class Lock:
    """A lock that is held, as seen by its owner and the owner's workers.

    The file contains `token`.
    """

    path: Path
    token: str

    def require(self) -> None:
        """Raise LockLost unless the lock is still ours; OSError if the file cannot be read.

        Call it right before an action that would damage another owner's work. The lock can still be
        lost between this check and that action: the window is microseconds, and a file system
        offers no way to close it.
        """
        with self._own_file():
            return

    def renew(self) -> None:
        """Update the heartbeat on the file that contains our token, and on no other.

        Raises as `require` does. Some FUSE and CIFS file systems cannot set times through a
        descriptor. There the times are set by path, right after the token was compared.
        """
        with self._own_file() as file:
            try:
                os.utime(file.fileno())
            except OSError:
                os.utime(self.path)

    @contextmanager
    def required(self) -> Iterator[None]:
        """Raise LockLost at the end of the block if the lock was lost, whatever the block raised.

        The next owner removes unfinished work, which may be why the block failed.
        """
        try:
            yield
        finally:
            # the file server does not answer; the block's own error is enough
            with suppress(OSError):
                self.require()

    def end_process_when_lost(self) -> None:
        """Watch the lock from a thread of a process that works for the owner; end it upon loss.

        The owner reports why.
        """
        watch = threading.Thread(
            target=_watch, args=(self.require, threading.Event()), name="lock", daemon=True
        )
        watch.start()

    @contextmanager
    def _own_file(self) -> Iterator[TextIO]:
        """Open the lock file. Raises LockLost if it is missing or belongs to another owner."""
        with self._open() as file:
            owner = _owner_in(file)
            if owner is None or owner.get("token") != self.token:
                raise LockLost(
                    f"the lock {self.path} was taken over by {describe(owner)}, which saw no "
                    "heartbeat of this process any more. The work is left to it, and nothing was "
                    f"published here since; {CONTINUES} once it has ended"
                )
            yield file

    def _open(self) -> TextIO:
        """Open the current lock file.

        Over NFS, listing the folder reveals a file that another node created.
        """
        for _ in range(2):
            with suppress(FileNotFoundError):
                return self.path.open(encoding="utf-8")
            with suppress(FileNotFoundError):
                list(self.path.parent.iterdir())
        raise LockLost(f"the lock {self.path} was removed while this process held it; {CONTINUES}")


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _pid_namespace() -> str:
    """Return the PID namespace: in containers on one host, a PID may be another process."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "unknown"


def _process_start(pid: int) -> str | None:
    """Return the process's start in clock ticks since boot; it tells a reused PID from the owner.

    Returns None if there is no such process, and HIDDEN if it exists but /proc does not show it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # no such process, or a cluster hides other users' processes from /proc
        try:
            os.kill(pid, 0)
        except PermissionError:
            pass
        except OSError:
            return None
        return HIDDEN
    return None if fields[0] == "Z" else fields[19]


def _read_owner(path: Path) -> dict[str, Any] | None:
    return _read_lock(path)[0]


def _owner_in(file: TextIO) -> dict[str, Any] | None:
    try:
        owner = json.load(file)
    except ValueError:
        return None
    return owner if isinstance(owner, dict) else None


def _is_running(owner: Mapping[str, Any] | None) -> bool | None:
    """Return whether the owner's process runs; None if it cannot be looked up on this machine.

    Another boot ID under this host's name is not always this machine before it was started again:
    it can be another machine, cloned from the same image.
    """
    if not owner or owner.get("host") != socket.gethostname() or owner.get("boot_id") != _boot_id():
        return None
    pid = owner.get("pid")
    if (
        not isinstance(pid, int)
        or owner.get("pid_namespace") != _pid_namespace()
        or not Path("/proc").exists()
    ):
        return None
    started = _process_start(pid)
    return None if started == HIDDEN else started == owner.get("process_start")


def _is_old(path: Path) -> bool:
    """Return whether the heartbeat at `path` is older than DEAD_AFTER_S by the disk's clock."""
    try:
        return time_on_disk_ns(path.parent) - path.stat().st_mtime_ns > DEAD_AFTER_S * 1e9
    except FileNotFoundError:
        return False


@dataclass
class _Watched:
    """The lock at `path` as a waiter sees it. Times are those of this process's own clock."""

    path: Path
    owner: dict[str, Any] | None = None
    beat_ns: int | None = None
    since_s: float = 0.0
    has_beaten: bool = False
    removal_since_s: float | None = None

    def refresh(self) -> None:
        """Read the lock's owner and heartbeat, and note when they changed."""
        owner, beat_ns = _read_lock(self.path)
        if owner == self.owner and beat_ns == self.beat_ns:
            return
        self.has_beaten = owner == self.owner and self.beat_ns is not None
        self.owner, self.beat_ns = owner, beat_ns
        self.since_s = time.monotonic()
        self.removal_since_s = None

    def is_suspect(self) -> bool:
        """Return whether the owner may be long dead: its heartbeat is old, and has not moved."""
        return not self.has_beaten and _is_running(self.owner) is None and _is_old(self.path)

    def is_dead(self) -> bool:
        """Return whether the owner's process is gone, or its heartbeat has stopped too long."""
        is_running = _is_running(self.owner)
        if is_running is not None:
            return not is_running
        silent_s = time.monotonic() - self.since_s
        return silent_s > DEAD_AFTER_S or (silent_s > DEAD_IF_OLD_AFTER_S and _is_old(self.path))

    def remove(self) -> bool:
        """Remove the dead owner's lock; return False while another living process does it."""
        if _remove_dead(self.path, self.owner, self.beat_ns):
            return True
        now_s = time.monotonic()
        if self.removal_since_s is None:
            self.removal_since_s = now_s
        elif now_s - self.removal_since_s > REMOVAL_S:
            _grave(self.path, self.owner).unlink(missing_ok=True)
            self.removal_since_s = None
        return False


def _read_lock(path: Path) -> tuple[dict[str, Any] | None, int | None]:
    """Return the owner in the lock at `path` and its heartbeat's time; None for the unreadable.

    The time is that of the opened file: over NFS the time of a path may be a remembered one.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return _owner_in(file), os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None, None


def _try_acquire(path: Path, owner: Mapping[str, Any]) -> bool:
    """Create the lock file with its content in one step: a hard link appears whole or not at all.

    A file server may run the request twice if its first reply was lost, and then report our own
    link as existing.
    """
    mine = path.with_name(f"{path.name}.{owner['token']}")
    try:
        mine.write_text(json.dumps(owner))
        os.link(mine, path)
    except FileExistsError:
        return bool((_read_owner(path) or {}).get("token") == owner["token"])
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        return _create_without_link(path, json.dumps(owner))
    finally:
        mine.unlink(missing_ok=True)
    return True


def _create_without_link(path: Path, text: str) -> bool:
    """Create the lock file with `text`; return False if it exists.

    It exists for a moment before its content; waiters then give it as long as any lock.
    """
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(text)
    except OSError:  # the disk is full: an empty file would hold up the next process
        path.unlink()
        raise
    return True


def _remove_dead(path: Path, owner: Mapping[str, Any] | None, beat_ns: int | None) -> bool:
    """Remove the lock of the dead `owner`; return False if another process is doing it.

    A heartbeat after `beat_ns` saves it. Only the process that created the file `.dead-TOKEN` may
    remove the lock with that token. So a slow process that saw the same dead owner can never remove
    the lock of the next owner.
    """
    grave = _grave(path, owner)
    try:
        grave.touch(exist_ok=False)
    except FileExistsError:
        return False
    if _read_lock(path) == (owner, beat_ns) and not _is_running(owner):
        path.unlink(missing_ok=True)
    grave.unlink(missing_ok=True)
    return True


def _grave(path: Path, owner: Mapping[str, Any] | None) -> Path:
    return path.with_name(f"{path.name}.dead-{(owner or {}).get('token', 'unreadable')}")


@contextmanager
def locked(
    path: Path,
    say: Callable[[str], None],
    poll_s: float = 0.5,
    note: Mapping[str, Any] | None = None,
) -> Iterator[Lock]:
    """Hold the lock at `path`; wait while a living owner has it, and report that once by `say`.

    `note` is what others can read about this owner: `slurm_job` and `attempt`. If the lock is lost,
    the next heartbeat ends this process with the exit code of LockLost; a block that ends before
    that raises LockLost. Also raises DiskFull.
    """
    me = {
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "pid_namespace": _pid_namespace(),
        "pid": os.getpid(),
        "process_start": _process_start(os.getpid()),
        "token": uuid.uuid4().hex,
        "since": time.time(),
        **(note or {}),
    }
    with disk_full_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _acquire(path, me, say, poll_s)
    lock = Lock(path, me["token"])
    released = threading.Event()
    beating = threading.Thread(
        target=_watch, args=(lock.renew, released, _write_error), name="lock", daemon=True
    )
    beating.start()
    try:
        with lock.required():
            yield lock
    finally:
        released.set()
        beating.join()
        if (_read_owner(path) or {}).get("token") == me["token"]:
            path.unlink(missing_ok=True)


def _acquire(path: Path, me: Mapping[str, Any], say: Callable[[str], None], poll_s: float) -> None:
    watched = _Watched(path)
    is_announced = False
    while not _try_acquire(path, me):
        watched.refresh()
        if watched.is_dead() and watched.remove():
            continue
        if not is_announced and not watched.is_suspect():
            say(f"waiting for {describe(watched.owner)}, which is doing this already ({path})")
            is_announced = True
        time.sleep(poll_s)


def describe(owner: Mapping[str, Any] | None) -> str:
    """Return a description of a lock's owner for messages."""
    if not owner:
        return "an owner that it does not name"
    more = {"SLURM job": owner.get("slurm_job"), "attempt": owner.get("attempt")}
    noted = ", ".join(f"{name} {value}" for name, value in more.items() if value is not None)
    return f"process {owner.get('pid')} on {owner.get('host')}{f' ({noted})' if noted else ''}"


def _watch(
    check: Callable[[], None],
    released: threading.Event,
    tell: Callable[[LockLost], None] = lambda _: None,
) -> None:
    """Call `check` at every heartbeat until the lock is released; end this process if it is lost.

    Nothing is cleaned up: the next owner sweeps unfinished work, and child processes die with this
    one.
    """
    while not released.wait(HEARTBEAT_S):
        try:
            check()
        except LockLost as lost:
            tell(lost)
            os._exit(lost.exit_code)
        except OSError:  # a transient error of the file server: the next heartbeat may succeed
            continue


def _write_error(error: LockLost) -> None:
    """Write the error to stderr as the command line does, bypassing Python's buffers.

    A thread that is blocked in a write may hold the locks of those buffers. Returns after
    LAST_WORDS_S at the latest, even if nobody reads (a stopped terminal, a full pipe).
    """
    text = f"error: {error}\n{exit_line(error.exit_code)}\n".encode()

    def write() -> None:
        with suppress(OSError):
            os.write(2, text)

    writer = threading.Thread(target=write, name="last words", daemon=True)
    with suppress(RuntimeError):  # the limit of threads is reached
        writer.start()
        writer.join(LAST_WORDS_S)


def holder(path: Path) -> dict[str, Any] | None:
    """Return the living owner of the lock at `path`, or None if nobody holds it. It does not wait.

    An owner that cannot be looked up counts as dead if its heartbeat is old: by this machine's
    clock, and by that of the disk, which is asked only then, since that takes a file. One that
    cannot be read is an empty dict.
    """
    owner = _read_owner(path)
    is_running = _is_running(owner)
    is_dead = not is_running
    if is_running is None:
        try:
            is_dead = time.time() - path.stat().st_mtime > DEAD_AFTER_S
        except OSError:
            return None
        with suppress(OSError):  # the folder is read-only
            is_dead = is_dead and _is_old(path)
    return (owner or {}) if path.exists() and not is_dead else None
