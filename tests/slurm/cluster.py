"""A real SLURM on this machine: munged, slurmctld and one slurmd for each node, in a folder of their own.

Nothing outside of that folder is written, and all of it is gone afterwards. Its programs find it by SLURM_CONF.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.ranks import free_port

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
LACKING = [name for name in PROGRAMS if shutil.which(name) is None]
needs_slurm = pytest.mark.skipif(
    bool(LACKING) or os.geteuid() != 0,
    reason=f"needs {', '.join(LACKING)} (slurm-wlm, munge)" if LACKING else "needs to be root, as slurmd does",
)
GPUS = 4  # of each node; SLURM takes any device file for one
DEADLINE_S = 60.0

CONFIG = """\
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
KillWait=30
PlugStackConfig={folder}/plugstack.conf
{nodes}
PartitionName=gpu Nodes={names} Default=YES State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs. `environ` is what its programs need."""

    folder: Path
    nodes: tuple[str, ...]
    environ: dict[str, str]

    def call(self, *command: str) -> str:
        """Run one of SLURM's programs; what it prints."""
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: str, log: Path, *options: str) -> int:
        """Submit a batch job; its number."""
        path = log.with_suffix(".sh")
        path.write_text(f"#!/bin/bash\n{script}\n")
        answer = self.call("sbatch", "--parsable", "--output", str(log), *options, str(path))
        return int(answer.strip().partition(";")[0])

    def state(self, job: int) -> str:
        """RUNNING, COMPLETED, FAILED and so on."""
        return self._field(job, "JobState")

    def exit_code(self, job: int) -> int:
        """What the job's script ended with."""
        return int(self._field(job, "ExitCode").partition(":")[0])

    def _field(self, job: int, name: str) -> str:
        shown = self.call("scontrol", "show", "job", str(job), "--oneliner")
        return dict(part.partition("=")[::2] for part in shown.split())[name]

    def wait(self, job: int, timeout_s: float = 120.0) -> str:
        """The state that the job ends in."""
        deadline_s = time.monotonic() + timeout_s
        while (state := self.state(job)) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            assert time.monotonic() < deadline_s, f"job {job} is still {state}: {self.logs()}"
            time.sleep(0.2)
        return state

    def logs(self) -> str:
        """The last lines of its daemons."""
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def cluster(nodes: int = 1, cpus: int = 8) -> Iterator[Cluster]:
    """A cluster of `nodes` nodes, each with `cpus` cores and GPUS pretended GPUs; it ends with the block."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    names = tuple(f"n{number + 1}" for number in range(nodes))
    made = Cluster(folder, names, {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")})
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _write_config(made, cpus)
        daemons.append(_start_munged(made))
        daemons.append(_start(made, "slurmctld", "-D", "-c", "-f", made.environ["SLURM_CONF"]))
        for name in names:
            daemons.append(_start(made, "slurmd", "-D", "-f", made.environ["SLURM_CONF"], "-N", name))
        _wait_for_nodes(made)
        yield made
    finally:
        _stop(made, daemons)


def _write_config(made: Cluster, cpus: int) -> None:
    host = socket.gethostname()
    lines = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={cpus} RealMemory=8000"
        f" Gres=gpu:{GPUS}"
        for name in made.nodes
    ]
    names = ",".join(made.nodes)
    config = CONFIG.format(host=host, control_port=free_port(), folder=made.folder, nodes="\n".join(lines), names=names)
    (made.folder / "slurm.conf").write_text(config)
    (made.folder / "gres.conf").write_text(f"NodeName={names} Name=gpu File=/dev/tty[0-{GPUS - 1}]\n")
    (made.folder / "plugstack.conf").write_text("")
    (made.folder / "state").mkdir()
    for name in made.nodes:
        (made.folder / "spool" / name).mkdir(parents=True)


def _start_munged(made: Cluster) -> "subprocess.Popen[bytes]":
    folder = made.folder
    subprocess.run(["mungekey", "--create", "--keyfile", str(folder / "munge.key")], check=True, capture_output=True)
    files = {"key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed", "log-file": "munge.log"}
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    process = _start(made, "munged", "--foreground", "--force", f"--socket={folder / 'munge.socket'}", *options)
    _wait(lambda: (folder / "munge.socket").exists(), "munged", made)
    return process


def _start(made: Cluster, *command: str) -> "subprocess.Popen[bytes]":
    with (made.folder / f"{command[0]}.out.log").open("ab") as log:
        return subprocess.Popen(command, env=made.environ, stdout=log, stderr=log, start_new_session=True)


def _wait_for_nodes(made: Cluster) -> None:
    def all_idle() -> bool:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format", "%T"], env=made.environ, capture_output=True, text=True
        )
        return done.stdout.split() == ["idle"] * len(made.nodes)

    _wait(all_idle, "all nodes idle", made)


def _wait(condition: Callable[[], bool], what: str, made: Cluster) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {DEADLINE_S} s\n{made.logs()}"
        time.sleep(0.1)


def _stop(made: Cluster, daemons: list["subprocess.Popen[bytes]"]) -> None:
    """End all jobs, then all daemons and what they have started, then remove the folder."""
    if len(daemons) > 1:
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run(["scancel", "--user", "root"], env=made.environ, capture_output=True, timeout=10)
    for process in reversed(daemons):
        process.terminate()
    for process in reversed(daemons):
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for left in _step_daemons(made):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.send_signal(signal.SIGKILL)
    shutil.rmtree(made.folder, ignore_errors=True)


def _step_daemons(made: Cluster) -> list[psutil.Process]:
    """Those of jobs that did not end: they carry the folder of their slurmd in their environment."""
    found = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if process.info["name"] == "slurmstepd" and str(made.folder) in process.environ().get("SLURM_CONF", ""):
                found += [*process.children(recursive=True), process]
    return found
