"""What one job asks SLURM for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """Of one job: nodes, and on each of them tasks, GPUs and host memory. The warning comes before the time limit."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    memory_mb: int
    runtime_minutes: int
    warning_s: int

    @property
    def tasks(self) -> int:
        """One for each rank."""
        return self.nodes * self.tasks_per_node
