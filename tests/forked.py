"""Project commands in processes forked from one that has done the slow imports of other packages.

A process of the pipeline imports for 1 to 5 s of CPU time before it does anything. `programs` makes
a folder with a `python` and a `snakemake` to be put first into PATH: they pass `python -m
pipeline_lib ...` and `snakemake ...` on to a server, which forks a process with their arguments,
environment, folder, input and outputs. That process imports pipeline_lib from where it is, gets the
signals that they get, and ends as they end. But it is no child of who started it: tests of what
happens between processes need the real programs. And what other packages read of the environment
when they are imported, such as the address of a hub, they have read in the server.
"""

import atexit
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline_lib.core.processes import die_with_parent, importing

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parent.parent
SOCKET_NAME = "server"
READY = "ready\n"
IMPORTED = (
    "snakemake.cli",
    "torch",
    "transformers",
    "transformers.models.qwen3.modeling_qwen3",
    "peft",
    "peft.tuners.lora.bnb",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "bokeh.plotting",
    "rich.console",
    "rich.table",
    "ruamel.yaml",
    "datasets",
    "pyarrow.parquet",
)
MAX_MESSAGE_BYTES = 1 << 20
# Isolated and without `site`, so that it starts in milliseconds.
PROGRAM = """\
#!{python} -IS
import array, json, os, signal, socket, sys
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
if name != "snakemake" and (arguments[:1] != ["-m"] or arguments[1].partition(".")[0] != "pipeline_lib"):
    os.execv("{python}", ["{python}", *arguments])
server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
server.connect("{socket}")
message = json.dumps([name, sys.argv[0], arguments, os.getcwd(), dict(os.environ)]).encode()
files = array.array("i", [0, 1, 2]).tobytes()
server.sendmsg([len(message).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
server.sendall(message)
answers = server.makefile()
pid = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@contextmanager
def programs() -> Iterator[Path]:
    """A folder `bin` of two programs with a server in the context; the real ones beside GPUs."""
    # imports may look for them, and then no forked process may use them
    if any(Path("/dev").glob("nvidia[0-9]*")):
        yield BIN
        return
    with tempfile.TemporaryDirectory(prefix="forked-") as name:
        folder = Path(name)
        made = folder / "bin"
        made.mkdir()
        for program in ("python", "snakemake"):
            (made / program).write_text(
                PROGRAM.format(python=BIN / "python", socket=folder / SOCKET_NAME)
            )
            (made / program).chmod(0o755)
        command = [sys.executable, "-m", "tests.forked", str(folder)]
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        ) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == READY.encode()
            try:
                yield made
            finally:
                server.kill()


def serve(folder: Path) -> None:
    """Fork a process for each request, until the process that started this one ends."""
    die_with_parent()
    with importing():
        for name in IMPORTED:
            importlib.import_module(name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "pipeline_lib"]:
        del sys.modules[name]  # each project has its own
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / SOCKET_NAME))
    listener.listen(64)
    print(READY, end="", flush=True)
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    while True:
        key, _ = waiting.select()[0]  # what it does may make the next one void
        if key.fileobj is listener:
            _start(listener, waiting)
        else:
            _end(key, waiting)


def _start(listener: socket.socket, waiting: selectors.BaseSelector) -> None:
    client, _ = listener.accept()
    length, files, _, _ = socket.recv_fds(client, 4, 3)
    message = _receive(client, int.from_bytes(length, "big"))
    pid = os.fork()
    if pid == 0:
        client.close()
        for key in list(waiting.get_map().values()):
            _close(key.fileobj)
        waiting.close()
        _be_program(files, *json.loads(message))
    for file in files:
        os.close(file)
    client.sendall(f"{pid}\n".encode())
    ended = os.pidfd_open(pid)
    waiting.register(ended, selectors.EVENT_READ, (pid, client))
    waiting.register(client, selectors.EVENT_READ, (pid, ended))


def _receive(client: socket.socket, length: int) -> bytes:
    message = b""
    while len(message) < length:
        message += client.recv(min(MAX_MESSAGE_BYTES, length - len(message)))
    return message


def _end(key: selectors.SelectorKey, waiting: selectors.BaseSelector) -> None:
    """A process has ended, which its client is told; or the client has, whose process is killed."""
    pid, other = key.data
    if isinstance(key.fileobj, socket.socket):
        os.kill(pid, signal.SIGKILL)
        waiting.unregister(key.fileobj)
        return
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):  # the client was killed
        other.sendall(f"{code}\n".encode())
    for each in (key.fileobj, other):
        with suppress(KeyError):  # a client that was killed
            waiting.unregister(each)
        _close(each)


def _close(file: Any) -> None:
    """Close a socket, or the descriptor of a process."""
    if isinstance(file, socket.socket):
        file.close()
    else:
        os.close(file)


def _be_program(
    files: list[int], name: str, path: str, arguments: list[str], folder: str, environ: Any
) -> None:
    """Do what Python does when it starts and when it ends."""
    code = 1
    try:
        die_with_parent()
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdin, sys.stdout, sys.stderr = (_stream(number) for number in range(3))
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environ)
        sys.executable = str(Path(path).parent / "python")
        if "OMP_NUM_THREADS" in environ:
            # read before the variable was set
            sys.modules["torch"].set_num_threads(int(environ["OMP_NUM_THREADS"]))
        sys.path[0] = str(BIN) if name == "snakemake" else folder
        sys.path[1:1] = [each for each in environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        if name == "snakemake":
            sys.argv = [str(BIN / name), *arguments]
            runpy.run_path(str(BIN / name), run_name="__main__")
        else:
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 - as Python does
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _stream(number: int) -> io.TextIOWrapper:
    if number == 0:
        return io.TextIOWrapper(io.FileIO(0, closefd=False))
    errors = "backslashreplace" if number == 2 else "strict"
    raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
    return io.TextIOWrapper(raw, errors=errors, line_buffering=number == 2 or os.isatty(number))


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
