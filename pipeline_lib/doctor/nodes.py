"""Examines nodes of a SLURM cluster, alone and together, by a job on them."""

import hashlib
import json
import queue
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil
import torch
import torch.distributed as dist

from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.errors import ConfigError, PipelineError
from pipeline_lib.core.text import redact, shortened
from pipeline_lib.doctor.exchange import MEET_S, Place, clock_offsets, gpu_at_work, measure_all, measure_pairs
from pipeline_lib.doctor.machine import UNMEASURED, Facts, Section, Unmeasured, deadline, look, measured, transports
from pipeline_lib.launch.environment import INTERFACE_VARIABLES, PLACE_IN_WORLD, choose_interface, dist_environment
from pipeline_lib.slurm.cluster import Request, read_groups, refuse_jobs, sbatch_options
from pipeline_lib.slurm.job import SlurmError, node_address
from pipeline_lib.slurm.site import Site

# A node of a cluster as one of its processes sees it: the facts of any machine, its network, and what it shares.

BUDGET_S = 60.0
PATIENCE = 3.0  # as long as on a machine whose own disk has the packages: many nodes read them at once here
PACKAGE = Path(__file__).parents[1]
INFINIBAND = Path("/sys/class/infiniband")
NOT_LINKS = ("lo", "docker", "virbr", "br-")


def node_facts(share: Path, token: str, environ: Mapping[str, str]) -> Facts:
    """All that is found out without the other nodes. `share` is the folder of the store, `token` names a file in it."""
    within = deadline(BUDGET_S)
    facts = look(share, environ, lambda most_s: within(PATIENCE * most_s), lambda _: None)
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):  # of this task alone
        facts["variables"].pop(name, None)
    facts["code"] = {"pipeline_lib": code_digest()}
    facts["store"] = measured(lambda: _shared(share, token, environ))
    facts["network"] = measured(network)
    return facts


def code_digest() -> str:
    """Of this package's source, so that nodes with another one are found."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _shared(share: Path, token: str, environ: Mapping[str, str]) -> Section:
    """Read what the asking machine wrote, and write what it can read. Raises Unmeasured."""
    try:
        if (share / token).read_text() != token:
            raise Unmeasured(f"{share / token} holds something else here")
        (share / f"{token}.{environ.get('SLURMD_NODENAME', socket.gethostname())}").write_text(token)
    except OSError as error:
        raise Unmeasured(f"{error.filename}: {error.strerror}") from error
    return {"folder": str(share), "reads_and_writes": True}


def network() -> Section:
    """Interfaces that are up, with their addresses and speeds, and InfiniBand ports."""
    found: Section = {"host": socket.gethostname()}
    state, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    for name in sorted(state):
        shown = [one.address for one in addresses.get(name, []) if one.family == socket.AF_INET]
        if state[name].isup and shown and not name.startswith(NOT_LINKS):
            found[name] = {"address": shown[0], "mbit_per_s": state[name].speed or "?", "mtu": state[name].mtu}
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        texts = [(port / name).read_text().strip() for name in ("state", "rate") if (port / name).exists()]
        found[f"{port.parts[-3]} port {port.name}"] = ", ".join(texts)
    return found


# How the tasks of a job tell their findings: JSON in short lines on standard output.
#
# srun passes lines of up to a kilobyte on as they are; of longer ones, pieces of several tasks get mixed.

MARK = "@doctor "
PIECE_CHARACTERS = 300  # in a line of up to a kilobyte, escaped


def lines_of(sender: str, number: int, message: dict[str, Any]) -> Iterator[str]:
    """The lines that carry the message `number` of `sender`."""
    text = json.dumps(message)
    pieces = [text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS)]
    for place, piece in enumerate(pieces):
        yield MARK + json.dumps([f"{sender}.{number}", place, len(pieces), piece])


class Inbox:
    """Puts messages together again from lines that arrive in any order."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._pieces: dict[str, dict[int, str]] = {}

    def take(self, line: str) -> dict[str, Any] | None:
        """The message that `line` completes; None if it does not, or is none of ours."""
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
        except (ValueError, KeyError):  # a line that was cut: its message never comes
            return None


