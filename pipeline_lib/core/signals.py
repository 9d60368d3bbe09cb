"""Signals that ask a process to stop."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# Ctrl-C; `timeout`, systemd and a shutdown; a closed terminal or a lost login; SLURM's warning.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
Handler = Callable[[int, Any], Any]


def handle_stops(handler: Handler | signal.Handlers) -> dict[signal.Signals, Any]:
    """Let `handler` handle each of STOP_SIGNALS; return the handlers from before.

    An ignored SIGHUP stays ignored: that is what `nohup` is for.
    """
    numbers = list(STOP_SIGNALS)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    return {number: signal.signal(number, handler) for number in numbers}


def restore(before: Mapping[signal.Signals, Any]) -> None:
    """Set the handlers `before` again."""
    for number, handler in before.items():
        signal.signal(number, handler)


class Terminated(BaseException):
    """A signal asked this process to end, unlike Ctrl-C, which ends only an answer of `chat`."""


@contextmanager
def stops_interrupt(is_once: bool) -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt in the block, and others Terminated, unless ignored.

    With `is_once`, those after the first are ignored, so that none interrupts what the first began.
    """
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]

    def interrupt(number: int, _frame: object) -> None:
        if is_once:
            for later in numbers:
                signal.signal(later, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        restore(before)
