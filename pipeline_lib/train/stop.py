"""A signal that asks a run to stop, as ranks hear it; and what their launcher passes on, which needs no torch."""

import signal

# SLURM's warning may come when a rank cannot save yet, or any more, and would kill it: blocked as its first act.
EARLY_SIGNAL = signal.SIGUSR1


class StopRequest:
    """Remembers that a signal asked us to stop; ranks agree on it at the next step boundary."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        """Begin with no request."""
        self.signal_number = 0

    def __enter__(self) -> "StopRequest":
        """Handle the signals from now on."""
        self._before = {number: signal.signal(number, self._remember) for number in self.SIGNALS}
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {EARLY_SIGNAL})
        return self

    def __exit__(self, *_: object) -> None:
        """Give the signals back; a warning that comes too late is blocked as one that came too early."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: object) -> None:
        self.signal_number = number

    @property
    def is_set(self) -> bool:
        """Whether a signal came."""
        return self.signal_number != 0
