"""One process at a time works on a digest, across snakemakes, clones, users and hosts.

An O_EXCL file, no flock (some network file systems ignore it). It names its owner and its heartbeat is
the file's mtime. A process that finds it held waits as long as the owner lives, and then finds the work done.
An owner that is dead (its process is gone; seen from another host: its heartbeat has stopped) is replaced.
One that was only silent finds that out at its next heartbeat, and at the latest before it publishes anything:
its process ends at once.
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
from pipeline_lib.core.files import disk_full_named

HIDDEN = "hidden"
HEARTBEAT_S = 10.0
DEAD_AFTER_S = 120.0
LAST_WORDS_S = 2.0  # for saying why a process ends: who looks at its output may have stopped reading
REMOVAL_S = 5.0  # removing a dead owner's lock takes microseconds; one that takes longer was killed meanwhile
NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # FAT, some of FUSE and SMB


@dataclass(frozen=True)
class Lock:
    """A lock that is held, as its owner and the processes that work for it know it: `token` stands in the file."""

    path: Path
    token: str

    def require(self) -> None:
        """Raise LockLost unless the lock is still ours; OSError if that cannot be read.

        Called right before what must not be done to another owner's work. Between the two the lock can still be lost:
        the window is of microseconds, and a file system offers no way to close it.
        """
        with self._own_file():
            return

    def renew(self) -> None:
        """Give a heartbeat, on the file that holds our token and on no other. Raises as `require` does.

        Where a file system refuses that (some of FUSE and CIFS), on the file of that name: its token was just compared.
        """
        with self._own_file() as file:
            try:
                os.utime(file.fileno())
            except OSError:
                os.utime(self.path)

    @contextmanager
    def required(self) -> Iterator[None]:
        """Raise LockLost at the end of the block if the lock was lost, whatever else the block failed with.

        The next owner removes what it finds half done, which the block may have failed for.
        """
        try:
            yield
        finally:
            with suppress(OSError):  # a file server that does not answer: what the block raised says enough
                self.require()

    def end_process_when_lost(self) -> None:
        """Watch the lock from a thread, in a process that works for the owner. The owner says why it ended."""
        watch = threading.Thread(target=_watch, args=(self.require, threading.Event()), name="lock", daemon=True)
        watch.start()

    @contextmanager
    def _own_file(self) -> Iterator[TextIO]:
        """The lock file, opened. Raises LockLost if it is another owner's or missing."""
        with self._open() as file:
            try:
                owner = json.load(file)
            except ValueError:
                owner = None
            if not isinstance(owner, dict) or owner.get("token") != self.token:
                raise LockLost(
                    f"the lock {self.path} was taken over by {describe(owner if isinstance(owner, dict) else None)}, "
                    f"who had seen no heartbeat of this process for {DEAD_AFTER_S:.0f} s. The work is left to it, and "
                    f"nothing was published here since; {CONTINUES} once it has ended"
                )
            yield file

    def _open(self) -> TextIO:
        """The file that is there now: over NFS, listing the folder asks for one that another node made."""
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
    """Tells containers apart that share a host name: the same pid is another process in each."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "unknown"


def _process_start(pid: int) -> str | None:
    """When the process began, in clock ticks since boot: tells a reused pid from the owner.

    None: there is no such process. HIDDEN: there is one, and /proc does not show it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return HIDDEN if _is_hidden(pid) else None
    return None if fields[0] == "Z" else fields[19]


def _is_hidden(pid: int) -> bool:
    """Whether the process lives but /proc does not show it, as clusters do with other users' processes."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _myself() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "pid_namespace": _pid_namespace(),
        "pid": os.getpid(),
        "process_start": _process_start(os.getpid()),
        "token": uuid.uuid4().hex,
        "since": time.time(),
    }


def _read_owner(path: Path) -> dict[str, Any] | None:
    try:
        owner = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) else None


def _is_dead(owner: Mapping[str, Any] | None, path: Path) -> bool:
    """Whether the lock at `path` was left behind. One whose owner cannot be looked up here counts by its age."""
    if owner and owner.get("host") == socket.gethostname() and Path("/proc").exists():
        if owner.get("boot_id") != _boot_id():
            return True
        pid = owner.get("pid")
        if isinstance(pid, int) and owner.get("pid_namespace") == _pid_namespace():
            started = _process_start(pid)
            if started != HIDDEN:
                return started != owner.get("process_start")
    try:
        return _time_on_disk(path) - path.stat().st_mtime > DEAD_AFTER_S
    except FileNotFoundError:
        return False


def _time_on_disk(path: Path) -> float:
    """The time by the clock that stamps files beside `path`, which may be a file server's."""
    probe = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def _try_acquire(path: Path, owner: Mapping[str, Any]) -> bool:
    """Create the lock file with its content in one step: a hard link either appears whole or fails.

    A file server that is asked twice, as its first answer was lost, says that our own link is there already.
    Without hard links the file is there a moment before its content: it counts by its age, which is young.
    """
    mine = path.with_name(f"{path.name}.{owner['token']}")
    mine.write_text(json.dumps(owner))
    try:
        os.link(mine, path)
    except FileExistsError:
        return bool((_read_owner(path) or {}).get("token") == owner["token"])
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        return _try_create(path, owner)
    finally:
        mine.unlink()
    return True


