"""The training stage as a process of its own, over inputs sealed as the stages before it would."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from pipeline_lib.config.compile import run_digest
from pipeline_lib.core.files import read_jsonl, write_json, write_text
from pipeline_lib.core.store import Manifest, Ref, Spec, describe_files, write_manifest
from pipeline_lib.records.plan import PlannedTracking
from pipeline_lib.records.record import to_json
from tests.train.conftest import Arena

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600.0
# A training that goes on until it is stopped: it learns too little for a loss to be a spike.
ENDLESS: dict[str, Any] = {"epochs": 1000, "lr": 1e-5}


def seal(folder: Path, stage: str, digest: str) -> None:
    """Seal whatever `folder` holds."""
    write_manifest(
        folder, Manifest(stage=stage, digest=digest, spec={}, files=describe_files(folder))
    )


@dataclass(frozen=True)
class Stage:
    """A training run that `python -m pipeline_lib train` can do, again and again."""

    arena: Arena
    spec: Spec
    plan_dir: Path
    log: Path

    @property
    def run_dir(self) -> Path:
        return self.arena.store.run_dir(run_digest(self.spec))

    @property
    def result(self) -> Path:
        return self.arena.store.sealed(self.spec.ref)

    @property
    def command(self) -> list[str]:
        spec_path = self.arena.store.spec_path(self.spec.digest)
        plan = f"{self.plan_dir}.ok"
        return [
            sys.executable,
            "-m",
            "pipeline_lib",
            "train",
            "--spec",
            str(spec_path),
            "--plan",
            plan,
        ]

    def start(self, **environ: str) -> "subprocess.Popen[bytes]":
        """Start it; what it says goes to `log`."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.command,
                cwd=ROOT,
                env={**os.environ, **environ},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run(self, **environ: str) -> int:
        """Its exit code."""
        return self.start(**environ).wait(120)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def steps_done(self) -> list[int]:
        """Steps in the live metrics."""
        path = self.run_dir / "metrics.jsonl"
        return [row["step"] for row in read_jsonl(path)] if path.exists() else []

    def wait_for_step(self, step: int) -> None:
        self._wait(lambda: step in self.steps_done(), f"step {step}")

    def wait_for_checkpoint(self) -> None:
        self._wait(lambda: any(self.run_dir.glob("checkpoints/step-*")), "a checkpoint")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Fail after a while: launchers that import a lot are slow on a busy machine."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"{what} did not come: {self.output}"
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """All that work for this run, except the stage's process; `info` is from when found."""
        return [
            process
            for process in psutil.process_iter(["cmdline", "status", "environ"])
            if any(
                str(self.arena.store.root.parent) in part for part in process.info["cmdline"] or []
            )
            and process.info["status"] != psutil.STATUS_ZOMBIE
            and "train" not in process.info["cmdline"]
        ]

    def rank(self, rank: int, named_by: str = "RANK") -> psutil.Process:
        """The process of one rank."""
        return next(found for found in self.processes() if _is_rank(found.info, named_by, rank))


def _is_rank(info: dict[str, Any], named_by: str, rank: int) -> bool:
    command = [part for part in info["cmdline"] if part != "-u"]
    return command[1:4] == ["-m", "pipeline_lib", "rank"] and (info["environ"] or {}).get(
        named_by
    ) == str(rank)


def make_stage(
    arena: Arena,
    launcher: str = "spawn",
    ranks: int = 2,
    trackers: tuple[str, ...] = (),
    nodes: int = 1,
    **settings: Any,
) -> Stage:
    """A stage over the inputs of `arena`, with these keys of `train`, which it seals if needed.

    It seals the inputs.
    """
    store = arena.store
    for ref in (arena.model, arena.shard):
        if not (store.sealed(ref) / "manifest.json").exists():
            seal(store.sealed(ref), ref.stage, ref.digest)
    job = arena.job(ranks, store.root.parent / "unused", **settings)
    plan = replace(
        job.plan,
        experiment="launched",
        batch=replace(job.plan.batch, steps=6 * int(settings.get("epochs", 1))),
        tracking=PlannedTracking(to=tuple(trackers), project="tests"),
        cluster=replace(job.plan.cluster, nodes=nodes, launcher=launcher),
    )
    ref = Ref("plan", f"{launcher}-{job.spec.digest}")
    folder = store.sealed(ref)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "plan.json", to_json(plan))
    write_text(folder / "plan.txt", f"plan of {launcher}\n")
    seal(folder, ref.stage, ref.digest)
    store.write_specs([job.spec])
    return Stage(arena, job.spec, folder, store.root.parent / f"{launcher}-{job.spec.digest}.log")
