"""A copy of the project in a folder of its own, and real Snakemake runs in it."""

import compileall
import contextlib
import copy
import fcntl
import functools
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from pipeline_lib.config.compile import Experiment, open_experiment
from pipeline_lib.core.store import Store

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
DEADLINE_S = 900.0
DATA_STAGES = ("download", "tokenize", "shard")
PARTS_OF_PROJECT = (
    "workflow",
    "pipeline_lib",
    "profiles",
    "slurm",
    "dvc.yaml",
    ".dvc",
    ".dvcignore",
)

SMALL = """\
experiment: small
model: {source: tiny, vocab_tokens: 512, hidden_size: 32, layers: 2}
data: {train: [{source: pydoc, max_rows: 400}], validation_fraction: 0.1}
tokenize: {max_tokens: 128, max_dropped_fraction: 0.2}
shard: {block_tokens: 128, shards: 2}
cluster: {cpu_ranks: 1}
train: {precision: fp32, global_batch_tokens: 2048, micro_batch_blocks: 2, epochs: 2, lr: 4.0e-3, save_every_steps: 3}
evaluate: {generations: 2, max_new_tokens: 8}
"""


@functools.cache
def compile_once() -> None:
    """Copies of the project keep the compiled modules, or each of its processes compiles them."""
    compileall.compile_dir(ROOT / "pipeline_lib", quiet=1)


