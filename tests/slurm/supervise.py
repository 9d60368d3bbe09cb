"""Runs a daemon and adopts all that it starts: `python supervise.py FOLDER NAME LOG COMMAND...`.

Promise: whatever the daemon's descendants do (fork twice, begin a session, clear their
environment), they stay below this process, so that a node can lose its power. It ends with the last
of them; SIGTERM goes on to the daemon.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_CHILD_SUBREAPER = 36


def supervise(log: str, command: list[str]) -> None:
    """Become nobody's child, run `command`, and wait for all that it leaves behind."""
    if os.fork():
        return
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _redirect(log)
    daemon = os.fork()
    if not daemon:
        _exec(command)
    alive = {daemon}

    def pass_on(number: int, _frame: object) -> None:
        for pid in alive:
            os.kill(pid, number)

    signal.signal(signal.SIGTERM, pass_on)
    with contextlib.suppress(ChildProcessError):
        while True:
            # Only seen here, reaped below: until then the number cannot become somebody else's.
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            if info is not None:
                alive.discard(info.si_pid)
                os.waitpid(info.si_pid, 0)


def _redirect(log: str) -> None:
    os.chdir("/")
    os.umask(0o022)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 256)


def _exec(command: list[str]) -> None:
    """Become the daemon.

    Python ignores SIGPIPE, and a shell SIGINT for `&`: jobs must not inherit that.
    """
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.execvp(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    supervise(sys.argv[3], sys.argv[4:])
