"""A rank of `benchmarks.checkpoint`: trains, saves through our Saver; the first one reports."""

import json
import os
import shutil
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.arch.geometry import FP32_BYTES
from pipeline_lib.calibrate.random_model import batch_of_documents, random_stepper, take_step
from pipeline_lib.config.section import read_settings
from pipeline_lib.config.train import Train
from pipeline_lib.core.events import EventLog
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.core.lock import Lock
from pipeline_lib.core.processes import die_with_parent
from pipeline_lib.core.run_folder import step_name
from pipeline_lib.core.store import Spec
from pipeline_lib.train import checkpoint
from pipeline_lib.train.checkpoint import StateSnapshot
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.metrics import SavedRows
from pipeline_lib.train.replicas import refuse_differing_replicas
from pipeline_lib.train.saver import Saver
from pipeline_lib.train.staging import HostBuffers, new_copies
from pipeline_lib.train.step import Stepper

TIMEOUT_S = 240
WARM_UP_STEPS, QUIET_STEPS = 3, 8
MOST_STEPS = 400  # while something goes on beside them
DISK_BYTES = 16 * 10**9  # of all ranks: enough to outlast what a disk caches
_CHUNK_BYTES = 16 << 20


@dataclass
class Trainer:
    """Steps, and what they take."""

    stepper: Stepper
    saver: Saver
    batches: list[Any]
    told: list[dict[str, Any]]  # fields of the events of this rank
    group: dist.ProcessGroup | None  # for the host alone; the saver's is in use while it writes
    step: int = 0
    taken_s: list[float] = field(default_factory=list)

    @property
    def world(self) -> World:
        """Of this rank."""
        return self.stepper.world

    def take(self, steps: int = MOST_STEPS, until_done: Any = None) -> list[float]:
        """Seconds of that many steps, or of those until `until_done()` on all ranks."""
        taken = []
        for _ in range(steps):
            if until_done is not None and self.agree(min, float(until_done())):
                break
            start_s = time.perf_counter()
            take_step(self.stepper, self.batches)
            self.step += 1
            taken.append(time.perf_counter() - start_s)
        return taken

    def agree(self, reduce: Any, value: float) -> float:
        """The least or the most of all ranks, or the sum."""
        operation = {min: dist.ReduceOp.MIN, max: dist.ReduceOp.MAX, sum: dist.ReduceOp.SUM}[reduce]
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, operation, group=self.group)
        return float(tensor)

    def copy(self) -> tuple[StateSnapshot, float]:
        """What the loop copies for a save, and seconds that it waits for that."""
        self.wait_for_device()
        start_s = time.perf_counter()
        strategy = self.stepper.strategy
        parts = self.saver.parts(strategy)
        tensor_bytes = FP32_BYTES * sum(strategy.state_sizes().values())
        own = checkpoint.own_tensors(self.world, strategy.own_state())
        scalars = {"attempt": 1, "strategy": self.saver.train.strategy, "updates": self.step}
        return StateSnapshot(
            self.step, parts, tensor_bytes, own, scalars, SavedRows()
        ), time.perf_counter() - start_s

    def wait_for_device(self) -> None:
        """Until its work is done: what is measured next begins then, on all ranks."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(group=self.group)


def save(trainer: Trainer, number: int) -> dict[str, Any]:
    """One save as the loop makes it, and the steps beside its writing.

    The checkpoint is deleted.
    """
    saver = trainer.saver
    before_bytes = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    snapshot, copy_s = trainer.copy()
    start_s = time.perf_counter()
    refuse_differing_replicas(trainer.stepper.wrapped, trainer.world, saver.group)
    saver.save(snapshot, 0, copy_s)
    blocked_s = copy_s + time.perf_counter() - start_s
    del snapshot
    flight = saver._flight
    beside_s = trainer.take(until_done=lambda: flight is None or flight.done())
    saver.wait()
    sealed = saver.folder / step_name(trainer.told[-1]["step"])
    trainer.wait_for_device()
    if trainer.world.is_first:
        shutil.rmtree(sealed)
    written = trainer.told[-1]
    return {
        "name": "save",
        "host_bytes": trainer.agree(sum, float(resident_bytes("VmHWM") - before_bytes)),
        "number": number,
        "blocked_s": trainer.agree(max, blocked_s),
        "copy_s": trainer.agree(max, copy_s),
        "copy_bytes_s": trainer.agree(sum, float(_copied_bytes(trainer)))
        / trainer.agree(max, copy_s),
        "write_s": written["duration_s"],
        "bytes": written["bytes"],
        "write_bytes_s": written["bytes"] / written["duration_s"],
        "steps_beside": len(beside_s),
        "step_beside_s": statistics.median(beside_s) if beside_s else None,
        "slowest_step_beside_s": max(beside_s, default=None),
    }


def resident_bytes(name: str) -> int:
    """Memory of this process by its name in /proc: `VmRSS` now, `VmHWM` at the peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _copied_bytes(trainer: Trainer) -> int:
    buffers = trainer.saver.buffers
    return sum(slab.used for slab in buffers._slabs) if buffers is not None else 0