# One task of `doctor --profile slurm`, which srun starts for each rank: tells what it finds, as it finds it.
#
# A task that fails says so and ends well: what the others find is wanted all the same.

OPERATION_S = 60.0  # a send or a collective that takes longer is given up

Tell = Callable[[dict[str, Any]], None]


def run_task(
    environ: MutableMapping[str, str], share: Path, token: str, device: str, say: Callable[[str], None]
) -> None:
    """Look at the node, as its first task, then measure with the others. `environ` is changed for torch's sake."""
    rank, node = int(environ["SLURM_PROCID"]), environ["SLURMD_NODENAME"]
    numbers = iter(range(1_000_000))

    def tell(message: dict[str, Any]) -> None:
        for line in lines_of(str(rank), next(numbers), {"node": node, "rank": rank, **message}):
            say(line)

    try:
        if environ["SLURM_LOCALID"] == "0":
            tell({"job": environ["SLURM_JOB_ID"], "number": int(environ["SLURM_NODEID"])})
            tell({"facts": node_facts(share, token, environ)})
        _meet_others(environ, rank, device, tell)
    except (PipelineError, OSError, RuntimeError, ValueError) as error:  # torch's errors are RuntimeErrors
        tell({"failed": shortened((str(error).strip() or repr(error)).splitlines()[0], 300)})


def _meet_others(environ: MutableMapping[str, str], rank: int, device: str, tell: Tell) -> None:
    for name in PLACE_IN_WORLD:  # of another launcher, from the environment of who asks: our place is what SLURM says
        environ.pop(name, None)
    place = dist_environment(environ)
    address = _address(place["MASTER_ADDR"])
    choose_interface(environ, address)
    world, of_node = int(place["WORLD_SIZE"]), int(place["LOCAL_WORLD_SIZE"])
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        address, int(place["MASTER_PORT"]), world, rank == 0, timedelta(seconds=MEET_S), wait_for_workers=False
    )
    leaders = tuple(range(0, world, of_node))
    here = Place(rank, world, leaders, torch.device("cpu"), store)
    if device == "cuda":
        here = Place(rank, world, leaders, _gpu_of_all(here, int(place["LOCAL_RANK"]), tell), store)
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        if here.device.type == "cuda":
            torch.cuda.set_device(here.device)
            environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=f"{folder}/nccl.%p")
            environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,P2P,SHM,NET")
        _measure(here, environ, tell)
        if here.leads:
            log = "".join(path.read_text(errors="replace") for path in sorted(Path(folder).glob("nccl.*")))
            interface = environ.get(INTERFACE_VARIABLES[1], "").removeprefix("=")
            tell({"interface": interface, "transports": transports(log)})
    if here.device.type == "cuda":
        tell({"local_rank": int(place["LOCAL_RANK"]), "gpu": gpu_at_work(here.device)})
    here.leave()


def _address(host: str) -> str:
    """Where SLURM reaches the node `host`: its name need not be known to others."""
    try:
        return node_address(host)
    except SlurmError:
        return host


def _gpu_of_all(here: Place, local_rank: int, tell: Tell) -> torch.device:
    """This rank's GPU if every rank has one, else the CPU for all."""
    can = torch.cuda.is_available() and local_rank < torch.cuda.device_count()
    if not can:
        tell({"no_gpu": local_rank, "sees": torch.cuda.device_count()})
    here.store.add("can", int(can))
    here.meet("devices", here.world)
    return torch.device("cuda", local_rank) if here.store.add("can", 0) == here.world else torch.device("cpu")


def _measure(here: Place, environ: Mapping[str, str], tell: Tell) -> None:
    """The clocks, the pairs, and all ranks at once."""
    here.meet("start", here.world)
    if here.leads:
        tell({"device": here.device.type})
        for node, ahead_s in clock_offsets(here).items():
            tell({"clock": node, "ahead_s": ahead_s})
    backend = "cpu:gloo,cuda:nccl" if here.device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=here.store,
        rank=here.rank,
        world_size=here.world,
        timeout=timedelta(seconds=OPERATION_S),
    )
    if here.leads:
        measure_pairs(here, tell)
    here.meet("pairs", here.world, MEET_S + 10 * len(here.leaders))
    if here.world > 1:
        measure_all(here, tell)
    dist.destroy_process_group()