def _try_create(path: Path, owner: Mapping[str, Any]) -> bool:
    try:
        file = path.open("x")
    except FileExistsError:
        return False
    with file:
        file.write(json.dumps(owner))
    return True


def _remove_dead(path: Path, owner: Mapping[str, Any] | None) -> bool:
    """Remove the lock of the dead `owner`; False if somebody else is doing it.

    Only the process that made the file `.dead-TOKEN` may remove the lock with that token. So a slow one, which
    saw the same dead owner, can never remove the lock of the next owner.
    """
    grave = path.with_name(f"{path.name}.dead-{(owner or {}).get('token', 'unreadable')}")
    try:
        grave.touch(exist_ok=False)
    except FileExistsError:
        with suppress(FileNotFoundError):
            if time.time() - grave.stat().st_ctime > REMOVAL_S:
                grave.unlink()
        return False
    if _read_owner(path) == owner and _is_dead(owner, path):
        path.unlink(missing_ok=True)
    grave.unlink(missing_ok=True)
    return True


@contextmanager
def locked(
    path: Path, say: Callable[[str], None], poll_s: float = 0.5, note: Mapping[str, Any] | None = None
) -> Iterator[Lock]:
    """Hold the lock at `path`; wait, telling once through `say`, while a living owner has it.

    `note` is what others are to know of us: `slurm_job` and `attempt`. When the lock is lost, the next heartbeat ends
    this process with the exit code of LockLost; a block that ends before raises LockLost. Raises DiskFull, too.
    """
    me = {**_myself(), **(note or {})}
    with disk_full_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _acquire(path, me, say, poll_s)
    held, released = Lock(path, me["token"]), threading.Event()
    beating = threading.Thread(target=_watch, args=(held.renew, released, _say_error), name="lock", daemon=True)
    beating.start()
    try:
        with held.required():
            yield held
    finally:
        released.set()
        beating.join()
        if (_read_owner(path) or {}).get("token") == me["token"]:
            path.unlink(missing_ok=True)


def _acquire(path: Path, me: Mapping[str, Any], say: Callable[[str], None], poll_s: float) -> None:
    """Wait until the lock is ours."""
    told = False
    while not _try_acquire(path, me):
        owner = _read_owner(path)
        if _is_dead(owner, path) and _remove_dead(path, owner):
            continue
        if not told:
            say(f"waiting for {describe(owner)}, which is doing this already ({path})")
            told = True
        time.sleep(poll_s)


def describe(owner: Mapping[str, Any] | None) -> str:
    """Who holds a lock, in words."""
    if not owner:
        return "an owner that it does not name"
    more = {"SLURM job": owner.get("slurm_job"), "attempt": owner.get("attempt")}
    noted = ", ".join(f"{name} {value}" for name, value in more.items() if value is not None)
    return f"process {owner.get('pid')} on {owner.get('host')}{f' ({noted})' if noted else ''}"


def _watch(
    check: Callable[[], None], released: threading.Event, tell: Callable[[LockLost], None] = lambda _: None
) -> None:
    """`check` the lock at every heartbeat until it is released; end this process at once when it was lost.

    Nothing is cleaned up: what is half done lies where the next owner sweeps, and children die with this process.
    """
    while not released.wait(HEARTBEAT_S):
        try:
            check()
        except LockLost as lost:
            tell(lost)
            os._exit(lost.exit_code)
        except OSError:  # a file server that hiccups: the next beat may get through
            continue


def _say_error(error: LockLost) -> None:
    """As the command line says it, past Python's buffers: whoever is stuck in a write may hold their locks.

    Returns after LAST_WORDS_S also where nobody reads: a terminal that was stopped, a pipe that is full.
    """
    text = f"error: {error}\n{exit_line(error.exit_code)}\n".encode()

    def write() -> None:
        with suppress(OSError):
            os.write(2, text)

    writer = threading.Thread(target=write, name="last words", daemon=True)
    with suppress(RuntimeError):  # no thread can be started: more than enough run
        writer.start()
        writer.join(LAST_WORDS_S)


def holder(path: Path) -> dict[str, Any] | None:
    """The living owner of the lock at `path`, by the lock's own rules; None if nobody holds it. Changes nothing.

    An owner that cannot be read is an empty dict.
    """
    owner = _read_owner(path)
    try:
        is_dead = _is_dead(owner, path)
    except OSError:  # a folder that may only be read: this machine's clock has to do
        try:
            is_dead = time.time() - path.stat().st_mtime > DEAD_AFTER_S
        except OSError:
            return None
    return (owner or {}) if path.exists() and not is_dead else None