def disk(trainer: Trainer, folder: Path, size_bytes: int) -> dict[str, Any]:
    """Write and put on disk one file a rank, without anything else."""
    path = folder / f"disk-{trainer.world.rank}"
    chunk = memoryview(bytearray(os.urandom(_CHUNK_BYTES)))
    trainer.wait_for_device()
    start_s = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(max(1, size_bytes // _CHUNK_BYTES)):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    took_s = trainer.agree(max, time.perf_counter() - start_s)
    size = trainer.agree(sum, float(path.stat().st_size))
    path.unlink()
    return {"name": "disk", "bytes": size, "seconds": took_s, "bytes_s": size / took_s}


def measure(trainer: Trainer, given: dict[str, Any], folder: Path) -> None:
    """Report the steps, the saves and the disk."""
    first_s = trainer.take(1)
    trainer.saver.emit_completed()  # which begins to make the buffers
    growth = None if trainer.saver.buffers is None else trainer.saver.buffers._growth
    start_s = time.perf_counter()
    growing_s = [] if growth is None else trainer.take(until_done=growth.done)
    grown_s = trainer.agree(max, time.perf_counter() - start_s)
    trainer.take(WARM_UP_STEPS)
    quiet_s = trainer.take(QUIET_STEPS)
    say(
        trainer,
        {
            "name": "steps",
            "first_s": first_s[0],
            "quiet_s": statistics.median(quiet_s),
            "buffers_s": grown_s if growth is not None else None,
            "step_beside_buffers_s": statistics.median(growing_s) if growing_s else None,
            "slowest_step_beside_buffers_s": max(growing_s, default=None),
        },
    )
    row: dict[str, Any] = {}
    for number in range(1, given["saves"] + 1):
        expected_s = row.get("write_s", 0.0) * 1.2
        is_late = time.monotonic() + expected_s > given["until_s"]
        if trainer.agree(max, float(is_late)):
            say(trainer, {"name": "cut", "saves": number - 1})
            break
        trainer.take(2)
        row = save(trainer, number)
        say(trainer, row)
    if given["compare"]:
        trainer.wait_for_device()
        start_s = time.perf_counter()
        trainer.stepper.strategy.snapshot(copied=new_copies)
        say(
            trainer,
            {"name": "new memory", "copy_s": trainer.agree(max, time.perf_counter() - start_s)},
        )
    if row:
        say(trainer, disk(trainer, folder, min(row["bytes"], DISK_BYTES) // trainer.world.size))
    for told in trainer.told:
        if "reason" in told:
            say(trainer, {"name": "event", **told})


def say(trainer: Trainer, row: dict[str, Any]) -> None:
    """Report `row`."""
    if trainer.world.is_first:
        print(json.dumps(row), flush=True)


def main() -> None:
    """Train and save as the parent wrote down."""
    die_with_parent()
    folder = Path(os.environ["BENCHMARK_FOLDER"])
    given = read_json(folder / "settings.json")
    train = read_settings(Train, given["train"])
    world = World.from_env(os.environ, "cuda" if torch.cuda.is_available() else "cpu")
    told: list[dict[str, Any]] = []
    events = EventLog(None, (lambda _, fields: told.append(fields),))
    batch = batch_of_documents(given["tokens"], 1000, 0.5, read_geometry(folder).vocab)
    with process_group(world, TIMEOUT_S):
        stepper = random_stepper(folder, train, 1, world)
        trained = sum(
            getattr(p, "ds_numel", p.numel())
            for p in stepper.wrapped.parameters()
            if p.requires_grad
        )
        spec = Spec("train", 1, {"benchmark": "checkpoint"}, {})
        buffers = HostBuffers(world) if world.device.type == "cuda" else None
        lock = Lock(folder / "lock", "benchmark")
        write_json(lock.path, {"token": lock.token})
        with Saver(
            folder / "run" / "checkpoints",
            world=world,
            train=train,
            spec=spec,
            events=events,
            lock=lock,
            state_elements=sum(stepper.strategy.state_sizes().values()),
            buffers=buffers,
        ) as saver:
            trainer = Trainer(stepper, saver, [batch], told, dist.new_group(backend="gloo"))
            stepper.warm_up(batch)
            say(trainer, {"name": "model", "trained_parameters": trained, "ranks": world.size})
            measure(trainer, given, folder)


if __name__ == "__main__":
    main()
