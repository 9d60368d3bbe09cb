"""The examination of the cluster: submit the job, and collect what its tasks report."""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.units import count, to_gbit_per_s
from pipeline_lib.doctor.facts import UNMEASURED, Facts
from pipeline_lib.doctor.messages import Inbox
from pipeline_lib.doctor.resources import existing_folder
from pipeline_lib.doctor.srun_job import SrunJob, outside_of_jobs
from pipeline_lib.hosts.checks import token_in, unseen_answers
from pipeline_lib.hosts.facts import PACKAGE, code_digest
from pipeline_lib.slurm.can_start import refuse_jobs, sbatch_options
from pipeline_lib.slurm.cluster import read_groups
from pipeline_lib.slurm.job import SlurmError
from pipeline_lib.slurm.request import JobRequest
from pipeline_lib.slurm.site import Site

PROGRAMS = ("srun", "scancel", "squeue", "sinfo")
# facts and rendezvous; a round of pairs on a slow network; the rest
START_S = 150.0
ROUND_S = 6.0
ALL_S = 120.0
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

    `all_reduce` has, by size in bytes, the seconds and the bus bandwidth in bytes/s. `job` is empty
    without SLURM.
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
            self.job = message["job"]
            self.numbers[message["number"]] = name
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
            self.all_reduce[message["all"]] = {
                "seconds": message["seconds"],
                "bus_bytes_per_s": message["bus_bytes_per_s"],
            }
        elif "device" in message:
            self.device = message["device"]
        elif "gpu" in message:
            section = self.nodes.setdefault(name, {}).setdefault("exchange", {})
            section.setdefault("gpus_at_work", {})[str(message["local_rank"])] = message["gpu"]
        elif "interface" in message:
            section = self.nodes.setdefault(name, {}).setdefault("between nodes", {})
            for key in ("interface", "transports"):
                if message[key]:
                    section[key] = message[key]
        elif "no_gpu" in message:
            sees = f"GPU {message['no_gpu']} was asked for, and torch sees {message['sees']}"
            self.fail(name, sees)
        elif "failed" in message:
            self.fail(name, message["failed"])
            return f"{name}: {message['failed']}"
        return None

    @property
    def sent_gbit_s(self) -> float | None:
        """What a node sends in reducing the largest size, in Gbit/s; None if not measured."""
        nodes = len(self.numbers)
        if not self.all_reduce or nodes < 2:
            return None
        size_bytes, last = max(self.all_reduce.items())
        return to_gbit_per_s(2 * size_bytes * (nodes - 1) / nodes / last["seconds"])

    def wrote(self) -> list[str]:
        """Return the nodes that report an answer to the token in the store."""
        wrote = []
        for name, facts in self.nodes.items():
            if "store" in facts and UNMEASURED not in facts["store"]:
                wrote.append(name)
        return wrote

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
        others = asdict(self)
        del others["nodes"]
        return {"nodes": self.nodes} | others


@dataclass(frozen=True)
class NodesExamination:
    """An examination of `nodes` nodes, as `cluster` says, and of their view of `store`'s disk."""

    cluster: Cluster
    nodes: int
    store: Path
    site: Site
    environ: Mapping[str, str]

    def findings(self, wait_s: float, say: Callable[[str], None]) -> Findings:
        """Submit the job, wait for it, and return its findings.

        Raise ConfigError or SlurmError with the remedy.
        """
        path = self.environ.get("PATH")
        missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
        if missing:
            problem = (
                f"there is no SLURM here: {', '.join(missing)} not on PATH; run it on a login node "
                "of the cluster, or leave out --profile to look at this machine"
            )
            raise ConfigError("doctor --profile slurm", [problem])
        run_s = START_S + ROUND_S * self.nodes + ALL_S
        request = self._request(run_s)
        refuse_jobs(self.site, request, read_groups())
        share = existing_folder(self.store)
        ranks = self.cluster.ranks_per_node
        options = list(sbatch_options(self.site, request))
        options += [f"--ntasks-per-node={ranks}", "--distribution=block"]
        # --wait: let the other tasks go on after one has ended.
        options += ["--kill-on-bad-exit=0", "--wait=60", "--input=none"]
        found = Findings(self.nodes)
        inbox = Inbox()
        with token_in([share]) as token:
            say(
                f"doctor: asks SLURM for {count(self.nodes, 'nodes')} with {count(ranks, 'ranks')} "
                "each"
            )
            with SrunJob(options, self._command(share, token), self._environ(), Path.cwd()) as job:
                for line in job.lines(wait_s, run_s, say):
                    message = inbox.take(line)
                    if message and (progress := found.take(message)):
                        say(f"doctor: {progress}")
            if not found.nodes:
                raise SlurmError(
                    "\n  ".join(["the job on the nodes told nothing; SLURM says:", *job.reasons()])
                )
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
        task = [sys.executable, "-m", "pipeline_lib", "probe", "node"]
        task += ["--store", str(share), "--token", token, "--device", self.cluster.device]
        if not self.site.setup:
            return task
        return ["bash", "-c", EXECUTE.format(setup="\n".join(self.site.setup)), "doctor", *task]

    def _environ(self) -> dict[str, str]:
        """Return this environment with site variables, and this package first on PYTHONPATH."""
        variables = {**outside_of_jobs(self.environ), **self.site.variables()}
        paths = [str(PACKAGE.parent)]
        if variables.get("PYTHONPATH"):
            paths.append(variables["PYTHONPATH"])
        return {**variables, "PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1"}
