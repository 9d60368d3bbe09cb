"""Examination of a SLURM cluster's nodes, alone and together, by a job that runs on them."""

import json
import queue
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil

from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.text import redact
from pipeline_lib.core.units import count, to_gbit_per_s
from pipeline_lib.doctor.facts import UNMEASURED, Facts, Section, Unmeasured, measured
from pipeline_lib.doctor.machine import deadline, measure_machine
from pipeline_lib.doctor.resources import existing_folder
from pipeline_lib.hosts.checks import token_in, unseen_answers
from pipeline_lib.hosts.facts import PACKAGE, code_digest
from pipeline_lib.launch.heartbeat import host_of
from pipeline_lib.slurm.can_start import refuse_jobs, sbatch_options
from pipeline_lib.slurm.cluster import read_groups
from pipeline_lib.slurm.job import SlurmError
from pipeline_lib.slurm.request import JobRequest
from pipeline_lib.slurm.site import Site

# Facts of a node, measured by one of its processes: those of any machine, its network, and its view of the store.

BUDGET_S = 60.0
PATIENCE = 3.0  # times the deadlines of one machine with local packages, since many nodes read them at once
INFINIBAND = Path("/sys/class/infiniband")
NOT_LINKS = ("lo", "docker", "virbr", "br-")


def node_facts(share: Path, token: str, environ: Mapping[str, str]) -> Facts:
    """Return the facts that need no other node; `share` is the store's folder, and `token` names a file in it."""
    within = deadline(BUDGET_S)
    facts = measure_machine(share, environ, lambda most_s: within(PATIENCE * most_s), lambda _: None)
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):  # specific to this task
        facts["variables"].pop(name, None)
    facts["code"] = {"pipeline_lib": code_digest()}
    facts["store"] = measured(lambda: _store_facts(share, token, environ))
    facts["network"] = measured(network)
    return facts


def _store_facts(share: Path, token: str, environ: Mapping[str, str]) -> Section:
    """Check that this node reads the submitting machine's token, and write an answer beside it. Raise Unmeasured."""
    try:
        if (share / token).read_text() != token:
            raise Unmeasured(f"{share / token} holds something else here")
        (share / f"{token}.{host_of(environ)}").write_text(token)
    except OSError as error:
        raise Unmeasured(f"{error.filename}: {error.strerror}") from error
    return {"folder": str(share), "reads_and_writes": True}


def network() -> Section:
    """Return the interfaces that are up, with addresses and speeds, and the InfiniBand ports."""
    found: Section = {"host": socket.gethostname()}
    state, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    for name in sorted(state):
        ipv4 = [one.address for one in addresses.get(name, []) if one.family == socket.AF_INET]
        if state[name].isup and ipv4 and not name.startswith(NOT_LINKS):
            found[name] = {"address": ipv4[0], "mbit_per_s": state[name].speed or "?", "mtu": state[name].mtu}
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        texts = [(port / name).read_text().strip() for name in ("state", "rate") if (port / name).exists()]
        found[f"{port.parts[-3]} port {port.name}"] = ", ".join(texts)
    return found


# Messages of the job's tasks: JSON in short lines on standard output. srun passes lines of up to a kilobyte unchanged;
# longer lines of several tasks get interleaved.

MARK = "@doctor "
PIECE_CHARACTERS = 300  # fits a line of up to a kilobyte even after escaping


