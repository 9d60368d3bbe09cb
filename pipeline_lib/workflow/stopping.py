"""A signal to snakemake stops the stages that it runs, as one to all of its processes does."""

import signal
import threading
from contextlib import suppress

import psutil

from pipeline_lib.core.signals import handle_stops

RETELL_S = 0.5


class StagesStopped:
    """Handles the signals to stop that this process gets while it runs stages on this machine."""

    def __init__(self) -> None:
        """Begin with no signal."""
        self.by_signal = False

    def begin(self) -> None:
        """Handle the signals from now on; an ignored SIGHUP stays ignored.

        The first asks all stages to stop, and raises KeyboardInterrupt, at which Snakemake waits
        for its jobs. Later ones are ignored: what the stages save must be waited for.
        """
        handle_stops(self._stop)

    def _stop(self, _number: int, _frame: object) -> None:
        handle_stops(signal.SIG_IGN)
        self.by_signal = True
        threading.Thread(target=_ask_stages_to_stop, name="stop the stages", daemon=True).start()
        raise KeyboardInterrupt


def _ask_stages_to_stop() -> None:
    """Send SIGTERM to each stage, also to those that are just starting, until this process ends."""
    over = threading.Event()
    told = set[psutil.Process]()
    while not over.wait(RETELL_S):
        for stage in _stages():
            if stage not in told:
                with suppress(psutil.NoSuchProcess):
                    stage.terminate()
                told.add(stage)


def _stages() -> list[psutil.Process]:
    """Return the stages that this process started, without what they started themselves."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.cmdline()[1:3] == ["-m", "pipeline_lib"]:
                found[process.pid] = (process, process.ppid())
    return [process for process, parent in found.values() if parent not in found]