class Project:
    """A working copy in which Snakemake runs, started from `programs`."""

    programs: Path = BIN

    def __init__(self, root: Path) -> None:
        """Copy the project to `root`, with a small config, if it is not there yet."""
        self.root = root
        self.config = root / "config" / "config.yaml"
        self.environment = {**os.environ, **self._variables()}
        self.environment.pop("PIPELINE_STORE", None)
        if not self.config.exists():
            self._copy_project()

    def _variables(self) -> dict[str, str]:
        """Where programs are; threads that wait in vain on shared cores are left out."""
        return {"PATH": f"{self.programs}:{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def _copy_project(self) -> None:
        compile_once()
        self.config.parent.mkdir(parents=True)
        for name in PARTS_OF_PROJECT:
            source = ROOT / name
            if source.is_symlink():
                (self.root / name).symlink_to(source.readlink())
            elif source.is_dir():
                ignored = shutil.ignore_patterns("*.pyc.*")  # not yet whole
                shutil.copytree(source, self.root / name, ignore=ignored)
            else:
                shutil.copy(source, self.root / name)
        self.config.write_text(SMALL)

    def copy_to(self, root: Path) -> Self:
        """The same project elsewhere, with all that it has made; not the state of Snakemake."""
        shutil.copytree(
            self.root, root, symlinks=True, ignore=shutil.ignore_patterns(".snakemake", "logs")
        )
        other = copy.copy(self)
        other.environment = {**self.environment, **self._variables()}
        other.root, other.config = root, root / "config" / "config.yaml"
        return other

    def starting_from(self, programs: Path) -> Self:
        """The same project, which starts its programs from that folder."""
        self.programs = programs
        self.environment |= self._variables()
        return self

    def take_data(self, other: "Project") -> None:
        """Take over the model and the blocks that another project has made of the same settings."""
        for stage in DATA_STAGES:
            shutil.copytree(other.store.root / stage, self.store.root / stage)

    def forget_training(self) -> None:
        """Remove the training and all that was made from it."""
        for stage in ("train", "merge", "evaluate", "report"):
            shutil.rmtree(self.store.root / stage)
        shutil.rmtree(self.root / "runs")
        shutil.rmtree(self.root / "results")

    def target(self, part: str) -> str:
        """What Snakemake is asked for to make a part and what that needs, and no more."""
        return str(self.store.pointer(self.experiment().ref(part)).relative_to(self.root))

    @property
    def store(self) -> Store:
        """Where the sealed directories are."""
        return Store(self.root / "store")

    def experiment(self, config: Path | None = None) -> Experiment:
        """What the config compiles to now."""
        before = Path.cwd()
        os.chdir(self.root)
        try:
            return open_experiment(config or self.config, self.store)
        finally:
            os.chdir(before)

    def edit(self, old: str, new: str) -> None:
        """Replace text of the config."""
        text = self.config.read_text()
        assert old in text
        self.config.write_text(text.replace(old, new))

    def set_cluster(self, section: str) -> None:
        """Train on another cluster than one rank, which starts in half the time of two."""
        self.edit("cluster: {cpu_ranks: 1}", f"cluster: {section}")

    def take_small_steps(self, epochs: int) -> None:
        """Train for so many epochs of 60 steps of a quarter of the work: faults come between."""
        self.edit("global_batch_tokens: 2048", "global_batch_tokens: 512")
        self.edit("epochs: 2", f"epochs: {epochs}")

    def run(self, *command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run a command of the environment in the project; the output is in stdout."""
        program = shutil.which(command[0], path=self.environment["PATH"])
        assert program is not None
        done = subprocess.run(
            [program, *command[1:]],
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
        )
        if check:
            assert done.returncode == 0, done.stdout
        return done

    def snakemake(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run snakemake with the default profile."""
        return self.run("snakemake", *arguments, check=check)

    def git(self, *arguments: str) -> None:
        """Run git in the project."""
        subprocess.run(["git", *arguments], cwd=self.root, env=self.environment, check=True)

    def start(self, *arguments: str, log: str = "started.log") -> "subprocess.Popen[str]":
        """Start snakemake and leave it running; what it prints is in the file `log`."""
        command = [str(self.programs / "snakemake"), *arguments]
        output = (self.root / log).open("w")
        return subprocess.Popen(
            command,
            cwd=self.root,
            env=self.environment,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )

    def start_in_terminal(self, *command: str) -> "Terminal":
        """Start the command as the leader of a terminal's session."""

        def lead() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        ours, its = pty.openpty()
        process = subprocess.Popen(
            command, cwd=self.root, env=self.environment, stdin=its, stdout=its, stderr=its, text=True,
            start_new_session=True, preexec_fn=lead,
        )  # fmt: skip
        os.close(its)
        return Terminal(process, ours)

    def manifest(self, part: str, experiment: Experiment | None = None) -> dict[str, Any]:
        """The manifest of a finished part."""
        path = self.sealed(part, experiment) / "manifest.json"
        return dict(json.loads(path.read_text()))

    def sealed(self, part: str, experiment: Experiment | None = None) -> Path:
        """The sealed directory of a part."""
        return self.store.sealed((experiment or self.experiment()).ref(part))

    def weights(self) -> dict[str, str]:
        """sha256 of the merged model's weight files."""
        files = self.manifest("merge")["files"]
        return {
            name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")
        }


class Terminal:
    """A terminal in which snakemake runs; what it shows is thrown away."""

    def __init__(self, process: "subprocess.Popen[str]", shown: int) -> None:
        """Read what `process` prints from the terminal's other end, `shown`."""
        self.process, self._shown = process, shown
        self._is_closed = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._is_closed.is_set():
            if select.select([self._shown], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # all of its processes have ended
                    os.read(self._shown, 4096)
        os.close(self._shown)

    def close(self) -> None:
        """As a user closes the window: the kernel sends SIGHUP to the session."""
        self._is_closed.set()
        self._reader.join()


def executed(output: str) -> list[str]:
    """The stages that a Snakemake run, or dry run, (would have) executed, sorted."""
    return sorted(re.findall(r"^Job \d+: [\w.=-]+: (\w+) ", output, re.MULTILINE))


def sealed_times(project: Project) -> dict[str, float]:
    """When each sealed directory came to be."""
    return {
        str(path.parent): path.stat().st_mtime
        for path in project.store.root.glob("*/*/manifest.json")
    }


def kill_tree(process: "subprocess.Popen[str]") -> None:
    """Kill -9 of snakemake and of all its children, by pid."""
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    for child in children:
        try:
            os.kill(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def wait_until(condition: Callable[[], bool], process: "subprocess.Popen[str]", what: str) -> None:
    """Poll until `condition` holds; fail if the process ends before, or after a deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, f"snakemake ended before {what}"
        assert time.monotonic() < deadline_s, f"{what} did not happen"
        time.sleep(0.05)  # `condition` may look at all processes of the machine


def no_process_left(root: Path) -> bool:
    """Whether no process works in `root` any more."""
    for process in psutil.process_iter(["cwd", "cmdline"]):
        if process.info["cwd"] == str(root) and "pipeline_lib" in " ".join(
            process.info["cmdline"] or []
        ):
            return False
    return True


@pytest.fixture(scope="module")
def forked_processes(small: "Project", forked_programs: Path) -> Iterator[None]:
    """Let projects of a module run forked programs, where their processes are not what it tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Project, "programs", forked_programs)
        yield


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose small experiment has run, once for all workers; tests use copies of it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with (shared / "small.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        project = Project(shared / "small")
        if not (
            project.root / "results" / "small" / "report.html"
        ).exists():  # also if another worker's run failed
            project.snakemake()
        return project


@pytest.fixture(scope="module")
def finished(small: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy of the finished project, with Snakemake's records; tests leave its config as is."""
    project = small.copy_to(tmp_path_factory.mktemp("finished") / "project")
    shutil.copytree(small.root / ".snakemake", project.root / ".snakemake")
    return project
