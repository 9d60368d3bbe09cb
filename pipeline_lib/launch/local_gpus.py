"""Which GPUs of this machine a stage takes: two stages at a time take different ones.

Stages of one user know of one another by locks on files, one for each GPU, which the system frees
when a process ends, however it ends.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pipeline_lib.core.stage import Say
from pipeline_lib.core.units import count
from pipeline_lib.core.user_cache import UserCache
from pipeline_lib.hosts.facts import ask_driver

VISIBLE = "CUDA_VISIBLE_DEVICES"
_FOLDER = "gpus"
_TURN = "turn"  # the file that a process locks while it looks for free GPUs
_POLL_S = 0.5
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that processes with `environ` see, by UUID; none without a driver.

    As CUDA does, it ends at the first entry of CUDA_VISIBLE_DEVICES that names no GPU. An instance
    of a GPU that is divided (MIG) goes by its entry there.
    """
    present = {index: uuid for index, uuid in ask_driver("index", "uuid")}
    if VISIBLE not in environ:
        return tuple(present.values())
    found: list[str] = []
    for entry in environ[VISIBLE].split(","):
        named = _named_by(entry.strip(), present)
        if named is None:
            break
        found.append(named)
    return tuple(found)


def _named_by(entry: str, present: Mapping[str, str]) -> str | None:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names: a number or a UUID's beginning."""
    if entry in present:
        return present[entry]
    if entry.startswith("MIG-"):
        return entry
    matching = [uuid for uuid in present.values() if entry and uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


@contextmanager
def taken_gpus(wanted: int, environ: MutableMapping[str, str], say: Say) -> Iterator[None]:
    """Take `wanted` GPUs of this machine for the block, and show only them to what it starts.

    Where other stages of this user have too many of them, wait. Nothing is taken where there are
    fewer in all, which others report, or where nothing can be locked.
    """
    visible = visible_gpus(environ) if wanted else ()  # most stages want none
    folder = UserCache.from_env(environ).within(_FOLDER, socket.gethostname())
    if not 0 < wanted <= len(visible) or not folder.is_private or folder.folder is None:
        yield
        return
    shown = environ.get(VISIBLE)
    with ExitStack() as locks:
        names = _wait_for(wanted, visible, folder.folder, locks, say)
        if wanted < len(visible):
            environ[VISIBLE] = ",".join(names)
        try:
            yield
        finally:
            if shown is None:
                environ.pop(VISIBLE, None)
            else:
                environ[VISIBLE] = shown


def _wait_for(
    wanted: int, visible: Sequence[str], folder: Path, locks: ExitStack, say: Say
) -> list[str]:
    """Return `wanted` of the GPUs `visible`, once so many are free; `locks` keeps them."""
    has_told = False
    while True:
        names = _try_to_take(wanted, visible, folder, locks)
        if names:
            return names
        if not has_told:
            gpus = count(wanted, "GPUs")
            say(f"waiting for {gpus} of {len(visible)}: other stages of yours have the rest")
            has_told = True
        time.sleep(_POLL_S)


def _try_to_take(wanted: int, visible: Sequence[str], folder: Path, locks: ExitStack) -> list[str]:
    """Return `wanted` GPUs that are free and now in `locks`; none if fewer are free."""
    with ExitStack() as turn, ExitStack() as found:
        _lock(folder / _TURN, fcntl.LOCK_EX, turn)
        names: list[str] = []
        for name in visible:
            if _lock(folder / name, fcntl.LOCK_EX | fcntl.LOCK_NB, found):
                names.append(name)
            if len(names) == wanted:
                locks.push(found.pop_all())
                return names
    return []


def _lock(path: Path, kind: int, locks: ExitStack) -> bool:
    """Lock the file at `path` until `locks` is closed; return False if another process has it.

    On a file system without such locks nobody ever has it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    locks.callback(os.close, descriptor)
    return True
