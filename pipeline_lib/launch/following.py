"""The stages that the SLURM job of a training goes on with: its merge and its evaluation.

As jobs of their own they would wait in the queue again. Each is sealed by itself, and one that does
not come to its end here is made by a job of its own, as Snakemake finds it missing.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence

from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.launch.place import OF_OTHER_TASKS
from pipeline_lib.launch.spawn import MODULE
from pipeline_lib.records.plan import PlannedCluster
from pipeline_lib.slurm.job import SlurmJob, node_names


def run_following(
    specs: Sequence[Spec],
    store: Store,
    cluster: PlannedCluster,
    environ: Mapping[str, str],
    say: Say,
) -> None:
    """Run the stages of `specs` one after another on the first node of this process's SLURM job.

    They get the CPUs and GPUs of all ranks there, by `cluster`. The first that fails ends it: what
    follows would need it.
    """
    missing = [spec for spec in specs if not store.pointer(spec.ref).exists()]
    job = SlurmJob.of(environ)
    if job is None or not missing:
        return
    nodes = node_names(job.fields["NodeList"])
    node = job.fields.get("BatchHost", nodes[0])
    inherited = {name: text for name, text in environ.items() if name not in OF_OTHER_TASKS}
    for spec in missing:
        say(f"---- {spec.stage} in the job of the training, on {node}")
        path = store.spec_path(spec.digest).absolute()
        command = [*_srun(node, cluster), sys.executable, "-m", MODULE, spec.stage]
        ended = subprocess.run([*command, "--spec", str(path)], env=inherited, check=False)
        if ended.returncode:
            say(
                f"{spec.stage} {spec.digest}: ended here with exit code {ended.returncode}; "
                "a job of its own makes it"
            )
            return


def _srun(node: str, cluster: PlannedCluster) -> list[str]:
    """Return the command that starts a task on `node`, beside what else the job runs there."""
    ranks = cluster.ranks // cluster.nodes
    command = ["srun", "--nodes", "1", "--ntasks", "1", "--nodelist", node]
    command += ["--cpus-per-task", str(cluster.cpus_per_rank * ranks)]
    command += ["--overlap", "--input", "none", "--export", "ALL"]
    return [*command, "--gres", f"gpu:{ranks}"] if cluster.is_gpu else command
