"""A calibration: one process for each rank under a deadline, and the content of cluster.json."""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.calibrate.fits import rate_of
from pipeline_lib.calibrate.task import Task, model_name
from pipeline_lib.config.schema import Config
from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.files import write_text
from pipeline_lib.core.processes import OWNER_VARIABLE, describe_owner
from pipeline_lib.doctor import probes
from pipeline_lib.doctor.facts import UNMEASURED, Unmeasured, measured
from pipeline_lib.launch.environment import (
    PLACE_IN_WORLD,
    allocator_settings,
    dist_environment,
    private_rendezvous,
    rank_environments,
)
from pipeline_lib.plan.measured import SCHEMA
from pipeline_lib.records.plan import Workload

DEADLINE_S = 420.0  # for all ranks, including the start of their interpreters
# A compiled variant takes about a minute on GPUs, any other some seconds.
PARTS_BUDGET_S = {"cuda": 210.0, "cpu": 10.0}
DISK_DEADLINE_S = 15.0
DISK_SPREAD = 0.2  # wide, since the disk is measured only once and may be shared


@dataclass(frozen=True)
class Calibration:
    """A calibration to run: task, store whose disk is measured, and each rank's environment.

    Under a launcher `environs` has only this process's own rank, and `is_first` is True on rank 0,
    which alone prints and writes.
    """

    task: Task
    model: str
    store: Path
    environs: tuple[dict[str, str], ...]
    is_first: bool = True
    deadline_s: float = DEADLINE_S

    @staticmethod
    def of(
        config: Config,
        geometry: Geometry,
        workload: Workload,
        ranks: int | None,
        store: Path,
        environ: Mapping[str, str],
    ) -> "Calibration":
        """Build the calibration for `config`'s model and training, on this machine's GPUs or CPU.

        Under torchrun or srun with several ranks only this process's rank is measured, and no
        others are started. Raises PipelineError if torch does not start.
        """
        facts = measured(lambda: probes.probe("torch", environ, DEADLINE_S))
        if UNMEASURED in facts:
            raise PipelineError(
                f"calibrate: torch does not start ({facts[UNMEASURED]}); see `doctor`"
            )
        device = "cuda" if facts["cuda_works"] else "cpu"
        task = Task(geometry, config.train, workload, device, PARTS_BUDGET_S[device])
        common = {OWNER_VARIABLE: describe_owner()}
        common["OMP_NUM_THREADS"] = environ.get(
            "OMP_NUM_THREADS", str(config.cluster.cpus_per_rank)
        )
        common |= allocator_settings(environ, device == "cuda")
        launched = launched_environment(environ)
        if device == "cuda":
            ranks = min(ranks or config.cluster.gpus_per_node or facts["gpus"], facts["gpus"])
        local = local_environments({**environ, **common}, ranks or config.cluster.cpu_ranks)
        environs = local if launched is None else ({**launched, **common},)
        return Calibration(
            task, model_name(config.root.model), store, environs, environs[0]["RANK"] == "0"
        )

    def measure(self, say: Callable[[str], None]) -> tuple[dict[str, Any], list[str]]:
        """Return the content of cluster.json, and the reasons for everything left out.

        Raises PipelineError if a rank fails or exceeds the deadline.
        """
        ranks = int(self.environs[0]["WORLD_SIZE"])
        if self.is_first:
            say(
                f"calibrate: {ranks} rank{'s' if ranks > 1 else ''} on {self.task.device}, for "
                f"{self.model}"
            )
        is_launched = "MASTER_ADDR" in self.environs[0]
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="calibrate-"))
            rendezvous = {} if is_launched else stack.enter_context(private_rendezvous())
            path = Path(folder) / "task.json"
            write_text(path, self.task.as_json())
            environs = [{**environ, **rendezvous} for environ in self.environs]
            try:
                answers = probes.run_children(
                    ["measure", "--task", str(path)], environs, self.deadline_s
                )
            except Unmeasured as error:
                advice = "`qwen3 doctor` says what is wrong with this machine"
                raise PipelineError(
                    f"calibrate: a rank did not measure: {error}; {advice}"
                ) from error
        found = answers[0]
        left_out = list(found.pop("left_out"))
        if self.is_first:
            arguments = ("--store", str(self.store.absolute()))
            disk = measured(
                lambda: probes.probe("disk", self.environs[0], DISK_DEADLINE_S, *arguments)
            )
            if UNMEASURED in disk:
                left_out.append(f"disk_bytes_s: {disk[UNMEASURED]}")
            else:
                found["rates"]["disk_bytes_s"] = rate_of([disk["write_bytes_per_s"]], DISK_SPREAD)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        head = {
            "schema": SCHEMA,
            "measured_at": now,
            "model": self.model,
            "precision": self.task.train.precision,
        }
        return {**head, **found}, left_out


def launched_environment(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return the distributed environment from torchrun or srun; None for a single process.

    In a batch script SLURM's variables describe the allocated tasks; only srun's own variables show
    that the tasks were started.
    """
    if "RANK" not in environ and "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    placed = dist_environment(environ)
    return placed if int(placed.get("WORLD_SIZE", "1")) > 1 else None


def local_environments(environ: Mapping[str, str], ranks: int) -> tuple[dict[str, str], ...]:
    """Return an environment for each of `ranks` ranks of this machine, without where they meet."""
    common = {key: value for key, value in environ.items() if key not in PLACE_IN_WORLD}
    return tuple(dist_environment(made) for made in rank_environments(common, ranks))
