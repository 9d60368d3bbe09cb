"""Which tests run side by side, in what order: by file, long ones first; tests/gpu one by one.

Where clusters are tested, each worker has a network, /run, /etc/slurm and /etc/netns of its own:
two never meet.
"""

import ctypes
import gc
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from tests import forked
from tests.fake_hub import FakeHub, point_clients, serving

GPU = "tests/gpu/"  # GPUs are lent for minutes
# These begin first, so that none is left alone at the end.
LONG = ("tests/slurm/", "tests/hosts/", "tests/pipeline/", "tests/train/")
# Threads of OpenMP spin while they wait for one another. Where workers and their processes are more
# than the cores, a thread that spins keeps others from working, and a matrix product takes 20 times
# as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# So do those that NumPy and SciPy each start when they are imported; 2**4 cycles are the least that
# OpenBLAS takes.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
# Tests read English, whatever their developer's terminal speaks.
os.environ["QWEN3_LANG"] = "en"
# An example takes as long as the other workers leave the cores to it.
settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Gives each file to one worker, for its fixtures."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(GPU) else str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Called where there are several workers."""
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the long ones to the front."""
    items.sort(
        key=lambda item: next(
            (LONG.index(part) for part in LONG if item.nodeid.startswith(part)), len(LONG)
        )
    )


class Failures:
    """Shows each failure when it comes: a CI that runs out of time prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        """Show them where pytest shows its results."""
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called after each phase of a test, also of one that a worker ran."""
        if report.failed:
            terminal = self._config.get_terminal_writer()
            terminal.line(
                f"\nFAILED {report.nodeid} in its {report.when} of {report.duration:.0f} s"
            )
            report.toterminal(terminal)


def pytest_configure(config: pytest.Config) -> None:
    """Isolate a worker that may start a cluster; give interrupted processes their signals.

    Tests interrupt the processes.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Failures(config))
    # as a shell leaves it to what it starts with `&`
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # as nohup leaves it: what tests start would ignore it too
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)
    gc.disable()  # until all is imported
    if (
        "PYTEST_XDIST_WORKER" in os.environ
        and os.geteuid() == 0
        and shutil.which("slurmd")
        and shutil.which("ip")
    ):
        _isolate()


def pytest_collection_finish() -> None:
    """Leave all that test modules import out of garbage collection: over a million objects."""
    gc.freeze()
    gc.enable()


def _isolate() -> None:
    """Leave the host's namespaces; what is mounted in the new ones ends with the worker.

    It also ends if the worker is killed.
    """
    # The host's name is to lead to an address here too, and slurmd wants one that is not 127.0.0.1.
    addresses = {
        str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    }
    addresses = {address for address in addresses if not address.startswith("127.")} | {"192.0.2.1"}
    if ctypes.CDLL(None).unshare(CLONE_NEWNS | CLONE_NEWNET):
        raise pytest.UsageError(
            "this container may have no namespaces, which the tests of SLURM need: use -n 0"
        )
    commands = ["mount --make-rprivate /"]
    for folder in ("/run", "/etc/slurm", "/etc/netns"):
        Path(folder).mkdir(exist_ok=True)
        commands.append(f"mount -t tmpfs tmpfs {folder}")
    commands += [
        "ip link set lo up",
        *(f"ip address add {address}/32 dev lo" for address in sorted(addresses)),
    ]
    for command in commands:
        subprocess.run(command.split(), check=True)


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The folder of a very small model with its tokenizer: copy it to change it."""
    from tests.tiny import tiny_model

    return tiny_model()


@pytest.fixture(scope="session")
def forked_programs() -> Iterator[Path]:
    """A folder of programs whose processes start with most imports done: see tests/forked.py."""
    with forked.programs() as folder:
        yield folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """An empty hub on loopback, which the real clients in this process use."""
    with serving() as hub:
        point_clients(hub, tmp_path / "clients", monkeypatch)
        yield hub