# Starts a command on nodes of the cluster by srun, and hands on what it prints; the job never outlives the block.

POLL_S = 2.0
CALL_S = 20.0
END_S = 15.0
KEPT_LINES = 200
# Left over from a job around us, they would make srun a step of it; what a user sets for srun's sake stays.
_OF_A_JOB = re.compile(r"(SLURM|SRUN|SBATCH)_")
_FROM_SRUN = re.compile(r"^(srun|slurmstepd): (error: )?")


def outside_of_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the traces of the SLURM job that this process may be in."""
    if "SLURM_JOB_ID" not in environ:
        return dict(environ)
    return {key: value for key, value in environ.items() if key == "SLURM_CONF" or not _OF_A_JOB.match(key)}


class Allocation:
    """A job of srun's, from the queue to its end. Used in a `with` block, which cancels what is left of it."""

    def __init__(self, options: list[str], command: list[str], environ: Mapping[str, str], cwd: Path) -> None:
        """Submit `command` with srun's `options`."""
        self.name = f"doctor-{uuid.uuid4().hex[:12]}"
        self.errors: list[str] = []
        self.has_started = False
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._shown = ""
        self._asked_s = 0.0
        self._process = subprocess.Popen(
            ["srun", f"--job-name={self.name}", *options, *command],
            env=dict(environ),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for us: srun would ask for a second one
            text=True,
            errors="replace",
        )
        streams = ((self._process.stdout, self._lines.put), (self._process.stderr, self._keep))
        self._pumps = [threading.Thread(target=_pump, args=pair, daemon=True) for pair in streams]
        for pump in self._pumps:
            pump.start()

    def __enter__(self) -> "Allocation":
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the job if it still waits or runs, and wait for srun and its last words."""
        if self._process.poll() is None:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(["scancel", f"--name={self.name}"], capture_output=True, timeout=CALL_S)
        if not self._ends_within(END_S):
            self._process.kill()
            self._process.wait()
        for pump in self._pumps:
            pump.join(END_S)

    def lines(self, wait_s: float, run_s: float, say: Callable[[str], None]) -> Iterator[str]:
        """What the tasks print, until they end, or for `run_s`. Raises SlurmError if none begins within `wait_s`."""
        begin_s, started_s = time.monotonic(), None
        while started_s is None or time.monotonic() - started_s < run_s:
            with suppress(queue.Empty):
                line = self._lines.get(timeout=0.2)
                if line is None:
                    self._ends_within(END_S)  # how the tasks ended srun says last, and not of a job that is cancelled
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

    def _keep(self, line: str | None) -> None:
        if line is not None and line.strip():
            self.errors = [*self.errors, line.strip()][-KEPT_LINES:]

    def _watch(self, begin_s: float, wait_s: float, say: Callable[[str], None]) -> None:
        """Say when the place in the queue has changed, and give up after `wait_s`."""
        if time.monotonic() - self._asked_s < POLL_S:
            return
        self._asked_s = time.monotonic()
        number, state, reason, start = self._queued()
        self.has_started = state in ("RUNNING", "COMPLETING")
        expected = f", expected to start at {start}" if start not in ("", "N/A") else ""
        shown = f"job {number} waits in the queue: {reason}{expected}" if state == "PENDING" else ""
        if shown and shown != self._shown:
            say(f"doctor: {shown}")
            self._shown = shown
        if not self.has_started and time.monotonic() - begin_s > wait_s:
            raise SlurmError(
                f"{shown or 'srun got no answer'}; after {wait_s:.0f} s that was enough, and the job is cancelled: wait"
                " longer with --timeout SECONDS, or ask for fewer nodes with --nodes"
            )

    def _queued(self) -> tuple[str, str, str, str]:
        """Number, state, reason and expected start, as squeue tells them; empty where it tells nothing."""
        command = ["squeue", "--noheader", f"--name={self.name}", "--format=%i|%T|%r|%S"]
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_S)
            fields = done.stdout.strip().split("|", 3)
            if done.returncode == 0 and len(fields) == 4:
                return fields[0], fields[1], fields[2], fields[3]
        return "", "", "", ""

    def reasons(self) -> list[str]:
        """What srun and the nodes' daemons complained of, each once; and the last word of a task."""
        said = [line for line in self.errors if _FROM_SRUN.match(line) and " error: " in line]
        others = [line for line in self.errors if not _FROM_SRUN.match(line)]
        return list(dict.fromkeys(redact(_FROM_SRUN.sub("", line)) for line in (*said, *others[-1:])))