def lines_of(sender: str, number: int, message: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that transmit `message`, the message `number` of `sender`."""
    text = json.dumps(message)
    pieces = [text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS)]
    for place, piece in enumerate(pieces):
        yield MARK + json.dumps([f"{sender}.{number}", place, len(pieces), piece])


class Inbox:
    """A receiver that reassembles messages from lines in any order."""

    def __init__(self) -> None:
        """Create an empty inbox."""
        self._pieces: dict[str, dict[int, str]] = {}

    def take(self, line: str) -> dict[str, Any] | None:
        """Return the message that `line` completes; None if it completes none, or is no message line."""
        if not line.startswith(MARK):
            return None
        try:
            name, place, count, piece = json.loads(line.removeprefix(MARK))
            pieces = self._pieces.setdefault(name, {})
            pieces[place] = piece
            if len(pieces) < count:
                return None
            del self._pieces[name]
            return dict(json.loads("".join(pieces[place] for place in range(count))))
        except (ValueError, KeyError):  # a truncated line: its message is lost
            return None


# The job: start a command on nodes by srun, and pass on its output. The job never outlives the `with` block.

POLL_S = 2.0
CALL_S = 20.0
END_S = 15.0
KEPT_LINES = 200
# Variables of an enclosing job, which would make srun start a step of it. Outside a job, the user's are kept.
_OF_A_JOB = re.compile(r"(SLURM|SRUN|SBATCH)_")
_FROM_SRUN = re.compile(r"^(srun|slurmstepd): (error: )?")


def outside_of_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables of the SLURM job that this process may be in."""
    if "SLURM_JOB_ID" not in environ:
        return dict(environ)
    return {key: value for key, value in environ.items() if key == "SLURM_CONF" or not _OF_A_JOB.match(key)}


class SrunJob:
    """A job started by srun, from the queue to its end; leaving its `with` block cancels it."""

    def __init__(self, options: list[str], command: list[str], environ: Mapping[str, str], cwd: Path) -> None:
        """Submit `command` with srun's `options`."""
        self.name = f"doctor-{uuid.uuid4().hex[:12]}"
        self.errors: list[str] = []
        self.has_started = False
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._wait_told = ""
        self._asked_s = 0.0
        self._process = subprocess.Popen(
            ["srun", f"--job-name={self.name}", *options, *command],
            env=dict(environ),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is handled here, since srun would ask for a second one
            text=True,
            errors="replace",
        )
        streams = ((self._process.stdout, self._lines.put), (self._process.stderr, self._keep_error))
        self._pumps = [threading.Thread(target=_pump, args=pair, daemon=True) for pair in streams]
        for pump in self._pumps:
            pump.start()

    def __enter__(self) -> "SrunJob":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the job if it is pending or running, and wait for srun and the rest of its output."""
        if self._process.poll() is None:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(["scancel", f"--name={self.name}"], capture_output=True, timeout=CALL_S)
        if not self._ends_within(END_S):
            self._process.kill()
            self._process.wait()
        for pump in self._pumps:
            pump.join(END_S)

    def lines(self, wait_s: float, run_s: float, say: Callable[[str], None]) -> Iterator[str]:
        """Yield the tasks' output until they end, or for `run_s`. Raise SlurmError if none starts within `wait_s`."""
        begin_s, started_s = time.monotonic(), None
        while started_s is None or time.monotonic() - started_s < run_s:
            with suppress(queue.Empty):
                line = self._lines.get(timeout=0.2)
                if line is None:
                    self._ends_within(END_S)  # srun reports failures of tasks last, and not after a cancellation
                    return
                started_s, self.has_started = started_s or time.monotonic(), True
                yield line
                continue
            if started_s is None and not self.has_started:
                self._watch(begin_s, wait_s, say)
                started_s = time.monotonic() if self.has_started else None
        self.errors.append(f"not all was done within {run_s:.0f} s: the job was ended")

    def _ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _keep_error(self, line: str | None) -> None:
        if line is not None and line.strip():
            self.errors = [*self.errors, line.strip()][-KEPT_LINES:]

    def _watch(self, begin_s: float, wait_s: float, say: Callable[[str], None]) -> None:
        """Report changes of the job's state in the queue, and raise SlurmError after `wait_s`."""
        if time.monotonic() - self._asked_s < POLL_S:
            return
        self._asked_s = time.monotonic()
        command = ["squeue", "--noheader", f"--name={self.name}", "--format=%i|%T|%r|%S"]
        number = state = reason = start = ""  # also if squeue reports nothing
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_S)
            fields = done.stdout.strip().split("|", 3)
            if done.returncode == 0 and len(fields) == 4:
                number, state, reason, start = fields
        self.has_started = state in ("RUNNING", "COMPLETING")
        expected = f", expected to start at {start}" if start not in ("", "N/A") else ""
        waits = f"job {number} waits in the queue: {reason}{expected}" if state == "PENDING" else ""
        if waits and waits != self._wait_told:
            say(f"doctor: {waits}")
            self._wait_told = waits
        if not self.has_started and time.monotonic() - begin_s > wait_s:
            raise SlurmError(
                f"{waits or 'srun got no answer'}; after {wait_s:.0f} s that was enough, and the job is cancelled: wait"
                " longer with --timeout SECONDS, or ask for fewer nodes with --nodes"
            )

    def reasons(self) -> list[str]:
        """Return the errors of srun and slurmstepd, each once, and the last line of a task's errors."""
        from_srun = [line for line in self.errors if _FROM_SRUN.match(line) and " error: " in line]
        others = [line for line in self.errors if not _FROM_SRUN.match(line)]
        return list(dict.fromkeys(redact(_FROM_SRUN.sub("", line)) for line in (*from_srun, *others[-1:])))


