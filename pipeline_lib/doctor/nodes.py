"""Examines nodes of a SLURM cluster, alone and together, by a job on them."""

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import ConfigError
from pipeline_lib.config.schema import Cluster
from pipeline_lib.doctor import node
from pipeline_lib.doctor.allocation import Allocation, outside_of_jobs, token_in
from pipeline_lib.doctor.facts import UNMEASURED, Facts
from pipeline_lib.doctor.wire import Inbox
from pipeline_lib.slurm.job import SlurmError
from pipeline_lib.slurm.partitions import read_groups
from pipeline_lib.slurm.preflight import refuse_jobs, sbatch_options
from pipeline_lib.slurm.request import Request
from pipeline_lib.slurm.site import Site

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
    code_here: str = field(default_factory=node.code_digest)

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
        paths = [str(node.PACKAGE.parent), *filter(None, [made.get("PYTHONPATH")])]
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
