"""Signals that ask a process to stop."""

import signal
from collections.abc import Callable, Sequence
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


def interrupt_at_stops() -> None:
    """Let each of STOP_SIGNALS raise KeyboardInterrupt, but those that are ignored."""
    for number in _not_ignored():
        signal.signal(number, signal.default_int_handler)


def interrupt_once() -> None:
    """Do the same for the first signal, and ignore later ones, so that none interrupts what the first began."""
    numbers = _not_ignored()

    def interrupt(_number: int, _frame: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in numbers:
        signal.signal(number, interrupt)


def _not_ignored() -> Sequence[signal.Signals]:
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