def _pump(stream: IO[str] | None, take: Callable[[str | None], None]) -> None:
    if stream is not None:
        with suppress(ValueError):  # the stream was closed
            for line in stream:
                take(line.rstrip("\n"))
    take(None)


# The examination of the cluster: submit the job, and collect what its tasks report.

PROGRAMS = ("srun", "scancel", "squeue", "sinfo")
START_S, ROUND_S, ALL_S = 150.0, 6.0, 120.0  # facts and rendezvous; a round of pairs on a slow network; the rest
RANK_MB = {"cpu": 1500, "cuda": 6000}
NODE_MB = 2500
EXECUTE = 'set -e\n{setup}\nexec "$@"'


@dataclass(frozen=True)
class Pair:
    """A link between two nodes: bytes/s in each direction, and the one-way latency in seconds."""

    first: str
    second: str
    there: float
    back: float
    latency_s: float

    @property
    def worst(self) -> float:
        """Bytes/s of the slower direction."""
        return min(self.there, self.back)


@dataclass
class Findings:
    """The results reported by the job's tasks; `nodes` has the facts of each node.

    `all_reduce` has, by size in bytes, the seconds and the bus bandwidth in bytes/s. `job` is empty without SLURM.
    """

    asked: int
    job: str = ""
    device: str = "cpu"
    nodes: dict[str, Facts] = field(default_factory=dict)
    numbers: dict[int, str] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    all_reduce: dict[int, dict[str, float]] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)
    failures: dict[str, list[str]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    code_here: str = field(default_factory=code_digest)

    def take(self, message: dict[str, Any]) -> str | None:
        """Add a task's message; return what the waiting user is told of it, if anything."""
        name = message["node"]
        if "job" in message:
            self.job, self.numbers[message["number"]] = message["job"], name
            return f"job {self.job} runs on {name}" if self.job else f"measuring on {name}"
        if "facts" in message:
            self.nodes[name] = message["facts"]
        elif "clock" in message:
            self.clocks[self.name_of(message["clock"])] = message["ahead_s"]
        elif "pair" in message:
            first, second = map(self.name_of, message["pair"])
            pair = Pair(first, second, message["there"], message["back"], message["latency_s"])
            self.pairs.append(pair)
            return f"{first} <-> {second}: {pair.worst * 8 / 1e9:.3g} Gbit/s"
        elif "all" in message:
            self.all_reduce[message["all"]] = {name: message[name] for name in ("seconds", "bus_bytes_per_s")}
        elif "device" in message:
            self.device = message["device"]
        elif "gpu" in message:
            section = self.nodes.setdefault(name, {}).setdefault("exchange", {})
            section.setdefault("gpus_at_work", {})[str(message["local_rank"])] = message["gpu"]
        elif "interface" in message:
            section = self.nodes.setdefault(name, {}).setdefault("between nodes", {})
            section.update({key: message[key] for key in ("interface", "transports") if message[key]})
        elif "no_gpu" in message:
            self.fail(name, f"GPU {message['no_gpu']} was asked for, and torch sees {message['sees']}")
        elif "failed" in message:
            self.fail(name, message["failed"])
            return f"{name}: {message['failed']}"
        return None

    @property
    def sent_gbit_s(self) -> float | None:
        """What a node sends while all ranks reduce the largest size, in Gbit/s; None if that was not measured."""
        nodes = len(self.numbers)
        if not self.all_reduce or nodes < 2:
            return None
        size_bytes, last = max(self.all_reduce.items())
        return to_gbit_per_s(2 * size_bytes * (nodes - 1) / nodes / last["seconds"])

    def wrote(self) -> list[str]:
        """Return the nodes that report an answer to the token in the store."""
        return [name for name, facts in self.nodes.items() if UNMEASURED not in facts.get("store", {UNMEASURED: ""})]

    def name_of(self, number: int) -> str:
        """Return the node's name; until it is reported, `node NUMBER`."""
        return self.numbers.get(number, f"node {number}")

    def fail(self, name: str, text: str) -> None:
        """Add what went wrong on a node, once."""
        texts = self.failures.setdefault(name, [])
        if text not in texts:
            texts.append(text)

    def to_json(self) -> dict[str, Any]:
        """Return all findings as JSON values, for --json."""
        return {"nodes": self.nodes} | {name: value for name, value in asdict(self).items() if name != "nodes"}


@dataclass(frozen=True)
class NodesExamination:
    """An examination of `nodes` nodes as `cluster` describes them, and of the disk of `store` as seen from them."""

    cluster: Cluster
    nodes: int
    store: Path
    site: Site
    environ: Mapping[str, str]

    def findings(self, wait_s: float, say: Callable[[str], None]) -> Findings:
        """Submit the job, wait for it, and return its findings. Raise ConfigError or SlurmError with the remedy."""
        missing = [name for name in PROGRAMS if shutil.which(name, path=self.environ.get("PATH")) is None]
        if missing:
            problem = (
                f"there is no SLURM here: {', '.join(missing)} not on PATH; run it on a login node of the cluster,"
                " or leave out --profile to look at this machine"
            )
            raise ConfigError("doctor --profile slurm", [problem])
        run_s = START_S + ROUND_S * self.nodes + ALL_S
        request = self._request(run_s)
        refuse_jobs(self.site, request, read_groups())
        share = existing_folder(self.store)
        ranks = self.cluster.ranks_per_node
        options = [*sbatch_options(self.site, request), f"--ntasks-per-node={ranks}", "--distribution=block"]
        # --wait: let the other tasks go on after one has ended.
        options += ["--kill-on-bad-exit=0", "--wait=60", "--input=none"]
        found, inbox = Findings(self.nodes), Inbox()
        with token_in([share]) as token:
            say(f"doctor: asks SLURM for {count(self.nodes, 'nodes')} with {count(ranks, 'ranks')} each")
            with SrunJob(options, self._command(share, token), self._environ(), Path.cwd()) as job:
                for line in job.lines(wait_s, run_s, say):
                    message = inbox.take(line)
                    if message and (progress := found.take(message)):
                        say(f"doctor: {progress}")
            if not found.nodes:
                raise SlurmError("\n  ".join(["the job on the nodes told nothing; SLURM says:", *job.reasons()]))
            found.said = job.reasons()
            found.unseen = unseen_answers(share, token, found.wrote())
        return found

    def _request(self, run_s: float) -> JobRequest:
        ranks = self.cluster.ranks_per_node
        return JobRequest(
            nodes=self.nodes,
            tasks_per_node=ranks,
            cpus_per_task=self.cluster.cpus_per_rank,
            gpus_per_node=self.cluster.gpus_per_node,
            memory_mb=NODE_MB + ranks * RANK_MB[self.cluster.device],
            runtime_minutes=int(run_s / 60) + 2,
            warning_s=0,
        )

    def _command(self, share: Path, token: str) -> list[str]:
        task = [sys.executable, "-m", "pipeline_lib", "probe", "node", "--store", str(share), "--token", token]
        task += ["--device", self.cluster.device]
        if not self.site.setup:
            return task
        return ["bash", "-c", EXECUTE.format(setup="\n".join(self.site.setup)), "doctor", *task]

    def _environ(self) -> dict[str, str]:
        """Return this environment with the site's variables, and with this package's folder first on PYTHONPATH."""
        variables = {**outside_of_jobs(self.environ), **self.site.variables()}
        paths = [str(PACKAGE.parent), *filter(None, [variables.get("PYTHONPATH")])]
        return {**variables, "PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1"}
