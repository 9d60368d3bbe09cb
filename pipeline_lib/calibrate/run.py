"""A calibration from outside: a process for each rank, under a deadline, and what becomes cluster.json."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import PipelineError
from pipeline_lib.base.fsio import write_text
from pipeline_lib.base.lifeline import OWNER_VARIABLE, describe_owner
from pipeline_lib.calibrate.fit import rate_of
from pipeline_lib.calibrate.task import Task
from pipeline_lib.config.schema import Config
from pipeline_lib.doctor import probes
from pipeline_lib.doctor.facts import UNMEASURED, Unmeasured, measured
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.workload import Workload
from pipeline_lib.train.launch.environment import LOOPBACK, PLACE_IN_WORLD, dist_environment, free_port

SCHEMA = 1
DEADLINE_S = 420.0  # for all ranks, the start of their interpreters included
# On GPUs a minute for each way to train that is compiled, and some seconds for each that is not.
PARTS_BUDGET_S = {"cuda": 210.0, "cpu": 10.0}
DISK_DEADLINE_S = 15.0
DISK_SPREAD = 0.2  # measured once, of what others may use too


@dataclass(frozen=True)
class Calibration:
    """What to measure and where: the store's disk, and a process for each of `environs`, or for one of a launcher's.

    `is_first` says whether this process speaks and writes for all that a launcher started.
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
        """For the model and the method of `config`, on the GPUs that are here, else on CPU ranks.

        Under torchrun or srun with several ranks it is this process's rank that is measured, and no others are started.
        Raises PipelineError if torch does not start.
        """
        facts = measured(lambda: probes.probe("torch", environ, DEADLINE_S))
        if UNMEASURED in facts:
            raise PipelineError(f"calibrate: torch does not start ({facts[UNMEASURED]}); see `doctor`")
        device = "cuda" if facts["cuda_works"] else "cpu"
        task = Task(geometry, config.train, workload, device, PARTS_BUDGET_S[device])
        common = {OWNER_VARIABLE: describe_owner()}
        common["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS", str(config.cluster.cpus_per_rank))
        if device == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in environ:
            common["PYTORCH_ALLOC_CONF"] = environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        launched = launched_environment(environ)
        if device == "cuda":
            ranks = min(ranks or config.cluster.gpus_per_node or facts["gpus"], facts["gpus"])
        local = rank_environments({**environ, **common}, ranks or config.cluster.cpu_ranks)
        environs = local if launched is None else ({**launched, **common},)
        return Calibration(task, model_name(config), store, environs, environs[0]["RANK"] == "0")

    def measure(self, say: Callable[[str], None]) -> tuple[dict[str, Any], list[str]]:
        """The content of cluster.json, and what was left out. Raises PipelineError if a rank fails or does not end."""
        ranks = int(self.environs[0]["WORLD_SIZE"])
        if self.is_first:
            say(f"calibrate: {ranks} rank{'s' if ranks > 1 else ''} on {self.task.device}, for {self.model}")
        with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
            path = Path(folder) / "task.json"
            write_text(path, self.task.as_json())
            try:
                answers = probes.run_children(["measure", "--task", str(path)], self.environs, self.deadline_s)
            except Unmeasured as error:
                advice = "`python -m pipeline_lib doctor` says what is wrong with this machine"
                raise PipelineError(f"calibrate: a rank did not measure: {error}; {advice}") from error
        found = answers[0]
        left_out = list(found.pop("left_out"))
        if self.is_first:
            left_out += self._add_disk(found["rates"])
        now = datetime.now(UTC).isoformat(timespec="seconds")
        head = {"schema": SCHEMA, "measured_at": now, "model": self.model, "precision": self.task.train.precision}
        return {**head, **found}, left_out

    def _add_disk(self, rates: dict[str, Any]) -> list[str]:
        """Measure the store's disk, once the ranks are done; returns why it could not be."""
        arguments = ("--store", str(self.store.absolute()))
        facts = measured(lambda: probes.probe("disk", self.environs[0], DISK_DEADLINE_S, *arguments))
        if UNMEASURED in facts:
            return [f"disk_bytes_s: {facts[UNMEASURED]}"]
        rates["disk_bytes_s"] = rate_of([facts["write_bytes_per_s"]], DISK_SPREAD)
        return []


def launched_environment(environ: Mapping[str, str]) -> dict[str, str] | None:
    """The place that torchrun or srun has given this process among several; None if it was started by itself.

    In a batch script SLURM names the tasks that there could be; only srun's own variables say that they are there.
    """
    if "RANK" not in environ and "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    placed = dist_environment(environ)
    return placed if int(placed.get("WORLD_SIZE", "1")) > 1 else None


def rank_environments(environ: Mapping[str, str], ranks: int) -> tuple[dict[str, str], ...]:
    """What ranks of this machine need to find each other, beside all of `environ`."""
    common = {key: value for key, value in environ.items() if key not in PLACE_IN_WORLD}
    common |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return tuple({**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks))


def model_name(config: Config) -> str:
    """The model as people know it."""
    model = config.model
    if model.source == "tiny":
        return "tiny"
    return Path(model.path).name if model.source == "local" else model.name
