"""One node's share of torchrun or accelerate, within a SLURM job: a task of srun, one on each node.

SLURM's warnings reach every process of a step, and end a launcher that does not expect them, at once or after the few
seconds that it grants its ranks. So an agent ignores them, and with it what it starts, until the ranks, which get them
too, handle them.
"""

import logging
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.train.launch.commands import RANK_MODULE, accelerate_command

# Of torch's elastic agent: those that it may end its ranks for. accelerate takes them from the environment.
SIGNALS_TO_HANDLE = "SIGHUP,SIGQUIT"
ELASTIC_SIGNALS_VARIABLE = "PET_SIGNALS_TO_HANDLE"


@dataclass(frozen=True)
class Agent:
    """What the stage tells the agent of every node; which node this is, SLURM says."""

    launcher: str
    nodes: int
    ranks_per_node: int
    timeout_s: int
    run_dir: Path
    rank_arguments: list[str]

    def run(self, environ: Mapping[str, str]) -> int:
        """Start the ranks of this node and wait for them: 0, or what the first that failed ended with."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if self.launcher == "accelerate":
            command = [*accelerate_command(environ, self.run_dir, environ["SLURM_NODEID"]), *self.rank_arguments]
            return subprocess.call(command, env={**environ, ELASTIC_SIGNALS_VARIABLE: SIGNALS_TO_HANDLE})
        return self._torchrun(environ)

    def _torchrun(self, environ: Mapping[str, str]) -> int:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        config = LaunchConfig(
            min_nodes=self.nodes,
            max_nodes=self.nodes,
            nproc_per_node=self.ranks_per_node,
            run_id=environ["SLURM_JOB_ID"],
            rdzv_backend="static",
            rdzv_endpoint=f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
            rdzv_configs={"rank": int(environ["SLURM_NODEID"]), "timeout": self.timeout_s},
            max_restarts=0,
            signals_to_handle=SIGNALS_TO_HANDLE,
        )
        try:
            elastic_launch(config, sys.executable)("-m", *RANK_MODULE, *self.rank_arguments)
        except ChildFailedError as error:
            code = error.get_first_failure()[1].exitcode
            return code if code > 0 else 128 - code  # as a shell says that a signal killed it
        return 0