def _pump(stream: IO[str] | None, take: Callable[[str | None], None]) -> None:
    if stream is not None:
        with suppress(ValueError):  # closed meanwhile
            for line in stream:
                take(line.rstrip("\n"))
    take(None)


@contextmanager
def token_in(share: Path) -> Iterator[str]:
    """A file in the folder `share` that holds its own name, for others to find; it and its answers are removed."""
    token = f".doctor-{uuid.uuid4().hex}"
    (share / token).write_text(token)
    try:
        yield token
    finally:
        for path in share.glob(f"{token}*"):
            path.unlink(missing_ok=True)


# Examines nodes of a SLURM cluster, alone and together, by a job on them.

PROGRAMS = ("srun", "scancel", "squeue", "sinfo")
START_S, ROUND_S, ALL_S = 150.0, 6.0, 120.0  # facts and meeting; a round of pairs, if the network is slow; the rest
RANK_MB = {"cpu": 1500, "cuda": 6000}
NODE_MB = 2500
SEEN_S = 10.0  # an NFS client may remember for so long what a folder held
EXECUTE = 'set -e\n{setup}\nexec "$@"'


@dataclass(frozen=True)
class Pair:
    """Two nodes: bytes a second from the first to the second and back, and the latency of one way."""

    first: str
    second: str
    there: float
    back: float
    latency_s: float

    @property
    def worst(self) -> float:
        """Bytes a second of the slower direction."""
        return min(self.there, self.back)


@dataclass
class Findings:
    """What the tasks of a job told, by node; `all_reduce` by size: seconds, and bytes a second on the bus."""

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

    def take(self, message: dict[str, Any]) -> None:
        """Add what a task tells."""
        name = message["node"]
        if "job" in message:
            self.job, self.numbers[message["number"]] = message["job"], name
        elif "facts" in message:
            self.nodes[name] = message["facts"]
        elif "clock" in message:
            self.clocks[self.name_of(message["clock"])] = message["ahead_s"]
        elif "pair" in message:
            first, second = map(self.name_of, message["pair"])
            self.pairs.append(Pair(first, second, message["there"], message["back"], message["latency_s"]))
        elif "all" in message:
            self.all_reduce[message["all"]] = {name: message[name] for name in ("seconds", "bus_bytes_per_s")}
        elif "device" in message:
            self.device = message["device"]
        elif "gpu" in message:
            self._part(name, "exchange").setdefault("gpus_at_work", {})[str(message["local_rank"])] = message["gpu"]
        elif "interface" in message:
            self._part(name, "between nodes").update({k: message[k] for k in ("interface", "transports") if message[k]})
        elif "no_gpu" in message:
            self._fail(name, f"GPU {message['no_gpu']} was asked for, and torch sees {message['sees']}")
        elif "failed" in message:
            self._fail(name, message["failed"])

    def name_of(self, number: int) -> str:
        """The node's name, once it has told it."""
        return self.numbers.get(number, f"node {number}")

    def _part(self, name: str, section: str) -> dict[str, Any]:
        return self.nodes.setdefault(name, {}).setdefault(section, {})

    def _fail(self, name: str, text: str) -> None:
        if text not in (told := self.failures.setdefault(name, [])):
            told.append(text)

    def to_json(self) -> dict[str, Any]:
        """Everything, for --json."""
        return {"nodes": self.nodes} | {name: value for name, value in asdict(self).items() if name != "nodes"}


@dataclass(frozen=True)
class NodesExamination:
    """What to look at: `nodes` nodes as `cluster` describes them, and the disk of `store` as seen from them."""

    cluster: Cluster
    nodes: int
    store: Path
    site: Site
    environ: Mapping[str, str]

    def findings(self, wait_s: float, say: Callable[[str], None]) -> Findings:
        """Submit, wait, measure. Raises ConfigError and SlurmError, each with what to change."""
        self._refuse_without_slurm()
        refuse_jobs(self.site, self.request, read_groups())
        share = next(path for path in (self.store.absolute(), *self.store.absolute().parents) if path.is_dir())
        found, inbox = Findings(self.nodes), Inbox()
        with token_in(share) as token:
            command, environ = self._command(share, token), self._environ()
            say(f"doctor: asks SLURM for {self.nodes} nodes with {self.cluster.ranks_per_node} ranks each")
            with Allocation(self._options(), command, environ, Path.cwd()) as job:
                for line in job.lines(wait_s, self._run_s, say):
                    if message := inbox.take(line):
                        _progress(message, found, say)
                        found.take(message)
            if not found.nodes:
                raise SlurmError("\n  ".join(["the job on the nodes told nothing; SLURM says:", *job.reasons()]))
            found.said = job.reasons()
            found.unseen = _unseen(share, token, found)
        return found

    @property
    def _run_s(self) -> float:
        return START_S + ROUND_S * self.nodes + ALL_S

    @property
    def request(self) -> Request:
        """Of the job."""
        ranks = self.cluster.ranks_per_node
        return Request(
            nodes=self.nodes,
            tasks_per_node=ranks,
            cpus_per_task=self.cluster.cpus_per_rank,
            gpus_per_node=self.cluster.gpus_per_node,
            memory_mb=NODE_MB + ranks * RANK_MB[self.cluster.device],
            runtime_minutes=int(self._run_s / 60) + 2,
            warning_s=0,
        )

    def _refuse_without_slurm(self) -> None:
        lacking = [name for name in PROGRAMS if shutil.which(name, path=self.environ.get("PATH")) is None]
        if lacking:
            raise ConfigError(
                "doctor --profile slurm",
                [
                    f"there is no SLURM here: {', '.join(lacking)} not on PATH; run it on a login node of the cluster,"
                    " or leave out --profile to look at this machine"
                ],
            )

    def _options(self) -> list[str]:
        more = [f"--ntasks-per-node={self.cluster.ranks_per_node}", "--distribution=block", "--kill-on-bad-exit=0"]
        more.append("--wait=60")  # for the others, when a task has died
        return [*sbatch_options(self.site, self.request), *more, "--input=none"]

    def _command(self, share: Path, token: str) -> list[str]:
        task = [sys.executable, "-m", "pipeline_lib", "probe", "node", "--store", str(share), "--token", token]
        task += ["--device", self.cluster.device]
        if not self.site.setup:
            return task
        return ["bash", "-c", EXECUTE.format(setup="\n".join(self.site.setup)), "doctor", *task]

    def _environ(self) -> dict[str, str]:
        """Ours, the site's, and the library beside us also where another is installed."""
        made = {**outside_of_jobs(self.environ), **self.site.variables()}
        paths = [str(PACKAGE.parent), *filter(None, [made.get("PYTHONPATH")])]
        return {**made, "PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1"}


def _progress(message: dict[str, Any], found: Findings, say: Callable[[str], None]) -> None:
    """What a person who waits wants to know."""
    if "job" in message:
        say(f"doctor: job {message['job']} runs on {message['node']}")
    elif "pair" in message:
        first, second = map(found.name_of, message["pair"])
        say(f"doctor: {first} <-> {second}: {min(message['there'], message['back']) * 8 / 1e9:.3g} Gbit/s")
    elif "failed" in message:
        say(f"doctor: {message['node']}: {message['failed']}")


def _unseen(share: Path, token: str, found: Findings) -> list[str]:
    """Nodes that say they wrote a file beside `token`, of which nothing is seen here."""
    wrote = [name for name, facts in found.nodes.items() if UNMEASURED not in facts.get("store", {UNMEASURED: ""})]
    deadline_s = time.monotonic() + SEEN_S
    while True:
        seen = {path.name.removeprefix(f"{token}.") for path in share.iterdir() if path.name.startswith(f"{token}.")}
        if seen.issuperset(wrote) or time.monotonic() > deadline_s:
            return [name for name in wrote if name not in seen]
        time.sleep(0.5)
